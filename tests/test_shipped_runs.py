"""The shipped runs open, are undamaged, come from the study files of their names, and belong to one package each."""

import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from dashboards.app import create_app
from dashboards.layout import resolve_url
from headscope.base import plugins
from headscope.cli.app import STUDY_FILES
from headscope.cli.flags import EXAMPLES, example_maps, example_run
from headscope.rendering import assembly, run_results
from headscope.rendering.blocks import Chart
from headscope.results.collection import all_results
from headscope.results.words import sentence
from headscope.run import Run
from headscope.runs.columns import FORMAT_VERSION, all_tables
from headscope.runs.run_tables import validate
from headscope.study.config import OptionParts, build_study, read_study
from probes.patching import analysis, view
from probes.patching.analysis import model_results

EXAMPLE = example_run()
EXAMPLE_MAPS = example_maps()

RUNS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
PATCHING_RUNS = [path for path in RUNS if "-patching-" in path.name]
DOCS = (Path(__file__).parents[1] / "docs" / "patching.md").read_text(encoding="utf-8")


def study_name(path: Path) -> str:
    """The name in a run directory <utc>-<name>-<hash>."""
    return path.name.split("-", 1)[1].rsplit("-", 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=study_name)
def test_every_shipped_run_is_undamaged(path: Path) -> None:
    run = Run.open(path)
    assert validate(run) == []
    assert not run.heads.empty


def given_options(probe: str, stored: Any) -> Any:
    """The options of a probe without defaults, since some may not be given together; any other entry as it is."""
    if probe not in plugins.probes():
        return stored
    fields = plugins.call_part(plugins.probes()[probe], OptionParts.options).model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {name: value for name, value in stored.items() if name not in defaults or value != defaults[name]}


@pytest.mark.parametrize("path", RUNS, ids=study_name)
def test_every_shipped_run_has_the_current_format_and_a_valid_study(path: Path) -> None:
    manifest = Run.open(path).manifest
    assert manifest["format_version"] == FORMAT_VERSION
    joined = manifest["config"].get("joined")
    for config in [manifest["config"]] if joined is None else [part["config"] for part in joined.values()]:
        build_study({name: given_options(name, value) for name, value in config.items()})
    for name, table in all_tables().items():
        if name in manifest["tables"]:
            assert pq.read_schema(path / f"{name}.parquet").equals(table.arrow)


@pytest.mark.parametrize("path", PATCHING_RUNS, ids=study_name)
def test_patching_runs_have_the_models_and_pairs_of_their_study_files(path: Path) -> None:
    run = Run.open(path)
    study = read_study(STUDY_FILES / f"{study_name(path)}.yaml", {})
    options = study.probe_options["patching"]
    assert run.manifest["config"]["models"] == study.models
    assert {*run.table("patching")["prompts"]} == {*options.pairs}
    pairs = run.table("patching").groupby(["model", "prompts"], observed=True)["pair"].nunique()
    assert pairs.to_list() == [options.count] * len(study.models) * len(options.pairs)


@pytest.mark.parametrize("path", PATCHING_RUNS, ids=study_name)
def test_the_docs_give_the_five_largest_exact_effects_of_each_task_and_model(path: Path) -> None:
    for effects in analysis.sweeps(Run.open(path)):
        top = effects.exact.nlargest(5, "effect")
        cells = [
            f"L{unit['layer']}H{unit['head']} {unit['effect']:+.2f} ({unit['low']:+.2f} to {unit['high']:+.2f})"
            for _, unit in top.iterrows()
        ]
        assert f"| {effects.key['prompts']} | {effects.model} | {' | '.join(cells)} |" in DOCS


@pytest.mark.parametrize("path", PATCHING_RUNS, ids=study_name)
def test_the_docs_give_the_verdicts_of_the_patching_runs(path: Path) -> None:
    verdicts: dict[tuple[str, str], list[str]] = {}
    for result in model_results(Run.open(path)):
        if result.verdict:
            verdicts.setdefault((str(result.where["prompts"]), result.model), []).append(result.verdict)
    assert len(verdicts) == 2 * len({task for task, _ in verdicts})
    for (task, model), (kept, changed) in verdicts.items():
        assert f"| {task} | {model} | {kept} | {changed} |" in DOCS


@pytest.mark.slow
@pytest.mark.parametrize("path", PATCHING_RUNS, ids=study_name)
def test_verdicts_by_our_criteria_are_not_counted_as_claims_of_the_paper(path: Path) -> None:
    run = Run.open(path)
    assert not [claim for claim in run_results.claims(all_results(run)) if claim.question.startswith("patching")]
    judged = [result for result in all_results(run) if result.question in ("patching.kept", "patching.changed")]
    assert len(judged) == 4 * run.table("patching")["prompts"].nunique()
    assert all(result.verdict for result in judged)
    texts = run_results.sentences_by_topic(all_results(run))["Activation patching"]
    assert {sentence(result) for result in judged} <= {*texts}


@pytest.mark.parametrize("path", PATCHING_RUNS, ids=study_name)
def test_patching_runs_appear_in_report_and_app(path: Path) -> None:
    run = Run.open(path)
    tasks = run.table("patching")["prompts"].nunique()
    assert len([*view.charts(assembly.render_context(run))]) == tasks + 1
    assert create_app(path).server.test_client().get("/").status_code == 200


def test_the_weights_run_has_the_models_of_its_study_file_and_its_findings_are_quoted() -> None:
    (path,) = (path for path in RUNS if "-weights-" in path.name)
    run = Run.open(path)
    study = read_study(STUDY_FILES / "weights.yaml", {})
    assert run.manifest["config"]["models"] == study.models
    assert sum(file.stat().st_size for file in path.iterdir()) < 2e6
    page = (Path(__file__).parents[1] / "docs" / "weights.md").read_text(encoding="utf-8")
    quoted = page.split("Some of the findings:\n\n```text\n")[1].split("\n```")[0]
    findings = {*run.findings()["text"]}
    lines = " ".join(quoted.split()).split(" In ")
    sentences = [lines[0], *(f"In {line}" for line in lines[1:])]
    assert len(sentences) == 16
    assert {*sentences} <= findings


@pytest.mark.slow
def test_the_app_opens_the_example_with_the_maps_of_its_heads() -> None:
    run = Run.open(EXAMPLE.parent / EXAMPLE_MAPS[0])
    study = read_study(STUDY_FILES / "maps.yaml", {})
    assert run.manifest["config"]["models"] == study.models
    assert sum(file.stat().st_size for file in run.path.iterdir()) < 6e6
    example = Run.open(EXAMPLE)
    with create_app(EXAMPLE, read_only=True, combined_with=EXAMPLE_MAPS).server.app_context():
        _, combined, _, content = resolve_url("/head/4.4", {"model": "adarope"})
    assert combined.models == example.models
    assert combined.conflicting_row_counts == {}
    pd.testing.assert_frame_equal(combined.heads, example.heads)
    charts = [block for blocks in content.sections.values() for block in blocks if isinstance(block, Chart)]
    chart = next(block for block in charts if "Attention map" in str(block.figure.layout.title.text))
    assert str(chart.figure.layout.title.text).startswith("Attention map of layer 4, head 4")
    assert [trace.meta for trace in chart.figure.data if trace.type == "heatmap"] == ["base", "adarope", "adarope"]


def test_the_budget_run_has_the_options_of_its_study_file_and_its_findings_are_quoted() -> None:
    (path,) = (path for path in RUNS if "-budget-" in path.name)
    run, study = Run.open(path), read_study(STUDY_FILES / "budget.yaml", {})
    assert run.manifest["config"]["models"] == study.models
    assert {*run.table("budget")["share"]} == {0.0, *study.probe_options["budget"].shares, 1.0}
    page = (Path(__file__).parents[1] / "docs" / "budget.md").read_text(encoding="utf-8")
    quoted = page.split("## What SmolLM2 can afford")[1].split("```text\n")[1].split("\n```")[0]
    findings = [text for text in run.findings()["text"] if text in " ".join(quoted.split())]
    assert len(" ".join(findings)) == len(" ".join(quoted.split()))


def test_every_shipped_run_belongs_to_one_of_the_two_packages() -> None:
    root = EXAMPLES.parents[1]
    headscope = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    examples = tomllib.loads((root / "examples" / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = headscope["tool"]["setuptools"]["exclude-package-data"]["headscope"]
    larger = {path for path in RUNS if any((path / "run.json").match(pattern) for pattern in left_out)}
    sources = examples["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {source: source.removeprefix("../") for source in sources} == sources
    assert {(root / "examples" / source).resolve() for source in sources} == larger
    assert headscope["project"]["version"] == examples["project"]["version"]
    assert sum(file.stat().st_size for path in {*RUNS} - larger for file in path.iterdir()) < 7e6

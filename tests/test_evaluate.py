"""Tasks of the lm-evaluation-harness on headscope's models: its own scores, any scheme, nothing fetched."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from adapters import noisy
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import manager
from test_cli import headscope, refused  # noqa: F401 (fixtures)
from test_study import save_checkpoint

from headscope.errors import BadInput, Interrupted, Missing
from headscope.models import loading
from headscope.positions.model import Model, load
from headscope.report.blocks import RenderContext
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from headscope.runs.validate import validate
from headscope.study import runner as study
from headscope.study.config import build_study
from probes.evaluate import harness, plots
from probes.evaluate import report
from probes.evaluate.analysis import means_over_tasks, preferred_metric_rows, summarise_heads

QUESTIONS = (
    ("The colour of grass is", ("green", "purple", "orange"), 0),
    ("The colour of blood is", ("yellow", "red", "blue"), 1),
    ("Snow is", ("black", "brown", "white"), 2),
    ("A ripe banana is", ("yellow", "blue", "grey"), 0),
    ("The sky on a clear day is", ("green", "blue", "pink"), 1),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny`, a checkpoint, and two tasks: `colours.yaml`, questions, and `prose.yaml`, texts."""
    place = tmp_path_factory.mktemp("evaluate")
    save_checkpoint(place / "tiny")
    rows = [{"question": asked, "choices": choices, "answer": right} for asked, choices, right in QUESTIONS]
    texts = [{"text": " ".join(f"{asked} {choices[right]}." for asked, choices, right in QUESTIONS) * 30}] * 2
    for name, lines in (("colours", rows), ("prose", texts)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [{"metric": metric, "higher_is_better": True} for metric in ("acc", "acc_norm")]
    task(
        place,
        "colours",
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        doc_to_choice="{{choices}}",
        metric_list=[*metrics, {"metric": "brier_score", "higher_is_better": False}],
    )
    task(
        place,
        "prose",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    return place


def task(place: Path, name: str, **rules: Any) -> None:
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": f"{place}/{name}.jsonl"}, "test_split": "train"}
    (place / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **rules}))


def plan(place: Path, **options: Any) -> dict[str, Any]:
    section = {"tasks": [f"{place}/colours.yaml", f"{place}/prose.yaml"], "lengths": [128], **options}
    models = {"base": f"{place}/tiny", "yarn": f"{place}/tiny@yarn:factor=8"}
    return {"name": "evaluate", "models": models, "device": "cpu", "evaluate": section}


# Scores ------------------------------------------------------------------------------------------------------------


LENGTH, LIMIT = 1024, 2


def kinds(place: Path) -> list[str]:
    """A task of each kind: one of RULER's, made here, choices from a file, and likelihoods from a file in windows."""
    return ["ruler_vt", f"{place}/colours.yaml", f"{place}/prose.yaml"]


@pytest.fixture(scope="module")
def scored_here(smollm2: Model, place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Any]]:
    """A run of the real model, and every address that was reached for meanwhile."""
    reached: list[Any] = []
    settings = {"tasks": kinds(place), "lengths": [LENGTH], "documents": LIMIT}
    content = {"models": {"base": "smollm2-135m"}, "device": "cpu", "evaluate": settings}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "connect", lambda _, address: reached.append(address))
        patched.setattr(socket, "getaddrinfo", lambda host, *_, **__: reached.append(host))
        run = study.run_study(build_study(content), tmp_path_factory.mktemp("real"), given={"base": smollm2})
    return run, reached


@pytest.mark.model
def test_the_harness_reaches_for_no_network(scored_here: tuple[Run, list[Any]]) -> None:
    """Left alone, nltk would download on import, and the harness open a tokenizer by its name."""
    assert scored_here[1] == []
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.model
def test_scores_are_those_of_the_harness_own_command_line_to_the_last_digit(
    scored_here: tuple[Run, list[Any]],
    smollm2: Model,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = loading.locate("smollm2-135m")[0]
    command = [
        *("lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "1"),
        *("--model_args", f"pretrained={folder},dtype=float32,max_length={LENGTH}", "--tasks", *kinds(place)),
        *("--metadata", json.dumps({"max_seq_lengths": [LENGTH]}), "--limit", str(LIMIT)),
        *("--log_samples", "--output_path", str(tmp_path / "theirs")),
    ]
    # Of the tasks that it ships it reads RULER's alone: all of them take half a minute.
    monkeypatch.setattr(manager, "__file__", str(harness.RULER_FOLDER / "manager.py"))
    monkeypatch.setattr(sys, "argv", command)
    cli_evaluate()
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]
    rows = {(row.task, row.metric): row for row in scored_here[0].tasks.itertuples()}
    assert set(rows) == {
        *(("colours", metric) for metric in ("acc", "acc_norm", "brier_score")),
        ("prose", "bits_per_byte"),
        ("ruler_vt", "match"),
    }
    for (name, metric), row in rows.items():
        called = str(LENGTH) if metric == "match" else metric
        assert row.score == np.float32(theirs[name][f"{called},none"])
        if isinstance(error := theirs[name][f"{called}_stderr,none"], float):
            assert row.stderr == np.float32(error)
        assert row.documents == LIMIT
    assert rows["colours", "acc"].higher_is_better
    assert not rows["colours", "brier_score"].higher_is_better
    (samples,) = (tmp_path / "theirs").rglob("samples_ruler_vt_*.jsonl")
    prompts = [json.loads(line)["doc"]["input"] for line in samples.read_text().splitlines()]
    (made,) = harness.build_task(*harness.find_tasks(["ruler_vt"]), LENGTH, smollm2.tokenizer).values()
    assert prompts == [document["input"] for document in list(made.eval_docs)[:LIMIT]]
    assert smollm2.tokenizer.pad_token == loading.load_tokenizer("smollm2-135m").pad_token


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study.run_study(build_study(plan(place)), tmp_path_factory.mktemp("runs"))


def test_every_model_is_scored_under_its_scheme_on_the_same_documents(whole: Run) -> None:
    assert validate(whole) == []
    bits = whole.tasks[whole.tasks["metric"] == "bits_per_byte"].set_index("model")
    assert bits.loc["base", "score"] != bits.loc["yarn", "score"]
    assert set(whole.tasks["documents"]) == {2, len(QUESTIONS)}
    assert set(whole.tasks["context_length"]) == {128}


def test_interrupted_it_goes_on_at_the_next_model_task_or_length(
    whole: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, calls = harness.score_tasks, []

    def stopping(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scores(*arguments)

    monkeypatch.setattr(harness, "score_tasks", stopping)
    with pytest.raises(Interrupted, match="finished cells are kept"):
        study.run_study(build_study(plan(place)), tmp_path)
    resumed = study.run_study(build_study(plan(place)), tmp_path, resume=True)
    assert len(calls) == 3 + 2
    assert resumed.manifest["tables"] == whole.manifest["tables"]


@pytest.mark.parametrize("changed", ["documents", "prompt"])
def test_a_run_whose_task_file_changed_does_not_go_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    content = plan(place, tasks=[f"{tmp_path}/own.yaml"])
    (tmp_path / "own.jsonl").write_text((place / "colours.jsonl").read_text())
    rules = yaml.safe_load((place / "colours.yaml").read_text()) | {"task": "own"}
    rules["dataset_kwargs"] = {"data_files": f"{tmp_path}/own.jsonl"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(rules))
    scores, calls = harness.score_tasks, []

    def stopping(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return scores(*arguments)

    monkeypatch.setattr(harness, "score_tasks", stopping)
    with pytest.raises(Interrupted):
        study.run_study(build_study(content), tmp_path / "runs")
    if changed == "documents":
        with (tmp_path / "own.jsonl").open("a") as file:
            file.write(json.dumps({"question": "Tar is", "choices": ["white", "black", "red"], "answer": 1}) + "\n")
    else:
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(rules | {"doc_to_text": "Say: {{question}}"}))
    with pytest.raises(BadInput, match="task own"):
        study.run_study(build_study(content), tmp_path / "runs", resume=True)


def test_prompts_that_lose_their_beginning_are_told(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"{at}: on and on. " * 50, "choices": ["yes", "no"], "answer": 0} for at in range(2)]
    (place / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = yaml.safe_load((place / "colours.yaml").read_text()) | {"task": "long"}
    rules["dataset_kwargs"] = {"data_files": f"{place}/long.jsonl"}
    (place / "long.yaml").write_text(yaml.safe_dump(rules))
    study.run_study(build_study(plan(place, tasks=[f"{place}/long.yaml"])), tmp_path)
    said = "prompts of long were too long and lost their beginning: give more --length"
    assert len([message for message in caplog.messages if said in message]) == 2  # one for each model


def test_answers_are_not_written_from_keys_that_the_whole_length_would_change(place: Path, tmp_path: Path) -> None:
    noisy(load(f"{place}/tiny")).save(tmp_path / "adapter.safetensors")
    content = plan(place)
    content["models"] = {"whole": f"{place}/tiny@adarope:adapter={tmp_path}/adapter.safetensors,length=sequence"}
    with pytest.raises(BadInput, match="'whole' cannot write answers under length=sequence: use length=visible"):
        study.run_study(build_study(content), tmp_path / "runs")


def test_a_group_gives_its_tasks_and_those_made_to_a_length_are_known() -> None:
    tasks = {each.name: each.is_generated_to_length for each in harness.find_tasks(["ruler", "niah_single_1"])}
    assert len(tasks) == 13
    assert all(tasks.values())


@pytest.mark.model
def test_synthetic_tasks_of_several_kinds_are_made_one_after_the_other(smollm2: Model) -> None:
    """The harness reads their modules anew each time."""
    for task in harness.find_tasks(["niah_single_1", "ruler_vt"]):
        assert len(harness.build_task(task, 1024, smollm2.tokenizer)) == 1


def test_a_missing_standard_error_is_that_of_resamples() -> None:
    values = list(np.random.default_rng(0).random(200))
    assert harness._bootstrap_standard_error(np.mean, values) == pytest.approx(np.std(values) / np.sqrt(200), rel=0.1)


# Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said", "arguments"),
    [
        (2, "length 64 is too short for a task", ("--length", 64)),
        (
            2,
            "task ruler_vt is made to a length and needs 1,024 tokens, not 512",
            ("--tasks", "ruler_vt", "--length", 512),
        ),
        (2, "evaluate.lengths", ("--length", "long")),
        (2, "evaluate.documents: Input should be greater than or equal to 2", ("--limit", 1)),
        (2, "name a task", ("--tasks", "")),
        (
            2,
            "task 'niah_singel_1' is not known to the harness (did you mean 'niah_single_1'?)",
            ("--tasks", "niah_singel_1"),
        ),
        (3, "no task file at '{place}/none.yaml': check the path", ("--tasks", "{place}/none.yaml")),
        (2, "empty.yaml' cannot be read: Unknown config shape", ("--tasks", "{place}/empty.yaml")),
        (3, "task own needs data that is not here and cannot be fetched", ("--tasks", "{place}/hub.yaml")),
        (3, "task own needs data that is not here", ("--tasks", "{place}/gone.yaml")),
        (2, "task own cannot be used", ("--tasks", "{place}/broken.yaml")),
        (2, "task own has 1 documents: a standard error needs two", ("--tasks", "{place}/one.yaml")),
    ],
)
def test_a_mistake_is_one_line(
    code: int,
    said: str,
    arguments: Any,
    refused: Any,  # noqa: F811
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "TASKS_FOLDER", harness.RULER_FOLDER)  # all that it ships take half a minute to read
    (place / "empty.yaml").write_text("metric_list: []\n")
    (place / "one.jsonl").write_text(
        json.dumps({"question": "Tar is", "choices": ["red", "black"], "answer": 1}) + "\n"
    )
    own = yaml.safe_load((place / "colours.yaml").read_text()) | {"task": "own"}
    changes = {
        "hub": {"dataset_path": "nobody/nothing", "dataset_kwargs": None},
        "gone": {"dataset_kwargs": {"data_files": f"{place}/gone.jsonl"}},
        "broken": {"output_type": "guess"},
        "one": {"dataset_kwargs": {"data_files": f"{place}/one.jsonl"}},
    }
    for name, change in changes.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(own | change))
    given = [str(each).replace("{place}", str(place)) for each in arguments]
    if "--tasks" not in given:
        given += ["--tasks", f"{place}/colours.yaml"]
    said = said.replace("{place}", str(place))
    assert said in refused(code, "evaluate", "--model", f"x={place}/tiny", "--device", "cpu", "--quiet", *given)


def test_a_task_that_needs_a_package_says_which() -> None:
    assert "needs a package that is not installed (ModuleNotFoundError: No module named 'bs4')" in str(
        harness._task_error("niah_single_2", ModuleNotFoundError("No module named 'bs4'"))
    )
    assert isinstance(harness._task_error("x", ConnectionError("offline")), Missing)


def test_json_is_all_that_is_printed(headscope: Any, place: Path, tmp_path: Path) -> None:  # noqa: F811
    flags = ("--model", f"x={place}/tiny", "--tasks", f"{place}/colours.yaml", "--device", "cpu", "--length", 128)
    code, out, _ = headscope("evaluate", *flags, "--json", "--out", tmp_path)
    assert code == 0
    assert {row["task"] for row in json.loads(out)["tasks"]} == {"colours"}


# What is shown -----------------------------------------------------------------------------------------------------


def scored(*rows: tuple[str, str, int, str, float, float]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["model", "task", "context_length", "metric", "score", "stderr"])
    return frame.assign(filter="none", documents=100, higher_is_better=True)


TASKS = scored(
    *(("base", "arc_easy", 4096, metric, score, 0.04) for metric, score in (("acc", 0.5), ("acc_norm", 0.6))),
    ("base", "boolq", 4096, "acc", 0.7, 0.03),
    *(("base", "ruler_vt", length, "match", score, 0.02) for length, score in ((2048, 0.9), (4096, 0.8))),
    ("yarn", "arc_easy", 4096, "acc_norm", 0.5, 0.04),
    ("yarn", "boolq", 4096, "acc", 0.6, 0.03),
)


def test_the_metric_shown_is_the_papers_and_means_are_over_tasks_of_a_kind() -> None:
    rows = preferred_metric_rows(TASKS)
    assert list(rows["metric"]) == ["acc_norm", "acc", "match", "match", "acc_norm", "acc"]
    found = means_over_tasks(rows).set_index(["model", "kind", "context_length"])
    assert list(found.index) == [("base", "accuracy", 4096), ("yarn", "accuracy", 4096)]
    assert found.loc[("base", "accuracy", 4096), "score"] == pytest.approx(0.65)
    assert found.loc[("base", "accuracy", 4096), "stderr"] == pytest.approx(0.025)


def test_means_are_over_the_tasks_that_every_model_has() -> None:
    more = pd.concat([TASKS, scored(("yarn", "hellaswag", 4096, "acc", 0.9, 0.1))])
    assert means_over_tasks(preferred_metric_rows(more)).equals(means_over_tasks(preferred_metric_rows(TASKS)))


def test_deeper_is_better_where_a_lower_score_is() -> None:
    rows = scored(("base", "wiki", 4096, "bits", 1.0, 0.1), ("yarn", "wiki", 4096, "bits", 2.0, 0.1))
    (heat,) = plots.plot_score_table(rows.assign(higher_is_better=False)).data
    assert heat.z.tolist() == [[1.0], [0.0]]


def test_the_table_holds_every_model_and_task_with_its_standard_error() -> None:
    (heat,) = plots.plot_score_table(TASKS).data
    assert list(heat.y) == ["base", "yarn"]
    assert [at.split("<br>")[0] for at in heat.x] == ["arc_easy", "boolq", "ruler_vt", "ruler_vt", "mean of 2"]
    assert heat.text[0][0] == "0.600<br>±0.040"
    assert heat.text[1][2] == ""
    assert plots.plot_scores_by_length(TASKS).layout.xaxis.ticktext == ("2,048", "4,096")
    lines = plots.plot_scores_by_length(TASKS).data
    assert [list(line.x) for line in lines] == [[2048, 4096], []]
    assert plots.plot_score_table(TASKS.iloc[:0]).layout.annotations[0].text == "no data to plot"


def test_report_and_terminal_tell_the_scores(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path)
    texts = [finding.text for finding in report.findings(run)]
    assert any(text.startswith("ruler_vt at ") and "base 0." in text and "yarn 0." in text for text in texts)
    assert any(text.startswith("Mean match of 2 tasks at ") for text in texts)
    overview = report.overview(run)
    assert overview is not None
    assert {row["task"] for row in overview.rows} == {"niah_single_1", "ruler_vt", "arc_easy"}
    shown = RenderContext(run, run.models, run.heads, run.models[0], {})
    scores, beside = report.charts(shown)
    assert len([*scores.charts]) == 2
    assert len([*beside.charts]) == 1


def test_scores_stand_beside_the_heads_of_the_same_model() -> None:
    units = pd.DataFrame({"layer": 0, "head": range(20)})
    heads = pd.concat(
        [
            units.assign(model="base", growth=0.2, ess2_512=10.0),
            units.assign(model="yarn", growth=0.4, ess2_512=np.where(units["head"] < 5, 12.0, 30.0)),
        ]
    )
    numbers = summarise_heads(heads)
    growth = "Growth exponent, median head"
    assert numbers[growth].to_dict() == {"base": 0.2, "yarn": 0.4}
    assert list(numbers) == [growth]  # one share alone, under yarn, shows nothing
    heads = pd.concat([heads, units.assign(model="other", growth=np.nan, ess2_512=10.0)])
    (kept,) = set(summarise_heads(heads)) - {growth}
    assert summarise_heads(heads)[kept].dropna().to_dict() == {"yarn": 0.25, "other": 1.0}
    few = pd.DataFrame({"layer": 0, "head": range(8)}).assign(model="smaller", growth=0.2, ess2_512=10.0)
    assert summarise_heads(pd.concat([heads, few]))[kept].dropna().to_dict() == {"yarn": 0.25, "other": 1.0}
    points = [trace for trace in plots.plot_scores_against_heads(TASKS, numbers).data if trace.customdata is not None]
    assert {trace.name: list(trace.x) for trace in points} == {"base": [0.2] * 3, "yarn": [0.4] * 2}
    assert dict(zip(points[0].customdata, points[0].y, strict=True))["ruler_vt"] == 0.8  # at its longest length

"""Discovery of probes: built-in ones, one from another package, and broken ones."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Browser, expect
from support.command_server import IMPORTS, serving
from support.refusals import assert_names
from support.tiny_studies import save_checkpoint, save_texts

from headscope import plugin_api, probe
from headscope.base import plugins
from headscope.base.declaration import FROM_SCORES, PLACES
from headscope.probe import Probe
from headscope.rendering.assembly import measured_statistics
from headscope.runs.column_metadata import Statistic, StatisticParts, is_statistic, statistics
from headscope.runs.columns import TableParts

ROOT = Path(__file__).parents[1]
EXTERNAL_PLUGIN = Path(__file__).with_name("external_plugin")
BASIC_PROBES = {"positions", "measure", "adapt", "pretrain"}
"""Probes whose tables and statistics other parts of headscope use."""
PLAYGROUND = [
    *(f"dashboards/playground/{name}.py" for name in ("callbacks", "components")),
    "headscope/playground/tasks.py",
]
"""Its questions about a prompt have the names of probes, whose code it does not use."""
OTHER_MEANINGS = {
    "ablation": [f"probes/needle/{name}.py" for name in ("analysis", "declaration", "plots", "results", "view")],
    "attribution": ["probes/needle/declaration.py", *PLAYGROUND],
    "patching": PLAYGROUND,
    "needle": [
        *("headscope/prompts/haystack.py", "headscope/prompts/needle_grid.py", "headscope/prompts/pair_sets.py"),
        *("headscope/prompts/needles.py", "probes/ablation/declaration.py", "probes/patching/run.py"),
        *("probes/attribution/declaration.py", "probes/sparsity/declaration.py", "probes/sparsity/run.py"),
    ],
    "patterns": [
        *("headscope/measures/key_patterns.py", "headscope/measures/top_keys.py", "headscope/scores/minference.py"),
        "probes/sparsity/run.py",
    ],
    "spans": [
        *(f"headscope/measures/{name}.py" for name in ("copying", "logit_attribution")),
        *(f"headscope/prompts/{name}.py" for name in ("pairs", "span_tokens")),
    ],
    "evaluate": ["headscope/tasks/harness.py", "probes/budget/run.py", "probes/budget/declaration.py"],
    "scaling": ["headscope/models/gguf_check.py"],
    "sparsity": ["headscope/scores/minference.py"],  # exports its table
    "window": ["headscope/attention/record.py", "headscope/attention/kernels/pair_moments.py"],
}
"""Files where the name of a probe means something else."""
COMMON_WORDS = {"weights"}
"""Names of probes that mean something else in most files: only the tables and columns of these probes are sought."""


def contract_classes() -> list[type]:
    """The classes with the contracts of parts, of which a Probe is a subclass for type checkers."""
    (block,) = [node for node in ast.parse(Path(probe.__file__).read_text()).body if isinstance(node, ast.If)]
    (parts,) = [node for node in block.body if isinstance(node, ast.ClassDef)]
    modules = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = [ast.unparse(base) for base in parts.bases]
    return [getattr(importlib.import_module(str(modules[name])), name) for name in names]


def public_names(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


CONTRACTS = {name: getattr(contracts, name) for contracts in contract_classes() for name in public_names(contracts)}
"""The contract of every part by its name."""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Run the command line in a process of its own that also finds the packages in the folder `packages`."""
    with serving(IMPORTS) as server:
        yield partial(server.run, tmp_path_factory.mktemp("printed"), packages=EXTERNAL_PLUGIN)


@pytest.fixture(scope="module")
def folder(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the example probe, in `runs`, and the output of its command, in `output.json`."""
    folder = tmp_path_factory.mktemp("external_plugin")
    tiny, texts = save_checkpoint(folder / "tiny"), save_texts(folder / "texts")
    flags = ("--model", f"base={tiny}", "--text", texts, "--docs", 3, "--lengths", "24,40", "--power", 2, "--json")
    code, out, err = command("norms", *flags, "--out", folder / "runs")
    assert code == 0, err
    (folder / "output.json").write_text(out)
    return folder


# Built-in probes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", plugins.probes().values(), ids=lambda probe: probe.name)
def test_every_part_of_a_built_in_probe_is_at_its_place_with_the_parameters_of_its_contract(probe: Probe) -> None:
    """Types are checked by mypy, see test_stub."""
    places = probe.part_places()
    assert len(places) >= 2
    follow = {*FROM_SCORES} if "scores" in places else set()
    assert {*vars(type(probe))} & {*CONTRACTS} == {*places} | follow
    for part, (module, name) in places.items():
        definition = getattr(importlib.import_module(module), name)
        if part in follow:
            continue  # what follows from scores is added
        if name.isupper() or isinstance(definition, type):
            assert getattr(probe, part)() is definition
        else:
            _, *expected = inspect.signature(CONTRACTS[part]).parameters
            assert [*inspect.signature(definition).parameters][: len(expected)] == expected
    repeated = [
        entry
        for entry in probe.parts.split()
        if "=" in entry and entry.split("=")[1] == PLACES.get(entry.split("=")[0])
    ]
    assert not repeated, "these have their usual place"


def test_every_part_has_one_contract_and_a_probe_all_of_them() -> None:
    assert sorted(name for contracts in contract_classes() for name in public_names(contracts)) == sorted(PLACES)


def test_a_part_without_a_place_is_refused_at_the_declaration() -> None:
    with pytest.raises(TypeError, match="explorer=MODULE"):
        type("Odd", (Probe,), {"name": "odd", "parts": "results explorer"})


def test_all_built_in_probes_are_installed_in_order() -> None:
    assert [*plugins.probes()] == [
        "positions",
        "measure",
        "patterns",
        "adapt",
        "pretrain",
        "spans",
        "sparsity",
        "detectors",
        "weights",
        "attribution",
        "needle",
        "evaluate",
        "influence",
        "patching",
        "paths",
        "ablation",
        "circuit",
        "imported",
        "budget",
        "window",
        "scaling",
    ]
    assert [*plugins.requestable_probes()] == [*plugins.probes()][1:]
    assert plugins.reported_problems() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "probe", [p for p in plugins.probes().values() if p.name not in BASIC_PROBES], ids=lambda p: p.name
)
def test_probe_names_appear_only_in_their_own_files(probe: Probe) -> None:
    """So that removing its folder and its entry point removes it completely."""
    folder = type(probe).__module__.split(".")[1]
    names = [table.name for table in plugins.call_part(probe, TableParts.tables)]
    names += [*plugins.call_part(probe, StatisticParts.statistics)]
    quoted = "|".join(map(re.escape, {probe.name, *names} - COMMON_WORDS))
    naming = re.compile(rf"probes[./]{folder}\b|[\"'`]({quoted})[\"'`]|run\.({'|'.join(map(re.escape, names))})\b")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.jinja"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    code = {name for name in tracked.stdout.split() if name.startswith(("headscope/", "dashboards/", "probes/"))}
    code -= {*OTHER_MEANINGS.get(probe.name, ())}
    other_files = [name for name in code if not name.startswith(f"probes/{folder}/") and (ROOT / name).is_file()]
    assert len(other_files) > 50
    assert [name for name in other_files if naming.search((ROOT / name).read_text(encoding="utf-8"))] == []


# A probe from another package----------------------------------------------------------------------------------------


def test_external_plugin_is_small() -> None:
    files = sorted((EXTERNAL_PLUGIN / "query_norms").glob("*.py"))
    assert [file.name for file in files] == ["__init__.py", "run.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 180


def test_external_plugin_imports_only_plugin_api() -> None:
    modules = set()
    for file in EXTERNAL_PLUGIN.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                modules.add(str(node.module))
    assert {module for module in modules if module.split(".")[0] in ("headscope", "probes", "dashboards")} == {
        "headscope.plugin_api"
    }


@pytest.mark.parametrize("name", plugin_api.__all__)
def test_every_name_of_the_plugin_api_can_be_imported_and_is_documented(name: str) -> None:
    assert getattr(plugin_api, name) is not None
    assert re.search(rf"\b{name}s?\b", str(plugin_api.__doc__))


def test_the_plugin_api_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="'Prob'"):
        _ = plugin_api.Prob  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_plugin_api_loads_torch_only_for_models_and_listeners() -> None:
    code = """
import sys
from headscope import plugin_api
assert not {"torch", "pandas"} & {*sys.modules}
needs_torch = []
for name in plugin_api.__all__:
    if name not in sys.argv[1:]:
        getattr(plugin_api, name)
        assert "torch" not in sys.modules, name
"""
    models_and_listeners = ["AttentionRecord", "CapturedLayers", "FinishedPass", "Model", "Observer", "StudyContext"]
    contexts = ["attached", "capturing", "evaluating"]
    command = [sys.executable, "-c", code, *models_and_listeners, *contexts]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_external_plugin_adds_a_command_a_table_and_a_column(folder: Path) -> None:
    output = json.loads((folder / "output.json").read_text())
    assert output["tables"]["norms"] == 3 * 2 * 4 * 4
    code = f"import headscope; print(headscope.Run.open({output['path']!r}).heads['query_norm'].describe())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXTERNAL_PLUGIN)},
    )
    assert "count     16.0" in result.stdout, result.stderr


@pytest.mark.slow
def test_external_plugin_adds_help_and_study_keys(command: Command, tmp_path: Path) -> None:
    _, help_text, _ = command("norms", "--help")
    assert "Measure the mean length of each head's queries." in help_text
    assert "--power" in help_text
    study = tmp_path / "study.yaml"
    study.write_text("norms: {powr: 2}\n")
    code, _, err = command("run", study)
    assert (code, err.count("\n")) == (2, 1)
    assert_names(err, "'norms.powr'", "'power'")


@pytest.mark.slow
def test_external_plugin_adds_a_chart_a_finding_and_a_term(command: Command, folder: Path, tmp_path: Path) -> None:
    (run,) = (folder / "runs").glob("2*")
    code, _, err = command("report", run, "--out", tmp_path / "report.html")
    assert code == 0, err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<h2[^>]*>Query norms</h2>", page)
    assert re.search(r"The median query norm of base is [\d.]+\.", page)
    assert "The length of a query vector" in page


@pytest.mark.slow
def test_results_of_an_external_plugin_are_compared_and_checked(command: Command, folder: Path, tmp_path: Path) -> None:
    (run,) = (folder / "runs").glob("2*")
    _, compared, _ = command("compare", run, run, "--json")
    assert "norms.median" in {change["after"]["question"] for change in json.loads(compared)["changes"]}
    checks = tmp_path / "checks.yaml"
    checks.write_text("- {result: norms.median, at_least: 0}\n- {statistic: query_norm, median: true, at_most: 0}\n")
    code, checked, _ = command("check", run, checks, "--json")
    assert (code, [line["outcome"] for line in json.loads(checked)]) == (5, ["passes", "fails"])


@pytest.fixture
def app(folder: Path) -> Iterator[str]:
    """The address of the app on the run."""
    command = [sys.executable, "-m", "headscope.cli.app", "dash", str(folder / "runs"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(EXTERNAL_PLUGIN)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline(), server.stdout.readline()]
        yield lines[1].split()[1]
        server.terminate()


@pytest.mark.browser
def test_external_plugin_adds_a_page_to_the_app(app: str, chromium: Browser) -> None:
    page = chromium.new_page()
    page.goto(app)
    page.get_by_role("link", name="Causes", exact=True).click()
    page.get_by_role("link", name="Query norms").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Query norms")
    page.locator("summary", has_text="Query norms").click()
    expect(page.get_by_role("listitem").get_by_text("The median query norm of base is")).to_be_visible()
    page.wait_for_selector(".js-plotly-plot .heatmaplayer image")
    assert page.url.startswith(f"{app}/query-norms")
    page.close()


# Broken probes -----------------------------------------------------------------------------------------------------


def install_broken(folder: Path, declaration: str) -> Path:
    """Install a package in `folder` with this declaration of a probe, or one with this method; returns `folder`."""
    if declaration.startswith("def "):
        method = textwrap.indent(declaration, "    ")
        header = "class Wrong(Probe):\n    name = 'wrong'\n    title = summary = 'W'\n"
        declaration = f"{header}{method}\nPROBE = Wrong()"
    (folder / "wrong.py").write_text(f"from headscope.plugin_api import Probe\n{declaration}\n")
    info = folder / "wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headscope.probes]\nwrong = wrong:PROBE\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        ("PROBE = 3", ("'declaration'", "TypeError")),
        ("import nothing_of_that_name", ("'declaration'", "ModuleNotFoundError", "'nothing_of_that_name'")),
        (
            "PROBE = Probe(name='wrong', title='W', options='wrong:Options')",
            ("'declaration'", "TypeError", "Probe", "API_VERSION 3"),
        ),
        (
            "def findings(self, run):\n    return ()",
            ("'declaration'", "TypeError", "'findings'"),
        ),
        ("def chart(self, context):\n    return ()", ("'chart'", "'charts'")),
        ("def options(self):\n    import gone", ("'options'", "ModuleNotFoundError", "'gone'")),
        ("def charts(self, context):\n    import gone", ("'charts'", "ModuleNotFoundError", "'gone'")),
        ("def charts(self, context):\n    yield 1 / 0", ("'charts'", "ZeroDivisionError")),
    ],
)
def test_broken_probe_part_gives_one_line_and_the_rest_works(
    declaration: str, named: tuple[str, ...], command: Command, folder: Path, tmp_path: Path
) -> None:
    (run,) = (folder / "runs").glob("2*")
    packages = install_broken(tmp_path, declaration)
    code, _, err = command("report", run, "--out", tmp_path / "report.html", packages=packages)
    assert code == 0, err
    assert (tmp_path / "report.html").is_file()
    if "'options'" in named:  # which are only imported for a study
        flags = ("--length", "100", "--seeds", 2, "--out", tmp_path / "runs", "--quiet")
        code, _, err = command("scaling", *flags, packages=packages)
        assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("headscope: ")
    assert_names(line, "'wrong'", *named)


@pytest.mark.slow
def test_requesting_a_broken_probe_gives_one_line(command: Command, tmp_path: Path) -> None:
    packages = install_broken(tmp_path, "def options(self):\n    import gone")
    code, _, err = command("wrong", "--out", tmp_path / "runs", packages=packages)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("headscope: ")
    assert_names(line, "'wrong'", "'options'", "ModuleNotFoundError")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def declare_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, str]]]:
    """Declare `query_norm` by one probe and a statistic of this name by another; returns the labels of both."""

    def declare(name: str) -> dict[str, str]:
        parts = [
            (type("Named", (Probe,), {"name": probe})(), {key: Statistic(probe, "", "")})
            for probe, key in (("first", "query_norm"), ("second", name))
        ]
        monkeypatch.setattr(
            plugins, "call_parts", lambda part: iter(parts if part is StatisticParts.statistics else ())
        )
        monkeypatch.setattr(plugins, "_reported", {})
        statistics.cache_clear()
        return {key: entry.label for key, entry in statistics().items()}

    yield declare
    statistics.cache_clear()


@pytest.mark.parametrize("name", ["query_norm_low", "query_norm_high", "query_norm_method", "layer", "query_norm"])
def test_a_statistic_whose_name_means_something_else_is_left_out_with_one_line(
    name: str, declare_second: Callable[[str], dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """`query_norm_low` is the low end of the interval of `query_norm`; a second probe cannot replace a statistic."""
    assert declare_second(name) == {"query_norm": "first"}
    (record,) = caplog.records
    assert_names(record.getMessage(), "'second'", f"'{name}'")


def test_a_statistic_whose_columns_have_the_name_of_another_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        (type("Named", (Probe,), {"name": "first"})(), {"norm_16": Statistic("first", "", "")}),
        (type("Named", (Probe,), {"name": "second"})(), {"norm": Statistic("second", "", "", by_length=True)}),
    ]
    monkeypatch.setattr(plugins, "call_parts", lambda part: iter(parts))
    monkeypatch.setattr(plugins, "_reported", {})
    statistics.cache_clear()
    try:
        assert {*statistics()} == {"norm_16"}
    finally:
        statistics.cache_clear()


@pytest.mark.parametrize("name", ["top_norm", "low", "norm_low", "norm_diff", "query_norm_16", "query_norm_diff"])
def test_every_other_statistic_of_a_plugin_is_offered(
    name: str, declare_second: Callable[[str], dict[str, str]]
) -> None:
    assert declare_second(name) == {"query_norm": "first", name: "second"}
    heads = pd.DataFrame({"model": ["m"], "layer": [0], "head": [0], "kv_group": [0], name: [1.0]})
    assert is_statistic(name)
    assert measured_statistics(heads) == [name]

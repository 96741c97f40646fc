"""The stub of the package: fresh, complete, and typed, so that editors complete the options of every function."""

import inspect
import re
from pathlib import Path

import pytest
from mypy import api as mypy_api

import headscope
from headscope import reference
from headscope.base import plugins

ROOT = Path(__file__).parents[1]
OTHER_PAGES = ("api.md", "plugin-api.md", "your-own-probe.md")
"""Pages of signatures, and the page of a package, whose two files are checked instead."""
EXTERNAL_PLUGIN = ROOT / "tests" / "external_plugin" / "query_norms"
PAGE_HEADER = """# mypy: disable-error-code="no-redef, no-untyped-def, no-untyped-call, type-arg"
import headscope as hs
run: hs.Run
"""
PARTS = """
from headscope.base import plugins
from headscope.probe import Probe
from headscope.runs.run import Run
from probes.needle import PROBE
reveal_type(PROBE.options())
reveal_type(PROBE.runner())
def parts(run: Run) -> None:
    reveal_type([*PROBE.results(run)])
    reveal_type(plugins.call_part(PROBE, Probe.head_columns, run))
    plugins.call_part(PROBE, Probe.head_results, run, "base")
"""


def test_the_stub_has_the_functions_and_options_of_the_probes() -> None:
    """Run `make docs` after a change of options."""
    text = reference.STUB.read_text(encoding="utf-8")
    assert text == reference.add_probe_functions(text)


def test_the_stub_has_every_name_of_the_package() -> None:
    names = set(re.findall(r"^def (\w+)\(| as (\w+)$", reference.STUB.read_text(encoding="utf-8"), re.MULTILINE))
    assert {function or name for function, name in names} == {*dir(headscope)} - {"__version__"}


def uses_of_every_function() -> str:
    """A script that calls every function of a probe, and some with wrong keywords."""
    lines = ["import headscope as hs", "MODEL = 'smollm2-135m'"]
    for name in plugins.probe_functions():
        takes_model = "model" in inspect.signature(getattr(headscope, name)).parameters
        lines.append(f"reveal_type(hs.{name}({'MODEL' if takes_model else ''}))")
    lines += ["reveal_type(hs.load('smollm2-135m'))", "hs.measure('smollm2-135m', row=3)", "hs.needle(needles='two')"]
    return "\n".join(lines)


CONTRACTS = """
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from headscope.probe import Probe
Arguments = ParamSpec("Arguments")
Part = TypeVar("Part")
Taken = TypeVar("Taken", contravariant=True)
class Takes(Protocol[Taken]):
    def __call__(self, part: Taken) -> None: ...
def value_of(contract: Callable[[Probe], Part]) -> Takes[Part]:
    raise NotImplementedError
def function_of(contract: Callable[Concatenate[Probe, Arguments], Part]) -> Takes[Callable[Arguments, Part]]:
    raise NotImplementedError
"""
"""Functions whose results take a part that has the type of a contract, a method of Probe."""


def parts_beside_contracts() -> str:
    """A script with every part of every built-in probe beside its contract."""
    lines = [CONTRACTS]
    for number, probe in enumerate(plugins.probes().values()):
        for part, (module, name) in probe.part_places().items():
            takes = "value_of" if name.isupper() or part in ("options", "runner") else "function_of"
            lines.append(f"from {module} import {name} as {part}_{number}")
            lines.append(f"{takes}(Probe.{part})({part}_{number})")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one run of mypy, with the settings of the project, says of all scripts of these tests."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "uses.py").write_text(uses_of_every_function())
    (folder / "parts.py").write_text(PARTS)
    (folder / "contracts.py").write_text(parts_beside_contracts())
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        if blocks and page.name not in OTHER_PAGES:
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
            (folder / f"page_{name}.py").write_text("\n".join([PAGE_HEADER, *blocks]))
    assert len([*folder.iterdir()]) > 12
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    output, errors, _ = mypy_api.run([str(folder), str(EXTERNAL_PLUGIN), *settings])
    assert errors == ""
    return output


@pytest.mark.slow
def test_mypy_accepts_every_python_block_of_the_docs(messages: str) -> None:
    """A page is one script; a block may use `run`. The two files of the example probe are checked, too."""
    assert [line for line in messages.splitlines() if "page_" in line or "query_norms" in line] == []


@pytest.mark.slow
def test_mypy_reveals_the_types_of_every_function(messages: str) -> None:
    revealed = re.findall(r'uses.py.*Revealed type is "(.+)"', messages)
    assert revealed == ["headscope.run.Run"] * len(plugins.probe_functions()) + ["headscope.positions.model.Model"]
    assert 'Unexpected keyword argument "row" for "measure"' in messages
    assert 'Argument "needles" to "needle" has incompatible type "str"' in messages


def test_mypy_types_what_the_parts_of_a_probe_return(messages: str) -> None:
    assert re.findall(r'parts.py.*Revealed type is "(.+)"', messages) == [
        "type[headscope.study.config.Options]",
        "def (Any, headscope.study.context.StudyContext) -> headscope.study.cells.ProbeRunner | "
        "headscope.study.cells.ObservingRunner",
        "list[headscope.results.result.Result]",
        "pandas.core.frame.DataFrame | None",
    ]
    assert re.search(r'parts.py:11: error: Missing positional arguments "layer", "head"', messages)


def test_mypy_finds_every_part_of_the_built_in_probes_to_have_the_type_of_its_contract(messages: str) -> None:
    assert parts_beside_contracts().count("(Probe.") > 200
    assert [line for line in messages.splitlines() if "contracts.py" in line] == []

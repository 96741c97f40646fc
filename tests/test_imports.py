"""Who may import whom: the two bans that carry the design, and the order of the house."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("headscope", "probes", "dashboards")

WITHOUT_TORCH = [
    "bins",
    "columns",
    "probe_tables",
    "schema",
    "errors",
    "tables",
    "store",
    "summary",
    "figures",
    "windows",
    "claims",
    "needles",
    "influences",
    "damping",
    "roles",
    "synthetic",
    "findings",
    "chart",
    "probe_charts",
    "charts",
    "terminal",
    "report",
    "config",
    "steps",
]
"""Modules of headscope that run where no torch is installed; so does all of `dashboards`."""

BELOW = {
    "errors": set(),
    "columns": set(),
    "probe_tables": {"columns"},
    "schema": {"errors", "columns", "probe_tables"},
    "geometry": set(),
    "attention": set(),
    "bins": set(),
    "steps": set(),
    "progress": set(),
    "tables": {"errors", "schema"},
    "store": {"errors", "schema", "tables", "summary"},
    "config": {"errors", "steps"},
    "texts": {"errors"},
    "checkpoints": {"errors"},
    "rotary": {"errors", "geometry", "seam", "checkpoints"},
    "models": {"errors", "geometry", "seam", "checkpoints", "rotary"},
    "kernel": set(),
    "seam": {"errors", "attention", "kernel"},
    "positions": {"errors", "geometry", "seam", "models", "rotary"},
    "capture": {"errors", "attention", "seam", "models", "positions"},
    "interventions": {"geometry", "seam", "positions"},
    "replay": {"errors", "seam", "capture", "models", "positions", "logits"},
    "prefixes": {"seam", "capture", "models", "positions"},
    "measures": {"errors", "attention", "bins", "geometry"},
    "logits": {"models", "measures"},
    "samples": {"errors", "texts"},
    "learning": {"errors", "models", "positions", "logits"},
    "damping": set(),
    "summary": {"errors", "schema", "bins", "store", "tables", "damping"},
    "claims": {"store", "summary", "influences"},
    "figures": {"errors", "schema", "bins", "summary", "store", "windows", "needles", "influences", "roles"},
    "windows": {"summary"},
    "roles": {"summary"},
    "influences": {"store", "summary", "damping"},
    "needles": {"store", "summary", "roles"},
    "synthetic": {"bins", "store"},
    "findings": {"errors", "schema", "store", "summary", "windows", "claims", "needles", "influences", "roles"},
    "chart": {"store", "findings"},
    "probe_charts": {"store", "summary", "figures", "chart", "needles", "influences"},
    "charts": {"errors", "schema", "store", "summary", "figures", "findings", "chart", "probe_charts"},
    "terminal": {"findings", "store", "summary", "needles"},
    "report": {"errors", "schema", "bins", "store", "summary", "figures", "findings", "chart", "charts"},
}
"""Module or package of headscope -> what else of headscope it may import. `study`, `measuring` and above may all."""


def files(*places: str) -> list[Path]:
    found = []
    for place in places:
        path = ROOT / place
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [file for file in found if file.is_file()]


def imports(file: Path) -> Iterator[str]:
    """Every module that the file imports anywhere, dotted; names imported from a package count as modules of it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


def own(file: Path) -> set[str]:
    """Modules of headscope that the file imports, by their first name."""
    return {name.split(".")[1] for name in imports(file) if name.startswith("headscope.")}


def loaded_by(*modules: str) -> set[str]:
    """Top-level modules that a fresh process holds after these imports."""
    code = f"import sys; import {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def existing(modules: list[str]) -> list[str]:
    places = [(f"headscope.{name}", files(f"headscope/{name}")) for name in modules]
    names = [name for name, found in places if found]
    return names + [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files("dashboards")
        if file.stem != "__main__"
    ]


def test_measures_know_neither_transformers_nor_pandas_nor_files() -> None:
    for file in files("headscope/measures"):
        assert not roots(file) & {"transformers", "transformer_lens", "pandas", "pyarrow"}, file
        assert not own(file) & {"store", "tables", "models", "study"}, file
    assert not loaded_by("headscope.measures") & {"transformers", "transformer_lens", "pandas", "pyarrow"}


def test_what_reads_runs_never_imports_torch_or_transformers() -> None:
    for file in files(*(f"headscope/{name}" for name in WITHOUT_TORCH), "dashboards"):
        assert not roots(file) & {"torch", "transformers", "transformer_lens"}, file


def test_what_reads_runs_runs_in_a_process_without_torch_or_transformers() -> None:
    assert not loaded_by(*existing(WITHOUT_TORCH)) & {"torch", "transformers", "transformer_lens"}


def test_importing_headscope_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "transformer_lens", "pandas", "pyarrow", "plotly", "scipy"}
    assert not loaded_by("headscope") & heavy


@pytest.mark.parametrize("module", BELOW)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    for file in files(f"headscope/{module}"):
        assert own(file) <= BELOW[module] | {module}, file


def test_the_order_of_the_house_has_no_circle_but_the_run_that_summarises_itself() -> None:
    done: set[str] = set()
    below = {module: set(others) for module, others in BELOW.items()}
    below["store"].remove("summary")  # Run.heads imports it when asked
    while ready := {module for module, others in below.items() if others <= done} - done:
        done |= ready
    assert done == set(BELOW)


def test_the_library_imports_neither_its_probes_nor_its_dashboards() -> None:
    for file in files("headscope"):
        if file.stem not in ("cli", "bench") and file.parent.name != "commands":
            assert not roots(file) & {"probes", "dashboards"}, file
    for file in files("probes"):
        assert "headscope.cli" not in set(imports(file)), file
        assert "dashboards" not in roots(file), file


def test_importing_every_module_needs_no_transformer_lens() -> None:
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files(*PACKAGES)
        if file.stem != "__main__"
    ]
    assert "transformer_lens" not in loaded_by(*names)

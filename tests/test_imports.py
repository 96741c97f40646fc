"""Which module may import which."""

import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest
from support.source_tree import PACKAGES, ROOT, files, imports, roots
from support.synthetic_runs import synthetic_run

from headscope.base import plugins

ALLOWED_IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "streaming": set(),
    "compat": {"errors"},
    "base": {"errors", "streaming"},
    "attention": {"base", "compat", "errors"},
    "prompts": {"base", "errors"},
    "runs": {"base", "errors"},
    "measures": {"attention", "base", "errors", "streaming"},
    "models": {"attention", "base", "compat", "errors"},
    "scores": {"attention", "base", "errors", "runs"},
    "plots": {"base", "compat", "errors", "runs"},
    "results": {"base", "errors", "prompts", "runs"},
    "positions": {"attention", "base", "errors", "models"},
    "rendering": {"base", "errors", "plots", "results", "runs"},
    "forward": {"attention", "base", "compat", "errors", "measures", "models", "positions", "prompts", "streaming"},
    "run": {"base", "rendering", "runs", "scores"},
    "decomposition": {"attention", "base", "compat", "errors", "forward", "measures", "models", "positions"},
    "interventions": {
        "attention",
        "base",
        "decomposition",
        "errors",
        "forward",
        "measures",
        "models",
        "positions",
        "prompts",
        "streaming",
    },
    "study": {
        "attention",
        "base",
        "compat",
        "errors",
        "forward",
        "interventions",
        "models",
        "positions",
        "prompts",
        "runs",
    },
    "probe": {"attention", "base", "rendering", "results", "runs", "study"},
    "tasks": {"base", "compat", "errors", "positions", "study"},
    "training": {"attention", "errors", "forward", "measures", "models", "positions", "prompts", "study"},
    "playground": {
        "attention",
        "base",
        "decomposition",
        "errors",
        "forward",
        "interventions",
        "measures",
        "models",
        "positions",
        "prompts",
        "scores",
        "streaming",
        "study",
    },
    "api": {"base", "errors", "models", "positions", "rendering", "results", "run", "runs", "study"},
    "plugin_api": {
        "attention",
        "base",
        "errors",
        "forward",
        "measures",
        "models",
        "plots",
        "positions",
        "probe",
        "prompts",
        "rendering",
        "runs",
        "study",
    },
    "bench": {"api", "positions", "prompts", "run", "runs", "study"},
}
"""Folder or module of headscope -> those that it may import, also for types. `cli` and `reference` may import
all."""
MAX_ROOMS, MAX_FLOORS = 30, 12
"""Folders and modules of headscope, and the longest way down from one of them through its imports."""

TORCH = {"torch", "transformers", "transformer_lens"}
WITHOUT_TORCH = (
    "errors",
    "base",
    "streaming",
    "plugin_api",
    "prompts",
    "runs",
    "results",
    "plots",
    "rendering",
    "study/config",
    "study/cells",
    "study/checkpoint_glob",
    "api",
    "cli",
)
"""Folders and files of headscope that must not load torch; neither must `dashboards` nor most parts of a probe."""
MAY_RUN_MODELS = "runner"
"""The part of a probe that may import torch."""


def imported_packages(file: Path) -> set[str]:
    """Rooms of headscope that the file imports, also for its types."""
    return {name.split(".")[1] for name in imports(file, with_types=True) if name.startswith("headscope.")}


def imports_by_file() -> dict[str, set[str]]:
    """The files that every file of the product imports: anywhere, in functions and for types, too.

    Importing a file also runs the `__init__` of its packages, except those that the importing file is in itself.
    """
    known = {module(file): file for file in files(*PACKAGES)}
    graph = {}
    for name, file in known.items():
        targets = {path if path in known else path.rpartition(".")[0] for path in imports(file, with_types=True)}
        packages = {package for target in targets for package in accumulate(target.split("."), "{}.{}".format)}
        run_already = {package for package in packages - targets if name.startswith(f"{package}.")}
        graph[name] = (packages & {*known}) - run_already - {name}
    return graph


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(*modules: str) -> set[str]:
    """Modules that a fresh process holds after these imports."""
    code = f"import sys; import {', '.join(modules)}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.split())
    assert loaded >= set(modules)
    return loaded


def parts() -> list[str]:
    """The modules of the parts of built-in probes, but for the one that runs models."""
    names = {
        module
        for probe in plugins.probes().values()
        for part, (module, _) in probe.part_places().items()
        if part != MAY_RUN_MODELS
    }
    assert len(names) > 50
    return sorted(names)


def test_no_file_imports_itself_through_others() -> None:
    graph = imports_by_file()
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files of a circle
    assert "headscope.rendering.view_parts" in graph["headscope.probe"], "an import for types"
    assert "headscope.rendering.notebook" in graph["headscope.run"], "an import in a function"
    assert {"headscope", "headscope.positions", "headscope.positions.model"} <= graph["probes.adapt.run"]


@pytest.mark.slow
def test_measures_import_neither_transformers_nor_pandas_nor_pyarrow() -> None:
    for file in files("headscope/measures"):
        assert not roots(file) & {"transformers", "transformer_lens", "pandas", "pyarrow"}, file
    loaded = loaded_by("headscope.measures")
    assert not loaded & {"transformers", "transformer_lens", "pandas", "pyarrow", "headscope.runs.run_tables"}


def test_run_readers_do_not_import_torch_or_transformers() -> None:
    for file in {*files(*(f"headscope/{name}" for name in WITHOUT_TORCH), "dashboards")}:
        inside = {"transformers"} if module(file) == "headscope.cli" else set()  # silences it, in a function
        assert not roots(file) & TORCH - inside, file


@pytest.mark.slow
def test_run_readers_and_reports_load_without_torch() -> None:
    readable = {*files(*(f"headscope/{name}" for name in WITHOUT_TORCH), "dashboards")}
    readers = [module(file) for file in sorted(readable)]
    assert not loaded_by(*readers, *parts()) & TORCH


def test_importing_headscope_loads_no_heavy_package() -> None:
    heavy = {"torch", "transformers", "transformer_lens", "pandas", "pyarrow", "plotly", "scipy", "pydantic"}
    assert not loaded_by("headscope") & heavy


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys; sys.argv = ['headscope', '--help']; from headscope.cli.app import app; app(standalone_mode=False)"
    )
    code += "; print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "headscope.cli.app" in result.stderr.split()
    assert not set(result.stderr.split()) & {
        *(*TORCH, "pandas", "pyarrow", "plotly", "pydantic", "dash"),
        *("yaml", "asyncio", "multiprocessing", "rich"),
    }


@pytest.mark.slow
def test_tables_and_results_are_printed_without_plotly(tmp_path: Path) -> None:
    """Of a run with the tables of every probe."""
    run = synthetic_run(tmp_path, models=("base",), layers=1, heads=2, groups=1, pairs=4, lengths=(256,), docs=1)
    code = f"""
import sys
from headscope.rendering import comparison, terminal
from headscope.runs.run import Run

run = Run.open({str(run.path)!r})
terminal.print_warnings(run)
terminal.print_summary(run, show_all=True)
terminal.print_next_steps(run)
terminal.run_to_dict(run)
print(*sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {module(file) for file in files("probes") if file.stem == "results"} <= set(result.stderr.split())
    assert not set(result.stderr.split()) & {"plotly", *TORCH}


@pytest.mark.slow
def test_importing_the_command_line_reads_no_shipped_run() -> None:
    modules = ", ".join(module(file) for file in files("headscope/cli"))
    code = f"""
import sys

def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "glob.glob") and "examples" in str(arguments[0]):
        print(event, *arguments, file=sys.stderr)

sys.addaudithook(note)
import {modules}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not result.stderr


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_package_imports_only_allowed_packages(package: str) -> None:
    for file in files(f"headscope/{package}"):
        assert imported_packages(file) <= ALLOWED_IMPORTS[package] | {package}, file


def test_every_package_has_allowed_imports_without_cycles() -> None:
    existing = {
        path.stem for path in (ROOT / "headscope").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    modules = {"__init__", "__main__", "cli", "reference"}
    assert existing == {*ALLOWED_IMPORTS, *modules}
    order = TopologicalSorter(ALLOWED_IMPORTS).static_order()  # raises for a circle
    floors: dict[str, int] = {}
    for package in order:
        floors[package] = 1 + max((floors[lower] for lower in ALLOWED_IMPORTS[package]), default=0)
    assert max(floors.values()) <= MAX_FLOORS
    assert len(existing) <= MAX_ROOMS


def test_the_library_imports_neither_its_probes_nor_its_dashboards() -> None:
    for file in files("headscope"):
        if file.parent.name not in ("cli", "bench"):
            assert not roots(file) & {"probes", "dashboards"}, file
    for file in files("probes"):
        assert not {"headscope.cli"} & {".".join(name.split(".")[:2]) for name in imports(file)}, file
        assert "dashboards" not in roots(file), file


def test_probes_import_no_other_probe() -> None:
    for file in files("probes"):
        probe_name = file.relative_to(ROOT / "probes").parts[0]
        assert {name.split(".")[1] for name in imports(file) if name.startswith("probes.")} <= {probe_name}, file


@pytest.mark.slow
def test_importing_every_module_needs_no_transformer_lens() -> None:
    assert "transformer_lens" not in loaded_by(*(module(file) for file in files(*PACKAGES)))


def test_no_test_module_imports_another() -> None:
    imports_of_tests = {
        file.name: [
            line
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.startswith(("from test_", "import test_"))
        ]
        for file in (ROOT / "tests").glob("test_*.py")
    }
    assert not {name: lines for name, lines in imports_of_tests.items() if lines}

"""Private names of other libraries: only `headscope.compat` uses them, and each is checked; one has a slower path."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import families, missing_kernel, tiny_studies
from support.source_tree import PACKAGES, ROOT, files
from torch import Tensor
from typer.core import TyperOption

import dashboards
import headscope as hs
from headscope.attention import kernel
from headscope.compat import torch as private_torch
from headscope.compat.library_name import Library, LibraryName
from headscope.errors import IncompatibleLibrary, warn_once
from headscope.forward.capture import capturing
from headscope.positions.model import load

COMPAT = ROOT / "headscope" / "compat"
LIBRARIES = sorted(file.stem for file in COMPAT.glob("*.py") if file.stem not in ("__init__", "library_name", "dash"))
"""Libraries with names that must exist; without those of Dash, all components are imported."""
HEAVY = ("lm_eval", "ray", "transformer_lens")
FOREIGN = {
    *LIBRARIES,
    "click",
    "dash",
    "plotly",
    "pydantic",
    "datasets",
    "gguf",
    "peft",
    "huggingface_hub",
    "safetensors",
}
STANDARD_LIBRARY = {"_exit", "_getframe", "_asdict", "_replace"}
"""Documented names of Python with an underscore."""
ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr", "object"}
"""Functions that take the name of an attribute; the last one is `patch.object`."""


def declared(library: str) -> list[LibraryName]:
    """The names of a library that headscope uses."""
    values = vars(import_module(f"headscope.compat.{library}")).values()
    nested = [name for value in values if isinstance(value, dict) for name in value]
    return list(dict.fromkeys(name for name in (*values, *nested) if isinstance(name, LibraryName)))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that these modules define: functions, classes, variables, parameters and attributes of `self`."""
    names = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def private_uses(tree: ast.Module, own: set[str], library_attributes: set[str]) -> Iterator[str]:
    """Private names of libraries in a module: imported, as attribute, as keyword, or as text that names an attribute.

    A private attribute is a library's if headscope itself defines no such name.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name.split(".") for alias in aliases]
                yield from (".".join(parts) for parts in modules if parts[0] in FOREIGN and any(map(is_private, parts)))
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] in FOREIGN:
                parts = [*module.split("."), *(alias.name for alias in aliases)]
                yield from (f"{module} {part}" for part in parts if is_private(part))
            case ast.Attribute(attr=name) if is_private(name) and name not in own | STANDARD_LIBRARY:
                yield ast.unparse(node)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if name in library_attributes:
                yield name
            case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function)) if function in ATTRIBUTE_FUNCTIONS:
                texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                yield from (text for text in texts if isinstance(text, str) and is_private(text) and text not in own)


def test_private_names_of_libraries_stand_in_compat_only() -> None:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files(*PACKAGES)}
    product = {file: tree for file, tree in trees.items() if COMPAT not in file.parents}
    own = own_names(list(product.values()))
    attributes = {name.attribute for library in LIBRARIES for name in declared(library) if is_private(name.attribute)}
    uses = {str(file.relative_to(ROOT)): [*private_uses(tree, own, attributes)] for file, tree in product.items()}
    assert not {file: names for file, names in uses.items() if names}
    compat = [tree for file, tree in trees.items() if COMPAT in file.parents]
    assert any([*private_uses(tree, own, attributes)] for tree in compat)


@pytest.mark.parametrize(
    "code",
    [
        "from typer._click.core import Context",
        "from lm_eval.tasks import _yaml_loader",
        "import ray._private.worker",
        "kernel = torch.ops.aten._flash_attention_forward",
        "getattr(bridge, '_weights_processed', False)",
        "patch.object(module, '_mk_function_ctor', None)",
        "HOOKS = {'_forward_hooks'}",
    ],
)
def test_a_private_name_is_noticed(code: str) -> None:
    assert [*private_uses(ast.parse(code), {"_own"}, {"_forward_hooks"})]


def test_own_private_names_are_no_private_names_of_libraries() -> None:
    own = "class Run:\n    def __init__(self):\n        self._own = 1\n\ndef read(run): return run._own, os._exit"
    tree = ast.parse(own)
    assert not [*private_uses(tree, own_names([tree]), set())]


MARKS_BY_LIBRARY = {**dict.fromkeys(HEAVY, pytest.mark.slow), "torch": missing_kernel.needs_kernel_name}


@pytest.mark.parametrize("library", [pytest.param(name, marks=MARKS_BY_LIBRARY.get(name, ())) for name in LIBRARIES])
def test_installed_libraries_have_the_names(library: str) -> None:
    names = declared(library)
    assert names
    for name in names:
        name.resolve()
        assert version(name.library.package).partition("+")[0] in name.library.tried


def test_importing_compat_imports_no_library() -> None:
    modules = ", ".join(f"headscope.compat.{library}" for library in LIBRARIES)
    code = f"import sys, {modules}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(result.stdout.split()) & FOREIGN


GONE = Library("torch", ("2.13.0", "2.15.0"))


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        (LibraryName(GONE, "torch:ops.aten._gone", "a test"), "torch.ops.aten._gone"),
        (LibraryName(GONE, "torch._gone:anything", "a test"), "torch._gone.anything"),
        (LibraryName(GONE, "torch.nn:Module()._gone", "a test"), "torch.nn.Module()._gone"),
        (
            LibraryName(GONE, "torch:ops.aten._flash_attention_forward", "a test", ("gone",)),
            "parameter 'gone' of torch.ops.aten._flash_attention_forward",
        ),
    ],
)
def test_a_missing_name_is_reported_with_library_version_and_remedy(name: LibraryName, lack: str) -> None:
    with pytest.raises(IncompatibleLibrary) as raised:
        name.resolve()
    expected = (
        f"torch {version('torch')} has no {lack}, which headscope needs for a test. Install torch 2.13.0 or 2.15.0"
    )
    assert str(raised.value) == expected


def test_a_command_on_an_incompatible_typer_ends_in_one_line(headscope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = next(base for base in TyperOption.__mro__ if "display_type" in vars(base))
    monkeypatch.delattr(owner, "display_type")
    code, _, err = headscope("needle", "--help")
    assert code == IncompatibleLibrary.exit_code
    (line,) = err.splitlines()
    assert line.startswith(f"headscope: typer {version('typer')} has no typer.core.TyperOption.display_type")


@contextmanager
def renamed_parameter() -> Iterator[None]:
    """torch with a kernel that takes other parameters."""
    name = LibraryName(private_torch.TORCH, private_torch.CPU_FLASH_ATTENTION.path, "a test", ("renamed",))
    with patch.object(private_torch, "CPU_FLASH_ATTENTION", name):
        yield


def attended(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of causal attention and of attention under a mask."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
    mask[:, 0] = True
    return [kernel.fused_attention(q, k, v, 0.3, True), kernel.fused_attention(q, k, v, 0.3, False, mask)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "without_kernel",
    [missing_kernel.without_cpu_kernel, pytest.param(renamed_parameter, marks=missing_kernel.needs_kernel_name)],
)
def test_attention_without_the_kernel_has_the_same_bits_and_log_sum_exp(
    without_kernel: Callable[[], AbstractContextManager[None]], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    expected = attended(q, k, v)
    with without_kernel():
        results = attended(q, k, v)
    for (out, lse), (expected_out, expected_lse) in zip(results, expected, strict=True):
        assert out.dtype == dtype
        assert torch.equal(out, expected_out)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"torch {version('torch')} has no" in line
    assert line.endswith("log-sum-exp in blocks of rows, which is slower")


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma2", "gpt_oss", "deepseek_v3"])
def test_models_open_and_give_the_same_records_without_the_kernel(family: str) -> None:
    ids = torch.randint(3, families.VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))

    def records() -> list[Any]:
        model, seen = load((families.SPECS | families.OTHERS)[family].build()), list[Any]()
        with torch.no_grad(), capturing(model) as layers:
            layers.listen(seen.append)
            model.module(ids)
        return seen

    expected = records()
    with missing_kernel.without_cpu_kernel():
        results = records()
    for record, other in zip(results, expected, strict=True):
        torch.testing.assert_close(record.lse, other.lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(record.q, other.q, rtol=1e-4, atol=1e-4)


def test_a_run_without_the_kernel_has_the_same_numbers_and_says_so(tmp_path: Path) -> None:
    checkpoint, texts = tiny_studies.save_checkpoint(tmp_path / "tiny"), tiny_studies.save_texts(tmp_path / "texts")

    def measure(out: str) -> hs.Run:
        model = hs.load(str(checkpoint), device="cpu")
        return hs.measure({"base": model}, text=texts, docs=2, lengths=[24, 40], rows=8, out=tmp_path / out)

    expected = measure("kernel")
    with missing_kernel.without_cpu_kernel():
        run = measure("blocks")
    numbers = [each.heads.select_dtypes("number") for each in (run, expected)]
    assert len(numbers[0]) > 0
    torch.testing.assert_close(
        *(torch.tensor(table.to_numpy()) for table in numbers), rtol=1e-3, atol=1e-5, equal_nan=True
    )
    assert run.manifest["hardware"]["fused_cpu_attention"] is False
    assert expected.manifest["hardware"]["fused_cpu_attention"] is (private_torch.cpu_flash_attention() is not None)


def test_the_app_imports_the_dash_components_that_it_uses_and_has_the_others() -> None:
    code = """
import sys
import dashboards.app
import dash_mantine_components as dmc
from dash import html
imported = {name for name in sys.modules if name.startswith(("dash_mantine_components.", "dash.html."))}
assert len(imported) < 90, len(imported)
for package, names in dashboards.COMPONENTS.items():
    for name in names.split():
        assert isinstance(getattr(sys.modules[package], name), type), name
from dash_mantine_components import Accordion
import dash_mantine_components.Badge
assert dmc.Accordion is Accordion and Accordion._js_dist is dmc._js_dist and dmc.Select._js_dist is dmc._js_dist
assert html.Blink().to_plotly_json()["type"] == "Blink"
assert not hasattr(dmc, "Nothing")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_the_declared_dash_components_are_those_of_the_app() -> None:
    used: dict[str, set[str]] = {"dash_mantine_components": set(), "dash.html": set()}
    modules = {"dmc": "dash_mantine_components", "html": "dash.html"}
    for file in (ROOT / "dashboards").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used[modules[node.value.id]].add(node.attr)
    assert {package: {*names.split()} for package, names in dashboards.COMPONENTS.items()} == used

"""Fills pages of docs/ with code, as plain Markdown: signatures and docstrings of Python objects, and whole files.

docs/api.md and docs/plugin-api.md name the objects in comments: `<!-- api: headscope.positions.model.load -->`. What
follows, up to the comment `<!-- end of api -->`, comes from the source of the object, which is read and not imported.
The code blocks of the tutorial about probes that have a file as their title are the files of a tested package.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

API_BLOCK = re.compile(r"(<!-- api: ([\w.]+) -->\n).*?(<!-- end of api -->)", re.DOTALL)
FILE_BLOCK = re.compile(r'(^```python title="(.+?)"\n).*?(^```$)', re.DOTALL | re.MULTILINE)
PACKAGE = Path(__file__).parents[2] / "tests" / "external_plugin"
MAX_LINE = 100
"""A longer signature has a line per parameter."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def fill_page(page: str) -> str:
    """The text of a page with fresh blocks."""
    page = API_BLOCK.sub(lambda match: f"{match[1]}\n{describe(match[2])}\n\n{match[3]}", page)
    return FILE_BLOCK.sub(lambda match: match[1] + (PACKAGE / match[2]).read_text(encoding="utf-8") + match[3], page)


def describe(path: str) -> str:
    """A module, class or function by its import path: heading, signature, docstring and public members."""
    module, _, name = path.rpartition(".")
    definitions = {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef | Function)}
    if name not in definitions:
        return ast.get_docstring(_tree(path)) or ""
    node = definitions[name]
    return "\n\n".join(_describe_class(node, module) if isinstance(node, ast.ClassDef) else _describe_function(node))


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _describe_function(node: Function) -> Iterator[str]:
    yield f"### {node.name}"
    yield _code(_signature(node))
    yield ast.get_docstring(node) or ""


def _describe_class(node: ast.ClassDef, module: str) -> Iterator[str]:
    """The class with the arguments of its constructor or its fields, and its methods and properties."""
    members = [*_inherited(node, module), *node.body]
    constructor = next((item for item in members if isinstance(item, Function) and item.name == "__init__"), None)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"### {node.name}"
    yield _code(_signature(constructor, node.name) if constructor else f"class {node.name}({bases})".replace("()", ""))
    yield ast.get_docstring(node) or ""
    if fields := [*_fields(members)]:
        yield "\n".join(fields)
    for item in members:
        if isinstance(item, Function) and not item.name.startswith("_"):
            yield from _describe_method(item)


def _inherited(node: ast.ClassDef, module: str) -> list[ast.stmt]:
    """The members of base classes in headscope, without those that the class has itself."""
    own = {item.name for item in node.body if isinstance(item, Function)}
    inherited: list[ast.stmt] = []
    for base in node.bases:
        if class_and_module := _find_class(ast.unparse(base), module):
            members = [*_inherited(*class_and_module), *class_and_module[0].body]
            inherited += [item for item in members if not (isinstance(item, Function) and item.name in own)]
    return inherited


def _find_class(name: str, module: str) -> tuple[ast.ClassDef, str] | None:
    """A class by its name in a module of headscope, where it is defined or imported."""
    for node in ast.walk(_tree(module)):  # also what is imported for type checkers only
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headscope"):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _find_class(alias.name, node.module or "")
    return None


def _fields(members: list[ast.stmt]) -> Iterator[str]:
    """A list entry per annotated public field, with the string that follows it."""
    for field, following in zip(members, [*members[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        default = f" = {ast.unparse(field.value)}" if field.value and len(ast.unparse(field.value)) < 40 else ""
        meaning = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meaning = f": {' '.join(str(following.value.value).split())}"
        yield f"- `{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}`{meaning}"


def _describe_method(node: Function) -> Iterator[str]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if any(name.endswith(".setter") for name in decorators):
        return
    if decorators & {"property", "cached_property"}:
        yield f"#### `{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}`"
    else:
        yield f"#### `{node.name}()`"
        yield _code(_signature(node))
    yield ast.get_docstring(node) or ""


def _signature(node: Function, name: str = "") -> str:
    """The signature without `self`; that of a constructor has the name of the class."""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, Function)
    if arguments.args.args and arguments.args.args[0].arg in ("self", "cls"):
        del arguments.args.args[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    start = f"class {name}" if name else f"def {node.name}"
    line = f"{start}({ast.unparse(arguments.args)}){returns}"
    if len(line) <= MAX_LINE:
        return line
    parameters = re.split(r", (?![^\[(]*[\])])", ast.unparse(arguments.args))
    return "\n".join([f"{start}(", *(f"    {parameter}," for parameter in parameters), f"){returns}"])


def _code(text: str) -> str:
    return f"```python\n{text}\n```"

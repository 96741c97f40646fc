"""Source files of the project and what they import."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("headscope", "probes", "dashboards")


def files(*places: str) -> list[Path]:
    """Python files of these folders and modules, given relative to the root and without suffix."""
    paths: list[Path] = []
    for place in places:
        path = ROOT / place
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        assert inside, place
        assert all(file.is_file() for file in inside), place
        paths += inside
    return paths


@cache
def imports(file: Path, *, with_types: bool = False) -> tuple[str, ...]:
    """Every module that the file imports anywhere, dotted; names imported from a package count as modules of it.

    `with_types` adds imports under `if TYPE_CHECKING`.
    """
    return tuple(_imports(file, with_types))


def _imports(file: Path, with_types: bool) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if not with_types
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
    """Top-level packages that the file imports."""
    return {name.partition(".")[0] for name in imports(file)}

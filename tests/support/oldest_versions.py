"""Print the lowest version of each dependency that pyproject.toml allows, as constraints of pip."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def oldest_versions() -> dict[str, str]:
    """The lower bound of every dependency. Raises ValueError for one without."""
    versions = {}
    for requirement in tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]:
        bound = re.fullmatch(r"([\w-]+)>=([\d.]+)(,<[\d.]+)?", requirement)
        if bound is None:
            raise ValueError(f"no lower bound in pyproject.toml: {requirement}. Write NAME>=VERSION")
        versions[bound[1]] = bound[2]
    return versions


if __name__ == "__main__":
    print(*(f"{name}=={number}" for name, number in oldest_versions().items()), sep="\n")

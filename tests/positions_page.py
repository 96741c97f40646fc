"""Write the tables of docs/positions.md from the data of the tests that check them.

Run it with: python -m tests.positions_page. Each table stands between two comments of the page.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.gguf_cases import CASES, MEANINGS, REFUSED, VARIANTS

PAGE = Path(__file__).parents[1] / "docs" / "positions.md"
BLOCK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""A generated table between comments; the first names it."""


def gguf_table() -> str:
    """Every setting of positions in a GGUF file, what headscope reads, and the comparisons that checked it."""
    rows = [
        "| setting of the file | what headscope reads | equal logits in | refused where it has no place |",
        "|---|---|---|---|",
    ]
    for key, meaning in MEANINGS.items():
        checks = "; ".join(name for name, case in (CASES | VARIANTS).items() if key in case.keys)
        refusal = REFUSED[key][0] if key in REFUSED else ""
        rows.append(f"| `{key}` | {meaning} | {checks} | {refusal} |")
    return "\n".join(rows)


def gguf_models() -> str:
    """The models of the comparisons."""
    return f"Files opened: {'; '.join(CASES)}.\n\nConfigurations: {'; '.join(VARIANTS)}."


TABLES: Mapping[str, Callable[[], str]] = {"gguf settings": gguf_table, "gguf models": gguf_models}
"""The tables of the page, by the name in its comments."""


def page() -> str:
    """The text of docs/positions.md with fresh tables."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

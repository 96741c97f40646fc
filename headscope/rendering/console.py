"""Lines and tables on the terminal. It imports neither plotly nor the parts of a report.

Names come from users, so text is never parsed as rich markup; `bold` adds emphasis.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_FILE_WIDTH = 1000
"""Largest width of a table in characters, where it is not wrapped to the terminal."""


def print_line(*fragments: object) -> None:
    """Print the fragments as one line, without markup."""
    line = Text.assemble(*(part if isinstance(part, Text) else str(part) for part in fragments))
    Console(soft_wrap=True, highlight=False).print(line)


def bold(text: object) -> Text:
    """A bold fragment of a line."""
    return Text(str(text), style="bold")


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "", wrap_files: bool = True) -> None:
    """Print records as a table with their keys as headings. Nothing is truncated.

    The first column is not wrapped if it has a heading. Without `wrap_files`, no column is wrapped in an output that is
    not a terminal, such as a log or a mail.
    """
    table = Table(box=None, header_style="bold", title=Text(title) if title else None, title_justify="left")
    for position, name in enumerate(rows[0]):
        is_first = position == 0
        heading = Text(name.replace("_", " "))
        table.add_column(
            heading, justify="left" if is_first else "right", no_wrap=is_first and bool(name), overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(_format_value(value)) for value in row.values()))
    console = Console()
    if not wrap_files and not console.is_terminal:
        widest = Console(width=MAX_FILE_WIDTH).measure(table).maximum
        console = Console(width=max(console.width, widest))
    console.print(table)


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

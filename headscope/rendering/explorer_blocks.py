"""Blocks of explorer pages: passages with shaded tokens, and links that change the selection.

The URL alone holds the selection. A link names only the parameters that it changes (see `query_link`); the app keeps
the others. In a static export a passage is a plain table and links are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from headscope.rendering.blocks import Links, TextTable


def query_link(path: str = "", **changes: object) -> str:
    """A link that changes URL parameters: "?doc=play&row=12"; with a path, a link to another page."""
    return f"{path}?{urlencode(changes)}" if changes else path


def choice_or_default(
    parameter: str, choices: Iterable[object], query: Mapping[str, str], notes: list[str], default: object = None
) -> str:
    """The value of a URL parameter if it is a valid choice, else the default, which is the first choice by default.

    Adds a sentence to `notes` for an invalid value.
    """
    valid_values = [str(choice) for choice in choices]
    default_value = valid_values[0] if default is None else str(default)
    value = query.get(parameter) or default_value
    if value in valid_values:
        return value
    notes.append(f"Unknown {parameter} ‘{value[:60]}’: showing {parameter} {default_value} instead.")
    return default_value


@dataclass(frozen=True)
class Token:
    """A displayed token; `text` is never interpreted as markup.

    `shading` is 0 (none) to 1. `href` is the link on click, `tooltip` the text on hover. A special token, such as BOS,
    is shown by its name. Marked tokens are the ones that the passage is about.
    """

    text: str
    shading: float = 0.0
    href: str = ""
    is_special: bool = False
    is_marked: bool = False
    tooltip: str = ""


TextCell = str | Sequence[Token]
"""Text, or consecutive tokens."""


@dataclass(frozen=True)
class Passage(TextTable):
    """A table of texts with shaded tokens: `cells` holds the tokens, `rows` the same texts without shading."""

    cells: Sequence[Sequence[TextCell]] = ()


def passage_table(caption: str, column_names: Sequence[str], cells: Sequence[Sequence[TextCell]]) -> Passage:
    """A passage from its cells; in a static export marked tokens are in ‹ and ›."""
    return Passage(caption, column_names, [[*map(_cell_text, row)] for row in cells], cells=cells)


@dataclass(frozen=True)
class LinkChoice(Links):
    """Links as a drop-down list; `selected_index` is None if no link is selected."""

    label: str = ""
    selected_index: int | None = None


@dataclass(frozen=True)
class KeyLinks(Links):
    """Links with keyboard shortcuts: `keys` has one key name per link, such as "ArrowLeft", or ""."""

    keys: Sequence[str] = ()


@dataclass(frozen=True)
class Badges(Links):
    """Links as a row of labels, each with a `meaning` shown on hover."""

    meanings: Sequence[str] = ()


def _cell_text(cell: TextCell) -> str:
    if isinstance(cell, str):
        return cell
    return "".join(f"‹{token.text}›" if token.is_marked else token.text for token in cell)

"""Parts of a page on which a reader goes from one thing to another: text whose tokens are shaded, and ways from there.

What is looked at stands in the address alone. A link of these parts names what it changes, as `way` writes it, and the
app keeps the rest. On paper a passage is a plain table, and ways are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from headscope.report.blocks import Links, TextTable


def query_link(path: str = "", **changes: object) -> str:
    """A link that changes this of the address: "?doc=play&row=12"; with a path, on another page."""
    return f"{path}?{urlencode(changes)}"


def choice_or_default(
    parameter: str, choices: Iterable[object], query: Mapping[str, str], notes: list[str], default: object = None
) -> str:
    """The choice that the address asks for, else the default one, the first; what is asked in vain is noted."""
    known = [str(choice) for choice in choices]
    otherwise = known[0] if default is None else str(default)
    told = query.get(parameter) or otherwise
    if told in known:
        return told
    notes.append(f"There is no {parameter} ‘{told[:60]}’ here; this is {parameter} {otherwise}.")
    return otherwise


@dataclass(frozen=True)
class Token:
    """A token as it is shown: nothing in `text` is more than text.

    `shade` is 0 (none) to 1; a click on one with `href` goes there; a `special` one is told by its name; `marked` ones
    are what the text is about; `hint` is told on hovering.
    """

    text: str
    shading: float = 0.0
    href: str = ""
    is_special: bool = False
    is_marked: bool = False
    tooltip: str = ""


TextCell = str | Sequence[Token]
"""Words, or tokens that follow one another."""


@dataclass(frozen=True)
class Passage(TextTable):
    """A table of texts whose tokens are shaded: `cells` is what `rows` tells without shades."""

    cells: Sequence[Sequence[TextCell]] = ()


def passage_table(caption: str, column_names: Sequence[str], cells: Sequence[Sequence[TextCell]]) -> Passage:
    """The table of these columns; on paper marked tokens stand between ‹ and ›."""
    return Passage(caption, column_names, [[*map(_cell_text, row)] for row in cells], cells=cells)


@dataclass(frozen=True)
class LinkChoice(Links):
    """Ways of one kind, drawn as a list to choose from; `at` is the one that is taken, None where none is."""

    label: str = ""
    selected_index: int | None = None


@dataclass(frozen=True)
class KeyLinks(Links):
    """Ways that a key takes as well: `keys` name one for each, such as "ArrowLeft", "" for none."""

    keys: Sequence[str] = ()


def _cell_text(cell: TextCell) -> str:
    if isinstance(cell, str):
        return cell
    return "".join(f"‹{token.text}›" if token.is_marked else token.text for token in cell)

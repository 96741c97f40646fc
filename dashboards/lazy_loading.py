"""A page as it is drawn: what fills a window at once, and the rest when that is on screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from threading import Lock
from typing import Any

from dash import html

from dashboards import layout as frame
from dashboards.components import MOST_SENTENCES, component
from dashboards.pages import Page
from dashboards.run_store import current
from dashboards.view import View, asked
from headscope.report.blocks import Block, Chart, PageContent, TextBlock, TextTable
from headscope.report.explorer_blocks import LinkChoice
from headscope.runs.run import Run

WINDOW = 560
"""So many px of parts come at once."""
KEPT = 16
"""Pages that are kept as they were drawn."""


@dataclass(frozen=True)
class Placed:
    """A part of a page, under which heading it stands, and how it is told from others."""

    heading: str
    part: Block
    key: str


class Drawing:
    """The components of a page, each made when it is asked for, and once."""

    def __init__(self, address: str, page: Page, run: Run, view: View, content: PageContent) -> None:
        self.address, self.page, self.run, self.view, self.content = address, page, run, view, content
        self._parts: Iterator[Placed] = _placed(content)
        self._first: list[Any] | None = None
        self._rest: list[Any] | None = None
        self._last: str | None = None
        self._lock = Lock()

    def first(self) -> list[Any]:
        """Title, what is to be known beforehand, and parts until a window is full."""
        with self._lock, _not_kept_if_it_fails():
            if self._first is None:
                self._first = self._begun()
            return self._first

    def rest(self) -> list[Any]:
        """The parts that `first` has not."""
        self.first()
        with self._lock, _not_kept_if_it_fails():
            if self._rest is None:
                self._rest = self._sections([*self._parts])
            return self._rest

    def whole(self) -> list[Any]:
        """All of it at once, for a page that takes the place of itself in another state and must not shrink."""
        rest, first = self.rest(), self.first()
        return [*first[:-1], *rest] if rest else first

    def _begun(self) -> list[Any]:
        taken: list[Placed] = []
        height, halves, more = 0.0, 0, False
        for placed in self._parts:
            new = not taken or taken[-1].heading != placed.heading
            if more := height >= WINDOW and new:
                self._parts = chain([placed], self._parts)
                break
            taken.append(placed)
            half = isinstance(placed.part, Chart) and placed.part.half_width
            height += _height(placed.part) / (2 if half else 1)
            halves = half + (0 if new else halves)
            if more := height >= WINDOW and isinstance(placed.part, Chart) and halves % 2 == 0:  # a row is full
                break
        if not more:
            self._rest = []
        begun = [*frame.above(self.page, self.run, self.content, self.view), *self._sections(taken)]
        later = html.Div(html.P("Drawing more …", className="waiting"), id={"rest": self.address})
        return [*begun, later] if more else begun

    def _sections(self, parts: list[Placed]) -> list[Any]:
        """The parts under their headings; one that goes on under that of an earlier part has none."""
        found = []
        for heading, some in groupby(parts, key=lambda placed: placed.heading):
            group = [*some]
            inside = [component(placed.part, self.view, placed.key) for placed in group]
            goes_on = heading == self._last
            title = [html.H2(heading)] if heading and not goes_on else []
            shape = html.Div(inside, className=_shape([placed.part for placed in group]))
            found.append(html.Section([*title, shape], className="on" if goes_on else ""))
            self._last = heading
        return found


def drawing(path: str, search: str) -> Drawing:
    """The page at that address, as it was drawn before if nothing has changed. Raises HeadscopeError as `leads_to`."""
    library = current()
    return _drawing(path, search, library.folder, library.state())


@lru_cache(KEPT)
def _drawing(path: str, search: str, *_: object) -> Drawing:
    return Drawing(f"{path}{search}", *frame.leads_to(path, asked(search)))


@contextmanager
def _not_kept_if_it_fails() -> Iterator[None]:
    try:
        yield
    except Exception:
        _drawing.cache_clear()
        raise


def _placed(content: PageContent) -> Iterator[Placed]:
    for at, (heading, parts) in enumerate(content.sections.items()):
        for place, part in enumerate(parts):
            yield Placed(heading, part, f"{at}-{place}")


def _height(part: Block) -> float:
    """Roughly, in px."""
    match part:
        case Chart():
            return float(part.figure.layout.height or 400) + 40
        case TextTable():
            return 60 + 30 * len(part.rows)
        case TextBlock():
            return 40 if part.collapsed else 40 * min(len(part.sentences), MOST_SENTENCES)
        case _:
            return 60


def _shape(parts: list[Block]) -> str:
    """How parts lie beside each other."""
    if any(isinstance(part, LinkChoice) for part in parts):
        return "parts choosing"
    return "parts columns" if any(isinstance(part, TextBlock) and part.heading for part in parts) else "parts"

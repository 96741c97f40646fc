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
from dashboards.components import MAX_SENTENCES, build_component
from dashboards.pages import Page
from dashboards.run_store import current_store
from dashboards.view_state import ViewState, parse_query
from headscope.report.blocks import Block, Chart, PageContent, TextBlock, TextTable
from headscope.report.explorer_blocks import LinkChoice
from headscope.runs.run import Run

INITIAL_HEIGHT = 560
"""So many px of parts come at once."""
CACHED_PAGES = 16
"""Pages that are kept as they were drawn."""


@dataclass(frozen=True)
class PlacedBlock:
    """A part of a page, under which heading it stands, and how it is told from others."""

    heading: str
    block: Block
    block_id: str


class RenderedPage:
    """The components of a page, each made when it is asked for, and once."""

    def __init__(self, address: str, page: Page, run: Run, view: ViewState, content: PageContent) -> None:
        self.address, self.page, self.run, self.view, self.content = address, page, run, view, content
        self._remaining_blocks: Iterator[PlacedBlock] = _place_blocks(content)
        self._initial: list[Any] | None = None
        self._deferred: list[Any] | None = None
        self._last_heading: str | None = None
        self._lock = Lock()

    def initial_components(self) -> list[Any]:
        """Title, what is to be known beforehand, and parts until a window is full."""
        with self._lock, _clear_cache_on_error():
            if self._initial is None:
                self._initial = self._render_initial()
            return self._initial

    def deferred_components(self) -> list[Any]:
        """The parts that `first` has not."""
        self.initial_components()
        with self._lock, _clear_cache_on_error():
            if self._deferred is None:
                self._deferred = self._render_sections([*self._remaining_blocks])
            return self._deferred

    def all_components(self) -> list[Any]:
        """All of it at once, for a page that takes the place of itself in another state and must not shrink."""
        rest, first = self.deferred_components(), self.initial_components()
        return [*first[:-1], *rest] if rest else first

    def _render_initial(self) -> list[Any]:
        taken: list[PlacedBlock] = []
        height, halves, more = 0.0, 0, False
        for placed in self._remaining_blocks:
            new = not taken or taken[-1].heading != placed.heading
            if more := height >= INITIAL_HEIGHT and new:
                self._remaining_blocks = chain([placed], self._remaining_blocks)
                break
            taken.append(placed)
            half = isinstance(placed.block, Chart) and placed.block.half_width
            height += _estimate_height(placed.block) / (2 if half else 1)
            halves = half + (0 if new else halves)
            if (
                more := height >= INITIAL_HEIGHT and isinstance(placed.block, Chart) and halves % 2 == 0
            ):  # a row is full
                break
        if not more:
            self._deferred = []
        begun = [*frame.page_header(self.page, self.run, self.content, self.view), *self._render_sections(taken)]
        later = html.Div(html.P("Drawing more …", className="waiting"), id={"rest": self.address})
        return [*begun, later] if more else begun

    def _render_sections(self, placed_blocks: list[PlacedBlock]) -> list[Any]:
        """The parts under their headings; one that goes on under that of an earlier part has none."""
        found = []
        for heading, some in groupby(placed_blocks, key=lambda placed: placed.heading):
            group = [*some]
            inside = [build_component(placed.block, self.view, placed.block_id) for placed in group]
            goes_on = heading == self._last_heading
            title = [html.H2(heading)] if heading and not goes_on else []
            shape = html.Div(inside, className=_section_class([placed.block for placed in group]))
            found.append(html.Section([*title, shape], className="on" if goes_on else ""))
            self._last_heading = heading
        return found


def rendered_page(path: str, search: str) -> RenderedPage:
    """The page at that address, as it was drawn before if nothing has changed. Raises HeadscopeError as `leads_to`."""
    library = current_store()
    return _cached_page(path, search, library.folder, library.fingerprint())


@lru_cache(CACHED_PAGES)
def _cached_page(path: str, search: str, *_: object) -> RenderedPage:
    return RenderedPage(f"{path}{search}", *frame.resolve_url(path, parse_query(search)))


@contextmanager
def _clear_cache_on_error() -> Iterator[None]:
    try:
        yield
    except Exception:
        _cached_page.cache_clear()
        raise


def _place_blocks(content: PageContent) -> Iterator[PlacedBlock]:
    for at, (heading, parts) in enumerate(content.sections.items()):
        for place, part in enumerate(parts):
            yield PlacedBlock(heading, part, f"{at}-{place}")


def _estimate_height(block: Block) -> float:
    """Roughly, in px."""
    match block:
        case Chart():
            return float(block.figure.layout.height or 400) + 40
        case TextTable():
            return 60 + 30 * len(block.rows)
        case TextBlock():
            return 40 if block.collapsed else 40 * min(len(block.sentences), MAX_SENTENCES)
        case _:
            return 60


def _section_class(blocks: list[Block]) -> str:
    """How parts lie beside each other."""
    if any(isinstance(part, LinkChoice) for part in blocks):
        return "parts choosing"
    return "parts columns" if any(isinstance(part, TextBlock) and part.heading for part in blocks) else "parts"

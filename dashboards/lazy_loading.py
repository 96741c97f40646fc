"""Rendering of a page in two steps: the blocks that fill a window first, the rest on request. Pages are cached."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from threading import Lock
from typing import Any

from dash import dcc, html

from dashboards import layout, tabs
from dashboards.components import MAX_SENTENCES, build_component
from dashboards.pages import Page
from dashboards.run_store import current_store
from dashboards.view_state import ViewState, parse_query
from headscope.rendering.blocks import Block, Chart, PageContent, TextBlock, TextTable
from headscope.rendering.explorer_blocks import LinkChoice
from headscope.runs.run import Run

log = logging.getLogger("headscope")

INITIAL_HEIGHT = 560
"""Estimated height in px of the blocks that are sent first."""
CACHED_PAGES = 16
"""Rendered pages kept in memory."""


@dataclass(frozen=True)
class PlacedBlock:
    """A block of a page, its heading, and an id unique on the page."""

    heading: str
    block: Block
    block_id: str


class RenderedPage:
    """The components of a page, each built once, on first request."""

    def __init__(self, address: str, page: Page, run: Run, view: ViewState, content: PageContent) -> None:
        self.address, self.page, self.run, self.view, self.content = address, page, run, view, content
        self._remaining_blocks: Iterator[PlacedBlock] = _place_blocks(tabs.visible_sections(content, view))
        self._initial: list[Any] | None = None
        self._deferred: list[Any] | None = None
        self._last_heading: str | None = None
        self._lock = Lock()

    def initial_components(self) -> list[Any]:
        """The header, and blocks until a window is full."""
        with self._lock, _clear_cache_on_error():
            if self._initial is None:
                self._initial = self._render_initial()
            return self._initial

    def deferred_components(self) -> list[Any]:
        """The blocks that `initial_components` leaves out."""
        self.initial_components()
        with self._lock, _clear_cache_on_error():
            if self._deferred is None:
                self._deferred = self._render_sections([*self._remaining_blocks])
            return self._deferred

    def all_components(self) -> list[Any]:
        """The whole page, for a change of state on the same page, which must not shrink meanwhile."""
        deferred, initial = self.deferred_components(), self.initial_components()
        return [*initial[:-1], *deferred] if deferred else initial

    def _render_initial(self) -> list[Any]:
        blocks: list[PlacedBlock] = []
        height, half_charts, has_more = 0.0, 0, False
        for placed in self._remaining_blocks:
            starts_section = not blocks or blocks[-1].heading != placed.heading
            blocks.append(placed)
            is_half = isinstance(placed.block, Chart) and placed.block.half_width
            height += _estimate_height(placed.block) / (2 if is_half else 1)
            half_charts = is_half + (0 if starts_section else half_charts)
            is_row_full = not is_half or half_charts % 2 == 0
            if has_more := height >= INITIAL_HEIGHT and is_row_full:
                break
        if not has_more:
            self._deferred = []
        header = layout.page_header(self.page, self.run, self.content, self.view)
        components = [*header, *tabs.tab_bar(self.content, self.view), *self._render_sections(blocks)]
        return [*components, self._placeholder()] if has_more else components

    def _placeholder(self) -> html.Div:
        """What stands for the deferred blocks; the browser sets its store once the visible charts are drawn."""
        request = dcc.Store(id={"deferred": self.address, "part": "request"})
        waiting = html.P("Loading more …", className="loading")
        return html.Div([waiting, request], id={"deferred": self.address, "part": "blocks"})

    def _render_sections(self, placed_blocks: list[PlacedBlock]) -> list[Any]:
        """The blocks under their headings; a section that continues an earlier one has no heading."""
        sections = []
        for heading, group in groupby(placed_blocks, key=lambda placed: placed.heading):
            members = [*group]
            components = [self._component(placed) for placed in members]
            is_continued = heading == self._last_heading
            title = [html.H2(heading)] if heading and not is_continued else []
            body = html.Div(components, className=_section_class([placed.block for placed in members]))
            sections.append(html.Section([*title, body], className="continued" if is_continued else ""))
            self._last_heading = heading
        return sections

    def _component(self, placed: PlacedBlock) -> Any:
        """The component of a block; one line in its place if it fails, and the page is not kept."""
        try:
            return build_component(placed.block, self.view, placed.block_id)
        except Exception as error:
            log.exception("block %s of the view %s fails", placed.block_id, self.address)
            _cached_page.cache_clear()
            return html.P(f"Not shown: {layout.describe_error(error)}.", className="notice", role="status")


def rendered_page(path: str, search: str) -> RenderedPage:
    """The page of a URL, from the cache if the runs are unchanged. Raises HeadscopeError like `layout.resolve_url`."""
    store, names = current_store(), parse_query(search).get("run", [])
    tables = store.table_stamps([names] if isinstance(names, str) else names)
    return _cached_page(path, search, store.folder, store.fingerprint(), tables)


@lru_cache(CACHED_PAGES)
def _cached_page(path: str, search: str, *_: object) -> RenderedPage:
    return RenderedPage(f"{path}{search}", *layout.resolve_url(path, parse_query(search)))


@contextmanager
def _clear_cache_on_error() -> Iterator[None]:
    try:
        yield
    except Exception:
        _cached_page.cache_clear()
        raise


def _place_blocks(sections: Mapping[str, Sequence[Block]]) -> Iterator[PlacedBlock]:
    for section, (heading, blocks) in enumerate(sections.items()):
        for index, block in enumerate(blocks):
            yield PlacedBlock(heading, block, f"{section}-{index}")


def _estimate_height(block: Block) -> float:
    """Rough height in px."""
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
    """CSS classes for the arrangement of the blocks."""
    if any(isinstance(block, LinkChoice) for block in blocks):
        return "blocks explorer-controls"
    has_headed_text = any(isinstance(block, TextBlock) and block.heading for block in blocks)
    return "blocks text-columns" if has_headed_text else "blocks"

"""Contracts of the parts of a probe that terminal, reports and app show."""

from collections.abc import Iterable, Mapping, Sequence

from headscope.rendering.blocks import Block, Card, ChartGroup, Overview, PageContent, RenderContext, Term
from headscope.runs.run import Run


class ViewParts:
    """What a probe shows beside its results."""

    def overview(self, run: Run) -> Overview | None:
        """Its data for `--json`."""
        return None

    def next_steps(self, run: Run) -> Iterable[str]:
        """Lines that say what to do with the results."""
        return ()

    def glossary(self) -> Sequence[Term]:
        """Terms that a reader of its chapter needs."""
        return ()

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        """The charts of its chapter and page, in order."""
        return ()

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        """Cards for the overview of a run, and for the top of the probe's own page."""
        return ()

    def page_cards(self, context: RenderContext, page: str) -> Iterable[Card]:
        """Cards for the top of a page that several probes share: `page` is "/compare" or "/checkpoints". The page shows
        at most two cards."""
        return ()

    def head_card(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        """The few blocks that the page of a head shows first."""
        return ()

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        """Further blocks about one head."""
        return ()

    def head_explorer(
        self, run: Run, model: str, layer: int, head: int, url_query: Mapping[str, str]
    ) -> Iterable[Block]:
        """Blocks about one head in the state that the URL's query holds, such as the trial that a reader chose."""
        return ()

    def similar_heads(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        """Blocks that list the heads most similar to one."""
        return ()

    def row_charts(
        self, run: Run, model: str, length: int, doc: str, layer: int, head: int, query: int
    ) -> Iterable[Block]:
        """Why a head has these weights in the row of one query position of a document."""
        return ()

    def page(self, context: RenderContext) -> PageContent | None:
        """Its page in the app, if charts and results in order are not enough."""
        return None

    def explorer(self, context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
        """An interactive page in the state of the query parameters, built from `headscope.rendering.explorer_blocks`.

        That module may change between versions.
        """
        raise NotImplementedError("the probe has no explorer")

"""The pages: one module each, and one of a kind for every probe."""

from collections.abc import Sequence
from typing import Protocol

from dashboards.view_state import ViewState
from headscope.report.blocks import PageContent
from headscope.runs.run import Run


class Page(Protocol):
    """What the app asks of a page: its name, its path, the controls that do something there, and what it shows."""

    @property
    def NAME(self) -> str: ...

    @property
    def PATH(self) -> str: ...

    def controls(self, run: Run) -> Sequence[str]: ...

    def content(self, run: Run, view: ViewState) -> PageContent: ...

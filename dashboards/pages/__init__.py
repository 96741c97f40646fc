"""The pages of the app: one module each, and one page per probe."""

from collections.abc import Sequence
from typing import Protocol

from dashboards.view_state import ViewState
from headscope.rendering.blocks import PageContent
from headscope.runs.run import Run


class Page(Protocol):
    """A page: its name, its path, the controls that have an effect on it, and its content."""

    @property
    def NAME(self) -> str: ...

    @property
    def PATH(self) -> str: ...

    def controls(self, run: Run) -> Sequence[str]: ...

    def missing_command(self, run: Run) -> str:
        """The command that would store what the page shows; "" if the run has it."""
        ...

    def content(self, run: Run, view: ViewState) -> PageContent: ...

"""The runs of the Python interface: stored runs with their results, charts and exports as methods."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from headscope.base.public_functions import checked_methods
from headscope.runs.run import Run as StoredRun

if TYPE_CHECKING:
    from headscope.rendering.notebook import NotebookCharts


@checked_methods
class Run(StoredRun):
    """A finished run, read-only: every table by name, and `run.heads`, the per-head table.

    `manifest` is its run.json, `models` the labels in the order of the study, `tables` the names of what is stored,
    `parts` the runs that are combined (only itself for a single run).
    """

    def findings(self) -> pd.DataFrame:
        """All results, for every model, one per row, with stable keys.

        `question`, `model` ("" if it concerns several), `baseline`, `where` and `unit` identify it. Then follow its
        `value`, its 95 % confidence interval `low` to `high`, the number `n` of `samples`, the `verdict` on a claim,
        `topic` and sentence `text`, and the `layer` and `head` that it belongs to.
        """
        from headscope.rendering import notebook

        return notebook.findings(self)

    def charts(self, topic: str = "") -> "NotebookCharts":
        """The charts of the report, each a plotly `figure` with a `caption` and a method `save("figure.pdf")`: all,
        or those of a topic such as "loss", or with these words in the title."""
        from headscope.rendering import notebook

        return notebook.charts(self, topic)

    def head(self, layer: int, head: int, model: str = "") -> "NotebookCharts":
        """One head of `model` (by default the last): its description in `sentences`, and its charts."""
        from headscope.rendering import notebook

        return notebook.head(self, layer, head, model)

    def to_latex(self, *statistics: str, count: int = 10, model: str | None = None) -> str:
        """A LaTeX tabular of the `count` heads of `model` with the largest first statistic, and their other statistics.

        Statistics are columns of `run.heads`; an interval follows its value in brackets. Without statistics: one row
        per model, with medians over heads and the mean loss. Raises BadInput for an unknown statistic or model.
        """
        from headscope.rendering import notebook

        return notebook.to_latex(self, statistics, count, model)

    def export(
        self, file_format: str, out: Path | str, score: str | None = None, model: str | None = None, **options: Any
    ) -> Path:
        """Write a score of all heads of `model` in the file format of another tool: see
        `headscope.scores.export_scores`."""
        from headscope.scores import export_scores

        return export_scores(self, file_format, out, score, model, **options)

    def _ipython_display_(self) -> None:
        from headscope.rendering import notebook

        notebook.run_page(self).display()

    def _repr_html_(self) -> str:
        from headscope.rendering import notebook

        return notebook.run_page(self).html()

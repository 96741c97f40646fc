"""The base class of the declaration of a probe."""

from typing import TYPE_CHECKING

from headscope.declaration import Declaration

if TYPE_CHECKING:
    from headscope.rendering.view_parts import ViewParts
    from headscope.results.collection import ResultParts
    from headscope.results.questions import QuestionParts
    from headscope.results.scores import ScoreParts
    from headscope.runs.column_metadata import StatisticParts
    from headscope.runs.columns import TableParts
    from headscope.runs.summary import ColumnParts
    from headscope.study.cells import RunnerParts
    from headscope.study.config import OptionParts

    class _Parts(
        OptionParts,
        RunnerParts,
        TableParts,
        ScoreParts,
        StatisticParts,
        ColumnParts,
        QuestionParts,
        ResultParts,
        ViewParts,
    ):
        """The contracts of all parts, for editors and mypy: a declaration must be read without what they import."""

else:
    _Parts = object


class Probe(Declaration, _Parts):
    """Base class of the declaration of one analysis.

    A subclass sets `name`, `title`, `summary` and `parts`, or overrides the methods of the parts that it has. Only
    `runner` may import torch. A part is imported when it is used, so that reading a declaration is fast.
    Names of helper methods and attributes begin with an underscore; any other name that Probe lacks is refused. The
    types below are exported by `headscope.plugin_api`.
    """

"""The base classes of the declaration of a probe: of any probe, and of one with one score of heads."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from headscope.base.declaration import Declaration

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.attention.record import AttentionRecord
    from headscope.rendering.blocks import Term
    from headscope.rendering.view_parts import ViewParts
    from headscope.results.collection import ResultParts
    from headscope.results.questions import QuestionParts
    from headscope.results.scores import Score, ScoreParts
    from headscope.runs.column_metadata import StatisticParts
    from headscope.runs.columns import Table, TableParts
    from headscope.runs.summary import ColumnParts
    from headscope.study.cells import ObservingRunner, RunnerParts
    from headscope.study.config import OptionParts, Options
    from headscope.study.context import StudyContext

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


class AttentionScoreProbe(Probe):
    """A probe whose score of a head is a function of the attention record of its layer.

    A subclass sets `name`, `title`, `summary`, the attributes below and `parts = "head_scores=run.head_scores"`, the
    place of the function. The name of its entry point equals `name`. Options, table, column with its interval over
    documents, results, charts and a glossary entry follow. The score of a head is its mean over documents, at the
    longest context length.
    """

    column: ClassVar[str]
    """The column of the per-head table."""
    label: ClassVar[str]
    """Name of the score in lower case, such as "query norm"."""
    meaning: ClassVar[str]
    """Definition of the score, in one clause without a full stop."""
    unit: ClassVar[str] = ""
    limits: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """Smallest and largest possible score, at which an interval ends."""
    formula: ClassVar[str] = ""

    def head_scores(self, record: "AttentionRecord") -> "Tensor":
        """The scores [heads] of one layer, from its queries, keys, values and masks over a whole text."""
        raise NotImplementedError

    def __init__(self) -> None:
        names = ("name", "title", "summary", "column", "label", "meaning")
        lacking = [f"{name} = ..." for name in names if not hasattr(self, name)]
        if type(self).head_scores is AttentionScoreProbe.head_scores:
            lacking.append("parts = 'head_scores=run.head_scores'")
        if lacking:
            raise TypeError(f"class {type(self).__name__} lacks a name or part. Write {lacking[0]}")

    def options(self) -> "type[Options]":
        from headscope.study.attention_scores import AttentionScoreOptions

        return AttentionScoreOptions

    def runner(self) -> "Callable[[Any, StudyContext], ObservingRunner]":
        from headscope.study.attention_scores import AttentionScoreRunner, ScoreFunction

        module, _ = self.part_places().get("head_scores", (type(self).__module__, ""))
        source = inspect.getsource(import_module(module))
        return partial(AttentionScoreRunner, function=ScoreFunction(self, self.head_scores, self.limits, source))

    def tables(self) -> "Sequence[Table]":
        from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table

        low, high = (end if math.isfinite(end) else None for end in self.limits)
        value = Column("value", "value", self.unit, self.meaning, low, high)
        return [Table(self.name, self.meaning, (MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, value))]

    def scores(self) -> "Sequence[Score]":
        from headscope.results.questions import Question
        from headscope.results.scores import Score, TableRows
        from headscope.runs.column_metadata import Statistic, capitalise

        top = Question(
            name=f"{self.name}.top_head",
            sentence=f"In {{model}}, {{unit}} has the largest {self.label}: {{value}}[; next are {{next:number}}]",
            headline=f"Largest {self.label}: {{unit}}, {{value}}",
            value_unit=self.unit,
            samples="documents",
            level="headline",
        )
        meaning = f"{self.meaning}, at the longest context length; mean over documents"
        statistic = Statistic(self.label, self.unit, meaning, formula=self.formula)
        rows, heading = TableRows(self.name, "value"), f"{capitalise(self.label)} of each head"
        return [Score(column=self.column, statistic=statistic, rows=rows, limits=self.limits, top=top, heading=heading)]

    def glossary(self) -> "Sequence[Term]":
        from headscope.rendering.blocks import Term
        from headscope.runs.column_metadata import capitalise

        return [Term(capitalise(self.label), f"{capitalise(self.meaning)}.", self.formula, (self.name,))]

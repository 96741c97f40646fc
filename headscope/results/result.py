"""A result: one number that answers a question, with everything needed to word, rank, compare and check it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headscope.base.heads import format_head
from headscope.runs.aggregation import Verdict

Scalar = str | int | float


@dataclass(frozen=True)
class Bound:
    """The side of a threshold on which a quantity is claimed to lie, fixed before the results are seen."""

    side: Literal["above", "below", "between", "outside"]
    threshold: float = 0.0
    upper: float = math.nan
    """The upper threshold of "between" and "outside"."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One answer to a registered question.

    A value without an interval has `low` and `high` NaN. An estimate has neither interval nor p-value, because its
    error is unknown. A statement without a number has no `value`.
    """

    question: str
    """Name of its `Question`, such as "patching.top"."""
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int | None = None
    """Number of samples behind the value. The question says of what: documents, trials, pairs or heads."""
    model: str = ""
    """Label of the model; "" if it concerns several."""
    baseline: str = ""
    """Label of the model that `value` is a difference from or a ratio to."""
    layer: int | None = None
    head: int | None = None
    kv_group: int | None = None
    """The head, or the KV group if `head` is None, that the value belongs to."""
    is_exact: bool = True
    """False for an estimate."""
    p_adjusted: float = math.nan
    """p-value, adjusted by Benjamini-Hochberg over the sweep."""
    where: Mapping[str, Scalar] = field(default_factory=dict)
    """Conditions that separate the results of one question, such as the context length or the prompts."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the sentence states."""
    verdict: Verdict = ""
    bound: Bound | None = None
    """The claim that the verdict is about."""
    reason: str = ""
    """Why a verdict is inconclusive, if not because the interval contains the threshold: a key of `words.REASONS`."""
    selected_from: int = 1
    """Number of units among which this one was chosen as the largest. The interval allows for that choice."""
    parts: Sequence["Result"] = ()
    """Results from which this one follows, such as one for each seed."""
    by_sample: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    """The values by document, pair or trial whose mean is `value`, so that runs can be compared sample by sample."""

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the answer across runs: question, model, baseline and conditions.

        It names no head: another run may have another answer to the same question.
        """
        conditions = (f"{name}={value}" for name, value in sorted(self.where.items()))
        return self.question, self.model, self.baseline, *conditions

    @property
    def models(self) -> str:
        """The model, with the one that its value is relative to: "yarn against base"."""
        return f"{self.model} against {self.baseline}" if self.baseline else self.model

    @property
    def conditions(self) -> str:
        """The conditions in words: "context_length 512, prompts ioi"."""
        return ", ".join(f"{name} {value}" for name, value in self.where.items())

    @property
    def unit(self) -> str:
        """The head or KV group, such as L3H1 or "L3 KV group 0"; "" without one."""
        if self.layer is None:
            return ""
        if self.head is not None:
            return format_head(self.layer, self.head)
        return f"L{self.layer} KV group {self.kv_group}"

    @property
    def has_value(self) -> bool:
        """Whether the result is a number, not a statement without one."""
        return not math.isnan(self.value)

    @property
    def has_interval(self) -> bool:
        """Whether the value has a confidence interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def half_width(self) -> float:
        """Half the width of the interval; NaN without one."""
        return (self.high - self.low) / 2

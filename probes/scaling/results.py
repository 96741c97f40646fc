"""Results of the scaling probe: the ratio of the effective length to its target."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.aggregation import confidence_interval
from headscope.runs.run import Run

QUESTIONS = (
    Question(
        name="scaling.ratio",
        sentence="With {scheme} logits and target ESS_{beta:g} = L^{exponent:g} (case {case}), the geometric mean of "
        "effective length / target at L = {context_length:,} is {value}",
        headline="ESS_{beta:g} of {scheme} logits / target L^{exponent:g} at L = {context_length:,}: {value}",
        number=".3f",
        samples="rows",
        level="headline",
    ),
)


def results(run: Run) -> Iterator[Result]:
    """The ratio at the largest length, for every target and scheme of the logit means."""
    if "scaling" not in run.tables:
        return
    length = int(run.scaling["context_length"].max())
    longest = run.scaling[run.scaling["context_length"] == length]
    for _, rows in longest.groupby(["scheme", "beta", "exponent"], observed=True, sort=False):
        first = rows.iloc[0]
        target = {name: round(float(first[name]), 6) for name in ("beta", "exponent")}
        mean, low, high = mean_with_interval(rows["ratio"])
        yield Result(
            question="scaling.ratio",
            value=mean,
            low=low,
            high=high,
            n=len(rows),
            where={"scheme": str(first["scheme"]), **target, "context_length": length},
            details={"case": first["regime"]},
        )


def mean_with_interval(ratios: pd.Series) -> tuple[float, float, float]:
    """Geometric mean over rows and the bounds of its interval, which are NaN for fewer than three rows."""
    logarithms = np.log(ratios.to_numpy(dtype=np.float64))
    (low,), (high,) = np.exp(confidence_interval(logarithms[None]))
    return float(np.exp(logarithms.mean())), float(low), float(high)

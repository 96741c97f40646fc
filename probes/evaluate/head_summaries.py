"""The heads of each model in single numbers, for scores of tasks to stand beside."""

import pandas as pd

from headscope.runs.column_metadata import statistic, statistics
from headscope.runs.summary import longest_common_ess_column

TOP_COUNT = 10
"""Heads of a model that are averaged where the highest matter."""
MAX_LENGTH_RATIO = 1.25
"""An effective length is kept if it changes by no more than this factor."""


def summarise_heads(heads: pd.DataFrame) -> pd.DataFrame:
    """A row a model, a column a number, called in words: the top heads of what singles heads out, the median growth
    exponent, and the share of heads that keep the effective length that they have under the first model, of models with
    the same heads. Numbers that only one model has are left out."""
    known = heads.astype({"model": "str"}).groupby("model", sort=False)
    told = {
        f"{shown.title}, mean of the top {TOP_COUNT} heads": known[name].apply(lambda each: each.nlargest(TOP_COUNT).mean())
        for name, shown in statistics().items()
        if shown.best_head_name and name in heads
    }
    if "growth" in heads:
        told[f"{statistic('growth').title}, median head"] = known["growth"].median()
    if len(heads) and (name := longest_common_ess_column(heads)) is not None:
        wide = heads.astype({"model": "str"}).pivot(index=["layer", "head"], columns="model", values=name)
        first = str(heads["model"].iloc[0])
        alike = wide.columns[wide.notna().eq(wide[first].notna(), axis=0).all()]  # models with the same heads
        change = wide[alike].div(wide[first], axis=0)
        shares = change.apply(lambda each: each.dropna().between(1 / MAX_LENGTH_RATIO, MAX_LENGTH_RATIO).mean()).drop(first)
        told[f"Heads that keep their effective length under {first}, share"] = shares
    numbers = pd.DataFrame(told)
    return numbers.loc[:, numbers.notna().sum() > 1]

"""Small wordings that every probe's charts and findings share."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from headscope.runs.courses import courses, without_steps_before
from headscope.runs.run import Run
from headscope.runs.statistics import number

MOST_TRAININGS = 10
"""Trainings that are shown beside each other."""


def few(labels: Sequence[str], most: int = 6) -> list[str]:
    """At most `most` of the labels, the first and the last among them, evenly spaced."""
    at = np.unique(np.linspace(0, len(labels) - 1, min(most, len(labels))).round().astype(int))
    return [labels[i] for i in at]


def shown_at_first(run: Run) -> list[str]:
    """The models that are shown where nobody chose: few, and of several trainings only the last of each."""
    models = run.manifest["models"]
    several = courses(models)["training"].nunique() > 1
    return few(without_steps_before(models), MOST_TRAININGS) if several else few(run.models)


def with_others(run: Run, model: str) -> list[str]:
    """The model in view and those that are shown beside it, in the order of the run."""
    shown = {*shown_at_first(run), model}
    return [label for label in run.models if label in shown]


def extremes(heads: pd.DataFrame, name: str, model: str) -> str:
    """The lowest and highest heads of a model in words, with the median."""
    block = heads[(heads["model"] == model) & heads[name].notna()]
    if block.empty:
        return ""
    order = block.sort_values(name)
    low, high = order.iloc[0], order.iloc[-1]
    return (
        f"From {number(low[name])} ({head_name(low)}) to {number(high[name])} ({head_name(high)}); median "
        f"{number(block[name].median())}."
    )


def by_model(heads: pd.DataFrame, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Label and heads of each model that has the statistic, those heads that lack it left out."""
    if name in heads:
        for label, block in heads.dropna(subset=[name]).groupby("model", observed=True):
            yield str(label), block


def count(true: pd.Series) -> str:
    """How many heads of how many."""
    return f"{int(true.sum())} of {len(true)} heads"


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def head_name(row: pd.Series) -> str:
    """What the head of a row is called in a sentence."""
    return f"layer {row['layer']}, head {row['head']}"


def here(heads: pd.DataFrame, layer: int, head: int) -> pd.Series:
    """Which rows are that head's."""
    return (heads["layer"] == layer) & (heads["head"] == head)


def ranks(heads: pd.DataFrame, name: str, layer: int, head: int) -> str:
    """The rank of a head by a statistic among the heads of each model, the highest first, in words; "" without any."""
    told = []
    for label, block in by_model(heads, name):
        values = block.set_index(["layer", "head"])[name]
        if (layer, head) in values.index:
            value = float(values.loc[(layer, head)])
            told.append(f"{int((values > value).sum()) + 1} of {len(values)} in {label} ({number(value)})")
    return ", ".join(told)

"""Small wordings that every probe's charts and findings share."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from headscope.runs.column_metadata import number
from headscope.runs.run import Run
from headscope.runs.training_runs import courses, without_steps_before

MAX_TRAININGS = 10
"""Trainings that are shown beside each other."""


def evenly_spaced(labels: Sequence[str], max_count: int = 6) -> list[str]:
    """At most `most` of the labels, the first and the last among them, evenly spaced."""
    at = np.unique(np.linspace(0, len(labels) - 1, min(max_count, len(labels))).round().astype(int))
    return [labels[i] for i in at]


def default_models(run: Run) -> list[str]:
    """The models that are shown where nobody chose: few, and of several trainings only the last of each."""
    models = run.manifest["models"]
    several = courses(models)["training"].nunique() > 1
    return evenly_spaced(without_steps_before(models), MAX_TRAININGS) if several else evenly_spaced(run.models)


def default_models_with(run: Run, model: str) -> list[str]:
    """The model in view and those that are shown beside it, in the order of the run."""
    shown = {*default_models(run), model}
    return [label for label in run.models if label in shown]


def describe_extremes(heads: pd.DataFrame, statistic_name: str, model: str) -> str:
    """The lowest and highest heads of a model in words, with the median."""
    block = heads[(heads["model"] == model) & heads[statistic_name].notna()]
    if block.empty:
        return ""
    order = block.sort_values(statistic_name)
    low, high = order.iloc[0], order.iloc[-1]
    return (
        f"From {number(low[statistic_name])} ({head_name(low)}) to {number(high[statistic_name])} ({head_name(high)}); median "
        f"{number(block[statistic_name].median())}."
    )


def heads_by_model(heads: pd.DataFrame, statistic_name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Label and heads of each model that has the statistic, those heads that lack it left out."""
    if statistic_name in heads:
        for label, block in heads.dropna(subset=[statistic_name]).groupby("model", observed=True):
            yield str(label), block


def format_head_count(mask: pd.Series) -> str:
    """How many heads of how many."""
    return f"{int(mask.sum())} of {len(mask)} heads"


def join_words(words: Sequence[str]) -> str:
    """One, two and three."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def head_name(row: pd.Series) -> str:
    """What the head of a row is called in a sentence."""
    return f"layer {row['layer']}, head {row['head']}"


def head_mask(heads: pd.DataFrame, layer: int, head: int) -> pd.Series:
    """Which rows are that head's."""
    return (heads["layer"] == layer) & (heads["head"] == head)


def describe_ranks(heads: pd.DataFrame, statistic_name: str, layer: int, head: int) -> str:
    """The rank of a head by a statistic among the heads of each model, the highest first, in words; "" without any."""
    told = []
    for label, block in heads_by_model(heads, statistic_name):
        values = block.set_index(["layer", "head"])[statistic_name]
        if (layer, head) in values.index:
            value = float(values.loc[(layer, head)])
            told.append(f"{int((values > value).sum()) + 1} of {len(values)} in {label} ({number(value)})")
    return ", ".join(told)

"""A figure with its caption, and what several sections of a report need to make one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.findings import number
from headscope.store import Run


@dataclass(frozen=True)
class Chart:
    """A figure, how to read it, and what it shows in words for those who do not see it."""

    figure: go.Figure
    caption: str
    summary: str = ""
    half: bool = False


def table(run: Run, name: str, models: Sequence[str]) -> pd.DataFrame | None:
    """A table of the run with only these models, its categories in the order of the study; None if not stored."""
    if name not in run.tables:
        return None
    frame = run.table(name)
    frame = frame[frame["model"].isin(list(models))]
    return frame.assign(model=frame["model"].astype(pd.CategoricalDtype(run.models)))


def finite(heads: pd.DataFrame, name: str) -> dict[str, pd.Series]:
    """The finite values of the column by model; models without one are left out."""
    if name not in heads:
        return {}
    kept = heads[np.isfinite(heads[name].astype("float64"))]
    return {str(label): block[name] for label, block in kept.groupby("model", observed=True)}


def extremes(heads: pd.DataFrame, name: str, model: str) -> str:
    """The lowest and highest heads of a model in words, with the median."""
    mine = heads[(heads["model"] == model) & heads[name].notna()]
    if mine.empty:
        return ""
    order = mine.sort_values(name)
    low, high = order.iloc[0], order.iloc[-1]
    return (
        f"From {number(low[name])} (layer {low['layer']}, head {low['head']}) to {number(high[name])} "
        f"(layer {high['layer']}, head {high['head']}); median {number(mine[name].median())}."
    )

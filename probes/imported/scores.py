"""The imported score of heads, and how it agrees with headscope's own measures."""

import numpy as np
import pandas as pd

from headscope.effects.statistics import MIN_COMPARED
from headscope.plugin_api import Score, Statistic, TableRows
from headscope.runs.column_metadata import is_statistic
from probes.imported.schema import IMPORTED

NAME = "imported"
SCORES = (
    Score(
        column=NAME,
        statistic=Statistic("imported score", "", "score of the head, or of its KV group, in the file of another tool"),
        rows=TableRows(IMPORTED.name, "score"),
    ),
)


def correlations(heads: pd.DataFrame, label: str) -> pd.DataFrame:
    """Spearman's rank correlation of the imported score with every other statistic of a model: name, correlation,
    heads; the strongest first. Statistics with fewer than ten heads or one value are left out."""
    rows = heads[heads["model"] == label]
    records = []
    for name in rows.columns if NAME in rows else ():
        if name == NAME or not is_statistic(str(name)):
            continue
        pair = rows[[NAME, name]].astype("float64").replace([np.inf, -np.inf], np.nan).dropna()
        if len(pair) >= MIN_COMPARED and pair.nunique().min() > 1:
            correlation = pair[NAME].rank().corr(pair[name].rank())
            records.append({"name": str(name), "correlation": float(correlation), "heads": len(pair)})
    table = pd.DataFrame(records, columns=["name", "correlation", "heads"])
    return table.sort_values("correlation", key=abs, ascending=False, kind="stable", ignore_index=True)

"""The column of imported scores, and how they agree with headscope's own measures."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.plugin_api import HEAD_KEYS, RunTables, Statistic, plain_types
from headscope.runs.column_metadata import is_statistic
from probes.imported.schema import IMPORTED

NAME = "imported"
STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {NAME: Statistic("imported score", "", "score of the head, or of its KV group, in the file of another tool")}
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """The column `imported` by (model, layer, head, kv_group)."""
    if IMPORTED.name not in run.tables:
        return None
    return plain_types(run.table(IMPORTED.name)).set_index(HEAD_KEYS)[["score"]].rename(columns={"score": NAME})


def correlations(heads: pd.DataFrame, label: str) -> pd.DataFrame:
    """Spearman's rank correlation of the imported score with every other statistic of a model: name, correlation,
    heads; the strongest first. Statistics with fewer than three heads or one value are left out."""
    rows = heads[heads["model"] == label]
    records = []
    for name in rows.columns if NAME in rows else ():
        if name == NAME or not is_statistic(str(name)):
            continue
        pair = rows[[NAME, name]].astype("float64").replace([np.inf, -np.inf], np.nan).dropna()
        if len(pair) >= 3 and pair.nunique().min() > 1:
            correlation = pair[NAME].rank().corr(pair[name].rank())
            records.append({"name": str(name), "correlation": float(correlation), "heads": len(pair)})
    table = pd.DataFrame(records, columns=["name", "correlation", "heads"])
    return table.sort_values("correlation", key=abs, ascending=False, kind="stable", ignore_index=True)

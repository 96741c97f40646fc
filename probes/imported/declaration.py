"""Options, table and score of imported scores of heads."""

import numpy as np
import pandas as pd
from pydantic import Field

from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.plugin_api import GROUP, HEAD, LAYER, MODEL, Column, Options, Score, Statistic, Table, TableRows
from headscope.results.effects.statistics import MIN_COMPARED
from headscope.runs.column_metadata import is_statistic


class ImportedOptions(Options):
    """Store the head scores of another tool's file."""

    file: str = Field(
        min_length=1,
        description="file or folder with heads or scores: DuoAttention, Retrieval_Head, HeadKV, QRHead, RTP-LLM, "
        "PASTA, CSV, a matrix [layers, heads], a list of heads, a head set",
    )
    column: str | None = Field(None, min_length=1, description="column of the scores in a CSV with several")
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)


IMPORTED = Table(
    "imported_scores",
    "scores of heads from a file of another tool",
    (
        MODEL,
        LAYER,
        HEAD,
        GROUP,
        Column(
            "score",
            "value",
            "",
            "the file's score of the head or of its KV group; of a list without scores n for "
            "the first of n heads to 1 for the last",
        ),
    ),
)

TABLES = (IMPORTED,)


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

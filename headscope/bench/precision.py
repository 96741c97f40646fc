"""How far the statistics of heads in bfloat16 and in float32 differ."""

from tempfile import TemporaryDirectory

import pandas as pd

from headscope.api import run_probe
from headscope.positions.model import Model
from headscope.runs.column_metadata import is_statistic, statistic


def precision_differences(half: Model, full: Model, length: int) -> pd.DataFrame:
    """Differences of one checkpoint in bfloat16 (`half`) and in float32 (`full`), on one document of `length` tokens.

    One row per statistic of heads: median: of |half - full| / |full| over heads; largest: its 95 % quantile;
    rank_correlation: Spearman's, of the heads. A statistic that all heads share, or that is zero, has no row.
    """
    heads = []
    with TemporaryDirectory() as folder:
        for model in (full, half):
            tables = ["attention", "pairs"]
            run = run_probe("measure", model, lengths=[length], docs=1, tables=tables, out=folder, quiet=True)
            heads.append(run.heads)
    exact, rounded = heads
    rows = []
    for name in map(str, exact):
        if is_statistic(name) and exact[name].nunique() > 1:
            relative = (rounded[name] - exact[name]).abs() / exact[name].abs().where(exact[name] != 0)
            correlation = exact[name].corr(rounded[name], method="spearman")
            rows.append((statistic(name).label, relative.median(), relative.quantile(0.95), correlation))
    return pd.DataFrame(rows, columns=["statistic", "median", "largest", "rank_correlation"])

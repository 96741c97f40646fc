"""Changes of the loss by the number of keys that rows keep while KV groups stream, beside other sparse attention."""

import numpy as np
import pandas as pd

from headscope.runs.run_tables import RunTables
from probes.budget.analysis import CURVE_KEYS, loss_changes
from probes.budget.schema import LOSS, SETTINGS
from probes.budget.streaming_order import streaming_count


def loss_by_kept_keys(run: RunTables) -> pd.DataFrame | None:
    """The table of `Probe.loss_by_kept_keys`, a rule `budget ORDER:SHARE` for each order and share of the KV groups.

    A head that does not stream keeps all earlier keys; a streaming one keeps the first and last tokens of the setting,
    of rows that see as many.
    """
    if LOSS.name not in run.tables:
        return None
    rows = run.derived(loss_changes).reset_index().melt([*CURVE_KEYS, "doc"], var_name="share", value_name="change")
    rows = rows[(rows["share"] > 0) & (rows["share"] < 1)].dropna()
    rows = rows.merge(run.table(SETTINGS.name).astype({"model": "str"}), on="model")
    visible = (rows["context_length"] + 1) / 2
    limits = zip(rows["context_length"], rows["sink"] + rows["recent"], strict=True)
    streaming = [np.minimum(np.arange(1, length + 1), most).mean() for length, most in limits]
    counts = [streaming_count(share, groups) for share, groups in zip(rows["share"], rows["groups"], strict=True)]
    share = np.array(counts) / rows["groups"]
    rows["rule"] = [f"budget {order}:{size:g}" for order, size in zip(rows["order"], rows["share"], strict=True)]
    return rows.assign(kept=(1 - share) * visible + share * streaming, visible=visible)

"""The estimate of an influence that is used where nothing was evaluated: its second order, damped where it is large.

Knows pandas and the columns of the tables of units. The second-order term comes out right while it is small and too
large by factors where it is large, since layer norms bound what a change upstream can do; so it saturates [ours].
"""

import pandas as pd

SATURATION_FACTOR = 2.0
"""Where the second-order term saturates, in mean absolute first-order estimates of the text's sweep [ours]."""
ESTIMATE_KEYS = ["model", "context_length", "doc", "fact", "depth", "component", "target", "layer", "kv_group", "head"]
METHODS_BY_ACCURACY = ("exact", "damped", "curved", "estimate")
"""Methods from the one that knows a unit best to the one that knows it least."""


def add_damped_estimates(influence: pd.DataFrame) -> pd.DataFrame:
    """The rows, and one of method `damped` for every unit and text that has both `screen` and `curved`.

    first + added / (1 + |added| / scale), in nats/token, with first = screen, added = curved - screen and scale twice
    the mean |first| over the units of the text's sweep. Keys that the table lacks are not needed.
    """
    unit = [name for name in ESTIMATE_KEYS if name in influence]
    rows = influence.astype({"method": "str", "delta_nll": "float64"})
    first, curved = (rows[rows["method"] == method].set_index(unit) for method in ("estimate", "curved"))
    added = (curved["delta_nll"] - first["delta_nll"]).dropna()
    if added.empty:
        return rows
    known = first.loc[added.index]
    sweep = [name for name in unit if name not in ("layer", "kv_group", "head")]
    scale = SATURATION_FACTOR * known["delta_nll"].abs().groupby(level=sweep, observed=True).transform("mean")
    size = (added.abs() / scale).fillna(0)  # 0 / 0 where nothing in the sweep moves
    damped = known.assign(method="damped", delta_nll=known["delta_nll"] + added / (1 + size))
    return pd.concat([rows, damped.reset_index()], ignore_index=True)

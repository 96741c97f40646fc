"""Each head's own best rule at the cost of a measured one, from rows of texts."""

import numpy as np
import pandas as pd

from probes.sparsity.analysis import kept_by_head, recall_at_costs, rule_family, rule_sizes, usable_families


def choose_rules(rows: pd.DataFrame, rule: str) -> pd.Series:
    """The rule of every head (layer, head) with the largest recall if it keeps as many keys as `rule` does.

    `rows` are `sparse_rows` of one model over rows of text. Families of rules that need no dense weights compete as for
    the best rule of a head; if none reaches the cost of a head, each has its nearest size there. All heads of a family
    have the same sizes: those at which they keep the mean cost of all heads.
    """
    costs, families = kept_by_head(rows, rule), sorted(usable_families(rows))
    recall = recall_at_costs(rows, costs)[families]
    is_missing = recall.isna().all(axis=1)
    recall[is_missing] = recall_at_costs(rows, costs, beyond=None)[families][is_missing]
    kept = rows.groupby("rule")["kept"].mean()
    rules = {family: rule_at_cost(kept[kept.index.map(rule_family) == family], costs.mean()) for family in families}
    return recall.idxmax(axis=1).map(rules)


def rule_at_cost(kept: pd.Series, cost: float) -> str:
    """The rule of a family that keeps `cost` keys, from the mean kept keys by measured rule of this family.

    Its sizes are interpolated over the log of the kept keys, as logarithms; beyond the measured ones, the nearest.
    """
    kept = kept.sort_values(kind="stable")
    sizes = np.log(np.array([rule_sizes(rule) for rule in kept.index], float))
    log_kept, log_cost = np.log(kept.clip(lower=1e-9)), np.log(max(cost, 1e-9))
    at_cost = [round(float(np.exp(np.interp(log_cost, log_kept, of_size)))) for of_size in sizes.T]
    return ":".join((kept.index[0].partition(":")[0], *map(str, at_cost)))

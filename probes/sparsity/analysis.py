"""Per-head statistics of the sparsity probe, curves of recall by cost, and the best rule of a head at equal cost."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.base import plugins
from headscope.base.heads import format_head
from headscope.rendering.blocks import Overview
from headscope.runs.aggregation import HEAD_KEYS, mean_losses, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import ColumnParts
from probes.sparsity.declaration import ANSWER, BEST, DENSE, INDEXER, PUBLISHED, TEXT

OVERVIEW_HEADS = 5
LAYER_GROUPS = 3
"""Groups of layers whose heads are drawn as a band."""
_LONGEST = "at the longest context length, over rows of text"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "sparse_keys": Statistic(
            "keys for 95 % of the mass",
            "keys",
            f"fewest keys that hold 95 % of a row's weight, mean {_LONGEST}",
            log_scale=True,
        ),
        "sparse_keys_answer": Statistic(
            "keys for 95 % of the mass in answer rows",
            "keys",
            "the same in the rows that produce the answer to a question about a needle",
            log_scale=True,
        ),
        "sparse_recall": Statistic(
            "recall", "", f"mean share of a row's weight on the keys of the first rule, {_LONGEST}"
        ),
        "sparse_error": Statistic(
            "output error", "", f"mean of |z' - z| / |z| if the head attends to the keys of the first rule, {_LONGEST}"
        ),
        "sparse_shared_loss": Statistic(
            "recall lost to one set per layer",
            "",
            f"recall of the head's own heaviest keys minus that of as many heaviest keys of its layer, {_LONGEST}",
            number_format=".3f",
        ),
    }
)


def rule_family(rule: str) -> str:
    """The rule without the size that varies: block:64 of block:64:16, vertical-slash of vertical-slash:30:800."""
    if rule.startswith(f"{BEST}:"):
        return BEST
    return rule.partition(":")[0] if rule.startswith("vertical-slash:") else rule.rpartition(":")[0] or rule


def longest_rows(run: RunTables, table: str, rows_of: str = TEXT) -> pd.DataFrame:
    """The rows of a table of these query rows, at the longest context length of each model."""
    rows = run.table(table)
    return rows_at_longest_length(plain_types(rows[rows["rows_of"] == rows_of]))


def rules_of(run: RunTables) -> list[str]:
    """The measured rules, in the order of the options."""
    return [str(rule) for rule in run.table("sparse_rows")["rule"].unique()]


def whole_model_rules(run: RunTables) -> list[str]:
    """The rules, in the order of the options; then those by which heads attend in whole models only."""
    whole = map(str, _whole_model_rows(run, "sparse_loss")["rule"].unique())
    return [*dict.fromkeys([*rules_of(run), *(rule for rule in whole if rule != DENSE)])]


def shown_rules(run: RunTables) -> list[str]:
    """The rules at the middle one of their sizes."""
    sizes: dict[str, list[str]] = {}
    for rule in rules_of(run):
        sizes.setdefault(rule_family(rule), []).append(rule)
    return [sorted(rules, key=rule_sizes)[len(rules) // 2] for rules in sizes.values()]


def rule_sizes(rule: str) -> list[int]:
    """The numbers in the name of a rule."""
    return [int(size) for size in rule.split(":")[1:]]


def shown_rule(run: RunTables) -> str:
    """The rule of the per-head table: the first, at its middle size."""
    return shown_rules(run)[0]


def shared_pair(run: RunTables) -> tuple[str, str] | None:
    """The rules `top` and `layer-top` of one size, the middle one of those that have both."""
    rules = rules_of(run)
    tops = sorted((rule for rule in rules if rule.startswith("top:") and f"layer-{rule}" in rules), key=rule_sizes)
    return (tops[len(tops) // 2], f"layer-{tops[len(tops) // 2]}") if tops else None


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """The columns of `STATISTICS` by (model, layer, head, kv_group), with their intervals over documents."""
    if "sparse_keys" not in run.tables:
        return None
    blocks = []
    for name, rows_of in (("sparse_keys", TEXT), ("sparse_keys_answer", ANSWER)):
        keys = longest_rows(run, "sparse_keys", rows_of)
        if len(keys):
            blocks.append(mean_with_interval(keys.set_index([*HEAD_KEYS, "doc"])["keys_95"], name, 1))
    rows = longest_rows(run, "sparse_rows").set_index(["rule", *HEAD_KEYS, "doc"])
    if len(rows):
        of_rule = rows.loc[shown_rule(run)]
        blocks.append(mean_with_interval(of_rule["recall"], "sparse_recall", 0, 1))
        blocks.append(mean_with_interval(of_rule["error"], "sparse_error", 0))
        if (pair := shared_pair(run)) is not None:
            recall = rows["recall"].unstack("rule")
            blocks.append(mean_with_interval(recall[pair[0]] - recall[pair[1]], "sparse_shared_loss", -1, 1))
    return pd.concat(blocks, axis=1) if blocks else None


def recall_curves(run: RunTables, model: str, layer: int | None = None, head: int | None = None) -> pd.DataFrame:
    """Mean recall and kept keys by rule with its family, over documents and heads, or of one head."""
    rows = longest_rows(run, "sparse_rows")
    rows = rows[rows["model"] == model]
    if layer is not None:
        rows = rows[(rows["layer"] == layer) & (rows["head"] == head)]
    means = rows.groupby("rule")[["recall", "kept"]].mean().reset_index()
    return means.assign(family=means["rule"].map(rule_family)).sort_values(["family", "kept"], ignore_index=True)


def recall_at_equal_cost(run: RunTables, model: str, cost: float | None = None) -> pd.DataFrame:
    """Recall of every head (layer, head) by family of rules, if each keeps `cost` keys on average.

    The default cost is that of the shown rule in each head: a window limits it. See `recall_at_costs`.
    """
    rows = _rows_of_rules(run, model)
    return recall_at_costs(rows, costs_by_head(run, model) if cost is None else cost)


def recall_at_costs(rows: pd.DataFrame, costs: pd.Series | float, beyond: float | None = np.nan) -> pd.DataFrame:
    """Recall by head (layer, head) and family of rules (columns) of `sparse_rows` of one model, at costs in keys.

    Costs are those of every head (layer, head), or one. Between measured sizes recall is interpolated over the log of
    the kept keys; `beyond` is the value of a family whose sizes do not reach the cost, None that of its nearest size.
    """
    means = rows.groupby(["layer", "head", "rule"])[["recall", "kept"]].mean().reset_index()
    means["family"] = means["rule"].map(rule_family)
    if isinstance(costs, pd.Series):
        means = means.join(costs.rename("cost"), on=["layer", "head"])
    else:
        means = means.assign(cost=costs)
    families = means.groupby(["layer", "head", "family"])[["recall", "kept", "cost"]]
    return families.apply(_at_equal_cost, "recall", beyond).unstack("family")


def _at_equal_cost(points: pd.DataFrame, column: str, beyond: float | None = np.nan) -> float:
    """A column of the sizes of one family at their `cost`, interpolated over the log of `kept`; `beyond` past them."""
    points = points.sort_values("kept")
    log_sizes, log_cost = np.log(points["kept"].clip(lower=1e-9)), np.log(max(points["cost"].iloc[0], 1e-9))
    return float(np.interp(log_cost, log_sizes, points[column], left=beyond, right=beyond))


def _rows_of_rules(run: RunTables, model: str) -> pd.DataFrame:
    rows = longest_rows(run, "sparse_rows")
    return rows[rows["model"] == model]


def costs_by_head(run: RunTables, model: str) -> pd.Series:
    """Mean number of keys that the shown rule keeps in every head (layer, head)."""
    return kept_by_head(_rows_of_rules(run, model), shown_rule(run))


def kept_by_head(rows: pd.DataFrame, rule: str) -> pd.Series:
    """Mean number of keys that a rule keeps in every head (layer, head)."""
    kept: pd.Series = rows[rows["rule"] == rule].groupby(["layer", "head"])["kept"].mean()
    return kept


def best_families(run: RunTables, model: str) -> pd.Series:
    """The family of rules of largest recall at equal cost, by head, among those that need no dense weights."""
    recall = recall_at_equal_cost(run, model)
    families = [family for family in recall if family in usable_families(_rows_of_rules(run, model))]
    measured = recall[families].dropna(how="all")
    return measured.idxmax(axis=1) if len(families) else pd.Series(dtype=str)


def usable_families(rows: pd.DataFrame) -> set[str]:
    """The families of the options' rules in `sparse_rows` that need no dense weights."""
    return {*map(rule_family, rows["rule"][~rows["needs_dense"].astype(bool)].unique())} - {PUBLISHED, INDEXER}


def recall_by_depth(run: RunTables, model: str) -> dict[str, pd.DataFrame]:
    """Recall of heads under the first family of rules, by the layers of each third of the model.

    By mean number of kept keys (index): the median over heads (`mean`) and the 10 % and 90 % quantiles, `low` and
    `high`; empty if fewer than two sizes were measured.
    """
    rows, family = _rows_of_rules(run, model), rule_family(rules_of(run)[0])
    rows = rows[rows["rule"].map(rule_family) == family]
    if rows["rule"].nunique() < 2:
        return {}
    heads = rows.groupby(["layer", "head", "rule"])[["recall", "kept"]].mean().reset_index()
    curves = {}
    for layers in np.array_split(np.sort(heads["layer"].unique()), LAYER_GROUPS):
        if len(layers):
            of_rules = heads[heads["layer"].isin(layers)].groupby("rule")
            recall = of_rules["recall"]
            table = pd.DataFrame({"mean": recall.median(), "low": recall.quantile(0.1), "high": recall.quantile(0.9)})
            name = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
            curves[name] = table.set_index(of_rules["kept"].mean()).sort_index()
    return curves


def recall_by_layer(run: RunTables, model: str) -> pd.DataFrame:
    """Mean recall by layer of the rules that choose one size of key sets for heads, groups and layers."""
    pair = shared_pair(run)
    rows = longest_rows(run, "sparse_rows")
    names = [] if pair is None else [pair[0], f"group-{pair[0]}", pair[1]]
    rows = rows[(rows["model"] == model) & rows["rule"].isin(names)]
    return rows.groupby(["layer", "rule"])["recall"].mean().unstack("rule").reindex(columns=names).dropna(axis=1)


def loss_changes(run: RunTables) -> pd.DataFrame:
    """By model, rule and doc (index): the loss (`value`), its `change` against dense attention, `kept` keys.

    In nats/token, at the longest `context_length` of each model; empty if no rule was applied in whole models.
    """
    rows = rows_at_longest_length(_whole_model_rows(run, "sparse_loss"))
    table = pd.DataFrame({"value": mean_losses(rows, ["model", "rule", "doc"])})
    table[["context_length", "kept"]] = rows.groupby(["model", "rule", "doc"])[["context_length", "kept"]].first()
    return _against_dense(table, "doc")


def changes_of_other_probes(run: RunTables) -> pd.DataFrame:
    """Rows like those of `loss_changes` for other ways to keep fewer keys, of the same texts, from other probes.

    Where layers do not see all keys they are left out: what is kept then depends on the heads that keep fewer.
    """
    dense = _whole_model_rows(run, "sparse_loss")
    dense = rows_at_longest_length(dense[dense["rule"] == DENSE])
    places = dense.groupby(["model", "doc", "context_length"])["kept"].first().rename("dense").reset_index()
    tables = [loss_changes(run)[:0]]
    for _, table in plugins.call_parts(ColumnParts.loss_by_kept_keys, run):
        if table is not None:
            rows = table.merge(places, on=["model", "doc", "context_length"])
            rows = rows[np.isclose(rows["dense"], rows["visible"], rtol=1e-6)]
            rows = rows.assign(value=np.nan).set_index(["model", "rule", "doc"])
            tables.append(rows[["value", "context_length", "kept", "change"]])
    return pd.concat([table for table in tables if len(table)] or tables[:1])


def loss_changes_at_equal_cost(run: RunTables, model: str, rule: str) -> pd.DataFrame:
    """Change of the loss by document and family of rules (columns), if rows keep as many keys as under a rule.

    The cost is the rule's mean number of kept keys in the same document. Between measured sizes the change is
    interpolated over the log of the kept keys; a family whose sizes do not reach the cost in every document is missing.
    """
    changes = loss_changes(run)
    rows = changes[changes.index.get_level_values("model") == model].reset_index()
    cost = rows[rows["rule"] == rule].set_index("doc")["kept"]
    rows = rows.assign(family=rows["rule"].map(rule_family), cost=rows["doc"].map(cost))
    by_family = rows.groupby(["doc", "family"])[["change", "kept", "cost"]].apply(_at_equal_cost, "change")
    return by_family.unstack("family").dropna(axis=1)


def answer_changes(run: RunTables, column: str) -> pd.DataFrame:
    """By model, rule and pair (index): `value` of a column, its `change` against dense attention, and `kept` keys."""
    rows = rows_at_longest_length(_whole_model_rows(run, "sparse_answers")).astype({column: "float64"})
    table = rows.set_index(["model", "rule", "pair"])[[column, "kept"]].rename(columns={column: "value"})
    return _against_dense(table, "pair")


def _whole_model_rows(run: RunTables, table: str) -> pd.DataFrame:
    if table in run.tables:
        return plain_types(run.table(table))
    return pd.DataFrame(columns=["model", "context_length", "doc", "pair", "rule", "nll", "tokens", "success", "kept"])


def _against_dense(table: pd.DataFrame, sample: str) -> pd.DataFrame:
    """The rows of rules, in order, with the `change` of their value from that of dense attention in the same sample."""
    keys = table.index.to_frame(index=False)
    is_dense = (keys["rule"] == DENSE).to_numpy()
    dense = table.loc[is_dense, "value"].droplevel("rule").reindex(pd.MultiIndex.from_frame(keys[["model", sample]]))
    return table.assign(change=table["value"].to_numpy() - dense.to_numpy())[~is_dense].dropna()


def change_curves(changes: pd.DataFrame, model: str) -> pd.DataFrame:
    """Means by rule, with its family, over the samples of one model: value, change, kept, and value of `dense`."""
    of_model = changes[changes.index.get_level_values("model") == model]
    means = of_model.groupby("rule")[["value", "change", "kept"]].mean().reset_index()
    means["dense"] = means["value"] - means["change"]
    return means.assign(family=means["rule"].map(rule_family)).sort_values(["family", "kept"], ignore_index=True)


def overview(run: Run) -> Overview | None:
    """The heads of every model that need most keys."""
    if "sparse_keys" not in run.heads:
        return None
    records = []
    for model, heads in run.heads.dropna(subset=["sparse_keys"]).groupby("model", observed=True):
        for row in heads.sort_values("sparse_keys", ascending=False)[:OVERVIEW_HEADS].to_dict("records"):
            names = [name for name in STATISTICS if name in row]
            head = {"model": str(model), "head": format_head(int(row["layer"]), int(row["head"]))}
            records.append({**head, **{name: row[name] for name in names}})
    return Overview("sparsity", pd.DataFrame(records))


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

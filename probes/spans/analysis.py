"""Per-head statistics of the spans probe for the shown pair of spans, and the comparison of two groups."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.prompts.spans import RESERVED_NAMES
from headscope.rendering.blocks import Overview
from headscope.results.effects.groups import HeldOut, compare_groups, judge_held_out
from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.spans.declaration import WHOLE_PROMPT

OVERVIEW_HEADS = 5
_PAIR = "of the shown pair of spans, at the longest length of each text; missing if the layer hides the key in a text"
_GROUPS = "prompts are the samples; the second group is the one that comes second in the file"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "spans_mass": Statistic(
            "attention mass",
            "",
            f"mean over texts and rows of the query span of the summed weight on the key span, {_PAIR}",
            formula="mean over i in A of Σ αᵢⱼ over j in B",
        ),
        "spans_excess": Statistic(
            "excess mass",
            "",
            f"attention mass minus that of uniform weights over the keys that the layer sees, {_PAIR}",
            number_format="+.3f",
        ),
        "spans_auroc": Statistic(
            "AUROC of the attention mass",
            "",
            f"probability that the mass is higher in a prompt of the second group than in one of the first; {_GROUPS}",
        ),
        "spans_difference": Statistic(
            "group difference of the mass",
            "",
            f"mean attention mass in the second group minus that in the first; {_GROUPS}",
            number_format="+.3f",
        ),
        "spans_p": Statistic(
            "adjusted p of the group difference",
            "",
            "Mann-Whitney test of the mass in two groups of prompts, two-sided, Benjamini-Hochberg over the heads",
            number_format=".2g",
        ),
        "lookback_ratio": Statistic(
            "lookback ratio",
            "",
            "mean weight per token of the prompt, over its sum with the mean weight per generated token, in the rows "
            "of generated tokens (Chuang et al. 2024)",
            formula="c / (c + g)",
        ),
    }
)


def shown_pairs(run: RunTables) -> dict[str, tuple[str, str]]:
    """The query and key span of the per-head table, by model."""
    if "span_prompts" not in run.tables:
        return {}
    rows = plain_types(run.table("span_prompts")).drop_duplicates("model")
    return {str(model): (str(query), str(key)) for model, query, key in rows[["model", "query", "key"]].to_numpy()}


def shown_rows(run: RunTables) -> pd.DataFrame:
    """The rows of the table `spans` of the shown pairs, of each text at its longest length, with its `group`."""
    return _rows_of_pairs(run, shown_pairs(run))


def _rows_of_pairs(run: RunTables, pairs: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    blocks = [
        plain_types(run.rows("spans", model=model, query=query, key=key)) for model, (query, key) in pairs.items()
    ]
    rows = rows_at_longest_length(pd.concat(blocks, ignore_index=True), by=("model", "doc"))
    keys = ["model", "doc", "context_length"]
    return rows.merge(plain_types(run.table("span_prompts"))[[*keys, "group"]], on=keys)


def complete_rows(run: RunTables) -> pd.DataFrame:
    """The `shown_rows` of the heads that have one of every text with the pair, so that heads compare like with like."""
    return _rows_in_every_text(run.derived(shown_rows))


def _rows_in_every_text(rows: pd.DataFrame) -> pd.DataFrame:
    texts, texts_of_head = (rows.groupby(keys)["doc"].transform("nunique") for keys in (["model"], HEAD_KEYS))
    return rows[texts_of_head == texts]


def heads_of_pair(run: RunTables, model: str, query: str, key: str) -> pd.DataFrame:
    """The columns `spans_mass` and `spans_excess` of a model's heads for any pair of spans, with their intervals."""
    rows = _rows_in_every_text(_rows_of_pairs(run, {model: (query, key)}))
    if rows.empty:
        return pd.DataFrame(columns=HEAD_KEYS)
    return _mass_statistics(rows.set_index([*HEAD_KEYS, "doc"])).reset_index()


def _mass_statistics(rows: pd.DataFrame) -> pd.DataFrame:
    mass = mean_with_interval(rows["mass"], "spans_mass", 0, 1)
    return mass.join(mean_with_interval(rows["mass"] - rows["chance"], "spans_excess", -1, 1))


def prompts_of(run: RunTables, model: str) -> pd.DataFrame:
    """The rows of `span_prompts` of a model, one per text, in the order of the file."""
    rows = plain_types(run.table("span_prompts"))
    return rows[rows["model"] == model].drop_duplicates("doc").sort_values("number", kind="stable")


def named_spans_of(run: RunTables, model: str) -> list[str]:
    """The key spans of a model's texts that headscope does not name itself: spans, roles, messages and classes."""
    keys = map(str, run.rows("spans", ["key"], model=model)["key"].unique())
    return [key for key in keys if key not in RESERVED_NAMES]


def group_names(run: RunTables, model: str) -> list[str]:
    """The two groups of a model's prompts, in the order of the file; [] without two groups."""
    names = [*dict.fromkeys(prompts_of(run, model)["group"])]
    return names if len(names) == 2 else []


def head_scores(run: RunTables, model: str) -> pd.DataFrame:
    """Attention mass of the shown pair: heads (layer, head, kv_group) by text; without heads that lack a text."""
    rows = run.derived(complete_rows)
    table = rows[rows["model"] == model].pivot(index=["layer", "head", "kv_group"], columns="doc", values="mass")
    return table[[doc for doc in prompts_of(run, model)["doc"] if doc in table.columns]]


def second_group(run: RunTables, model: str, scores: pd.DataFrame) -> np.ndarray:
    """Which columns of `head_scores` are prompts of the second group."""
    rows = prompts_of(run, model).set_index("doc")
    return np.asarray(rows["group"].reindex(scores.columns) == group_names(run, model)[1], dtype=bool)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """The columns of `STATISTICS` by (model, layer, head, kv_group), with their intervals over texts."""
    if not {"spans", "span_prompts"} <= {*run.tables}:
        return None
    rows = run.derived(complete_rows).set_index([*HEAD_KEYS, "doc"])
    if rows.empty:
        return None
    blocks = [_mass_statistics(rows)]
    compared = [frame for model in shown_pairs(run) if (frame := _compare(run, model)) is not None]
    blocks += [pd.concat(compared)] if compared else []
    if "span_lookback" in run.tables:
        table = run.table("span_lookback")
        whole = plain_types(table[table["key"] == WHOLE_PROMPT])
        blocks.append(mean_with_interval(whole.set_index([*HEAD_KEYS, "doc"])["ratio"], "lookback_ratio", 0, 1))
    return pd.concat(blocks, axis=1)


def _compare(run: RunTables, model: str) -> pd.DataFrame | None:
    """The comparison of the two groups of a model's prompts, if there are two."""
    scores = head_scores(run, model)
    if not group_names(run, model) or scores.empty:
        return None
    is_second = second_group(run, model, scores)
    if is_second.all() or not is_second.any():
        return None
    frame = compare_groups(scores, is_second).rename(columns={"p_adjusted": "p"}).add_prefix("spans_")
    return pd.concat({model: frame}, names=["model"])


def held_out(run: RunTables, model: str) -> HeldOut | None:
    """Heads chosen on half of the prompts and judged on the other half; None without two groups of four prompts."""
    scores = head_scores(run, model)
    if not group_names(run, model) or scores.empty:
        return None
    return judge_held_out(scores.to_numpy(np.float64), second_group(run, model, scores))


def span_means(run: RunTables, model: str, layer: int | None = None, head: int | None = None) -> pd.DataFrame:
    """Mean mass and chance over texts by query and key span, of one head or over all heads."""
    of_head = {} if layer is None else {"layer": layer, "head": head}
    rows = run.rows("spans", ["query", "key", "mass", "chance"], model=model, **of_head)
    means: pd.DataFrame = rows.groupby(["query", "key"], observed=True)[["mass", "chance"]].mean().reset_index()
    return plain_types(means)


def overview(run: Run) -> Overview | None:
    """The heads of the largest excess mass of every model."""
    if "spans_excess" not in run.heads:
        return None
    records = []
    for model, (query, key) in shown_pairs(run).items():
        heads = run.heads[run.heads["model"] == model].dropna(subset=["spans_excess"])
        for row in heads.sort_values("spans_excess", ascending=False)[:OVERVIEW_HEADS].to_dict("records"):
            shown = {"model": model, "head": format_head(int(row["layer"]), int(row["head"])), "from": query, "to": key}
            records.append({**shown, "mass": row["spans_mass"], "chance": row["spans_mass"] - row["spans_excess"]})
    return Overview("spans", pd.DataFrame(records))

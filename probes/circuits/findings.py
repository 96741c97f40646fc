"""Findings of circuits, of a run and of one head."""

import math
from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Finding, FindingData
from headscope.report.text import (
    WINDOWED,
    describe_ranks,
    describe_sink_rows,
    format_head_count,
    head_mask,
    head_name,
    heads_by_model,
    heads_by_window,
)
from headscope.runs.column_metadata import exceeds, format_number, roles, statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.circuits import PROBE, plots
from probes.circuits.analysis import (
    COMPOSITION_COLUMNS,
    attributed_heads,
    chance_score,
    head_score_columns,
    mean_contributions,
    measured_effective_length,
    rank_correlation,
    rows_of_head,
    strongest_inputs,
    strongest_paths,
)

COPYING_THRESHOLD = 0.5
"""Copying score above which a head is called OV-copying [ours]."""
SINK_SHARE = 0.5
"""Weight on the first key above which a head is called a sink head [ours]."""
CHANCE = "null distribution: a random sign for each dimension that the earlier head writes to, which keeps all norms"
LISTED_PATHS = 5
LISTED_COMPONENTS = 3


def findings(run: Run) -> Iterator[Finding]:
    """Copying heads, strongest compositions, and what the positional curve says of the effective length."""
    for label in default_models(run):
        heads = run.heads[run.heads["model"] == label]
        for _, block in heads_by_model(heads, "ov_copying"):
            yield from _copying_findings(label, block)
        if "head_composition" in run.tables:
            yield from _composition_findings(run, label)
        for _, block in heads_by_model(heads, "positional_effective_length"):
            yield from _positional_findings(run, label, block)
        for _, block in heads_by_model(heads, "value_sink_mass"):
            length = int(run.table("value_attention")["context_length"].max())
            for window_label, part in heads_by_window(run, block, length):
                yield _value_finding(run, label, window_label, part)
    if "qk_rows" in run.tables:
        for model, layer, head in attributed_heads(run.table("qk_rows")):
            if model in default_models(run):
                yield _attribution_finding(run, model, layer, head)


def _copying_findings(label: str, heads: pd.DataFrame) -> Iterator[Finding]:
    best = heads.sort_values("ov_copying").iloc[-1]
    yield Finding(
        PROBE.title,
        f"In {label}, the OV circuits of {format_head_count(exceeds(heads['ov_copying'], COPYING_THRESHOLD))} copy "
        f"(copying score above {COPYING_THRESHOLD}); the median score is {heads['ov_copying'].median():+.2f}, the "
        f"highest {best['ov_copying']:+.3f} ({head_name(best)}).",
        label,
        data=FindingData(float(best["ov_copying"]), n=len(heads), layer=int(best["layer"]), head=int(best["head"])),
    )
    for column in head_score_columns(heads):
        correlation, count = rank_correlation(heads["ov_copying"], heads[column])
        if math.isnan(correlation):
            continue
        top = heads.dropna(subset=[column]).nlargest(10, column)
        yield Finding(
            PROBE.title,
            f"In {label}, OV copying and the {statistic(column).label} have a rank correlation of {correlation:+.2f} "
            f"over {count} heads; of the {len(top)} heads with the highest {statistic(column).label}, "
            f"{int(exceeds(top['ov_copying'], COPYING_THRESHOLD).sum())} copy (median copying score "
            f"{top['ov_copying'].median():+.2f}).",
            label,
            data=FindingData(correlation, n=count),
        )


def _composition_findings(run: Run, label: str) -> Iterator[Finding]:
    rows = run.table("head_composition")
    rows = rows[rows["model"] == label]
    for kind in COMPOSITION_COLUMNS if len(rows) else ():
        of_kind = rows[rows["input"] == kind]
        chance = chance_score(run, label, kind)
        paths = strongest_paths(of_kind, LISTED_PATHS, chance)
        yield Finding(
            PROBE.title,
            _describe_no_composition(of_kind, label, kind, chance)
            if paths.empty
            else _describe_compositions(of_kind, paths, label, kind, chance),
            label,
            data=FindingData(float((of_kind["score"] - of_kind["baseline"]).max()), n=len(of_kind)),
        )
    yield from _induction_findings(run, label)


def _describe_compositions(rows: pd.DataFrame, paths: pd.DataFrame, label: str, kind: str, chance: float | None) -> str:
    text = (
        f"In {label}, the strongest {kind.upper()}-compositions are {_list_paths(paths)} (composition score minus the "
        f"mean of random matrices, {paths.iloc[0]['baseline']:.3f})."
    )
    if chance is None:
        return text
    return (
        f"{text} {int((rows['score'] > chance).sum()):,} of {len(rows):,} pairs exceed {chance:.3f}; by chance the "
        f"largest score exceeds this value in 5 % of cases ({CHANCE})."
    )


def _describe_no_composition(rows: pd.DataFrame, label: str, kind: str, chance: float | None) -> str:
    by = rows["score"] if chance is not None else rows["score"] - rows["baseline"]
    best = rows.iloc[int(by.to_numpy().argmax())]
    largest = (
        f"the largest score, {best['score']:.3f} (L{best['sender_layer']}H{best['sender_head']} → {head_name(best)})"
    )
    if chance is None:
        return (
            f"In {label}, no {kind.upper()}-composition exceeds chance: {largest}, is not above the mean of random "
            f"matrices of the same shapes, {best['baseline']:.3f}."
        )
    return (
        f"In {label}, no {kind.upper()}-composition exceeds chance: {largest}, is not above {chance:.3f}; by chance "
        f"the largest score exceeds this value in 5 % of cases ({CHANCE})."
    )


def _induction_findings(run: Run, label: str) -> Iterator[Finding]:
    """Which earlier heads the leading induction heads read with their keys."""
    role = roles().get("induction")
    heads = run.heads[run.heads["model"] == label]
    if role is None or role.order_by not in heads or heads[role.order_by].isna().all():
        return
    best = strongest_inputs(run)
    best = best[(best["model"] == label) & (best["input"] == "k")].set_index(["layer", "head"])
    leaders = heads.nlargest(LISTED_PATHS, role.order_by)
    rows = [
        best.loc[[key]].reset_index()
        for key in zip(leaders["layer"], leaders["head"], strict=True)
        if key in best.index
    ]
    if rows:
        yield Finding(
            PROBE.title,
            f"In {label}, the {len(rows)} heads with the highest {statistic(role.order_by).label} K-compose most with: "
            f"{_list_paths(pd.concat(rows))}.{_explain_negative(pd.concat(rows))}",
            label,
        )


def _positional_findings(run: Run, label: str, heads: pd.DataFrame) -> Iterator[Finding]:
    column = "positional_effective_length"
    measured = measured_effective_length(heads.columns)
    median = heads[column].median()
    text = (
        f"In {label}, the positional logits alone give a median effective length of {format_number(median)} tokens, "
        f"and a median spread of {format_number(heads['positional_spread'].median())} logits over all distances"
    )
    correlation = math.nan
    if measured:
        correlation, count = rank_correlation(heads[column], heads[measured])
        text += (
            f"; the rank correlation with the measured effective length is {correlation:+.2f} over {count} heads "
            f"(median {format_number(heads[measured].median())} tokens)"
        )
    yield Finding(
        PROBE.title, f"{text}.", label, data=FindingData(correlation if measured else float(median), n=len(heads))
    )


def _value_finding(run: Run, label: str, window_label: str, heads: pd.DataFrame) -> Finding:
    """Whether sinks stop counting once weights are multiplied by the norms of values."""
    is_sink = heads["key_sink_mass"] > SINK_SHARE
    kept = is_sink & (heads["value_sink_mass"] > SINK_SHARE)
    medians = [format_number(heads[name].median()) for name in ("key_effective_length", "value_effective_length")]
    seeing = f" {describe_sink_rows(run.table('value_attention'), heads)}" if window_label == WINDOWED else ""
    return Finding(
        PROBE.title,
        f"In {label}, {format_head_count(is_sink)}{window_label} give the first key more than half of their weight"
        f"{seeing}; of these {int(is_sink.sum())}, {int(kept.sum())} still do once weights are multiplied by the norms "
        f"of the values. The median weight of the first key changes from {heads['key_sink_mass'].median():.3f} to "
        f"{heads['value_sink_mass'].median():.3f}, the median effective length from {medians[0]} to {medians[1]} "
        "tokens.",
        label,
        data=FindingData(float(kept.sum()), n=int(is_sink.sum())),
    )


def _attribution_finding(run: Run, model: str, layer: int, head: int) -> Finding:
    """Which components write the logits of a head's top far rows."""
    tables = {name: rows_of_head(run, name, model, layer, head) for name in ("qk_rows", "qk_components")}
    means = mean_contributions(tables["qk_components"])
    logit = float(tables["qk_rows"]["logit"].astype("float64").mean())
    sides = {
        side: ", ".join(
            f"{name} ({means.loc[name, side]:+.2f})" for name in means[side].nlargest(LISTED_COMPONENTS).index
        )
        for side in plots.SIDE_LABELS
    }
    return Finding(
        PROBE.title,
        f"In {model}, L{layer}H{head} has a mean logit of {logit:+.2f} in {_count_rows(len(tables['qk_rows']))}. "
        f"The largest contributions at the key's token are those of {sides['key']}; at the query's token, those of "
        f"{sides['query']}.",
        model,
        data=FindingData(logit, n=len(tables["qk_rows"]), layer=layer, head=head),
    )


def _count_rows(count: int) -> str:
    return f"{count} attributed row{'' if count == 1 else 's'}"


def _explain_negative(paths: pd.DataFrame) -> str:
    return " Negative values are below random matrices of the same shapes." if (paths["excess"] <= 0).any() else ""


def _list_paths(paths: pd.DataFrame) -> str:
    return ", ".join(
        f"L{row.sender_layer}H{row.sender_head} → L{row.layer}H{row.head} ({row.excess:+.3f})"
        for row in paths.itertuples()
    )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The head's rank by copying score, and the earlier heads that it composes with most."""
    if ranks := describe_ranks(run, "ov_copying", layer, head):
        yield f"Rank by OV copying score: {ranks}."
    if "head_composition" in run.tables:
        best = strongest_inputs(run)
        best = best[(best["model"] == model) & head_mask(best, layer, head)]
        if len(best):
            partners = ", ".join(
                f"{str(row.input).upper()} with L{row.sender_layer}H{row.sender_head} ({row.excess:+.3f})"
                for row in best.itertuples()
            )
            yield (
                f"Strongest composition with earlier heads in {model}, minus random matrices of the same shapes: "
                f"{partners}.{_explain_negative(best)}"
            )

"""Findings, charts and glossary of circuits."""

import math
from collections.abc import Iterator

import pandas as pd

from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, Finding, FindingData, RenderContext, Term, TextTable
from headscope.report.text import (
    default_models,
    default_models_with,
    describe_extremes,
    describe_ranks,
    format_head_count,
    head_mask,
    head_name,
    heads_by_model,
)
from headscope.runs.column_metadata import columns_by_length, format_number, roles, statistic, statistics
from headscope.runs.run import Run
from probes.circuits import PROBE, plots
from probes.circuits.analysis import COMPOSITION_COLUMNS, rank_correlation, strongest_inputs, strongest_paths

COPYING_THRESHOLD = 0.5
"""Copying score above which a head is called OV-copying [ours]."""
LISTED_PATHS = 5

GLOSSARY = (
    Term(
        "OV circuit and copying score",
        "What a head writes if it attends to a token: the token's embedding through W_V and W_O, read by the "
        "unembedding. The copying score is near 1 if attending to a token raises that token's own logit, and near -1 "
        "if it lowers it. It uses token embeddings without context, which deep heads never read alone.",
        "Σ Re λ / Σ |λ| of W_U W_OV W_E",
        ("head_circuits",),
    ),
    Term(
        "Composition",
        "How much of what an earlier head writes is read by a later head's queries (Q), keys (K) or values (V), "
        "compared with random matrices of the same shapes. A previous-token head and an induction head K-compose. "
        "Rotation is left out (distance 0), and layers between the heads can change what is read.",
        "‖W_A W_B‖ / (‖W_A‖ ‖W_B‖) − random",
        ("head_composition",),
    ),
    Term(
        "Positional logit curve",
        "The logit of a head's mean query with its mean key, rotated to each distance: the preference for distances "
        "that a head has whatever the tokens. The positional effective length is that of softmax over this curve.",
        "s̄(D) = q̄ R(θ D) k̄ᵀ / √d",
        ("positional_preference",),
    ),
)


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


def _copying_findings(label: str, heads: pd.DataFrame) -> Iterator[Finding]:
    best = heads.sort_values("ov_copying").iloc[-1]
    yield Finding(
        PROBE.title,
        f"In {label}, the OV circuits of {format_head_count(heads['ov_copying'] > COPYING_THRESHOLD)} copy (copying "
        f"score above {COPYING_THRESHOLD}); the median score is {heads['ov_copying'].median():+.2f}, the highest "
        f"{best['ov_copying']:+.3f} ({head_name(best)}).",
        label,
        data=FindingData(float(best["ov_copying"]), n=len(heads), layer=int(best["layer"]), head=int(best["head"])),
    )
    for column in _head_score_columns(heads):
        correlation, count = rank_correlation(heads["ov_copying"], heads[column])
        if math.isnan(correlation):
            continue
        top = heads.dropna(subset=[column]).nlargest(10, column)
        yield Finding(
            PROBE.title,
            f"In {label}, OV copying and the {statistic(column).label} have a rank correlation of {correlation:+.2f} "
            f"over {count} heads; of the {len(top)} heads with the highest {statistic(column).label}, "
            f"{int((top['ov_copying'] > COPYING_THRESHOLD).sum())} copy (median copying score "
            f"{top['ov_copying'].median():+.2f}).",
            label,
            data=FindingData(correlation, n=count),
        )


def _composition_findings(run: Run, label: str) -> Iterator[Finding]:
    rows = run.table("head_composition")
    rows = rows[rows["model"] == label]
    for kind in COMPOSITION_COLUMNS if len(rows) else ():
        paths = strongest_paths(rows[rows["input"] == kind], LISTED_PATHS)
        if paths.empty:
            continue
        first = paths.iloc[0]
        yield Finding(
            PROBE.title,
            f"In {label}, the strongest {kind.upper()}-compositions are {_list_paths(paths)} (score minus "
            f"{first['baseline']:.3f} of random matrices).",
            label,
            data=FindingData(float(first["excess"]), n=len(rows) // len(COMPOSITION_COLUMNS)),
        )
    yield from _induction_findings(run, label)


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
            f"{_list_paths(pd.concat(rows))}.",
            label,
        )


def _positional_findings(run: Run, label: str, heads: pd.DataFrame) -> Iterator[Finding]:
    column = "positional_effective_length"
    measured = columns_by_length(heads.columns, "ess2")
    median = heads[column].median()
    text = (
        f"In {label}, the positional logits alone give a median effective length of {format_number(median)} tokens, "
        f"and a median spread of {format_number(heads['positional_spread'].median())} logits over all distances"
    )
    correlation = math.nan
    if measured:
        correlation, count = rank_correlation(heads[column], heads[measured[-1]])
        text += (
            f"; the rank correlation with the measured {statistic(measured[-1]).label} is {correlation:+.2f} over "
            f"{count} heads (median {format_number(heads[measured[-1]].median())} tokens)"
        )
    yield Finding(
        PROBE.title, f"{text}.", label, data=FindingData(correlation if measured else float(median), n=len(heads))
    )


def _head_score_columns(heads: pd.DataFrame) -> list[str]:
    """Scores of other probes that name a head, such as the top retrieval head, and the induction score."""
    columns = [name for name, declared in statistics().items() if declared.best_head_name and name in heads]
    role = roles().get("induction")
    if role is not None and role.order_by in heads:
        columns.append(role.order_by)
    return [name for name in columns if heads[name].notna().any()]


def _list_paths(paths: pd.DataFrame) -> str:
    return ", ".join(
        f"L{row.sender_layer}H{row.sender_head} → L{row.layer}H{row.head} ({row.excess:+.3f})"
        for row in paths.itertuples()
    )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The head's rank by copying score, and the earlier heads that it composes with most."""
    if "ov_copying" in run.heads and (ranks := describe_ranks(run.heads, "ov_copying", layer, head)):
        yield f"Rank by OV copying score: {ranks}."
    if "head_composition" in run.tables:
        best = strongest_inputs(run)
        best = best[(best["model"] == model) & head_mask(best, layer, head)]
        if len(best):
            partners = ", ".join(
                f"{str(row.input).upper()} with L{row.sender_layer}H{row.sender_head} ({row.excess:+.3f})"
                for row in best.itertuples()
            )
            yield f"Strongest composition with earlier heads in {model}, above random matrices: {partners}."


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Copying scores, composition by layer, and positional logit curves."""
    yield ChartGroup(PROBE.title, "OV circuits: do heads copy what they attend to?", _copying_charts(context))
    yield ChartGroup(PROBE.title, "Composition between heads", _composition_charts(context))
    yield ChartGroup(PROBE.title, "Positional preference", _positional_charts(context))


def _copying_charts(context: RenderContext) -> Iterator[Chart]:
    for label in list(context.finite_values("ov_copying"))[:1]:
        yield Chart(
            head_figures.plot_matrix(context.heads, "ov_copying", label),
            "One cell per head; layer 0 is at the bottom. Token embeddings through the head's weights: red raises the "
            "attended token's own logit, blue lowers it.",
            describe_extremes(context.heads, "ov_copying", label),
            half_width=True,
        )
        rows = context.heads[context.heads["model"] == label]
        for column in _head_score_columns(rows):
            yield Chart(
                plots.plot_statistics(context.heads, column, "ov_copying", label),
                "One point per head. A head that finds a token and copies it is at the top right.",
                half_width=True,
            )


def _composition_charts(context: RenderContext) -> Iterator[Chart | TextTable]:
    composition = context.table("head_composition")
    if composition is None:
        return
    for label in context.models[:1]:
        for kind in COMPOSITION_COLUMNS:
            yield Chart(
                plots.plot_composition(composition, kind, label),
                "Each cell: the largest score of two heads of these layers, minus the mean of random matrices of the "
                f"same shapes. Squares mark the layers of the {plots.MAX_LABELLED_PATHS} strongest pairs.",
                half_width=True,
            )


def _positional_charts(context: RenderContext) -> Iterator[Chart]:
    preference = context.table("positional_preference")
    if preference is not None and len(preference):
        yield Chart(
            plots.plot_positional_quantiles(preference),
            "Median over heads (band: quartiles) of the logit of the mean query with the mean key. A falling line "
            "favours near tokens whatever they are.",
            half_width=True,
        )
    lengths = columns_by_length(context.heads.columns, "ess2")
    for label in list(context.finite_values("positional_effective_length"))[:6] if lengths else ():
        yield Chart(
            plots.plot_statistics(context.heads, "positional_effective_length", lengths[-1], label),
            "One point per head. If the positional logits explained the effective length, points would lie on y = x.",
            half_width=True,
        )


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart | TextTable]:
    """One head: its positional logit curve, the tokens it boosts and suppresses, and logits of token pairs."""
    models = default_models_with(run, model)
    for table, plot, caption in (
        (
            "positional_preference",
            plots.plot_positional_curve,
            "The logit of the mean query with the mean key, rotated.",
        ),
        ("token_pairs", plots.plot_token_pairs, "Token embeddings through the head's queries and keys, rotated."),
    ):
        rows = run.table(table) if table in run.tables else pd.DataFrame()
        rows = rows[head_mask(rows, layer, head) & rows["model"].isin(models)] if len(rows) else rows
        if len(rows):
            yield Chart(plot(rows, models, layer, head), caption, half_width=True)
    if "ov_tokens" in run.tables:
        rows = run.table("ov_tokens")
        rows = rows[head_mask(rows, layer, head) & (rows["model"] == model)]
        if len(rows):
            yield _token_table(rows, model)


def _token_table(rows: pd.DataFrame, model: str) -> TextTable:
    lines = []
    for source, block in rows.groupby("source", observed=True):
        words = {
            str(effect): ", ".join(f"“{text}”" for text in part.sort_values("rank")["text"])
            for effect, part in block.groupby("effect", observed=True)
        }
        lines.append([f"“{source}”", words.get("boosted", ""), words.get("suppressed", "")])
    caption = f"Tokens whose logit the head changes most in {model} if it attends to a token, from the weights."
    return TextTable(caption, ["attended token", "boosted", "suppressed"], lines)

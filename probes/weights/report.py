"""Charts and glossary of the probe `weights`."""

from collections.abc import Iterator

import pandas as pd

from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term, TextBlock, TextTable
from headscope.rendering.statistic_charts import matrix_chart
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from headscope.study.text_flags import command_line, flags_of_text
from probes.weights import PROBE, plots
from probes.weights.analysis import (
    COMPOSITION_COLUMNS,
    attributed_heads,
    head_score_columns,
    mean_contributions,
    measured_effective_length,
    rows_of_head,
    strongest_component_pairs,
)

LISTED_PAIRS = 8
MAX_ATTRIBUTED_HEADS = 4
"""Heads with a chart of QK attribution in a report; the pages of heads show all."""

GLOSSARY = (
    Term(
        "OV circuit and copying score",
        "Effect of an attended token on the logits: its embedding through W_V, W_O and the unembedding. The copying "
        "score is near 1 if attending to a token raises that token's own logit, and near -1 if it lowers it. It uses "
        "token embeddings without context; the inputs of deeper heads also contain the outputs of earlier layers.",
        "Σ Re λ / Σ |λ| of W_U W_OV W_E",
        ("head_circuits",),
    ),
    Term(
        "Composition",
        "Overlap of an earlier head's output with the query (Q), key (K) or value (V) input of a later head, compared "
        "with random matrices of the same shapes. A previous-token head and an induction head K-compose. Rotation is "
        "left out (distance 0), and layers between the heads can change the later head's input.",
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
    Term(
        "QK attribution",
        "Why a head attends to a token: its logit as a sum over what the embedding, earlier heads and MLPs added at "
        "the query's token and at the key's token, with norms frozen at the scale that they had. A part that all keys "
        "share raises the logit and leaves the weights as they are.",
        "s = Σ_ab (W_Q a) R(θ D) (W_K b)ᵀ / √d",
        ("qk_rows",),
    ),
    Term(
        "Value-weighted attention",
        "Attention weights times the norm of what each key's value adds to the residual stream, renormalised. A first "
        "token with a large weight but a nearly zero value gets a weight near 0.",
        "wᵢⱼ ∝ αᵢⱼ ‖W_O vⱼ‖",
        ("value_attention",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Copying scores, composition by layer, and positional logit curves."""
    yield ChartGroup(PROBE.title, "OV circuits: do heads copy what they attend to?", _copying_charts(context))
    yield ChartGroup(PROBE.title, "Composition between heads", _composition_charts(context))
    yield ChartGroup(PROBE.title, "Positional preference", _positional_charts(context))
    yield ChartGroup(PROBE.title, "Do sinks count in value-weighted attention?", _value_charts(context))
    yield ChartGroup(PROBE.title, "Why heads attend where they do", _attribution_charts(context))


def _copying_charts(context: RenderContext) -> Iterator[Chart]:
    for label in list(context.finite_values("ov_copying"))[:1]:
        caption = (
            "Token embeddings through the head's weights: red raises the attended token's own logit, blue lowers it."
        )
        yield matrix_chart(context.heads, "ov_copying", label, context.scale_heads, caption)
        rows = context.heads[context.heads["model"] == label]
        for column in head_score_columns(rows):
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
    measured = measured_effective_length(context.heads.columns)
    if measured is None:
        return
    for label in list(context.finite_values("positional_effective_length"))[:6]:
        yield Chart(
            plots.plot_statistics(context.heads, "positional_effective_length", measured, label),
            "One point per head. If the positional logits explained the effective length, points would lie on y = x.",
            half_width=True,
        )


def _value_charts(context: RenderContext) -> Iterator[Chart]:
    for label in list(context.finite_values("value_sink_mass"))[:1]:
        for plain, weighted in (
            ("key_sink_mass", "value_sink_mass"),
            ("key_effective_length", "value_effective_length"),
        ):
            yield Chart(
                plots.plot_statistics(context.heads, plain, weighted, label),
                "One point per head. Plain weights of keys against weights times the norms of what values add to the "
                "residual stream.",
                half_width=True,
            )


def _attribution_charts(context: RenderContext) -> Iterator[Chart | TextTable]:
    rows = context.table("qk_rows")
    heads = [] if rows is None else attributed_heads(rows)
    for model, layer, head in heads[:MAX_ATTRIBUTED_HEADS]:
        yield _attribution_chart(context.run, model, layer, head)


def _attribution_chart(run: Run, model: str, layer: int, head: int) -> Chart:
    means = mean_contributions(rows_of_head(run, "qk_components", model, layer, head))
    return Chart(
        plots.plot_qk_components(means, f"L{layer}H{head}: {model}"),
        "Mean over the head's attributed rows. The bars of one colour, with those of the components left out, sum to "
        "the logit: what was written at the query's token, or at the key's token.",
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
        rows = run.rows(table, model=models, layer=layer, head=head) if table in run.tables else pd.DataFrame()
        if len(rows):
            yield Chart(plot(rows, models, layer, head), caption, half_width=True)
    if "ov_tokens" in run.tables and len(rows := rows_of_head(run, "ov_tokens", model, layer, head)):
        yield _token_table(rows, model)
    if "qk_rows" in run.tables and len(rows := rows_of_head(run, "qk_rows", model, layer, head)):
        yield _attribution_chart(run, model, layer, head)
        yield _far_row_table(rows, model)
        yield _component_table(rows_of_head(run, "qk_pairs", model, layer, head), model)


def row_charts(
    run: Run, model: str, length: int, doc: str, layer: int, head: int, query: int
) -> Iterator[Chart | TextTable | TextBlock]:
    """QK attribution of one row; where it is not stored, the command that stores it."""
    tables = {
        name: _rows_of_query(run, name, model, layer, head, (doc, length, query))
        for name in ("qk_rows", "qk_components", "qk_pairs")
    }
    if tables["qk_rows"].empty:
        of_row = {"parts": "values", "heads": f"L{layer}H{head}", "query-rows": query}
        command = command_line("weights", flags_of_text(run, model, doc, length) | of_row)
        yield TextBlock(
            [
                "QK attribution says which earlier components contribute to the logit of a row. For this row it is not "
                f"stored. To store it in the opened folder, add its --out to: {command}",
                "Then add the new run, and no other run of this kind, under Combined runs.",
            ]
        )
        return
    row = tables["qk_rows"].iloc[0]
    caption = (
        f"The key at token {row['key']:,} (“… {row['key_text']}”) has the weight {format_number(float(row['weight']))} "
        f"and the logit {row['logit']:+.2f}. The bars of one colour, with those of the components left out, sum to it: "
        "what was written at the query's token, or at the key's token."
    )
    means = mean_contributions(tables["qk_components"])
    yield Chart(plots.plot_qk_components(means, f"L{layer}H{head}: {model}", f"query {query:,}"), caption)
    yield _component_table(tables["qk_pairs"], model)


def _rows_of_query(
    run: Run, table: str, model: str, layer: int, head: int, text_and_query: tuple[str, int, int]
) -> pd.DataFrame:
    if table not in run.tables:
        return pd.DataFrame()
    rows = rows_of_head(run, table, model, layer, head)
    doc, length, query = text_and_query
    return rows[(rows["doc"] == doc) & (rows["context_length"] == length) & (rows["query"] == query)]


def _far_row_table(rows: pd.DataFrame, model: str) -> TextTable:
    lines = [
        [
            format_number(float(row["weight"])),
            f"{row['logit']:+.2f}",
            f"{row['query'] - row['key']:,}",
            f"… {row['key_text']}",
            f"… {row['query_text']}",
        ]
        for row in rows.sort_values("weight", ascending=False).to_dict("records")
    ]
    caption = f"Rows in {model} whose logits are attributed. Each text ends with its token."
    return TextTable(caption, ["weight", "logit", "distance", "attended token", "query token"], lines)


def _component_table(pairs: pd.DataFrame, model: str) -> TextTable:
    lines = [
        [str(row.query_component), str(row.key_component), f"{row.contribution:+.2f}"]
        for row in strongest_component_pairs(pairs, LISTED_PAIRS).itertuples()
    ]
    caption = f"Pairs of components that add most to these logits in {model}: mean over the rows."
    return TextTable(caption, ["written at the query's token", "written at the key's token", "logits"], lines)


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

"""Charts and glossary of the probe `weights`."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import format_head
from headscope.plots import axes, shapes, style
from headscope.plots.shapes import mean_curve
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term, TextBlock, TextTable
from headscope.rendering.statistic_charts import matrix_chart
from headscope.runs.column_metadata import format_number, statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from headscope.study.text_flags import command_line, flags_of_text
from probes.weights import PROBE
from probes.weights.analysis import (
    COMPOSITION_COLUMNS,
    attributed_heads,
    head_score_columns,
    mean_contributions,
    measured_effective_length,
    rows_of_head,
    strongest_component_pairs,
)

MAX_LABELLED_PATHS = 10
"""Strongest compositions that are marked in the matrix."""
MAX_COMPONENTS = 12
"""Components in the plot of QK attribution."""
HOVER = "distance %{x:,.0f}: %{y:+.2f} logits"
SIDE_LABELS = {"query": "written at the query's token", "key": "written at the key's token"}


def plot_statistics(heads: pd.DataFrame, x: str, y: str, model: str) -> go.Figure:
    """One point per head of a model: statistic `y` against statistic `x`."""
    x_stat, y_stat = statistic(x), statistic(y)
    title = f"{y_stat.title} against {x_stat.label}: {style.escape_label(model)}"
    rows = heads[heads["model"] == model]
    if x in rows and y in rows:
        rows = rows.dropna(subset=[x, y])
    if x not in rows or y not in rows or rows.empty:
        return style.empty_figure(title, "no head has both values")
    scales = [
        {"title_text": stat.label_with_unit}
        | (axes.log_axis(rows[name], sparse=True) if stat.log_scale and (rows[name] > 0).all() else {})
        for stat, name in ((x_stat, x), (y_stat, y))
    ]
    hover = f"{x_stat.label} %{{x:.3g}}<br>{y_stat.label} %{{y:.3g}}"
    return shapes.head_points(title, rows, (x, y), hover, *scales)


def plot_composition(composition: pd.DataFrame, kind: str, model: str) -> go.Figure:
    """Largest excess over random matrices of every pair of layers; the strongest pairs of heads are marked."""
    title = f"{kind.upper()}-composition by layer: {style.escape_label(model)}"
    rows = composition[(composition["model"] == model) & (composition["input"] == kind)]
    if rows.empty:
        return style.empty_figure(title, "no data for this model")
    rows = rows.assign(excess=rows["score"] - rows["baseline"])
    best = rows.loc[rows.groupby(["sender_layer", "layer"])["excess"].idxmax()]
    layers = np.union1d(best["sender_layer"], best["layer"])
    grid = best.pivot_table(index="layer", columns="sender_layer", values="excess").reindex(
        index=layers, columns=layers
    )
    ends = best[["sender_layer", "sender_head", "layer", "head"]].to_numpy().tolist()
    best["name"] = [f"{format_head(*end[:2])} → {format_head(*end[2:])}" for end in ends]
    names = best.pivot(index="layer", columns="sender_layer", values="name").reindex(index=layers, columns=layers)
    axes_titles = ({"title_text": f"layer of the {which} head", "showgrid": False} for which in ("earlier", "later"))
    figure = shapes.matrix(
        title,
        grid.astype("float64"),
        "%{customdata}<br>excess %{z:.3f}",
        *axes_titles,
        unit="excess",
        gaps=False,
        top_margin=70,
        customdata=names.astype(object).fillna("").to_numpy(),
    )
    top = rows.nlargest(MAX_LABELLED_PATHS, "excess").drop_duplicates(["sender_layer", "layer"])
    return figure.add_scatter(
        x=top["sender_layer"],
        y=top["layer"],
        mode="markers",
        hoverinfo="skip",
        showlegend=False,
        marker={"symbol": "square-open", "size": 9, "color": style.HIGHLIGHT_COLOUR},
    )


def plot_positional_curve(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """Logit of one head's mean query with its mean key by distance, a line per model; `rows` are the head's."""
    title, rows = f"Positional logits of layer {layer}, head {head}", rows[rows["model"].isin(models)]
    if rows.empty:
        return style.empty_figure(title, "not measured in these models")
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(models)))
    curves = {}
    for label, model_style in style.model_styles(rows).items():
        table = rows[rows["model"] == label].pivot_table(index="distance", columns="doc", values="logit", observed=True)
        curves[model_style] = mean_curve(table.set_axis(_log_positions(table.index)))
    return shapes.bands(title, curves, HOVER, _distance_axis(rows["distance"]), "logit")


def plot_positional_quantiles(preference: pd.DataFrame) -> go.Figure:
    """Median and quartiles over heads of the positional logit minus its value at distance 1, a line per model."""
    title = "Positional logits of all heads by distance"
    rows = preference[preference["context_length"] == preference["context_length"].max()]
    if rows.empty:
        return style.empty_figure(title, "no data")
    curves = {}
    for label, model_style in style.model_styles(rows).items():
        of_model = rows[rows["model"] == label]
        table = of_model.pivot_table(index="distance", columns=["layer", "head"], values="logit", observed=True)
        reference = table.loc[1] if 1 in table.index else table.iloc[0]
        quartiles = (table - reference).quantile([0.25, 0.5, 0.75], axis=1).T
        curves[model_style] = quartiles.set_axis(["low", "mean", "high"], axis=1).set_axis(_log_positions(table.index))
    return shapes.bands(title, curves, HOVER, _distance_axis(rows["distance"]), "logit minus that at distance 1")


def plot_token_pairs(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """Logit of each pair of tokens by distance in one head, for the first model; `rows` are the head's."""
    rows = rows[rows["model"] == next(label for label in models if (rows["model"] == label).any())]
    sums = rows.groupby(["query_token", "key_token", "distance"], observed=True)["contribution"].sum()
    curves = {}
    for index, (tokens, block) in enumerate(sums.groupby(level=[0, 1], observed=True)):
        name = " → ".join(style.escape_label(str(token)) for token in cast(tuple[str, str], tokens))
        pair_style = style.ModelStyle(name, style.CATEGORY_PALETTE[index % 8], "", "circle")
        positions = _log_positions(block.index.get_level_values("distance"))
        curves[pair_style] = pd.DataFrame({"y": block.to_numpy()}, positions)
    title = f"Logits of token pairs in layer {layer}, head {head}"
    return shapes.lines(title, curves, HOVER, _distance_axis(rows["distance"]), "logit")


def plot_qk_components(means: pd.DataFrame, name: str, row: str = "") -> go.Figure:
    """Bars of the components that add most to a head's logits at top far rows, or at one row with this name; `means`
    are `mean_contributions`."""
    title = f"What writes the logits of {style.escape_label(name)}"
    figure = style.new_figure(f"{title}, {row}" if row else title, 420)
    leading = means.loc[means.abs().max(axis=1).nlargest(MAX_COMPONENTS).index[::-1]]
    for index, (side, text) in enumerate(SIDE_LABELS.items()):
        figure.add_bar(
            y=leading.index,
            x=leading[side],
            orientation="h",
            name=text,
            marker_color=style.CATEGORY_PALETTE[index],
            hovertemplate="%{y}: %{x:+.2f} logits<extra>" + text + "</extra>",
        )
    x = "contribution (logits)" if row else "mean contribution (logits)"
    return shapes.finish(figure.update_layout(margin_l=100), x, {"type": "category", "automargin": True})


def _distance_axis(distances: pd.Series) -> shapes.Axis:
    return {"title_text": "distance (tokens); 0 is drawn at 0.5", **axes.log_axis([0.5, max(distances.max(), 1)])}


def _log_positions(distances: pd.Index) -> pd.Index:
    """Distances on a log axis: 0 is drawn at 0.5."""
    return pd.Index(np.maximum(np.asarray(distances, np.float64), 0.5))


LISTED_PAIRS = 8
MAX_ATTRIBUTED_HEADS = 4
"""Heads with a chart of QK attribution in a report; the pages of heads show all."""

GLOSSARY = (
    Term(
        "OV circuit and copying score",
        "Effect of an attended token on the logits: its embedding through W_V, W_O and the unembedding. The copying "
        "score is near 1 if attending to a token raises that token's own logit, and near -1 if it lowers it. It uses "
        "token embeddings without context or position; the inputs of deeper heads also contain the outputs of earlier "
        "layers.",
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
                plot_statistics(context.heads, column, "ov_copying", label),
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
                plot_composition(composition, kind, label),
                "Each cell: the largest score of two heads of these layers, minus the mean of random matrices of the "
                f"same shapes. Squares mark the layers of the {MAX_LABELLED_PATHS} strongest pairs.",
                half_width=True,
            )


def _positional_charts(context: RenderContext) -> Iterator[Chart]:
    preference = context.table("positional_preference")
    if preference is not None and len(preference):
        yield Chart(
            plot_positional_quantiles(preference),
            "Median over heads (band: quartiles) of the logit of the mean query with the mean key. A falling line "
            "favours near tokens whatever they are.",
            half_width=True,
        )
    measured = measured_effective_length(context.heads.columns)
    if measured is None:
        return
    for label in list(context.finite_values("positional_effective_length"))[:6]:
        yield Chart(
            plot_statistics(context.heads, "positional_effective_length", measured, label),
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
                plot_statistics(context.heads, plain, weighted, label),
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
        plot_qk_components(means, f"L{layer}H{head}: {model}"),
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
            plot_positional_curve,
            "The logit of the mean query with the mean key, rotated.",
        ),
        ("token_pairs", plot_token_pairs, "Token embeddings through the head's queries and keys, rotated."),
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
    yield Chart(plot_qk_components(means, f"L{layer}H{head}: {model}", f"query {query:,}"), caption)
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

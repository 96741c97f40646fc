"""Plots of OV and QK circuits: copying score against head scores, composition, positional logit curves, token pairs."""

from typing import cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.heads import format_head
from headscope.plots import axes, shapes, style
from headscope.plots.shapes import mean_curve
from headscope.runs.column_metadata import statistic

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

"""Rank shift: the ranks of heads by a statistic, in a baseline and in another model."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import Head, format_head
from headscope.plots import style
from headscope.plots.head_scatter import HEAD_COLUMNS
from headscope.plots.line_ends import spread_labels
from headscope.runs.column_metadata import statistic

TOP_COUNT = 10
"""Number of top heads of each model that are drawn and whose overlap is counted."""
MAX_LINES = 30
"""Maximum number of lines in a panel."""
NAME_HEIGHT = 11
"""Height in px of a head's name at the end of its line."""
CHANGE_STYLES = {
    1: ("increase, intervals do not overlap", style.CATEGORY_PALETTE[1]),
    -1: ("decrease, intervals do not overlap", style.CATEGORY_PALETTE[3]),
    0: ("within noise, or no interval", style.TEXT_COLOUR),
}
"""Legend label and colour by direction of the change."""


def plot_rank_shift(
    heads: pd.DataFrame,
    statistic_name: str,
    baseline: str,
    selected_heads: Collection[Head] = (),
    beyond_noise: bool = False,
) -> go.Figure:
    """Plot the ranks of heads by a statistic in the baseline (left) and in another model (right), one panel per model.

    Rank 1 is the largest value. The lines are the selected heads, or by default the top ten heads of either model. With
    `beyond_noise` they are the heads whose 95 % confidence intervals do not overlap, the largest rank changes first.
    Error bars are the ranks that the ends of a head's interval would have among the values of the other heads.
    """
    stat = statistic(statistic_name)
    title = f"Rank by {stat.label}, before and after"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    styles = style.model_styles(heads.dropna(subset=[statistic_name]))
    other_models = [label for label in styles if label != baseline]
    if baseline not in styles or not other_models:
        return style.empty_figure(
            title, "a comparison needs the baseline and at least one other model with this statistic"
        )
    figure = style.panel_figure(
        title, [f"{styles[baseline].name} → {styles[label].name}" for label in other_models], height=440
    )
    directions_in_legend: set[int] = set()
    lines_by_panel: list[pd.DataFrame] = []
    for index, label in enumerate(other_models):
        changes = rank_changes(heads, statistic_name, baseline, label)
        lines = _select_lines(changes, selected_heads, beyond_noise)
        lines_by_panel.append(lines)
        if lines.empty:
            reason = _why_no_line(changes, beyond_noise)
            place = style.panel_row_col(index, other_models)
            figure.add_annotation(text=reason, x=0.5, y=0.5, yref="y domain", showarrow=False, **place)
        for direction, (legend_label, colour) in CHANGE_STYLES.items():
            direction_lines = lines[lines["direction"] == direction]
            if len(direction_lines):
                _add_lines(
                    figure,
                    direction_lines,
                    legend_label,
                    colour,
                    direction not in directions_in_legend,
                    style.panel_row_col(index, other_models),
                )
                figure.data[-1].meta = style.escape_label(label)  # the model whose page a click opens
                directions_in_legend.add(direction)
    last_rank = max((int(rank) for trace in figure.data for rank in trace.y if rank is not None), default=TOP_COUNT)
    ticks = [rank for rank in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if rank <= last_rank]
    figure.update_yaxes(
        type="log", range=[np.log10(last_rank * 1.15), -0.08], tickvals=ticks, ticktext=list(map(str, ticks))
    )
    figure.update_xaxes(tickvals=[0, 1], ticktext=["before", "after"], range=[-0.25, 1.5], showgrid=False)
    _name_heads(figure, lines_by_panel, last_rank)
    style.set_outer_axis_titles(figure, len(other_models), "", "rank")
    figure.update_layout(showlegend=bool(directions_in_legend))
    return style.set_metadata(
        style.declare_head_points(figure), x="before (0) or after (1)", value=f"rank by {stat.label}"
    )


def rank_changes(heads: pd.DataFrame, statistic_name: str, baseline: str, other_model: str) -> pd.DataFrame:
    """Ranks of the heads that both models have, one row per head.

    Columns: layer, head, kv_group; with each of the prefixes before_ and after_: rank (from 1), best and worst (the
    ranks of the ends of the head's interval), value, low, high; direction: 1 or -1 for a change beyond noise, else 0.
    """
    sides = []
    for side, model in (("before", baseline), ("after", other_model)):
        ends = [end for end in (f"{statistic_name}_low", f"{statistic_name}_high") if end in heads]
        values = (
            heads.loc[heads["model"] == model, [*HEAD_COLUMNS, statistic_name, *ends]]
            .dropna(subset=[statistic_name])
            .set_index(HEAD_COLUMNS)
        )
        values = values.astype("float64").set_axis(["value", *(["low", "high"] if ends else [])], axis=1)
        values = values.reindex(columns=["value", "low", "high"])
        sorted_values = np.sort(values["value"].to_numpy())
        end_ranks = {
            end: len(sorted_values) - np.searchsorted(sorted_values, values[end].to_numpy(), "right") + 1
            for end in values
        }
        ranks = pd.DataFrame(
            {"rank": end_ranks["value"], "best": end_ranks["high"], "worst": end_ranks["low"]}, values.index
        )
        ranks["worst"] = np.maximum(ranks["worst"], ranks["rank"])
        ranks["best"] = np.minimum(ranks["best"], ranks["rank"])
        ranks.loc[values["low"].isna(), ["best", "worst"]] = ranks.loc[
            values["low"].isna(), ["rank", "rank"]
        ].to_numpy()
        sides.append(ranks.join(values).add_prefix(f"{side}_"))
    changes = sides[0].join(sides[1], how="inner").reset_index()
    up = changes["after_low"] > changes["before_high"]
    down = changes["after_high"] < changes["before_low"]
    return changes.assign(direction=up.astype(int) - down.astype(int))


def top_overlap(changes: pd.DataFrame) -> int:
    """The number of top heads of the baseline that are also top heads of the other model."""
    return int(((changes["before_rank"] <= TOP_COUNT) & (changes["after_rank"] <= TOP_COUNT)).sum())


def _why_no_line(changes: pd.DataFrame, beyond_noise: bool) -> str:
    """Why a panel shows no head, in lines that fit a panel."""
    if changes.empty:
        return "no head is measured<br>in both models"
    if not beyond_noise:
        return "the selected heads are<br>not measured in both models"
    if changes[["before_low", "after_low"]].isna().any(axis=1).all():
        return "no confidence intervals:<br>they need three documents"
    return "no head's confidence<br>intervals are apart"


def _select_lines(changes: pd.DataFrame, selected_heads: Collection[Head], beyond_noise: bool) -> pd.DataFrame:
    if beyond_noise:
        rank_ratio = (np.log(changes["after_rank"]) - np.log(changes["before_rank"])).abs()
        return (
            changes.assign(rank_ratio=rank_ratio)[changes["direction"] != 0]
            .sort_values("rank_ratio", ascending=False)
            .head(MAX_LINES)
        )
    if selected_heads:
        return changes[[head in selected_heads for head in zip(changes["layer"], changes["head"], strict=True)]].head(
            MAX_LINES
        )
    return changes[(changes["before_rank"] <= TOP_COUNT) | (changes["after_rank"] <= TOP_COUNT)].head(MAX_LINES)


def _name_heads(figure: go.Figure, lines_by_panel: Sequence[pd.DataFrame], last_rank: int) -> None:
    """Write the names of the heads at the right ends of their lines."""
    row_count = -(-len(lines_by_panel) // 3)
    height = (figure.layout.height - figure.layout.margin.t - 56) / row_count
    bottom, span = np.log10(last_rank * 1.15), np.log10(last_rank * 1.15) + 0.08
    labels = []
    for index, lines in enumerate(lines_by_panel):
        places = ((bottom - np.log10(lines["after_rank"])) / span * height).tolist()
        number = str(index + 1) if index else ""
        for row, place in zip(
            lines.to_dict("records"), spread_labels(places, [NAME_HEIGHT] * len(lines)) or (), strict=True
        ):
            labels.append(
                {
                    "text": format_head(row["layer"], row["head"]),
                    "font": {"size": 10},
                    "x": 1,
                    "xref": f"x{number}",
                    "xanchor": "left",
                    "xshift": 5,
                    "y": place / height,
                    "yref": f"y{number} domain",
                    "yanchor": "middle",
                    "showarrow": False,
                }
            )
    style.add_annotations(figure, labels)


def _add_lines(
    figure: go.Figure,
    lines: pd.DataFrame,
    label: str,
    colour: str,
    show_in_legend: bool,
    panel_position: dict[str, int],
) -> None:
    """Add one trace for all heads: left end, right end, gap, and so on."""
    rows: list[Any] = lines.to_dict("records")
    ends = [(row, side) for row in rows for side in ("before_", "after_", "")]  # "" is the gap

    def values(of_end: Callable[[dict[str, Any], str], Any], gap: object = None) -> list[Any]:
        return [of_end(row, side) if side else gap for row, side in ends]

    figure.add_scatter(
        x=[0, 1, None] * len(rows),
        y=values(lambda row, side: row[f"{side}rank"]),
        mode="lines+markers",
        connectgaps=False,
        line={"color": colour, "width": 1.3},
        marker={"size": 5},
        error_y={
            "array": values(lambda row, side: row[f"{side}worst"] - row[f"{side}rank"]),
            "arrayminus": values(lambda row, side: row[f"{side}rank"] - row[f"{side}best"]),
            "symmetric": False,
            "thickness": 1,
            "width": 0,
        },
        customdata=[[int(row[name]) for name in HEAD_COLUMNS] for row, _ in ends],
        text=values(_describe_end, ""),
        hovertemplate="%{text}<extra></extra>",
        name=label,
        legendgroup=label,
        showlegend=show_in_legend,
        **panel_position,
    )


def _describe_end(row: dict[str, Any], side: str) -> str:
    """The hover text of one end of a line."""
    low, high = row[f"{side}low"], row[f"{side}high"]
    interval = "" if np.isnan(low) else f" ({low:.3g} to {high:.3g})"
    rank, value = row[f"{side}rank"], row[f"{side}value"]
    return f"layer {row['layer']}, head {row['head']}: rank {rank}, value {value:.4g}{interval}"

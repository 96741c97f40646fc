"""Rank shift: heads as lines between models, by the rank that a statistic gives them."""

from collections.abc import Collection

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.plots.head_scatter import HEAD_COLUMNS
from headscope.plots.highlight import HeadIndex
from headscope.runs.column_metadata import statistic

TOP_COUNT = 10
"""Heads of either model that are drawn, and among which overlap is counted."""
MAX_LINES = 30
"""Lines in a panel."""
CHANGE_STYLES = {
    1: ("higher beyond noise", 4),
    -1: ("lower beyond noise", 0),
    0: ("within noise, or without an interval", 7),
}
"""What became of a head's value: words, and place in the palette."""


def plot_rank_shift(
    heads: pd.DataFrame,
    statistic_name: str,
    baseline: str,
    selected_heads: Collection[HeadIndex] = (),
    beyond_noise: bool = False,
) -> go.Figure:
    """The rank of heads by `name`, the largest first, under `baseline` on the left and another model on the right.

    Drawn are `chosen` heads, else the top ten of either model; or those alone that changed `beyond_noise`, whose 95 %
    intervals do not meet, the largest changes of rank first. Bars are the ranks that the ends of a head's interval
    would have among the others' values.
    """
    shown = statistic(statistic_name)
    title = f"Rank by {shown.label}, before and after"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    looks = style.model_styles(heads.dropna(subset=[statistic_name]))
    others = [label for label in looks if label != baseline]
    if baseline not in looks or not others:
        return style.empty_figure(title, "a comparison needs the base model and at least one other with this statistic")
    made = style.panel_figure(title, [f"{looks[baseline].name} → {looks[label].name}" for label in others], height=440)
    told: set[int] = set()
    for at, label in enumerate(others):
        lines = _select_lines(rank_changes(heads, statistic_name, baseline, label), selected_heads, beyond_noise)
        for way, (words, colour) in CHANGE_STYLES.items():
            mine = lines[lines["way"] == way]
            if len(mine):
                _add_lines(made, mine, words, style.PALETTE[colour], way not in told, style.panel_row_col(at, others))
                told.add(way)
    most = max((int(rank) for trace in made.data for rank in trace.y if rank is not None), default=TOP_COUNT)
    ticks = [rank for rank in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if rank <= most]
    made.update_yaxes(type="log", range=[np.log10(most * 1.15), -0.08], tickvals=ticks, ticktext=list(map(str, ticks)))
    made.update_xaxes(tickvals=[0, 1], ticktext=["before", "after"], range=[-0.25, 1.25], showgrid=False)
    style.set_outer_axis_titles(made, len(others), "", "rank")
    made.update_layout(showlegend=bool(told))
    return style.set_metadata(
        style.declare_head_points(made), x="before (0) or after (1)", value=f"rank by {shown.label}"
    )


def rank_changes(heads: pd.DataFrame, statistic_name: str, baseline: str, other_model: str) -> pd.DataFrame:
    """One row a head that both models have: layer, head, kv_group, and for each of before and after its rank from 1,
    the ranks `best` and `worst` of the ends of its interval, its value; `way` is 1 or -1 beyond noise, else 0."""
    sides = []
    for side, model in (("before", baseline), ("after", other_model)):
        ends = [end for end in (f"{statistic_name}_low", f"{statistic_name}_high") if end in heads]
        mine = (
            heads.loc[heads["model"] == model, [*HEAD_COLUMNS, statistic_name, *ends]]
            .dropna(subset=[statistic_name])
            .set_index(HEAD_COLUMNS)
        )
        mine = mine.astype("float64").set_axis(["value", *(["low", "high"] if ends else [])], axis=1)
        mine = mine.reindex(columns=["value", "low", "high"])
        order = np.sort(mine["value"].to_numpy())
        above = {end: len(order) - np.searchsorted(order, mine[end].to_numpy(), "right") + 1 for end in mine}
        ranks = pd.DataFrame({"rank": above["value"], "best": above["high"], "worst": above["low"]}, mine.index)
        ranks["worst"] = np.maximum(ranks["worst"], ranks["rank"])
        ranks["best"] = np.minimum(ranks["best"], ranks["rank"])
        ranks.loc[mine["low"].isna(), ["best", "worst"]] = ranks.loc[mine["low"].isna(), ["rank", "rank"]].to_numpy()
        sides.append(ranks.join(mine).add_prefix(f"{side}_"))
    both = sides[0].join(sides[1], how="inner").reset_index()
    up, down = both["after_low"] > both["before_high"], both["after_high"] < both["before_low"]
    return both.assign(way=up.astype(int) - down.astype(int))


def top_overlap(changes: pd.DataFrame) -> int:
    """How many of the top heads before are among the top heads after."""
    return int(((changes["before_rank"] <= TOP_COUNT) & (changes["after_rank"] <= TOP_COUNT)).sum())


def _select_lines(changes: pd.DataFrame, selected_heads: Collection[HeadIndex], beyond_noise: bool) -> pd.DataFrame:
    if beyond_noise:
        far = (np.log(changes["after_rank"]) - np.log(changes["before_rank"])).abs()
        return changes.assign(far=far)[changes["way"] != 0].sort_values("far", ascending=False).head(MAX_LINES)
    if selected_heads:
        return changes[[place in selected_heads for place in zip(changes["layer"], changes["head"], strict=True)]].head(
            MAX_LINES
        )
    return changes[(changes["before_rank"] <= TOP_COUNT) | (changes["after_rank"] <= TOP_COUNT)].head(MAX_LINES)


def _add_lines(
    figure: go.Figure,
    lines: pd.DataFrame,
    label: str,
    colour: str,
    show_in_legend: bool,
    panel_position: dict[str, int],
) -> None:
    """One gapped line through all heads: left end, right end, gap."""
    x: list[int | None] = []
    y: list[int | None] = []
    less: list[int | None] = []
    more: list[int | None] = []
    places: list[list[int]] = []
    says: list[str] = []
    for row in lines.to_dict("records"):
        for at, side in enumerate(("before", "after")):
            rank = row[f"{side}_rank"]
            x.append(at)
            y.append(rank)
            less.append(rank - row[f"{side}_best"])
            more.append(row[f"{side}_worst"] - rank)
            places.append([int(row["layer"]), int(row["head"]), int(row["kv_group"])])
            ends = (
                f" ({row[f'{side}_low']:.3g} to {row[f'{side}_high']:.3g})"
                if row[f"{side}_low"] == row[f"{side}_low"]
                else ""
            )
            says.append(
                f"layer {row['layer']}, head {row['head']}: rank {rank}, value {row[f'{side}_value']:.4g}{ends}"
            )
        for gap in (x, y, less, more):
            gap.append(None)
        places.append(places[-1])
        says.append("")
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines+markers",
        connectgaps=False,
        line={"color": colour, "width": 1.3},
        marker={"size": 5},
        error_y={"array": more, "arrayminus": less, "symmetric": False, "thickness": 1, "width": 0},
        customdata=places,
        text=says,
        hovertemplate="%{text}<extra></extra>",
        name=label,
        legendgroup=label,
        showlegend=show_in_legend,
        **panel_position,
    )

"""Rank shift: heads as lines between models, by the rank that a statistic gives them."""

from collections.abc import Collection

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import style
from headscope.figures.marks import Head
from headscope.figures.scatter import UNIT
from headscope.runs.statistics import statistic

TOP = 10
"""Heads of either model that are drawn, and among which overlap is counted."""
MOST = 30
"""Lines in a panel."""
WAYS = {1: ("higher beyond noise", 4), -1: ("lower beyond noise", 0), 0: ("within noise, or without an interval", 7)}
"""What became of a head's value: words, and place in the palette."""


def shift(
    heads: pd.DataFrame, name: str, baseline: str, chosen: Collection[Head] = (), beyond_noise: bool = False
) -> go.Figure:
    """The rank of heads by `name`, the largest first, under `baseline` on the left and another model on the right.

    Drawn are `chosen` heads, else the top ten of either model; or those alone that changed `beyond_noise`, whose 95 %
    intervals do not meet, the largest changes of rank first. Bars are the ranks that the ends of a head's interval
    would have among the others' values.
    """
    shown = statistic(name)
    title = f"Rank by {shown.label}, before and after"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    looks = style.looks(heads.dropna(subset=[name]))
    others = [label for label in looks if label != baseline]
    if baseline not in looks or not others:
        return style.nothing(title, "a comparison needs the base model and at least one other with this statistic")
    made = style.panels(title, [f"{looks[baseline].name} → {looks[label].name}" for label in others], height=440)
    told: set[int] = set()
    for at, label in enumerate(others):
        lines = _lines(moved(heads, name, baseline, label), chosen, beyond_noise)
        for way, (words, colour) in WAYS.items():
            mine = lines[lines["way"] == way]
            if len(mine):
                _draw(made, mine, words, style.PALETTE[colour], way not in told, style.place(at, others))
                told.add(way)
    most = max((int(rank) for trace in made.data for rank in trace.y if rank is not None), default=TOP)
    ticks = [rank for rank in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if rank <= most]
    made.update_yaxes(type="log", range=[np.log10(most * 1.15), -0.08], tickvals=ticks, ticktext=list(map(str, ticks)))
    made.update_xaxes(tickvals=[0, 1], ticktext=["before", "after"], range=[-0.25, 1.25], showgrid=False)
    style.outer_titles(made, len(others), "", "rank")
    made.update_layout(showlegend=bool(told))
    return style.says(style.of_heads(made), x="before (0) or after (1)", value=f"rank by {shown.label}")


def moved(heads: pd.DataFrame, name: str, baseline: str, label: str) -> pd.DataFrame:
    """One row a head that both models have: layer, head, kv_group, and for each of before and after its rank from 1,
    the ranks `best` and `worst` of the ends of its interval, its value; `way` is 1 or -1 beyond noise, else 0."""
    sides = []
    for side, model in (("before", baseline), ("after", label)):
        ends = [end for end in (f"{name}_low", f"{name}_high") if end in heads]
        mine = heads.loc[heads["model"] == model, [*UNIT, name, *ends]].dropna(subset=[name]).set_index(UNIT)
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


def overlap(both: pd.DataFrame) -> int:
    """How many of the top heads before are among the top heads after."""
    return int(((both["before_rank"] <= TOP) & (both["after_rank"] <= TOP)).sum())


def _lines(both: pd.DataFrame, chosen: Collection[Head], beyond_noise: bool) -> pd.DataFrame:
    if beyond_noise:
        far = (np.log(both["after_rank"]) - np.log(both["before_rank"])).abs()
        return both.assign(far=far)[both["way"] != 0].sort_values("far", ascending=False).head(MOST)
    if chosen:
        return both[[place in chosen for place in zip(both["layer"], both["head"], strict=True)]].head(MOST)
    return both[(both["before_rank"] <= TOP) | (both["after_rank"] <= TOP)].head(MOST)


def _draw(made: go.Figure, lines: pd.DataFrame, words: str, colour: str, legend: bool, place: dict[str, int]) -> None:
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
    made.add_scatter(
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
        name=words,
        legendgroup=words,
        showlegend=legend,
        **place,
    )

"""Charts of any statistic of the per-head table: models against one, and a box a model."""

from collections.abc import Collection

import pandas as pd

from headscope.figures import compare, ranks
from headscope.figures import heads as head_figures
from headscope.figures.marks import Head
from headscope.report.content import Chart, Shown
from headscope.runs.statistics import column, number


def against_chart(heads: pd.DataFrame, name: str, first: str) -> Chart:
    """Every head's statistic under each other model against `first`."""
    if column(name).stem != "ess2":
        caption = f"A point is a head. On the dashed line it is as under {first}; above it, larger."
    else:
        caption = (
            f"A point is a head. On the dashed line it attends to as many tokens as under {first}; above it, to more. "
            "A scheme that keeps local heads and extends global ones follows the line at the left and rises at the "
            "right."
        )
    return Chart(compare.against(heads, name, first), caption, half=heads["model"].nunique() == 2)


def box_chart(shown: Shown, name: str) -> Chart:
    """The statistic over heads, a box a model."""
    low = " A low value means that the head uses its pairs evenly." if name == "cov" else ""
    medians = ", ".join(f"{label} {number(block.median())}" for label, block in shown.finite(name).items())
    return Chart(
        head_figures.spread(shown.heads, name),
        "Box: minimum, quartiles, median and maximum over heads, the mean dashed. Each dot is a head, the first "
        f"layer on the left.{low}",
        f"Medians: {medians}.",
        half=True,
    )


def rank_chart(
    heads: pd.DataFrame, name: str, first: str, chosen: Collection[Head] = (), beyond_noise: bool = False
) -> Chart:
    """How heads change their rank by a statistic from `first` to each other model, and how many leaders stay."""
    if beyond_noise:
        which = f"Heads whose 95 % intervals do not meet, at most {ranks.MOST} a panel, the largest changes of rank."
    else:
        which = "The picked heads." if chosen else f"The top {ranks.TOP} heads of either model."
    told = []
    for label in heads.dropna(subset=[name])["model"].unique() if name in heads else ():
        if label != first and len(both := ranks.moved(heads, name, first, str(label))):
            clear = f", {int((both['way'] != 0).sum())} of {len(both)} heads changed beyond noise"
            told.append(
                f"{ranks.overlap(both)} of the top {ranks.TOP} stay under {label}"
                f"{clear if both['before_low'].notna().any() else ''}"
            )
    caption = f"{which} A line is a head, rank 1 the largest value; bars are the ranks that its interval reaches."
    return Chart(ranks.shift(heads, name, first, chosen, beyond_noise), caption, f"{'; '.join(told)}." if told else "")

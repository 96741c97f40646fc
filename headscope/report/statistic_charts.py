"""Charts of any statistic of the per-head table: models against one, and a box a model."""

from collections.abc import Collection

import pandas as pd

from headscope.plots import head_scatter, rank_shift
from headscope.plots import heads as head_figures
from headscope.plots.highlight import HeadIndex
from headscope.report.blocks import Chart, RenderContext
from headscope.runs.column_metadata import column, number


def comparison_chart(heads: pd.DataFrame, statistic_name: str, baseline: str) -> Chart:
    """Every head's statistic under each other model against `first`."""
    if column(statistic_name).stem != "ess2":
        caption = f"A point is a head. On the dashed line it is as under {baseline}; above it, larger."
    else:
        caption = (
            f"A point is a head. On the dashed line it attends to as many tokens as under {baseline}; above it, to more. "
            "A scheme that keeps local heads and extends global ones follows the line at the left and rises at the "
            "right."
        )
    return Chart(
        head_scatter.plot_against_baseline(heads, statistic_name, baseline),
        caption,
        half_width=heads["model"].nunique() == 2,
    )


def box_chart(context: RenderContext, statistic_name: str) -> Chart:
    """The statistic over heads, a box a model."""
    low = " A low value means that the head uses its pairs evenly." if statistic_name == "cov" else ""
    medians = ", ".join(
        f"{label} {number(block.median())}" for label, block in context.finite_values(statistic_name).items()
    )
    return Chart(
        head_figures.plot_distribution(context.heads, statistic_name),
        "Box: minimum, quartiles, median and maximum over heads, the mean dashed. Each dot is a head, the first "
        f"layer on the left.{low}",
        f"Medians: {medians}.",
        half_width=True,
    )


def rank_chart(
    heads: pd.DataFrame,
    statistic_name: str,
    baseline: str,
    selected_heads: Collection[HeadIndex] = (),
    beyond_noise: bool = False,
) -> Chart:
    """How heads change their rank by a statistic from `first` to each other model, and how many leaders stay."""
    if beyond_noise:
        which = f"Heads whose 95 % intervals do not meet, at most {rank_shift.MAX_LINES} a panel, the largest changes of rank."
    else:
        which = "The picked heads." if selected_heads else f"The top {rank_shift.TOP_COUNT} heads of either model."
    told = []
    for label in heads.dropna(subset=[statistic_name])["model"].unique() if statistic_name in heads else ():
        if label != baseline and len(both := rank_shift.rank_changes(heads, statistic_name, baseline, str(label))):
            clear = f", {int((both['direction'] != 0).sum())} of {len(both)} heads changed beyond noise"
            told.append(
                f"{rank_shift.top_overlap(both)} of the top {rank_shift.TOP_COUNT} stay under {label}"
                f"{clear if both['before_low'].notna().any() else ''}"
            )
    caption = f"{which} A line is a head, rank 1 the largest value; bars are the ranks that its interval reaches."
    return Chart(
        rank_shift.plot_rank_shift(heads, statistic_name, baseline, selected_heads, beyond_noise),
        caption,
        f"{'; '.join(told)}." if told else "",
    )

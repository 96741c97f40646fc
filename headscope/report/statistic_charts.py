"""Charts of any statistic of the per-head table: models against one, and a box a model."""

import pandas as pd

from headscope.figures import compare
from headscope.figures import heads as head_figures
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

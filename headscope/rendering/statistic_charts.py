"""Charts of any statistic of the per-head table: comparison with a baseline, distribution, and ranks."""

from collections.abc import Collection, Iterable, Iterator

import pandas as pd

from headscope.base.heads import Head
from headscope.plots import head_matrices as head_figures
from headscope.plots import head_scatter, rank_shift, style
from headscope.plots.small_multiples import have_equal_axes, small_multiples
from headscope.plots.top_heads import plot_top_heads
from headscope.rendering.blocks import Card, Chart, RenderContext
from headscope.rendering.explorer_blocks import query_link
from headscope.rendering.text import describe_extremes
from headscope.results.head_results import TOP_HEADS
from headscope.results.result import Result
from headscope.results.words import answers
from headscope.runs.column_metadata import exceeds, format_number, parse_column, statistic


def model_panels(charts: Iterable[tuple[str, Chart]]) -> Iterator[Chart]:
    """The same chart of several models, given with their labels, as one chart with a panel per model.

    Charts whose axes have other categories or ticks stay apart.
    """
    by_model = dict(charts)
    if len(by_model) < 2 or not have_equal_axes([chart.figure for chart in by_model.values()]):
        yield from by_model.values()
        return
    label, first = next(iter(by_model.items()))
    title = (
        str(first.figure.layout.title.text).replace("<br>", " ").replace(f": {style.escape_label(label, 200)}", "", 1)
    )
    yield Chart(
        small_multiples(title, {label: chart.figure for label, chart in by_model.items()}),
        first.caption,
        " ".join(f"{label}: {chart.summary}" for label, chart in by_model.items() if chart.summary),
        cell_links=next((chart.cell_links for chart in by_model.values() if chart.cell_links), first.cell_links),
    )


def matrix_chart(
    heads: pd.DataFrame, statistic_name: str, model: str, scale_heads: pd.DataFrame | None = None, caption: str = ""
) -> Chart:
    """The statistic of every head of a model. The default caption is its meaning."""
    stat = statistic(statistic_name)
    return Chart(
        head_figures.plot_matrix(heads, statistic_name, model, scale_heads),
        f"One cell per head; the first layer is at the bottom. {caption or f'{stat.title}: {stat.meaning}.'}",
        describe_extremes(heads, statistic_name, model),
        half_width=True,
    )


def matrix_panels(context: RenderContext, statistic_name: str, caption: str) -> Iterator[Chart]:
    """A layer x head matrix of the statistic per model, in one chart."""
    labels = [*context.finite_values(statistic_name)]
    if len(labels) > 1:
        figure = head_figures.plot_small_matrices(context.heads, statistic_name, context.scale_heads)
    elif labels:
        figure = head_figures.plot_matrix(context.heads, statistic_name, labels[0], context.scale_heads)
    for label in labels[:1]:
        summary = describe_extremes(context.heads, statistic_name, label)
        yield Chart(figure, caption, f"{label}: {summary}" if len(labels) > 1 else summary, half_width=len(labels) == 1)


def comparison_chart(heads: pd.DataFrame, statistic_name: str, baseline: str) -> Chart:
    """The statistic of every head under each other model against the baseline."""
    if parse_column(statistic_name).stem != "ess2":
        caption = (
            f"One point per head. On the dashed line the value equals that under {baseline}; above it, it is larger."
        )
    else:
        caption = (
            f"One point per head. On the dashed line its effective length equals that under {baseline}; above it, it "
            "attends to more tokens. A scheme that keeps local heads and extends global ones follows the line on "
            "the left and rises above it on the right."
        )
    return Chart(
        head_scatter.plot_against_baseline(heads, statistic_name, baseline),
        caption,
        half_width=heads["model"].nunique() == 2,
    )


def top_heads_card(
    context: RenderContext,
    statistic_name: str,
    question: str,
    results: Iterable[Result],
    role: str = "",
    threshold: float | None = None,
) -> Iterator[Card]:
    """The heads of the largest statistic in the first model that has it, under every model.

    A head has the role, if there is one, if its statistic is above the threshold. The caption words the `results`.
    """
    measured = context.finite_values(statistic_name)
    if not measured:
        return
    first = next(iter(measured))
    heads = context.heads[context.heads["model"].isin([*measured])]
    ordered = heads.loc[measured[first].sort_values(ascending=False, kind="stable").index]
    has_role = threshold is not None and bool(exceeds(ordered[statistic_name], threshold).any())
    yield Card(
        plot_top_heads(heads, statistic_name, ordered[:TOP_HEADS], threshold),
        answers(results),
        half_width=True,
        question=question,
        href=query_link("/heads", stat=statistic_name, **({"role": role, "model": first} if has_role else {})),
    )


def box_chart(context: RenderContext, statistic_name: str) -> Chart:
    """The distribution of the statistic over heads, one box per model."""
    note = " A low value means that the head uses its rotary pairs evenly." if statistic_name == "cov" else ""
    medians = ", ".join(
        f"{label} {format_number(values.median())}" for label, values in context.finite_values(statistic_name).items()
    )
    return Chart(
        head_figures.plot_distribution(context.heads, statistic_name),
        "Box: minimum, quartiles, median and maximum over heads; the dashed line is the mean. One point per head, "
        f"with the first layer on the left.{note}",
        f"Medians: {medians}.",
        half_width=True,
    )


def rank_chart(
    heads: pd.DataFrame,
    statistic_name: str,
    baseline: str,
    selected_heads: Collection[Head] = (),
    beyond_noise: bool = False,
) -> Chart:
    """The change in the ranks of heads from the baseline to each other model, and the overlap of the top heads."""
    if beyond_noise:
        which_heads = (
            f"Heads whose 95 % confidence intervals do not overlap, at most {rank_shift.MAX_LINES} per panel, "
            "by change of rank."
        )
    elif selected_heads:
        which_heads = "Selected heads."
    else:
        which_heads = f"The top {rank_shift.TOP_COUNT} heads of either model."
    top, overlaps = rank_shift.TOP_COUNT, []
    for label in heads.dropna(subset=[statistic_name])["model"].unique() if statistic_name in heads else ():
        if label != baseline and len(changes := rank_shift.rank_changes(heads, statistic_name, baseline, str(label))):
            beyond = f", {int((changes['direction'] != 0).sum())} of {len(changes)} heads change beyond noise"
            overlaps.append(
                f"{rank_shift.top_overlap(changes)} of the top {top} heads stay in the top {top} under {label}"
                f"{beyond if changes['before_low'].notna().any() else ''}"
            )
    caption = (
        f"{which_heads} One line per head; rank 1 is the largest value. Error bars: ranks that its interval spans."
    )
    return Chart(
        rank_shift.plot_rank_shift(heads, statistic_name, baseline, selected_heads, beyond_noise),
        caption,
        f"{'; '.join(overlaps)}." if overlaps else "",
    )

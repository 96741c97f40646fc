"""Models against a baseline: every head's statistic, and what the probes compare."""

from collections.abc import Iterator, Sequence
from itertools import chain

from dashboards.view_state import FILTER_PARAMETERS, ViewState
from headscope.plots import layers
from headscope.report import assembly
from headscope.report.blocks import Block, Chart, LazySequence, PageContent, RenderContext, TextBlock
from headscope.report.statistic_charts import box_chart, comparison_chart, rank_chart
from headscope.report.text import default_models
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run

NAME = "Compare"
PATH = "/compare"


def controls(run: Run) -> Sequence[str]:
    """All but the model in view, where there are models to compare."""
    comparable = len(run.models) > 1 and assembly.run_statistics(run)
    return ("base", "models", "stat", "lines", *FILTER_PARAMETERS) if comparable else ()


def content(run: Run, view: ViewState) -> PageContent:
    """The statistic of each head against the baseline, then what else differs."""
    if len(run.models) < 2 or not view.statistic_name:
        why = "A comparison needs two models with a statistic of their heads. Give headscope run two: --model A=... "
        return PageContent("Compare", "", {"": [TextBlock([f"{why}--model B=..."])]})
    first = view.baseline or default_models(run)[0]
    sizes = {told["label"]: (told["geometry"]["layers"], told["geometry"]["heads"]) for told in run.manifest["models"]}
    others = [label for label in view.shown_models if label != first]
    apart = [label for label in others if sizes[label] != sizes[first]]
    models = [first, *(label for label in others if label not in apart)]
    shown = assembly.render_context(run, view.model, view.filter_heads(run.heads), models)
    title = statistic(view.statistic_name).title
    sections: dict[str, Sequence[Block]] = {title: LazySequence(_statistic_charts(shown, view, first))}
    for heading, charts in assembly.charts_for_page(shown, PATH).items():
        sections[heading] = LazySequence(chain(sections.get(heading, ()), charts))
    told = "" if len(shown.heads) else " No head passes the filters."
    told += f" Left out, as their heads are no counterparts: {', '.join(apart)}." if apart else ""
    lead = f"{', '.join(models[1:]) or 'Nothing'} against {first}, head by head.{told}"
    return PageContent(f"Models against {first}", lead, sections)


def _statistic_charts(context: RenderContext, view: ViewState, baseline: str) -> Iterator[Chart]:
    yield comparison_chart(context.heads, view.statistic_name, baseline)
    yield rank_chart(context.heads, view.statistic_name, baseline, view.selected_heads, view.rank_lines == "changed")
    for name in dict.fromkeys([view.statistic_name, "cov"]):
        if name in context.heads:
            yield box_chart(context, name)
            yield _layer_chart(context, name)


def _layer_chart(context: RenderContext, statistic_name: str) -> Chart:
    caption = "Mean over the heads of a layer; the band holds the middle 80 % of heads."
    return Chart(layers.plot_by_layer(context.heads, statistic_name), caption, half_width=True)

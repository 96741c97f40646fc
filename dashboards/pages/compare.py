"""Models against a baseline: every head's statistic, and what the probes compare."""

from collections.abc import Iterator, Sequence
from itertools import chain

from dashboards.view import FILTERS, View
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
    return ("base", "models", "stat", "lines", *FILTERS) if comparable else ()


def content(run: Run, view: View) -> PageContent:
    """The statistic of each head against the baseline, then what else differs."""
    if len(run.models) < 2 or not view.stat:
        why = "A comparison needs two models with a statistic of their heads. Give headscope run two: --model A=... "
        return PageContent("Compare", "", {"": [TextBlock([f"{why}--model B=..."])]})
    first = view.base or default_models(run)[0]
    sizes = {told["label"]: (told["geometry"]["layers"], told["geometry"]["heads"]) for told in run.manifest["models"]}
    others = [label for label in view.models if label != first]
    apart = [label for label in others if sizes[label] != sizes[first]]
    models = [first, *(label for label in others if label not in apart)]
    shown = assembly.render_context(run, view.model, view.kept(run.heads), models)
    title = statistic(view.stat).title
    sections: dict[str, Sequence[Block]] = {title: LazySequence(_of_statistic(shown, view, first))}
    for heading, charts in assembly.charts_for_page(shown, PATH).items():
        sections[heading] = LazySequence(chain(sections.get(heading, ()), charts))
    told = "" if len(shown.heads) else " No head passes the filters."
    told += f" Left out, as their heads are no counterparts: {', '.join(apart)}." if apart else ""
    lead = f"{', '.join(models[1:]) or 'Nothing'} against {first}, head by head.{told}"
    return PageContent(f"Models against {first}", lead, sections)


def _of_statistic(shown: RenderContext, view: View, first: str) -> Iterator[Chart]:
    yield comparison_chart(shown.heads, view.stat, first)
    yield rank_chart(shown.heads, view.stat, first, view.picked, view.lines == "changed")
    for name in dict.fromkeys([view.stat, "cov"]):
        if name in shown.heads:
            yield box_chart(shown, name)
            yield _by_layer(shown, name)


def _by_layer(shown: RenderContext, name: str) -> Chart:
    caption = "Mean over the heads of a layer; the band holds the middle 80 % of heads."
    return Chart(layers.plot_by_layer(shown.heads, name), caption, half_width=True)

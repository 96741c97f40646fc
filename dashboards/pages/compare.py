"""Models against a baseline: every head's statistic, and the comparisons of the probes."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain

from dashboards.empty_pages import command_for_run
from dashboards.view_state import FILTER_PARAMETERS, ViewState
from headscope.plots import layers
from headscope.rendering import assembly
from headscope.rendering.blocks import Block, Chart, LazySequence, PageContent, RenderContext
from headscope.rendering.statistic_charts import box_chart, comparison_chart, rank_chart
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models

NAME = "Compare"
PATH = "/compare"


def controls(run: Run) -> Sequence[str]:
    """All but the single model, if there are models to compare."""
    is_comparable = len(run.models) > 1 and assembly.run_statistics(run)
    return ("baseline", "models", "stat", "rank_lines", *FILTER_PARAMETERS) if is_comparable else ()


def missing_command(run: Run) -> str:
    """The command that measures the models of the run and another one; "" if the run can be compared."""
    if controls(run):
        return ""
    command = command_for_run("headscope run", run)
    if len(run.models) != 1:
        return command
    label = "yarn" if run.models != ["yarn"] else "other"
    checkpoint = run.manifest["models"][0]["checkpoint"]
    return f"{command} {shlex.join(['--model', f'{label}={checkpoint}@yarn:factor=8'])}"


def content(run: Run, view: ViewState) -> PageContent:
    """The statistic of each head against the baseline, then the comparisons of the probes."""
    baseline = view.baseline or default_models(run)[0]
    geometry = {model["label"]: model["geometry"] for model in run.manifest["models"]}
    shapes = {label: (size["layers"], size["heads"], size.get("layer_heads")) for label, size in geometry.items()}
    compared = [label for label in view.shown_models if label != baseline]
    omitted = [label for label in compared if shapes[label] != shapes[baseline]]
    models = [baseline, *(label for label in compared if label not in omitted)]
    context = assembly.render_context(run, view.model, view.filter_heads(run.heads), models)
    title = statistic(view.statistic_name).title
    sections: dict[str, Sequence[Block]] = {
        "": [] if "tab" in view.query else LazySequence(assembly.cards_for_page(context, PATH)),
        title: LazySequence(_statistic_charts(context, view, baseline)),
    }
    for heading, charts in assembly.charts_for_page(context, PATH).items():
        sections[heading] = LazySequence(chain(sections.get(heading, ()), charts))
    notes = "" if len(context.heads) else " No head matches the filters."
    if omitted:
        notes += f" Left out, because their layers or heads differ in number: {', '.join(omitted)}."
    introduction = f"{', '.join(models[1:]) or 'No model'} against {baseline}, head by head.{notes}"
    return PageContent(f"Models against {baseline}", introduction, sections, tabs=True)


def _statistic_charts(context: RenderContext, view: ViewState, baseline: str) -> Iterator[Chart]:
    yield comparison_chart(context.heads, view.statistic_name, baseline)
    yield rank_chart(context.heads, view.statistic_name, baseline, view.selected_heads, view.rank_lines == "changed")
    for name in dict.fromkeys([view.statistic_name, "cov"]):
        if name in context.heads:
            yield box_chart(context, name)
            yield _layer_chart(context, name)


def _layer_chart(context: RenderContext, statistic_name: str) -> Chart:
    caption = "Mean over the heads of a layer; the band covers the middle 80 % of heads."
    return Chart(layers.plot_by_layer(context.heads, statistic_name), caption, half_width=True)

"""Charts and glossary of the probe of circuits of heads."""

from collections.abc import Iterator

from headscope.effects.sweep import rows_of_sweep
from headscope.plots import style
from headscope.prompts.pairs import metric_label, metric_unit
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.results.words import sentence
from probes.circuit import PROBE, plots
from probes.circuit.analysis import ABLATED, counted_rows, member_sweeps
from probes.circuit.results import results
from probes.circuit.schema import CIRCUIT, CIRCUIT_MEMBERS

GLOSSARY = (
    Term(
        "Circuit of heads",
        "A set C of heads that is run with all other heads ablated. Faithfulness: how much of the model's metric m(M) "
        "the circuit keeps; 0 is the run with all heads ablated, m(0), and 1 the model. Minimality of a member v: the "
        "circuit's metric minus that without v. Completeness: circuit and model stay alike when the same subset K is "
        "removed from both (Wang et al. 2022).",
        "faithfulness (m(C) - m(0)) / (m(M) - m(0)); minimality m(C) - m(C without v); completeness: "
        "m(M without K) - m(C without K), near 0 for every K",
        (CIRCUIT.name, CIRCUIT_MEMBERS.name),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Minimality and completeness of the circuits of the selected model."""
    if CIRCUIT.name not in context.run.tables:
        return
    texts = {(one.model, tuple(one.where.values()), one.question): sentence(one) for one in results(context.run)}
    table = context.run.derived(counted_rows)
    for effects in context.run.derived(member_sweeps):
        if effects.model != context.selected_model:
            continue
        where, metric = tuple(effects.where.values()), effects.key["metric"]
        label = f"{metric_label(metric)} ({metric_unit(metric)})"
        rows = rows_of_sweep(table, effects.key)
        place = f"{style.escape_label(effects.model)}, {style.escape_label(effects.key['prompts'])}"
        heading = f"{effects.key['prompts']}, other heads {ABLATED[effects.key['complement']]}"
        minimal, complete = (
            texts.get((effects.model, where, f"circuit.{name}"), "") for name in ("minimal", "faithfulness")
        )
        yield ChartGroup(
            PROBE.title,
            heading,
            [
                Chart(
                    plots.plot_members(effects, label),
                    "One bar per member: metric of the circuit minus that of the circuit without the member, mean over "
                    "prompts with its 95 % confidence interval.",
                    minimal,
                    half_width=True,
                ),
                Chart(
                    plots.plot_completeness(rows[~rows["is_selecting"]], place, label),
                    "One point per removed subset, means over prompts. On the dashed line the circuit does without "
                    "the subset what the model does without it.",
                    complete,
                    half_width=True,
                ),
            ],
        )

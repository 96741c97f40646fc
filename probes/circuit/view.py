"""Charts and glossary of the probe of circuits of heads."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import head_scatter, shapes, style
from headscope.prompts.pairs import metric_label, metric_unit
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.results.effects.sweep import Effects, rows_of_sweep
from headscope.results.effects.units import unit_name
from headscope.results.words import sentence
from probes.circuit import PROBE
from probes.circuit.declaration import CIRCUIT, CIRCUIT_MEMBERS, WHOLE
from probes.circuit.results import ABLATED, counted_rows, member_sweeps, results

FAMILIES = {WHOLE: "nothing removed", "random": "random subset removed", "greedy": "greedy subset removed"}


def plot_members(effects: Effects, label: str) -> go.Figure:
    """Bars of the minimality of every member with its interval; `label` names the metric with its unit."""
    units = effects.units.sort_values("effect", ascending=False, kind="stable").rename(columns={"effect": "y"})
    model = style.escape_label(effects.model)
    table = units[["y", "low", "high"]].set_axis([unit_name(unit) for _, unit in units.iterrows()])
    table["customdata"] = units[["layer", "head", "kv_group"]].to_numpy().tolist()
    figure = shapes.bars(
        f"Minimality of the members: {model}, {style.escape_label(effects.key['prompts'])}",
        {style.ModelStyle(model, style.PALETTE[0], "", ""): table},
        "with minus without %{x}: %{y:.3g}<extra></extra>",
        {},
        f"{label}, with minus without",
        top_margin=70,
    )
    return style.set_metadata(figure, heads=True, model=model)


def plot_completeness(rows: pd.DataFrame, place: str, label: str) -> go.Figure:
    """Mean metric of the model against that of the circuit, one point per removed subset; the dashed line is y = x.

    `rows` are those of the table `circuit` of one circuit, `place` names it.
    """
    means = rows.groupby("subset", sort=False, observed=True).agg(
        x=("metric_model", "mean"), y=("metric_circuit", "mean"), heads=("heads", "first")
    )
    figure = style.new_figure(f"Completeness: {place}")
    for number, (family, name) in enumerate(FAMILIES.items()):
        points = means[means.index.str.startswith(family)]
        if len(points):
            figure.add_scatter(
                x=points["x"],
                y=points["y"],
                mode="markers",
                marker={"symbol": style.MARKER_SYMBOLS[number], "size": 9, "color": style.CATEGORY_PALETTE[number]},
                text=[heads or "nothing" for heads in points["heads"]],
                hovertemplate="%{text} removed<br>model %{x:.3g}<br>circuit %{y:.3g}<extra></extra>",
                name=name,
            )
    values = means[["x", "y"]].to_numpy(dtype=np.float64)
    head_scatter.add_diagonal(figure, [values.min(), values.max()])
    shapes.finish(figure, f"model: {label}", f"circuit: {label}")
    return style.set_metadata(figure, value=f"{label} of the circuit", x=f"{label} of the model")


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
                    plot_members(effects, label),
                    "One bar per member: metric of the circuit minus that of the circuit without the member, mean over "
                    "prompts with its 95 % confidence interval.",
                    minimal,
                    half_width=True,
                ),
                Chart(
                    plot_completeness(rows[~rows["is_selecting"]], place, label),
                    "One point per removed subset, means over prompts. On the dashed line the circuit does without "
                    "the subset what the model does without it.",
                    complete,
                    half_width=True,
                ),
            ],
        )

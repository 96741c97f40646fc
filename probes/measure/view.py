"""Charts and glossary of the probe `measure`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import Head
from headscope.plots import curves as effective_length
from headscope.plots import curves as loss
from headscope.plots import head_matrices as head_figures
from headscope.plots import layers, learned_frequencies, role_emergence, rotary
from headscope.plots.draft import HeadPlot
from headscope.plots.style import ModelStyle, missing_data_reason, styles_of
from headscope.rendering.assembly import training_steps
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.statistic_charts import box_chart, comparison_chart, matrix_chart, model_panels
from headscope.rendering.text import head_mask
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import (
    default_models_with,
    evenly_spaced,
    longest_ess_column,
    models_with_same_tokens,
    same_text_mask,
)
from headscope.runs.trainings import training_checkpoints

GLOSSARY = (
    Term(
        "Head",
        "A layer of a language model has several attention heads. For each token, a head gives every earlier token a "
        "weight; the weights of one token, αᵢⱼ, sum to one. Heads are numbered from 0 within their layer. Query heads "
        "that share one key head form a KV group and share its rotary frequencies.",
    ),
    Term(
        "Effective length, ESS₂",
        "The effective number of tokens that a head attends to. All weight on one token gives 1; equal weight on n "
        "tokens gives n. The value of a head is the exponential of the mean logarithm over the query tokens in the "
        "last octave of visible keys, that is, in the last four bins that the head's layer fills; every token counts "
        "once. If the length of the context or window is the edge of a bin, such as 512, 1,024 or 2,048, these tokens "
        "see more than half of it.",
        "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ("attention",),
    ),
    Term(
        "Growth exponent",
        "The exponent with which the effective length grows with the number n of visible tokens. The expected value is "
        "about 0 for a head that retrieves one token wherever it is, and about 1 for a head that aggregates the whole "
        "context.",
        tables=("attention",),
    ),
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding rotates each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) distinguish nearby tokens; slow pairs hardly change with distance. The usage of a pair is the mean "
        "absolute value of its contribution to the logit, the number that the softmax turns into a weight.",
        tables=("pairs", "distance"),
    ),
    Term(
        "Coefficient of variation, CoV",
        "Standard deviation of usage over the pairs of a head, divided by the mean. 0 means that all pairs are used "
        "equally; larger values mean that a few pairs dominate.",
        tables=("pairs",),
    ),
    Term(
        "Effective base",
        "The base of the plain rotary embedding whose frequencies have the same mean logarithm. A larger base means "
        "slower pairs.",
        tables=("scales",),
    ),
    Term(
        "Position schemes",
        "base is the checkpoint with the RoPE scaling of its config, unscaled without it. YaRN slows the slow pairs to "
        "reach longer contexts, and multiplies queries and keys by a constant, its attention factor; “YaRN without "
        "factor” omits it. AdaRoPE learns the frequencies of each KV group, and for each head a temperature τ and an "
        "exponent γ with which its logits grow with the context.",
    ),
    Term(
        "95 % confidence intervals",
        "A range that contains the true mean in about 95 % of repeated samples of documents (or trials), by Student's "
        "t. One or two documents give no interval.",
    ),
)


CARD_HEIGHT = 300
"""Height of the chart on the card of a head, in px."""


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The chapters of the probe."""
    yield ChartGroup("How many tokens each head attends to", "", _length_charts(context))
    yield ChartGroup("How attention is spread", "", _attention_spread_charts(context))
    yield ChartGroup("Which rotary pairs the heads use", "", _pair_charts(context))
    yield ChartGroup(
        "What the position schemes changed", "Position parameters", parameter_charts(context), app_pages="/compare"
    )
    yield ChartGroup("Loss along the context", "", loss_charts(context), app_pages="/compare /")
    yield ChartGroup("During training", "", _training_charts(context))


def _length_charts(context: RenderContext) -> Iterator[Chart]:
    heads, models = context.heads, context.models
    name = longest_ess_column(heads)
    if name is None:
        return
    first = models[0]
    caption = "The colour scale is logarithmic: dark heads attend to few tokens, bright heads to many."
    yield matrix_chart(heads, name, first, context.scale_heads, caption)
    caption = (
        "Slope of ln ESS₂ against the logarithm of the number of visible keys. Near 0 the effective length is "
        "constant; near 1 it grows in proportion to the context."
    )
    yield matrix_chart(heads, "growth", first, context.scale_heads, caption)
    other_models = [label for label in models[1:] if heads.loc[heads["model"] == label, name].notna().any()]
    if other_models:
        yield comparison_chart(heads, name, first)
    caption = (
        f"Ratio of effective lengths to {first}. Red: the effective length rises, blue: it falls, white: no change."
    )
    changes = {
        label: head_figures.plot_change(heads, name, label, first, context.scale_heads) for label in other_models
    }
    yield from model_panels((label, Chart(figure, caption, half_width=True)) for label, figure in changes.items())
    notable = [*context.notable_heads]
    if "attention" in context.run.tables and notable:
        yield Chart(
            effective_length.plot_effective_length(_rows_of_heads(context, "attention", *notable), notable),
            "One panel per notable head, as listed in the table of heads. Dotted diagonal: uniform attention over all "
            "visible keys. Dotted horizontal: a constant effective length.",
        )


def head_card(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """The effective length of one head under the default models."""
    if "attention" in run.tables:
        yield Chart(
            run.derived(_head_plot, tuple(default_models_with(run, model)), GROWTH, layer, head),
            "Both axes are logarithmic. Dotted diagonal: uniform attention over all visible keys. Dotted horizontal: a "
            "constant effective length. Bands: 95 % confidence intervals over documents, with three or more documents.",
            half_width=True,
        )


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """Charts of one head: logits and rotary pairs under the default models, frequencies of `model`."""
    models = tuple(default_models_with(run, model))
    if "distance" in run.tables:
        yield Chart(
            run.derived(_head_plot, models, rotary.LOGITS, layer, head),
            "Mean logit of a key by its distance, summed over all rotary pairs: how the head prefers distances, "
            "independent of the tokens.",
            half_width=True,
        )
    if "pairs" in run.tables:
        yield Chart(
            run.derived(_head_plot, models, rotary.SPECTRUM, layer, head),
            "Above: the frequency of each rotary pair. Below: its usage, with a 95 % confidence interval if there are "
            "three or more documents.",
            half_width=True,
        )
    if "positions" in run.tables:
        rows = run.heads[head_mask(run.heads, layer, head)]
        yield Chart(
            run.derived(_frequency_plot, model, layer, int(rows["kv_group"].iloc[0]) if len(rows) else 0),
            "Frequencies of the KV group: of the checkpoint, of the model and, if they were learned, at the start.",
            half_width=True,
        )
    if "distance" in run.tables:
        yield Chart(
            run.derived(_head_plot, models, PROFILES, layer, head),
            "Red pairs raise the logit of a key at that distance, blue pairs lower it. One scale for all models.",
        )


def _head_plot(run: Run, models: Sequence[str], plot: HeadPlot, layer: int, head: int) -> go.Figure:
    """A figure of one head under these models; it does not depend on the selected model."""
    data, measured = run.derived(
        _head_data, tuple(run.models) if run.is_drawn_for_all_models else models, plot, layer, head
    )
    if measured.isdisjoint(models):
        return plot.plot(_head_rows(run, models, plot.table, layer, head), layer, head)
    return plot.draw(data, styles_of([label for label in models if label in data], models), layer, head)


def _head_data(
    run: Run, models: Sequence[str], plot: HeadPlot, layer: int, head: int
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The data of a plot by model, and the models that have values."""
    rows = _head_rows(run, models, plot.table, layer, head)
    if missing_data_reason(rows, *plot.columns):
        return {}, frozenset()
    return plot.prepare(rows, layer, head), frozenset(rows.dropna(subset=[*plot.columns])["model"])


def _frequency_plot(run: Run, model: str, layer: int, kv_group: int) -> go.Figure:
    """The learned frequencies of a KV group; its heads show the same."""
    rows = run.derived(_group_frequencies, layer, kv_group).get(model)
    if rows is None:
        return learned_frequencies.plot_learned_frequencies(run.positions, model, layer, kv_group)
    return learned_frequencies.draw_learned_frequencies(rows, model, layer, kv_group)


def _group_frequencies(run: Run, layer: int, kv_group: int) -> dict[str, pd.DataFrame]:
    positions = rows_at_longest_length(run.positions)
    return learned_frequencies.group_frequencies(positions, layer, kv_group)


def _length_curves(attention: pd.DataFrame, layer: int, head: int) -> Mapping[str, Any]:
    return effective_length.length_curves(attention, [(layer, head)]).get((layer, head), {})


def _draw_growth(curves: Mapping[str, Any], styles: Mapping[str, ModelStyle], layer: int, head: int) -> go.Figure:
    heads = [(layer, head)]
    return effective_length.draw_effective_length({(layer, head): curves}, styles, heads, CARD_HEIGHT)


def _draw_distance_profiles(
    profiles: Mapping[str, Any], styles: Mapping[str, ModelStyle], layer: int, head: int
) -> go.Figure:
    of_panels = {label: styles[label] for label in evenly_spaced([*styles])}
    return rotary.draw_pair_profiles(profiles, of_panels, layer, head)


GROWTH = HeadPlot(
    "attention", ("model", "log_ess2", "visible", "rows"), effective_length.TITLE, _length_curves, _draw_growth
)
PROFILES = replace(rotary.PROFILES, draw=_draw_distance_profiles)


def _head_rows(run: Run, models: Sequence[str], table: str, layer: int, head: int) -> pd.DataFrame:
    """The head's rows of a table under these models, in this order."""
    rows = run.rows(table, model=models, layer=layer, head=head)
    return rows.assign(model=rows["model"].astype(pd.CategoricalDtype([*models])))


def _rows_of_heads(context: RenderContext, table: str, *heads: Head) -> pd.DataFrame:
    """The rows of these heads (layer, head) under the models of the charts, in the order of the run.

    Rows of other heads with the same layer or number may be among them.
    """
    layers, numbers = zip(*heads, strict=True)
    rows = context.run.rows(table, model=context.models, layer={*layers}, head={*numbers})
    return rows.assign(model=rows["model"].astype(pd.CategoricalDtype(context.run.models)))


def _attention_spread_charts(context: RenderContext) -> Iterator[Chart]:
    captions = {
        "sink_mass": "Mean weight on the first token over the heads of a layer; the band contains the middle 80 % of "
        "heads. A head with more than half of its weight there is a sink head.",
        "local_mass": "Mean weight on the last 32 tokens over the heads of a layer; the band contains the middle 80 % "
        "of heads.",
    }
    for name, caption in captions.items():
        if name in context.heads and context.heads[name].notna().any():
            yield Chart(layers.plot_by_layer(context.heads, name), caption, half_width=True)


def _pair_charts(context: RenderContext) -> Iterator[Chart]:
    tables, models = context.run.tables, context.models
    if "pairs" in tables:
        yield box_chart(context, "cov")
        explanation = (
            " Above: the frequency of each rotary pair. Below: its usage, with a 95 % confidence interval if there are "
            "three or more documents. Where two lines coincide, the dashed one is on top."
        )
        for index, ((layer, head), reason) in enumerate(context.notable_heads.items()):
            yield Chart(
                rotary.plot_spectrum(_rows_of_heads(context, "pairs", (layer, head)), layer, head),
                f"Selected for: {reason}.{explanation if index < 2 else ''}",
                half_width=True,
            )
    if "distance" in tables:
        for layer, head in list(context.notable_heads)[:2]:
            distance = _rows_of_heads(context, "distance", (layer, head))
            for label in dict.fromkeys([models[0], models[-1]]):
                yield Chart(
                    rotary.plot_pair_profile(distance, layer, head, label),
                    "Red pairs raise the logit of a key at that distance, blue pairs lower it. Fast pairs oscillate; "
                    "slow pairs keep one sign over the whole context.",
                    half_width=True,
                )


def parameter_charts(context: RenderContext) -> Iterator[Chart]:
    """Charts of learned frequencies, temperatures and effective bases."""
    positions, heads = context.table("positions"), context.heads
    if positions is not None:
        yield from _frequency_charts(rows_at_longest_length(positions), context.models)
    for name in ("effective_base", "tau", "gamma"):
        if any(
            values.max() - values.min() > 1e-3 * abs(values.max()) for values in context.finite_values(name).values()
        ):
            yield Chart(
                layers.plot_by_layer(heads, name),
                f"{statistic(name).title}: {statistic(name).meaning}. Mean over the heads of a layer; "
                "the band contains the middle 80 % of heads.",
                half_width=True,
            )
            if name != "effective_base":
                yield Chart(
                    head_figures.plot_distribution(heads, name),
                    f"Distribution of the {statistic(name).label} over heads. One dot per head.",
                    half_width=True,
                )


def _frequency_charts(positions: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    """Charts of the layers whose learned frequencies changed most, and of the direction of the change."""
    origins = (("log_theta_base", "the checkpoint"), ("log_theta_init", "the start of learning"))
    learned = [label for label in models if _has_learned_frequencies(positions, label)]
    comparisons = [
        (label, column, origin)
        for column, origin in origins
        for label in learned
        if _has_learned_frequencies(positions, label, column)
    ]
    for label, column, origin in comparisons:
        yield Chart(
            learned_frequencies.plot_layers_by_change(positions, label, column),
            f"Size of the change of frequencies from {origin}: root mean square over pairs. One bar per layer, one dot "
            "per KV group.",
            _describe_layer_changes(positions, label, column),
        )
    for column, origin in origins:
        caption = (
            f"Direction of the change from {origin}: blue pairs rotate more slowly, red pairs faster. Mean over KV "
            "groups, whose changes may have opposite signs."
        )
        yield from model_panels(
            (
                label,
                Chart(learned_frequencies.plot_frequency_change(positions, label, column), caption, half_width=True),
            )
            for label, reference, _ in comparisons
            if reference == column
        )


def _describe_layer_changes(positions: pd.DataFrame, label: str, origin: str) -> str:
    """A sentence with the layers whose frequencies changed most and least."""
    changes = learned_frequencies.frequency_changes(positions[positions["model"] == label], origin)
    ordered = learned_frequencies.rms_change(changes, ["layer"]).sort_values(ascending=False, kind="stable")
    first = ", ".join(f"layer {layer} ({value:.2g})" for layer, value in ordered.head(3).items())
    return f"Most changed: {first}; least: layer {ordered.index[-1]} ({ordered.iloc[-1]:.2g})."


def loss_charts(context: RenderContext) -> Iterator[Chart]:
    """Charts of the loss by position, and of its difference to the first model."""
    nll, models = context.table("nll"), context.models
    if nll is None:
        return
    yield Chart(
        loss.plot_loss_by_position(nll),
        "Mean over documents; the band is one standard deviation between documents, mostly due to their difficulty.",
        half_width=True,
    )
    if len(models) > 1:
        comparable = nll["model"].isin(models_with_same_tokens(context.run, models[0]))
        comparable &= same_text_mask(context.run, nll, models[0])
        yield Chart(
            loss.plot_loss_difference(nll[comparable], models[0]),
            f"The same documents under each model. Below zero a model predicts better than {models[0]}; the band is a "
            "95 % confidence interval over documents, with three or more documents.",
            half_width=True,
        )


def _training_charts(context: RenderContext) -> Iterator[Chart]:
    run, steps = context.run, training_steps(context.run)
    if len(steps) < 2:
        return
    checkpoints = training_checkpoints(run.manifest["models"])
    has_several_trainings = checkpoints["training"].nunique() > 1
    name = longest_ess_column(run.heads)
    for statistic_name in [name, "growth", "cov", "sink_mass", "effective_base", "gamma"]:
        if (
            statistic_name
            and statistic_name in run.heads
            and np.isfinite(run.heads[statistic_name].astype("float64")).any()
        ):
            if has_several_trainings:
                figure = role_emergence.plot_training_by_layer(run.heads, statistic_name, checkpoints)
                yield Chart(figure, "One line per training: the median over the heads of the layer.")
            else:
                figure = layers.plot_over_steps(run.heads, statistic_name, steps, list(context.notable_heads)[:4])
                caption = "Grey: the median and the middle 80 % of heads at each checkpoint. Coloured: notable heads."
                yield Chart(figure, caption, half_width=True)


def _has_learned_frequencies(positions: pd.DataFrame, label: str, origin: str = "log_theta_base") -> bool:
    """Whether the model's frequencies differ from `origin` by different amounts in different layers."""
    rows = positions[positions["model"] == label]
    rows = rows[np.isfinite(rows["log_theta"]) & np.isfinite(rows[origin])]
    change = (rows["log_theta"] - rows[origin]).groupby(rows["pair"])
    return bool((change.max() - change.min() > 1e-4).any())

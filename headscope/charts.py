"""Which figures a report shows of a run, in which order, and the sentence that says how to read each.

A figure is drawn only when its table is there, and a comparison only when there are two models. Of many models,
`findings.few` are drawn line by line; matrices are drawn for the first and compared for at most three others.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from headscope import probe_charts
from headscope.chart import Chart, extremes, finite, table
from headscope.figures import compare, layers, lengths, loss, rotary, training
from headscope.figures import heads as head_figures
from headscope.findings import Head, few, notable, number
from headscope.store import Run
from headscope.summary import longest, statistic

MOST_HEADS = 6
"""Heads that are drawn one by one."""


def sections(run: Run) -> dict[str, list[Chart]]:
    """Charts of a run by section title; a section without charts is left out."""
    models = few(run.models)
    heads = run.heads[run.heads["model"].isin(models)]
    chosen = dict(list(notable(heads).items())[:MOST_HEADS])
    made = {
        "How many tokens each head attends to": [*length_charts(run, heads, models, chosen)],
        "How attention is spread": [*spread_charts(heads)],
        "Which rotary pairs the heads use": [*pair_charts(run, heads, models, chosen)],
        "What the position schemes changed": [*parameter_charts(run, heads, models)],
        "Loss along the context": [*loss_charts(run, models)],
        "During training": [*learning_charts(run), *checkpoint_charts(run, chosen)],
        "Needle in a haystack": [*probe_charts.needle_charts(run, heads, models)],
        "Head influence": [*probe_charts.influence_charts(run, heads)],
        "Needle retrieval from a window": [*probe_charts.window_charts(run)],
        "Scaling theorems": [*probe_charts.scaling_charts(run)],
    }
    return {title: charts for title, charts in made.items() if charts}


def length_charts(run: Run, heads: pd.DataFrame, models: Sequence[str], chosen: Mapping[Head, str]) -> Iterator[Chart]:
    name = longest(heads)
    if name is None:
        return
    first = models[0]
    yield Chart(
        head_figures.matrix(heads, name, first),
        "A cell is a head, the first layer at the bottom. The colour scale is logarithmic: dark "
        "heads attend to a few tokens, bright heads to many.",
        extremes(heads, name, first),
        half=True,
    )
    yield Chart(
        head_figures.matrix(heads, "growth", first),
        "Slope of ln ESS₂ on the logarithm of the number of visible keys. Near 0, a head keeps its effective length; "
        "near 1, it widens in proportion to the context.",
        extremes(heads, "growth", first),
        half=True,
    )
    others = [label for label in models[1:] if heads.loc[heads["model"] == label, name].notna().any()]
    if others:
        yield against_chart(heads, name, first)
    for label in others[:3]:
        yield Chart(
            head_figures.change(heads, name, label, first),
            f"Ratio of effective lengths, {label} over {first}. Red heads widened, blue heads narrowed, white ones "
            "kept their length.",
            half=True,
        )
    attention = table(run, "attention", models)
    if attention is not None and chosen:
        yield Chart(
            lengths.growth(attention, list(chosen)),
            "A panel is a head, chosen as listed in the table of heads. The dotted diagonal is uniform attention, "
            "which uses every visible key; the dotted horizontal is a length that does not grow.",
        )


def against_chart(heads: pd.DataFrame, name: str, first: str) -> Chart:
    """Every head's statistic under each other model against `first`."""
    if not name.startswith("ess2_"):
        caption = f"A point is a head. On the dashed line it is as under {first}; above it, larger."
    else:
        caption = (
            f"A point is a head. On the dashed line it attends to as many tokens as under {first}; above it, to more. "
            "A scheme that keeps local heads and extends global ones follows the line at the left and rises at the "
            "right."
        )
    return Chart(compare.against(heads, name, first), caption, half=heads["model"].nunique() == 2)


def spread_charts(heads: pd.DataFrame) -> Iterator[Chart]:
    captions = {
        "sink_mass": "Weight on the first token, averaged over the heads of a layer; the band holds the middle 80 % "
        "of heads. Weight above one half makes the first token the head's main target.",
        "local_mass": "Weight on the last 32 tokens, averaged over the heads of a layer; the band holds the middle "
        "80 % of heads.",
    }
    for name, caption in captions.items():
        if name in heads and heads[name].notna().any():
            yield Chart(layers.by_layer(heads, name), caption, half=True)


def pair_charts(run: Run, heads: pd.DataFrame, models: Sequence[str], chosen: Mapping[Head, str]) -> Iterator[Chart]:
    pairs, distance = table(run, "pairs", models), table(run, "distance", models)
    if pairs is not None:
        yield box_chart(heads, "cov")
        how = (
            " Above: the frequency of each rotary pair. Below: how much the pair moves the logits. Error bars are one "
            "standard error. Where two lines coincide, the later, dashed one lies on top."
        )
        for at, ((layer, head), why) in enumerate(chosen.items()):
            yield Chart(
                rotary.spectrum(pairs, layer, head),
                f"Chosen for: {why}.{how if at < 2 else ''}",
                half=True,
            )
    if distance is not None:
        for layer, head in list(chosen)[:2]:
            for label in dict.fromkeys([models[0], models[-1]]):
                yield Chart(
                    rotary.profile(distance, layer, head, label),
                    "Red pairs raise the logit of a key at that distance, blue pairs lower it. Fast pairs oscillate; "
                    "slow ones hold one sign over the whole context.",
                    half=True,
                )


def box_chart(heads: pd.DataFrame, name: str) -> Chart:
    """The statistic over heads, a box a model."""
    low = " A low value means that the head uses its pairs evenly." if name == "cov" else ""
    medians = ", ".join(f"{label} {number(block.median())}" for label, block in finite(heads, name).items())
    return Chart(
        head_figures.spread(heads, name),
        "Box: minimum, quartiles, median and maximum over heads, the mean dashed. Each dot is a head, the first "
        f"layer on the left.{low}",
        f"Medians: {medians}.",
        half=True,
    )


def parameter_charts(run: Run, heads: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    positions = table(run, "positions", models)
    for label in models:
        if positions is not None and _learned(positions, label):
            yield Chart(
                rotary.frequency_change(positions, label),
                "Mean over key groups. Blue pairs turn more slowly than in the checkpoint, red pairs faster.",
                half=True,
            )
            if _learned(positions, label, "log_theta_init"):
                yield Chart(
                    rotary.frequency_change(positions, label, "log_theta_init"),
                    "The same against where learning started: what was learned. Mean over key groups.",
                    half=True,
                )
    for name in ("effective_base", "tau", "gamma"):
        if any(values.max() - values.min() > 1e-3 * abs(values.max()) for values in finite(heads, name).values()):
            yield Chart(
                layers.by_layer(heads, name),
                f"{statistic(name).label.capitalize()}: {statistic(name).meaning}. Mean over the heads of a layer; "
                "the band holds the middle 80 % of heads.",
                half=True,
            )
            if name != "effective_base":
                yield Chart(
                    head_figures.spread(heads, name),
                    f"The same by head: how far heads came to differ in {statistic(name).label}. A dot is a head.",
                    half=True,
                )


def loss_charts(run: Run, models: Sequence[str]) -> Iterator[Chart]:
    nll = table(run, "nll", models)
    if nll is None:
        return
    yield Chart(
        loss.by_position(nll),
        "Mean over documents; the band is one standard deviation between documents, which is mostly how hard they are.",
        half=True,
    )
    if len(models) > 1:
        yield Chart(
            loss.difference(nll, models[0]),
            f"The same documents under each model. Below zero a model predicts better than {models[0]}; the band is a "
            "95 % bootstrap interval over documents.",
            half=True,
        )


def learning_charts(run: Run) -> Iterator[Chart]:
    if "training" in run.tables:
        yield Chart(
            training.batches(run.training),
            "Loss of each step's own batch, before the step: noisy, because batches differ in how hard they are, and "
            "lower where sequences are longer; the shape of a point tells the length.",
            half=True,
        )
    if "validation" in run.tables:
        yield Chart(
            training.held_out(run.validation),
            "Held-out documents, never learned from. The line is the mean over documents, the band reaches from the "
            "document that gained most to the one that gained least. Below zero is better than at step 0.",
            half=True,
        )
        for adapter in run.validation["adapter"].unique():
            yield Chart(
                training.held_out_by_position(run.validation, str(adapter)),
                "The same documents by position: what each kept adapter gained over step 0.",
                half=True,
            )


def checkpoint_charts(run: Run, chosen: Mapping[Head, str]) -> Iterator[Chart]:
    known = steps(run)
    if len(known) < 2:
        return
    name = longest(run.heads)
    for statistic_name in [name, "growth", "cov", "sink_mass", "effective_base", "gamma"]:
        if statistic_name and finite(run.heads, statistic_name):
            yield Chart(
                layers.over_steps(run.heads, statistic_name, known, list(chosen)[:4]),
                "Grey: the median head and the middle 80 % of heads at each checkpoint. Coloured: the chosen heads.",
                half=True,
            )


def steps(run: Run) -> dict[str, int]:
    """The training step of each model that carries one."""
    return {model["label"]: int(model["step"]) for model in run.manifest["models"] if model.get("step") is not None}


def _learned(positions: pd.DataFrame, label: str, against: str = "log_theta_base") -> bool:
    """Whether the model's frequencies differ from the checkpoint's, and not by the same amount in every layer."""
    rows = positions[positions["model"] == label]
    rows = rows[np.isfinite(rows["log_theta"]) & np.isfinite(rows[against])]
    change = (rows["log_theta"] - rows[against]).groupby(rows["pair"])
    return bool((change.max() - change.min() > 1e-4).any())

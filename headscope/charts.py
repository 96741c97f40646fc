"""Which figures a report shows of a run, in which order, and the sentence that says how to read each.

A figure is drawn only when its table is there, and a comparison only when there are two models. Of many models,
`findings.few` are drawn line by line; matrices are drawn for the first and compared for at most three others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import compare, influence, layers, lengths, loss, rotary, scaling, window
from headscope.figures import heads as head_figures
from headscope.findings import Head, few, longest, notable, number
from headscope.influences import shown
from headscope.store import Run
from headscope.summary import SWEEP, statistic

PROFILED = (1, 32, 128, 512)
"""Window widths whose pairs are drawn, as in the paper."""

MOST_HEADS = 6
"""Heads that are drawn one by one."""


@dataclass(frozen=True)
class Chart:
    """A figure, how to read it, and what it shows in words for those who do not see it."""

    figure: go.Figure
    caption: str
    summary: str = ""
    half: bool = False


def sections(run: Run) -> dict[str, list[Chart]]:
    """Charts of a run by section title; a section without charts is left out."""
    models = few(run.models)
    heads = run.heads[run.heads["model"].isin(models)]
    chosen = dict(list(notable(heads).items())[:MOST_HEADS])
    made = {
        "How many tokens each head attends to": [*_lengths(run, heads, models, chosen)],
        "How attention is spread": [*_spread(heads)],
        "Which rotary pairs the heads use": [*_pairs(run, heads, models, chosen)],
        "What the position schemes changed": [*_parameters(run, heads, models)],
        "Loss along the context": [*_loss(run, models)],
        "During training": [*_training(run, chosen)],
        "Head influence": [*_influence(run, heads)],
        "Needle retrieval from a window": [*_window(run)],
        "Scaling theorems": [*_scaling(run)],
    }
    return {title: charts for title, charts in made.items() if charts}


def table(run: Run, name: str, models: Sequence[str]) -> pd.DataFrame | None:
    """A table of the run with only these models, its categories in the order of the study; None if not stored."""
    if name not in run.tables:
        return None
    frame = run.table(name)
    frame = frame[frame["model"].isin(list(models))]
    return frame.assign(model=frame["model"].astype(pd.CategoricalDtype(run.models)))


def _lengths(run: Run, heads: pd.DataFrame, models: Sequence[str], chosen: Mapping[Head, str]) -> Iterator[Chart]:
    name = longest(heads)
    if name is None:
        return
    first = models[0]
    yield Chart(
        head_figures.matrix(heads, name, first),
        "A cell is a head, the first layer at the bottom. The colour scale is logarithmic: dark "
        "heads attend to a few tokens, bright heads to many.",
        _extremes(heads, name, first),
        half=True,
    )
    yield Chart(
        head_figures.matrix(heads, "growth", first),
        "Slope of ln ESS₂ on the logarithm of the number of visible keys. Near 0, a head keeps its effective length; "
        "near 1, it widens in proportion to the context.",
        _extremes(heads, "growth", first),
        half=True,
    )
    others = [label for label in models[1:] if heads.loc[heads["model"] == label, name].notna().any()]
    if others:
        yield Chart(
            compare.against(heads, name, first),
            f"A point is a head. On the dashed line it attends to as many tokens as under {first}; above it, to more. "
            "A scheme that keeps local heads and extends global ones follows the line at the left and rises at the "
            "right.",
            half=len(others) == 1,
        )
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


def _spread(heads: pd.DataFrame) -> Iterator[Chart]:
    captions = {
        "sink_mass": "Weight on the first token, averaged over the heads of a layer; the band holds the middle 80 % "
        "of heads. Weight above one half makes the first token the head's main target.",
        "local_mass": "Weight on the last 32 tokens, averaged over the heads of a layer; the band holds the middle "
        "80 % of heads.",
    }
    for name, caption in captions.items():
        if name in heads and heads[name].notna().any():
            yield Chart(layers.by_layer(heads, name), caption, half=True)


def _pairs(run: Run, heads: pd.DataFrame, models: Sequence[str], chosen: Mapping[Head, str]) -> Iterator[Chart]:
    pairs, distance = table(run, "pairs", models), table(run, "distance", models)
    if pairs is not None:
        yield Chart(
            head_figures.spread(heads, "cov"),
            "Box: minimum, quartiles, median and maximum over heads, the mean dashed. Each dot is a head, the first "
            "layer on the left. A low value means that the head uses its pairs evenly.",
            "Medians: "
            + ", ".join(f"{label} {number(block.median())}" for label, block in _finite(heads, "cov").items())
            + ".",
        )
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


def _parameters(run: Run, heads: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    positions = table(run, "positions", models)
    for label in models:
        if positions is not None and _learned(positions, label):
            yield Chart(
                rotary.frequency_change(positions, label),
                "Mean over key groups. Blue pairs turn more slowly than in the checkpoint, red pairs faster.",
                half=True,
            )
    for name in ("effective_base", "tau", "gamma"):
        if any(values.max() - values.min() > 1e-3 * abs(values.max()) for values in _finite(heads, name).values()):
            yield Chart(
                layers.by_layer(heads, name),
                f"{statistic(name).label.capitalize()}: {statistic(name).meaning}. Mean over the heads of a layer; "
                "the band holds the middle 80 % of heads.",
                half=True,
            )


def _loss(run: Run, models: Sequence[str]) -> Iterator[Chart]:
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


def _training(run: Run, chosen: Mapping[Head, str]) -> Iterator[Chart]:
    steps = {model["label"]: int(model["step"]) for model in run.manifest["models"] if model.get("step") is not None}
    if len(steps) < 2:
        return
    name = longest(run.heads)
    for statistic_name in [name, "growth", "cov", "sink_mass", "effective_base", "gamma"]:
        if statistic_name and _finite(run.heads, statistic_name):
            yield Chart(
                layers.over_steps(run.heads, statistic_name, steps, list(chosen)[:4]),
                "Grey: the median head and the middle 80 % of heads at each checkpoint. Coloured: the chosen heads.",
                half=True,
            )


def _finite(heads: pd.DataFrame, name: str) -> dict[str, pd.Series]:
    """The finite values of the column by model; models without one are left out."""
    if name not in heads:
        return {}
    kept = heads[np.isfinite(heads[name].astype("float64"))]
    return {str(label): block[name] for label, block in kept.groupby("model", observed=True)}


def _learned(positions: pd.DataFrame, label: str) -> bool:
    """Whether the model's frequencies differ from the checkpoint's, and not by the same amount in every layer."""
    rows = positions[positions["model"] == label]
    rows = rows[np.isfinite(rows["log_theta"]) & np.isfinite(rows["log_theta_base"])]
    change = (rows["log_theta"] - rows["log_theta_base"]).groupby(rows["pair"])
    return bool((change.max() - change.min() > 1e-4).any())


def _extremes(heads: pd.DataFrame, name: str, model: str) -> str:
    mine = heads[(heads["model"] == model) & heads[name].notna()]
    if mine.empty:
        return ""
    order = mine.sort_values(name)
    low, high = order.iloc[0], order.iloc[-1]
    return (
        f"From {number(low[name])} (layer {low['layer']}, head {low['head']}) to {number(high[name])} "
        f"(layer {high['layer']}, head {high['head']}); median {number(mine[name].median())}."
    )


def _influence(run: Run, heads: pd.DataFrame) -> Iterator[Chart]:
    if "influence" not in run.tables:
        return
    for key, units in shown(run.influence).groupby(SWEEP, observed=True, sort=False):
        label, length, component, target = key
        mine = heads[heads["model"] == label]
        yield Chart(
            influence.histogram(units, _retriever(mine)),
            "Loss added when the position parameters of one unit are reset, all others kept. Most units near zero and "
            "a thin tail on the right mean that few units carry the gain one by one.",
            half=True,
        )
        yield Chart(
            influence.matrix(units), "Red units are missed when reset, blue ones were better before.", half=True
        )
        if component in ("freq", "joint") and "positions" in run.tables:
            top = units.sort_values("delta").iloc[-1]
            drawn = influence.spectrum(run.positions, str(label), int(top["layer"]), int(top["kv_group"]))
            yield Chart(
                drawn, "The unit of largest influence: its frequencies as learned, at the start and in base.", half=True
            )
        name, first = longest(heads), run.models[0]
        if name is not None and label != first:
            change = _log_ratio(heads, name, str(label), first)
            drawn = influence.against(units, change, "change", f"ln ratio of ESS₂, {label} over {first}")
            yield Chart(drawn, "Do the units that matter also change how many tokens they attend to?", half=True)
        if "retrieval" in mine:
            yield Chart(influence.against(units, mine, "retrieval", "retrieval score"), "A dot is a unit.", half=True)
        if "influence_sets" in run.tables:
            sets = run.influence_sets
            same = (sets["model"] == label) & (sets["component"] == component) & (sets["target"] == target)
            caption = (
                "Units reset together, the most influential first, against as many random ones of the same layers; the "
                "last point resets all. A steep start means few units, a steady rise that many units act together."
            )
            yield Chart(influence.cumulative(sets[same & (sets["context_length"] == length)]), caption, half=True)


def _retriever(heads: pd.DataFrame) -> tuple[int, int, int] | None:
    """Layer, KV group and head of the highest retrieval score, where one was measured."""
    if "retrieval" not in heads or heads["retrieval"].isna().all():
        return None
    top = heads.iloc[int(heads["retrieval"].fillna(-1).argmax())]
    return int(top["layer"]), int(top["kv_group"]), int(top["head"])


def _log_ratio(heads: pd.DataFrame, name: str, label: str, first: str) -> pd.DataFrame:
    """Layer, kv_group, head and `change`, ln of the statistic under `label` over that under `first`."""
    place = ["layer", "kv_group", "head"]
    mine, base = (heads[heads["model"] == model].set_index(place)[name].astype("float64") for model in (label, first))
    return pd.DataFrame({"change": np.log(mine / base)}).reset_index()


def _window(run: Run) -> Iterator[Chart]:
    if "window" not in run.tables:
        return
    found = run.window
    yield Chart(
        window.by_width(found),
        "A model sees one needle in a row of background tokens and must tell whether its distance lies in a window "
        "around c. Lines are means over initial weights, bands their 95 % interval.",
        half=True,
    )
    yield Chart(
        window.mass(found),
        "A point is a trained model that solves the task; its frequency mass is the average of its frequencies, "
        "weighted by how much each pair can move the logit. Theorem 1 bounds it from both sides, up to two constants: "
        "here the tightest that hold for every point.",
        half=True,
    )
    yield Chart(
        window.dominant(found),
        "Median over initial weights of the frequency whose pair can move the needle's logit most. The slowest pair "
        "hardly turns within the context and may serve as an offset: where it is strongest, the frequency mass "
        "says more.",
    )
    if "window_pairs" in run.tables:
        center, widths = int(found["center"].iloc[0]), set(found["width"])
        for width in (width for width in PROFILED if width in widths):
            for scheme in ("fixed", "learned"):
                caption = "Contribution of each pair to the needle's logit. Dashed lines mark the window."
                yield Chart(window.profile(run.window_pairs, scheme, width, center), caption, half=True)


def _scaling(run: Run) -> Iterator[Chart]:
    if "scaling" in run.tables:
        for scheme in run.scaling["scheme"].unique():
            caption = "Means over sampled rows of Gaussian logits; bars are one standard error. At 1 the theorem holds."
            yield Chart(scaling.convergence(run.scaling, scheme), caption, half=True)

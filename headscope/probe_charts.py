"""What a report shows of the probes: needles, head influence, and the synthetic ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.chart import Chart, extremes, finite, table
from headscope.figures import compare, influence, needle, scaling, window
from headscope.figures import heads as head_figures
from headscope.influences import shown_of
from headscope.needles import by_seed, seed_columns
from headscope.store import Run
from headscope.summary import SWEEP, longest

PROFILED = (1, 32, 128, 512)
"""Window widths whose pairs are drawn, as in the paper."""


def needle_charts(run: Run, heads: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    needles = table(run, "needles", models)
    if needles is None:
        return
    yield from success_charts(needles, models)
    yield from score_charts(run, heads, models)


def success_charts(needles: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    """Where each model finds the needle."""
    strict = "strict" in set(needles["mode"])
    for label in models:
        yield Chart(
            needle.success_map(needles, label, "strict" if strict else "wu"),
            "A cell is a context length and a depth; it succeeds where the answer holds more than half of the needle's "
            "words.",
            half=True,
        )


def score_charts(run: Run, heads: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    """Which heads copy it, how scores go with growth, and how far seeds and models agree."""
    scored = [label for label in models if label in finite(heads, "retrieval")]
    for label in scored:
        yield Chart(
            head_figures.matrix(heads, "retrieval", label),
            "Share of the needle that a head copies while the model answers right: at the step that writes a token, "
            "the head's largest weight lies on that very token of the needle.",
            extremes(heads, "retrieval", label),
            half=True,
        )
    if scored:
        yield Chart(
            needle.ranked(heads),
            "Heads above the dotted line, a score of 0.1, are called retrieval heads. Bands: 95 % bootstrap interval "
            "over trials.",
            half=True,
        )
    for label in scored:
        if label in finite(heads, "growth"):
            yield Chart(
                needle.against_growth(heads, label),
                "A point is a head. Theory asks a retrieval head to keep its effective length: a growth exponent "
                "near 0.",
                half=True,
            )
    if len(scored) > 1:
        yield Chart(
            compare.against(heads, "retrieval", scored[0]),
            f"A point is a head. On the dashed line it copies as much as under {scored[0]}.",
        )
    scores = by_seed(run)
    for label in scored if len(seed_columns(scores)) > 1 else ():
        yield Chart(
            needle.between_seeds(scores, label), "The same needles in two haystacks; a point is a head.", half=True
        )


def influence_charts(run: Run, heads: pd.DataFrame) -> Iterator[Chart]:
    for _, charts in sweeps(run, heads):
        yield from charts


def sweeps(run: Run, heads: pd.DataFrame) -> Iterator[tuple[tuple[str, int, str, str], Iterator[Chart]]]:
    """Each sweep, (model, context length, component, target), and its charts, drawn as they are asked for."""
    if "influence" not in run.tables:
        return
    groups: Any = run.derived(shown_of).groupby(SWEEP, observed=True, sort=False)
    for key, units in groups:
        yield key, _sweep(run, heads, key, units)


def _sweep(run: Run, heads: pd.DataFrame, key: tuple[str, int, str, str], units: pd.DataFrame) -> Iterator[Chart]:
    label, length, component, target = key
    mine = heads[heads["model"] == label]
    yield Chart(
        influence.histogram(units, _retriever(mine)),
        "Loss added when the position parameters of one unit are reset, all others kept. Most units near zero and "
        "a thin tail on the right mean that few units carry the gain one by one.",
        half=True,
    )
    yield Chart(influence.matrix(units), "Red units are missed when reset, blue ones were better before.", half=True)
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
        if len(found := sets[same & (sets["context_length"] == length)]):
            caption = (
                "Units reset together, the most influential first, against as many random ones of the same layers; the "
                "last point resets all. A steep start means few units, a steady rise that many units act together."
            )
            yield Chart(influence.cumulative(found), caption, half=True)


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


def window_charts(run: Run) -> Iterator[Chart]:
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


def scaling_charts(run: Run) -> Iterator[Chart]:
    if "scaling" in run.tables:
        for scheme in run.scaling["scheme"].unique():
            caption = "Means over sampled rows of Gaussian logits; bars are one standard error. At 1 the theorem holds."
            yield Chart(scaling.convergence(run.scaling, scheme), caption, half=True)

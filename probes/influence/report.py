"""What report and app show of head influence: a group of charts for each sweep, and a page about one model."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from headscope.plots import learned_frequencies
from headscope.plots.style import escape_label
from headscope.report.blocks import (
    Block,
    Chart,
    ChartGroup,
    Finding,
    LazySequence,
    PageContent,
    RenderContext,
    TextBlock,
)
from headscope.runs.column_metadata import sentence, statistic, statistics
from headscope.runs.run import Run
from headscope.runs.summary import longest
from probes.influence import PROBE, band_figures, bands, plots
from probes.influence.analysis import (
    Key,
    Swept,
    banded,
    by_document,
    certainty,
    contexts,
    curves,
    every_sweep,
    leaders,
    leading,
    name,
    named,
    reach,
    significance,
    sweeps,
    together,
    words,
)
from probes.influence.findings import of_sweeps
from probes.influence.objectives import NOUNS
from probes.influence.tables import PLACE, SWEEP

_LOSSES = {"text": "Loss", "answer": "Loss of the answer"}
_RESET = "the position parameters of one unit are reset"
_DONE = {"joint": _RESET, "freq": _RESET, "scale": _RESET}


def charts(shown: RenderContext) -> Iterator[ChartGroup]:
    """A group for each sweep: what was reset to what, and in which context length; and one for all bands of pairs."""
    yield from (group for _, group in _groups(shown))


def page(shown: RenderContext) -> PageContent:
    """Of one model: histogram, matrix, learned spectrum and cumulative curve of each component."""
    run, label = shown.run, shown.selected_model
    swept = list(dict.fromkeys(sweep[0][0] for sweep in run.derived(every_sweep)))
    if label not in swept:
        others = f" It holds those of {', '.join(swept)}." if swept else ""
        how = f"Make one: {PROBE.example}."
        return PageContent(PROBE.title, "", {"": [TextBlock([f"This view has no sweep of {label}.{others}", how])]})
    sections: dict[str, Sequence[Block]]
    sections = {"": [TextBlock([said.text for said in run.derived(_told) if said.model == label])]}
    sections |= {group.heading: LazySequence(group.charts) for other, group in _groups(shown) if other == label}
    lead = "Loss added when one unit is changed, a head or a key group, and all others are kept."
    return PageContent(f"{PROBE.title}: {label}", lead, sections)


def _told(run: Run) -> list[Finding]:
    return [*of_sweeps(run)]


def _groups(shown: RenderContext) -> Iterator[tuple[str, ChartGroup]]:
    """The groups, each with the label of its model."""
    for sweep in shown.run.derived(sweeps):
        label, length, *what = sweep[0]
        heading = f"{sentence(words(*what))}, {contexts(length, what[-1])}"
        yield label, ChartGroup(PROBE.title, heading, _of_sweep(shown, sweep))
    for (label, length, objective), units in shown.run.derived(banded):
        loss = "" if objective == "text" else ": loss of the answer"
        heading = f"Rotary pairs by band{loss}, {contexts(length, objective)}"
        effects = together(shown.run, label, length, objective)
        waves = reach(shown.run, label, units["component"])
        yield label, ChartGroup(PROBE.title, heading, _of_bands(units, effects, waves))


def _of_bands(units: pd.DataFrame, effects: pd.DataFrame, waves: Mapping[str, str]) -> Iterator[Chart]:
    told = (
        f"{_texts(units)} A column is a head, or a key group, layer by layer; a row is a band of its rotary pairs with "
        "their wavelengths (short: below an eighth of the native context, long: above it), "
    )
    for kind, done in bands.KINDS.items():
        if len(mine := units[units["component"].str.startswith(kind)]):
            first = leading(mine)
            most = f"Most: pairs {bands.label(first['component'])} of {name(first)}, {first['delta']:+.2g} nats/token."
            caption = f"{told}the fastest on top: the loss added with {done}, of this unit alone."
            yield Chart(band_figures.by_band(mine, waves), caption, most)
    if effects.empty:
        return
    yield Chart(
        band_figures.of_bands(effects, waves),
        "What the model loses when every head at once loses a band: its part of the logits, or only its rotation, so "
        "that the heads still see what a token is but not how far.",
    )


def _of_sweep(shown: RenderContext, sweep: Swept) -> Iterator[Chart]:
    run, (key, units) = shown.run, sweep
    noun = NOUNS[key[-1]]
    label, _, component, _, objective = key
    heads = shown.heads[shown.heads["model"] == label]
    yield Chart(
        plots.forest(units, _of(run.derived(by_document), key)),
        f"{_texts(units)} The units of largest influence: filled where evaluated, hollow where estimated; a small "
        f"dot is one {noun}, the bar a 95 % interval over {noun}s, where there are three or more.",
        _leaders(units),
    )
    if len(sets := _of(run.derived(named), key)):
        how = "The heads of each named set changed together; the bar a 95 % interval, where there are three or more."
        yield Chart(plots.sets(sets), how, half_width=True)
    yield Chart(
        plots.histogram(units, {statistic(column).best: head for column, head in leaders(heads).items()}),
        f"{_LOSSES[objective]} added when {_DONE.get(component, 'this is done to one unit')}, all others kept. Most "
        "units near zero and a thin tail on the right mean that few units carry the gain one by one.",
        half_width=True,
    )
    yield Chart(plots.matrix(units), "Red units are missed, blue ones were better left out.", half_width=True)
    if component in ("freq", "joint") and "positions" in run.tables:
        top = units.sort_values("delta").iloc[-1]
        yield Chart(
            learned_frequencies.plot_learned_frequencies(run.positions, label, int(top["layer"]), int(top["kv_group"])),
            "The unit of largest influence: its frequencies as learned, at the start and in base.",
            half_width=True,
        )
    ess2, first = longest(shown.heads), run.models[0]
    if ess2 is not None and label != first:
        change = _log_ratio(shown.heads, ess2, label, first)
        yield Chart(
            plots.against(
                units, change, "change", f"ln ratio of ESS₂, {escape_label(label)} over {escape_label(first)}"
            ),
            "Do the units that matter also change how many tokens they attend to?",
            half_width=True,
        )
    for column in (called for called, declared in statistics().items() if declared.best and called in heads):
        drawn = plots.against(units, heads, column, statistic(column).label)
        yield Chart(drawn, "A dot is a unit.", half_width=True)
    if len(effects := _of(run.derived(curves), key)):
        yield Chart(
            plots.cumulative(effects),
            "Units changed together, the most influential first, against as many random ones of the same layers; the "
            "last point changes all. A steep start means few units, a steady rise that many units act together.",
            half_width=True,
        )


def _of(rows: pd.DataFrame, key: Key) -> pd.DataFrame:
    """The rows of one sweep."""
    same = np.logical_and.reduce([rows[name] == value for name, value in zip(SWEEP, key, strict=True)])
    return rows[same]


def _texts(units: pd.DataFrame) -> str:
    first = units.iloc[0]
    return f"{first['documents']} {NOUNS[first['objective']]}{'s' if first['documents'] > 1 else ''}."


def _leaders(units: pd.DataFrame) -> str:
    """The unit that matters most, and how many differ from zero beyond noise."""
    first = leading(units)
    told = f"Most: {name(first)}, {first['delta']:+.2g} nats/token{certainty(first)}{significance(first)}."
    if units["p_adjusted"].isna().all():
        return f"{told} So few {NOUNS[first['objective']]}s cannot tell any unit from zero."
    clear = int((units["p_adjusted"] < 0.05).sum())
    return f"{told} {clear} of {len(units)} units differ from zero (false discovery rate 5 %)."


def _log_ratio(heads: pd.DataFrame, name: str, label: str, first: str) -> pd.DataFrame:
    """Layer, kv_group, head and `change`, ln of the statistic under `label` over that under `first`."""
    own, base = (heads[heads["model"] == model].set_index(PLACE)[name].astype("float64") for model in (label, first))
    return pd.DataFrame({"change": np.log(own / base)}).reset_index()

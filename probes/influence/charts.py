"""What report and app show of head influence: a group of charts for each sweep, and a page about one model."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.figures import learned
from headscope.figures.style import text
from headscope.report.content import Chart, Content, Group, Piece, Shown, Words
from headscope.runs.statistics import sentence, statistic, statistics
from headscope.runs.summary import longest
from probes.influence import PROBE, figures
from probes.influence.findings import of_sweeps
from probes.influence.found import Swept, by_document, certainty, leaders, name, significance, sweeps, words
from probes.influence.tables import PLACE, SWEEP


def charts(shown: Shown) -> Iterator[Group]:
    """A group for each sweep: what was reset to what, and in which context length."""
    for sweep in shown.run.derived(sweeps):
        yield _group(shown, sweep)


def page(shown: Shown) -> Content:
    """Of one model: histogram, matrix, learned spectrum and cumulative curve of each component."""
    run, label = shown.run, shown.model
    swept = list(dict.fromkeys(sweep[0][0] for sweep in run.derived(sweeps)))
    if label not in swept:
        others = f" It holds those of {', '.join(swept)}." if swept else ""
        how = f"Make one: {PROBE.example}."
        return Content(PROBE.title, "", {"": [Words([f"This view has no sweep of {label}.{others}", how])]})
    sections: dict[str, list[Piece]] = {"": [Words([said.text for said in of_sweeps(run) if said.model == label])]}
    for sweep in run.derived(sweeps):
        if sweep[0][0] == label:
            group = _group(shown, sweep)
            sections[group.heading] = [*group.charts]
    lead = "Loss added when the position parameters of one unit are reset, all others kept."
    return Content(f"{PROBE.title}: {label}", lead, sections)


def _group(shown: Shown, sweep: Swept) -> Group:
    (_, length, *what), _ = sweep
    return Group(PROBE.title, f"{sentence(words(*what))}, {length:,} tokens", _of_sweep(shown, sweep))


def _of_sweep(shown: Shown, sweep: Swept) -> Iterator[Chart]:
    run, (key, units) = shown.run, sweep
    label, length, component, target = key
    heads = shown.heads[shown.heads["model"] == label]
    yield Chart(
        figures.forest(units, _of(run.derived(by_document), key)),
        f"{_documents(units)} The units of largest influence: filled where evaluated, hollow where estimated; a small "
        "dot is one document, the bar a 95 % interval over documents, where there are three or more.",
        _leaders(units),
    )
    yield Chart(
        figures.histogram(units, {statistic(column).best: head for column, head in leaders(heads).items()}),
        "Loss added when the position parameters of one unit are reset, all others kept. Most units near zero and "
        "a thin tail on the right mean that few units carry the gain one by one.",
        half=True,
    )
    yield Chart(figures.matrix(units), "Red units are missed when reset, blue ones were better before.", half=True)
    if component in ("freq", "joint") and "positions" in run.tables:
        top = units.sort_values("delta").iloc[-1]
        yield Chart(
            learned.spectrum(run.positions, label, int(top["layer"]), int(top["kv_group"])),
            "The unit of largest influence: its frequencies as learned, at the start and in base.",
            half=True,
        )
    ess2, first = longest(shown.heads), run.models[0]
    if ess2 is not None and label != first:
        change = _log_ratio(shown.heads, ess2, label, first)
        yield Chart(
            figures.against(units, change, "change", f"ln ratio of ESS₂, {text(label)} over {text(first)}"),
            "Do the units that matter also change how many tokens they attend to?",
            half=True,
        )
    for column in (called for called, declared in statistics().items() if declared.best and called in heads):
        drawn = figures.against(units, heads, column, statistic(column).label)
        yield Chart(drawn, "A dot is a unit.", half=True)
    if "influence_sets" in run.tables:
        sets = run.influence_sets
        same = (sets["model"] == label) & (sets["component"] == component) & (sets["target"] == target)
        if len(together := sets[same & (sets["context_length"] == length)]):
            yield Chart(
                figures.cumulative(together),
                "Units reset together, the most influential first, against as many random ones of the same layers; the "
                "last point resets all. A steep start means few units, a steady rise that many units act together.",
                half=True,
            )


def _of(rows: pd.DataFrame, key: tuple[str, int, str, str]) -> pd.DataFrame:
    """The rows of one sweep."""
    same = np.logical_and.reduce([rows[name] == value for name, value in zip(SWEEP, key, strict=True)])
    return rows[same]


def _documents(units: pd.DataFrame) -> str:
    count = int(units["documents"].iloc[0])
    return f"{count} document{'s' if count > 1 else ''}."


def _leaders(units: pd.DataFrame) -> str:
    """The unit that matters most, and how many differ from zero beyond noise."""
    first = units.sort_values("delta", ascending=False, kind="stable").iloc[0]
    told = f"Most: {name(first)}, {first['delta']:+.2g} nats/token{certainty(first)}{significance(first)}."
    if units["p_adjusted"].isna().all():
        return f"{told} So few documents cannot tell any unit from zero."
    clear = int((units["p_adjusted"] < 0.05).sum())
    return f"{told} {clear} of {len(units)} units differ from zero (false discovery rate 5 %)."


def _log_ratio(heads: pd.DataFrame, name: str, label: str, first: str) -> pd.DataFrame:
    """Layer, kv_group, head and `change`, ln of the statistic under `label` over that under `first`."""
    own, base = (heads[heads["model"] == model].set_index(PLACE)[name].astype("float64") for model in (label, first))
    return pd.DataFrame({"change": np.log(own / base)}).reset_index()

"""How heads come into being: any statistic and every role against training step, of one training or of several."""

from collections.abc import Iterator, Sequence
from itertools import chain

import pandas as pd

from dashboards.view import View
from headscope.figures import birth, layers
from headscope.report import outline
from headscope.report.content import Chart, Content, Later, Listing, Piece, Words
from headscope.runs.courses import courses
from headscope.runs.roles import roles
from headscope.runs.run import Run
from headscope.runs.statistics import by_length

NAME = "Checkpoints"
PATH = "/checkpoints"


def controls(run: Run) -> Sequence[str]:
    """Where models are checkpoints."""
    return ("stat", "layers", "role") if len(outline.steps(run)) > 1 and outline.statistics_of(run) else ()


def content(run: Run, view: View) -> Content:
    """The statistic and the roles over steps, and what probes show of a training."""
    steps = outline.steps(run)
    course = courses(run.manifest["models"])
    sections: dict[str, Sequence[Piece]] = {}
    heads = view.kept(run.heads)
    if len(steps) > 1 and view.stat:
        sections["Over checkpoints"] = Later(_statistic(run, view, heads, course))
        sections["Roles"] = Later(_roles(run.heads, course))
    for heading, charts in outline.charts_on(outline.shown(run, view.model, heads), PATH).items():
        sections[heading] = Later(chain(sections.get(heading, ()), charts))
    if not any(sections.values()):
        why = "No two models of these runs carry a training step. Measure checkpoints in a batch: "
        return Content("Checkpoints", "", {"": [Words([f"{why}headscope run --checkpoints 'ckpts/step-*'."])]})
    return Content("Checkpoints", _lead(course), sections)


def _lead(course: pd.DataFrame) -> str:
    trainings = course["training"].nunique()
    of = f", of {trainings} trainings" if trainings > 1 else ""
    return f"{len(course)} models carry a training step{of}."


def _statistic(run: Run, view: View, heads: pd.DataFrame, course: pd.DataFrame) -> Iterator[Chart]:
    alone = course["training"].nunique() == 1
    if alone:
        chosen = sorted(view.picked) or list(outline.notable(run.heads))
        steps = outline.steps(run)
        yield Chart(
            layers.over_steps(heads, view.stat, steps, chosen[:8]),
            "Grey: the median head and the middle 80 % of heads. Coloured: picked heads, else notable ones.",
            half=True,
        )
        yield Chart(layers.by_step(heads, view.stat, steps), "Median over the heads of a layer.", half=True)
    told = (
        "A line a head."
        if alone
        else "A line a training: the median over the heads of the layer; dotted: picked heads."
    )
    yield Chart(birth.by_layer(heads, view.stat, course, view.picked), told)


def _roles(heads: pd.DataFrame, course: pd.DataFrame) -> Iterator[Piece]:
    """How many heads bear each role at each step, and since when those of the last step do."""
    known = list(roles())
    if unlike(heads[heads["model"].isin(course["label"])]):
        told = "These checkpoints were measured at different lengths, by which roles that go by effective length differ"
        yield Words([f"{told}: measure all of them alike."])
    yield Chart(birth.bearing(heads, course, known), "Heads that bear the role at that step.", half=True)
    taken = birth.taken(heads, course, known)
    trainings = list(dict.fromkeys(course["training"]))
    yield Chart(
        birth.when_taken(taken, trainings, list(course["step"])),
        "A point a head: the first step from which it bears the role at every later one.",
        half=True,
    )
    if len(taken):
        yield _table(taken, trainings)


def unlike(heads: pd.DataFrame) -> bool:
    """Whether some of the models were measured at other lengths than others."""
    lengths = heads[by_length(map(str, heads), "ess2")].notna()
    return len(lengths.groupby(heads["model"], observed=True).any().drop_duplicates()) > 1


def _table(taken: pd.DataFrame, trainings: Sequence[str]) -> Listing:
    """A row a role, a column a training."""
    steps = taken.groupby(["role", "training"], sort=False)["step"]
    told = {
        place: f"{len(at)} from {at.min():,}, half by {at.sort_values().iloc[(len(at) - 1) // 2]:,}"
        for place, at in steps
    }
    rows = [(role, *(told.get((role, each), "none") for each in trainings)) for role in taken["role"].unique()]
    caption = "Heads that bear a role at the end: how many, from which step the first, and by which half of them"
    return Listing(caption, ("role", *trainings), rows, {name: role.meaning for name, role in roles().items()})

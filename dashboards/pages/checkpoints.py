"""Any statistic against training step, where models are checkpoints of one training."""

from collections.abc import Sequence

from dashboards.view import View
from headscope.figures import layers
from headscope.report import outline
from headscope.report.content import Chart, Content, Piece, Words
from headscope.runs.run import Run

NAME = "Checkpoints"
PATH = "/checkpoints"


def controls(run: Run) -> Sequence[str]:
    """Where models are checkpoints."""
    return ("stat", "layers", "role") if len(outline.steps(run)) > 1 and outline.statistics_of(run) else ()


def content(run: Run, view: View) -> Content:
    """The statistic over steps, for all heads and for the picked ones, and what probes show of a training."""
    steps = outline.steps(run)
    heads = view.kept(run.heads)
    sections: dict[str, list[Piece]] = {}
    if len(steps) > 1 and view.stat:
        chosen = sorted(view.picked) or list(outline.notable(run.heads))
        sections["Over checkpoints"] = [
            Chart(
                layers.over_steps(heads, view.stat, steps, chosen[:8]),
                "Grey: the median head and the middle 80 % of heads. Coloured: picked heads, else notable ones.",
                half=True,
            ),
            Chart(layers.by_step(heads, view.stat, steps), "Median over the heads of a layer.", half=True),
        ]
    for heading, charts in outline.charts_on(outline.shown(run, view.model, heads), PATH).items():
        sections.setdefault(heading, []).extend(charts)
    if not sections:
        why = "No two models of these runs carry a training step. Measure checkpoints in a batch: "
        return Content("Checkpoints", "", {"": [Words([f"{why}headscope run --checkpoints 'ckpts/step-*'."])]})
    return Content("Checkpoints", f"{len(steps)} models carry a training step.", sections)

"""What breaks when the position parameters of one head or key group are reset."""

from dashboards.content import Content, Part, Words
from dashboards.view import View
from headscope import findings, probe_charts
from headscope.influences import words
from headscope.store import Run

NAME = "Influence"
PATH = "/influence"
CONTROLS = ("model", "layers", "role")


def content(run: Run, view: View) -> Content:
    """Of one model: histogram, matrix, learned spectrum and cumulative curve of each component."""
    swept = run.influence["model"].unique() if "influence" in run.tables else ()
    if view.model not in swept:
        others = f" It holds those of {', '.join(swept)}." if len(swept) else ""
        how = "Make one: headscope influence --model NAME=CHECKPOINT@adarope:adapter=PATH."
        return Content("Head influence", "", {"": [Words([f"This view has no sweep of {view.model}.{others}", how])]})
    told = findings.sentences(run, ["Head influence"])
    mine = [sentence for group in told.values() for sentence in group if sentence.startswith(f"{view.model}, ")]
    sections: dict[str, list[Part]] = {"": [Words(mine)]}
    for (label, length, *what), charts in probe_charts.sweeps(run, view.kept(run.heads)):
        if label == view.model:
            heading = words(*what)
            sections[f"{heading[0].upper()}{heading[1:]}, {length:,} tokens"] = [*charts]
    lead = "Loss added when the position parameters of one unit are reset, all others kept."
    return Content(f"Head influence: {view.model}", lead, sections)

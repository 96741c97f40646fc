"""Needle in a haystack: where models find the needle, which heads copy it, and how far scores agree."""

from dashboards.content import Content, Words
from dashboards.view import View
from headscope import findings, probe_charts
from headscope.store import Run

NAME = "Retrieval"
PATH = "/retrieval"
CONTROLS = ("model", "layers", "role")


def content(run: Run, view: View) -> Content:
    """Success maps, score matrices, ranks and agreement, as in the report, of the heads that pass the filters."""
    if "needles" not in run.tables:
        why = "These runs hold no needle trials. Make some: headscope needle --model NAME=CHECKPOINT@SCHEME."
        return Content("Retrieval", "", {"": [Words([why])]})
    models = findings.few(run.models)
    heads = view.masked(run.heads[run.heads["model"].isin(models)])
    told = findings.sentences(run, ["Needle in a haystack"])
    return Content(
        "Needle in a haystack",
        "Where each model finds a hidden fact, and which heads copy it out.",
        {
            "": [Words(found) for found in told.values()],
            "Where the needle is found": [*probe_charts.success_charts(run.needles, models)],
            "Which heads copy it": [*probe_charts.score_charts(run, heads, models)],
        },
    )

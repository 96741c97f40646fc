"""The playground: the user's own prompt under the models that the app was started with."""

from collections.abc import Iterator, Sequence

from dashboards.empty_pages import command_for_run
from dashboards.playground.components import QUANTITIES, HeadChoice, PlaygroundBlock
from dashboards.playground.view import parse_view
from dashboards.playground.worker import has_worker, model_labels
from dashboards.view_state import ViewState
from headscope.base.head_set import HeadSet
from headscope.base.heads import Head
from headscope.playground.prompt_predictions import MAX_TOKENS
from headscope.rendering import assembly
from headscope.rendering.blocks import PageContent, TextBlock
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run

NAME = "Playground"
PATH = "/playground"
COMMAND = "headscope dash --model base=smollm2-135m --model yarn=smollm2-135m@yarn:factor=8"
TOP_HEADS = 10
"""Heads of a choice such as "top 10 by retrieval score"."""


def controls(run: Run) -> Sequence[str]:
    """None: the page has its own."""
    return ()


def missing_command(run: Run) -> str:
    """The command that starts the app with models; "" if it was."""
    return "" if has_worker() else command_for_run(COMMAND, run, ("models",))


def content(run: Run, view: ViewState) -> PageContent:
    """The playground, or the command that starts the app with models."""
    if command := missing_command(run):
        return PageContent(
            NAME, "", {"": [TextBlock(["The playground needs a model. Start the app with:"], command=command)]}
        )
    block = PlaygroundBlock(
        ["A saved page has no playground."],
        models=model_labels(),
        first_head=_first_head(run, view),
        choices=[*_choices(run, view)],
        view=parse_view(str(view.query.get("playground", "")), model_labels(), QUANTITIES),
    )
    return PageContent(NAME, f"Your own prompt of up to {MAX_TOKENS:,} tokens. Ctrl+Enter runs it.", {"": [block]})


def _first_head(run: Run, view: ViewState) -> Head:
    """The head whose attention is drawn first: a selected one, else the best by a score that names its best head, such
    as the top retrieval head, else a notable one."""
    scores = [name for name in _statistics(run, view) if statistic(name).best_head_name]
    best = [head for name in scores for head in HeadSet.top(run.heads, name, 1, view.model)]
    return next(iter([*view.selected_heads, *best, *assembly.notable_heads(run.heads)]), (0, 0))


def _statistics(run: Run, view: ViewState) -> Iterator[str]:
    """The statistics of the run that the model of the page has."""
    return (name for name in assembly.run_statistics(run) if view.model in assembly.models_with_statistic(run, name))


def _choices(run: Run, view: ViewState) -> Iterator[HeadChoice]:
    """Heads that can be ablated at once: the selected ones, the named sets, the first by each statistic of the run."""
    if view.selected_heads:
        yield HeadChoice("selected heads", view.selected_heads)
    for name, heads in view.head_sets.items():
        yield HeadChoice(f"set {name}", heads)
    for name in _statistics(run, view):
        heads = HeadSet.top(run.heads, name, TOP_HEADS, view.model)
        note = "; includes estimates" if "estimates" in heads.source else ""
        yield HeadChoice(f"top {len(heads)} by {statistic(name).label} ({view.model}{note})", heads)

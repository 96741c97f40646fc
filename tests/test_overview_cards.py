"""The overview answers questions: each card states numbers of the tables and leads to the page with all of them."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import plotly.graph_objects as go
import pytest
from dash import html
from support.refusals import assert_names
from support.shipped_runs import shipped_path
from support.synthetic_runs import synthetic_run

from dashboards.app import create_app
from dashboards.layout import resolve_url
from dashboards.lazy_loading import RenderedPage
from dashboards.tabs import visible_sections
from dashboards.view_state import ViewState
from headscope.base import plugins
from headscope.base.heads import format_head
from headscope.probe import Probe
from headscope.rendering import assembly
from headscope.rendering.blocks import Card, PageContent
from headscope.runs.column_metadata import format_number, heads_with_role
from headscope.runs.run import Run
from headscope.runs.trainings import training_checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn", "learned"), lengths=(256,), pairs=2)


@pytest.fixture(scope="module")
def cards(run: Run) -> dict[str, Any]:
    return {card.question: card for card in assembly.overview_cards(assembly.render_context(run, "learned"))}


@pytest.mark.slow
def test_the_overview_starts_with_five_to_eight_cards_that_link_to_existing_pages(run: Run) -> None:
    with create_app(run.path.parent).server.app_context():
        page, _, view, content = resolve_url("/", {"model": "learned"})
        cards = [*content.sections[""]]
        assert 5 <= len(cards) <= 8
        for card in cards:
            assert isinstance(card, Card)
            assert re.fullmatch(r"\w.*\.", card.caption)
            path, _, query = view.resolve_link(card.href).partition("?")
            target = resolve_url(path, dict(pair.split("=") for pair in query.split("&")))
            assert not target[2].notes, card.question
        rendered = RenderedPage("", page, run, view, content)
        components = [*rendered.initial_components(), *rendered.deferred_components()]
    assert str(components).count("Article(") == len(cards)
    assert isinstance(components[0], html.H1)


@pytest.mark.slow
def test_compare_and_checkpoints_start_with_the_answers_to_their_questions(run: Run) -> None:
    with create_app(run.path.parent).server.app_context():
        _, _, view, content = resolve_url("/compare", {"model": "learned", "baseline": "base"})
        questions = [card.question for card in content.sections[""]]
        assert questions == ["Which heads change most?", "Do the models predict better than base?"]
        linked_view, linked = resolve_link(view, [*content.sections[""]][1])
        assert "Loss along the context" in visible_sections(linked, linked_view)


def test_checkpoints_start_with_the_roles_that_most_heads_take_on_during_the_training() -> None:
    training = shipped_path("from-scratch")
    with create_app(training.parent).server.app_context():
        _, _, view, content = resolve_url("/checkpoints", {"run": training.name})
        cards = [*content.sections[""]]
        assert [card.question for card in cards] == [
            "When do heads take on the role constant?",
            "When do heads take on the role local?",
        ]
        assert_names(cards[0].caption, "0 in alibi-s0", "1,448 in nope-s0")
        for card in cards:
            assert not resolve_link(view, card)[0].notes
            trainings = training_checkpoints(Run.open(training).manifest["models"])["training"]
            assert {trace.name for trace in card.figure.data} == {*trainings}


def test_cards_of_checkpoints_count_the_heads_that_pass_the_filters() -> None:
    training = shipped_path("from-scratch")
    with create_app(training.parent).server.app_context():
        cards = [*resolve_url("/checkpoints", {"run": training.name, "layers": "0-0"})[3].sections[""]]
    heads = Run.open(training).heads
    final = heads[(heads["model"] == "nope-s0/step-002048") & (heads["layer"] == 0)]
    for card in cards:
        role = card.question.split()[-1].rstrip("?")
        (line,) = [trace for trace in card.figure.data if trace.name == "nope-s0"]
        assert line.y[-1] == heads_with_role(final, role).sum()


def test_a_page_shows_the_first_card_of_every_probe_before_a_second_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def card(probe: Probe, context: Any, page: str) -> list[Card]:
        return [Card(go.Figure(), "An answer.", question="Mine?", href="/heads")]

    monkeypatch.setattr(type(plugins.probes()["detectors"]), "page_cards", card, raising=False)
    context = assembly.render_context(run, "learned")
    questions = [card.question for card in assembly.cards_for_page(context, "/compare")]
    assert questions == ["Which heads change most?", "Mine?"]


def resolve_link(view: ViewState, card: Card) -> tuple[ViewState, PageContent]:
    """The page that a card leads to."""
    path, _, query = view.resolve_link(card.href).partition("?")
    return resolve_url(path, {key: values[0] for key, values in parse_qs(query).items()})[2:]


@pytest.mark.slow
def test_the_card_of_lengths_has_the_medians_of_the_heads_table(run: Run, cards: dict[str, Any]) -> None:
    medians = run.heads.groupby("model", observed=True)["ess2_256"].median()
    text = cards["How many tokens does a head attend to?"].caption
    assert all(f"{format_number(value)} in {label}" in text for label, value in medians.items())


def test_the_card_of_changes_names_the_highest_and_lowest_ratios(run: Run, cards: dict[str, Any]) -> None:
    wide = run.heads.pivot_table(index=["layer", "head"], columns="model", values="ess2_256", observed=True)
    ratio = wide["learned"] / wide["base"]
    card = cards["Which heads change most?"]
    top, bottom = (f"{format_head(*head)} ({format_number(ratio[head])})" for head in (ratio.idxmax(), ratio.idxmin()))
    assert_names(card.caption, top, bottom)
    assert card.caption.index(top) < card.caption.index(bottom)
    (bars,) = card.figure.data
    np.testing.assert_allclose(max(bars.x), np.log2(ratio.max()))


@pytest.mark.parametrize(
    ("question", "column", "threshold"),
    [
        ("Which heads are retrieval heads?", "retrieval", 0.1),
        ("Which heads are induction heads?", "induction_token", 0.5),
    ],
)
def test_the_cards_of_roles_count_the_heads_and_those_that_keep_the_role(
    run: Run, cards: dict[str, Any], question: str, column: str, threshold: float
) -> None:
    values = run.heads.pivot_table(index=["layer", "head"], columns="model", values=column, observed=True)
    first = values["base"].sort_values(ascending=False, kind="stable")
    count = int((first > threshold).sum())
    text = cards[question].caption
    assert_names(text, f"{count} in base")
    if count == 0:
        return
    assert_names(text, "24 heads", f"{format_head(*first.index[0])} ({first.iloc[0]:.2f})")
    top = first[first > threshold].index[:6]
    for label in ("yarn", "learned"):
        assert f"{int((values.loc[top, label] > threshold).sum())} in {label}" in text
    assert len(cards[question].figure.data) == 3


@pytest.mark.slow
def test_a_run_of_one_model_has_no_card_that_compares(cards: dict[str, Any], tmp_path: Path) -> None:
    alone = synthetic_run(tmp_path, models=("base",), layers=2, heads=4, lengths=(256,), docs=2, pairs=2)
    questions = [card.question for card in assembly.overview_cards(assembly.render_context(alone))]
    assert "How many tokens does a head attend to?" in questions
    comparisons = {"Which heads change most?", "Do the models predict better than base?"}
    assert comparisons <= {*cards}
    assert not comparisons & {*questions}

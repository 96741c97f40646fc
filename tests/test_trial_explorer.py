"""The trial browser shows the stored trials of a cell, and every text as text."""

import pytest

from dashboards import explorer_components
from dashboards.view_state import ViewState
from headscope.report import assembly
from headscope.report.blocks import PageContent, TextBlock
from headscope.report.explorer_blocks import Passage, Token
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.needle import findings
from probes.needle.trial_explorer import trials_page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), layers=2)


def seen(run: Run, model: str = "yarn", **asked: str) -> PageContent:
    return trials_page(assembly.render_context(run, model), asked)


def tables(content: PageContent, heading: str) -> list[Passage]:
    return [part for part in content.sections[heading] if isinstance(part, Passage)]


def links(passage: Passage) -> dict[str, Token]:
    cells = (cell for row in passage.cells for cell in row if not isinstance(cell, str))
    return {token.href: token for cell in cells for token in cell if token.href}


def test_every_cell_of_the_map_opens_its_trials(run: Run) -> None:
    stored = run.needles[(run.needles["model"] == "yarn") & (run.needles["mode"] == "strict")]
    (drawn,) = tables(seen(run), "")
    cells = links(drawn)
    assert len(cells) == 8
    for href, token in cells.items():
        asked = dict(part.split("=") for part in href.removeprefix("?").split("&"))
        here = stored[
            (stored["context_length"] == int(asked["length"]))
            & (stored["depth"].map(lambda depth: f"{depth:.4f}") == asked["depth"])
        ]
        assert token.text == f"{here['success'].mean():.0%}"
        opened = seen(run, **asked)
        (heading,) = [name for name in opened.sections if name.startswith("Trials at")]
        (listed,) = tables(opened, heading)
        assert [row[1][0].text for row in listed.cells] == here["needle"].tolist()
        assert [row[4][0].text for row in listed.cells] == here["answer"].tolist()
        assert [row[0] for row in listed.cells] == ["success" if each else "failure" for each in here["success"]]


def test_a_trial_is_told_step_by_step_with_the_heads_that_copied(run: Run) -> None:
    content = seen(run, length="1024", depth="0.3300", trial="2")
    heading = [*content.sections][-1]
    read, steps = tables(content, heading)
    assert "‹ 1847 by Odette Marchbanks.›" in read.rows[0][0]
    stored = run.needles.query("model == 'yarn' and mode == 'strict' and context_length == 1024")
    stored = stored[stored["depth"].round(2) == 0.33].reset_index(drop=True)
    trial = stored.iloc[1]
    assert heading == f"Needle {trial['needle']} in {trial['doc']}"
    assert "".join(row[1][0].text for row in steps.cells) == trial["answer"]
    copies = run.needle_copies.merge(stored.iloc[[1]])
    told = {token.href for row in steps.cells for token in row[2] if token.href}
    assert told <= {f"/head/{row['layer']}.{row['head']}" for row in copies.to_dict("records")}
    for step, row in enumerate(steps.cells):
        here = copies[copies["step"] == step]
        assert len([token for token in row[2] if token.href]) == min(len(here), 24)


def test_texts_are_text_and_stand_in_their_own_direction(run: Run) -> None:
    content = seen(run)
    read = tables(content, [*content.sections][-1])[0]
    assert "<b>a messenger</b> \u05e9\u05dc\u05d5\u05dd" in read.rows[0][0]
    drawn = str(explorer_components.build_component(read, ViewState.from_query({}, run), "0"))
    assert "Bdi(" in drawn
    assert "<b>a messenger</b>" in drawn  # a child of a component, which React escapes
    assert "dangerously" not in drawn


def test_what_is_asked_in_vain_is_told(run: Run) -> None:
    content = seen(run, length="77", trial="x" * 99)
    (told,) = [part for part in content.sections[""] if isinstance(part, TextBlock)]
    assert told.sentences[0] == "Unknown length ‘77’: showing length 256 instead."
    assert len(told.sentences) == 2
    assert all(len(sentence) < 120 for sentence in told.sentences)


def test_a_run_of_before_tells_the_command_that_stores_what_is_missing(run: Run) -> None:
    old = Run(run.path, run.manifest)
    old.tables = [name for name in run.tables if not name.startswith("needle_")]
    content = seen(old)
    (told,) = content.sections[[*content.sections][-1]]
    assert isinstance(told, TextBlock)
    assert "headscope needle --model" in told.sentences[0]
    assert len(links(tables(content, "")[0])) == 8
    assert len([*findings.findings(old)]) > 4


def test_a_model_without_trials_says_so(run: Run) -> None:
    other = Run(run.path, run.manifest)
    other._frames["needles"] = run.needles[run.needles["model"] != "yarn"]
    assert seen(other).introduction == "No needle trials of yarn. Choose another model."

"""The trial explorer shows the stored trials of a cell, and all text of a trial as plain text."""

from dataclasses import replace

import pytest
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run

from dashboards import explorer_components
from dashboards.view_state import ViewState
from headscope.rendering import assembly
from headscope.rendering.blocks import Chart, PageContent, TextBlock
from headscope.rendering.explorer_blocks import LinkChoice, Passage
from headscope.rendering.text import format_percent
from headscope.runs.run import Run
from probes.needle import PROBE, results
from probes.needle.declaration import NEEDLES
from probes.needle.trial_explorer import trials_page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), layers=2)


def page_content(run: Run, model: str = "yarn", **url_query: str) -> PageContent:
    return trials_page(assembly.render_context(run, model), url_query)


def passages(content: PageContent, heading: str) -> list[Passage]:
    return [block for block in content.sections[heading] if isinstance(block, Passage)]


@pytest.mark.slow
def test_every_cell_of_the_success_map_links_to_its_trials(run: Run) -> None:
    stored = run.needles[(run.needles["model"] == "yarn") & (run.needles["mode"] == "strict")]
    (success_map,) = (block for block in page_content(run).sections[""] if isinstance(block, Chart))
    hrefs = [href for row in success_map.cell_links for href in row]
    texts = [text for row in success_map.figure.data[0].text for text in row]
    assert len(hrefs) == 8
    for href, text in zip(hrefs, texts, strict=True):
        url_query = dict(part.split("=") for part in href.partition("?")[2].split("&"))
        del url_query["model"]
        trials = stored[
            (stored["context_length"] == int(url_query["length"]))
            & (stored["depth"].map(lambda depth: f"{depth:.4f}") == url_query["depth"])
        ]
        assert text == format_percent(trials["success"].mean())
        content = page_content(run, **url_query)
        (heading,) = [name for name in content.sections if name.startswith("Trials at")]
        (trial_list,) = passages(content, heading)
        assert [row[1][0].text for row in trial_list.cells] == trials["needle"].tolist()
        assert [row[4][0].text for row in trial_list.cells] == trials["answer"].tolist()
        outcomes = ["success" if success else "failure" for success in trials["success"]]
        assert [row[0] for row in trial_list.cells] == outcomes


@pytest.mark.slow
def test_trial_shows_each_answer_token_with_the_heads_that_copied_it(run: Run) -> None:
    content = page_content(run, length="1024", depth="0.3300", trial="2")
    heading = [*content.sections][-2]
    prompt, steps = passages(content, heading)
    assert "‹ 1847 by Odette Marchbanks.›" in prompt.rows[0][0]
    stored = run.needles.query("model == 'yarn' and mode == 'strict' and context_length == 1024")
    stored = stored[stored["depth"].round(2) == 0.33].reset_index(drop=True)
    trial = stored.iloc[1]
    assert heading == f"Needle {trial['needle']} in {trial['doc']}"
    assert "".join(row[1][0].text for row in steps.cells) == trial["answer"]
    copies = run.needle_copies.merge(stored.iloc[[1]])
    assert [row[1][0].href for row in steps.cells] == [f"?step={step + 1}" for step in range(len(steps.cells))]
    hrefs = {token.href for row in steps.cells for token in row[2] if token.href}
    assert hrefs <= {f"/head/{row['layer']}.{row['head']}" for row in copies.to_dict("records")}
    for step, row in enumerate(steps.cells):
        step_copies = copies[copies["step"] == step]
        assert len([token for token in row[2] if token.href]) == min(len(step_copies), 24)


ATTENTION = "What a head attends to at an answer token"


@pytest.mark.slow
def test_an_answer_token_opens_what_any_head_attends_to_there(run: Run) -> None:
    query = {"length": "1024", "depth": "0.3300", "trial": "2"}
    trial = run.needles.query("model == 'yarn' and mode == 'strict' and context_length == 1024")
    trial = trial[trial["depth"].round(2) == 0.33].reset_index(drop=True).iloc[1]
    keys = run.needle_keys.merge(trial[NEEDLES.keys].to_frame().T)
    row = keys.sort_values(["layer", "head"]).iloc[-1]
    state = query | {"step": str(row["step"] + 1), "layer": str(row["layer"]), "head": str(row["head"])}
    content = page_content(run, **state)
    (passage,) = passages(content, ATTENTION)
    (shaded,) = [token for _, tokens in passage.cells for token in tokens if token.shading]
    assert shaded.is_marked
    assert_names(shaded.tooltip, f"{row['key']:,}", "0.750")
    assert_names(passage.caption, f"L{row['layer']}H{row['head']}")
    assert " w" in passage.rows[0][1], "the haystack around the key is shown"
    labels = [block.label for block in content.sections[ATTENTION] if isinstance(block, LinkChoice)]
    assert labels == ["Answer token", "Layer", "Head"]
    heads = run.heads[["layer", "head"]].drop_duplicates()
    without = heads.merge(keys[["layer", "head"]], indicator=True, how="left").query("_merge == 'left_only'").iloc[0]
    content = page_content(run, **query, layer=str(without["layer"]), head=str(without["head"]))
    note = content.sections[ATTENTION][-1]  # in place of the passage
    assert isinstance(note, TextBlock)
    assert_names(note.sentences[0], f"L{without['layer']}H{without['head']}", "15 %")


@pytest.mark.slow
def test_a_run_without_attended_keys_names_the_command(run: Run) -> None:
    context = assembly.render_context(run, "yarn")
    tables = {name: facts for name, facts in run.manifest["tables"].items() if name != "needle_keys"}
    old = Run(run.path, {**run.manifest, "tables": tables})
    content = trials_page(replace(context, run=old), {})
    (note,) = content.sections[ATTENTION]
    assert isinstance(note, TextBlock)
    assert PROBE.example.startswith("headscope needle")
    assert PROBE.example in note.sentences[0]


def test_markup_and_right_to_left_text_are_shown_as_plain_text(run: Run) -> None:
    content = page_content(run)
    prompt = passages(content, [*content.sections][-2])[0]
    assert "<b>a messenger</b> \u05e9\u05dc\u05d5\u05dd" in prompt.rows[0][0]
    component = str(explorer_components.build_component(prompt, ViewState.from_query({}, run), "0"))
    assert "Bdi(" in component
    assert "<b>a messenger</b>" in component  # a child of a component, which React escapes
    assert "dangerously" not in component


def test_invalid_query_values_are_replaced_by_defaults_with_a_note(run: Run) -> None:
    content = page_content(run, length="77", trial="x" * 99)
    (notes,) = [block for block in content.sections[""] if isinstance(block, TextBlock)]
    length, trial = notes.sentences
    assert_names(length, "length", 77, 256)
    assert_names(trial, "trial")
    assert all(len(sentence) < 120 for sentence in notes.sentences)


def test_run_without_stored_prompts_shows_the_command_that_stores_them(run: Run) -> None:
    old_run = Run(run.path, run.manifest)
    old_run.tables = [name for name in run.tables if not name.startswith("needle_")]
    content = page_content(old_run)
    (note,) = content.sections[[*content.sections][-1]]
    assert isinstance(note, TextBlock)
    assert "headscope needle --model" in note.sentences[0]
    assert any(isinstance(block, Chart) for block in content.sections[""])
    assert len([*results.results(old_run)]) > 4


def test_page_of_a_model_without_trials_asks_for_another_model(run: Run) -> None:
    base_run = Run(run.path, run.manifest)
    base_run._frames["needles"] = run.needles[run.needles["model"] != "yarn"]
    content = page_content(base_run)
    assert not content.sections
    assert_names(content.introduction, "yarn")

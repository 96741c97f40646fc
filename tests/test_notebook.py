"""A run in a notebook shows itself without a server or another host, and the example notebook does what it says."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from playwright.sync_api import Browser

from headscope.errors import BadInput
from headscope.report import assembly
from headscope.report.blocks import Chart
from headscope.runs.run import Run, concatenate
from headscope.runs.synthetic import synthetic_run

NOTEBOOK = Path(__file__).parents[1] / "headscope" / "examples" / "from-checkpoint-to-figure.ipynb"
HOSTILE = '<b title="x">&amp;</b>'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), ("base", HOSTILE), layers=2, heads=4, pairs=4)


def titles(charts: Any) -> list[str]:
    return [chart.figure.layout.title.text for chart in charts]


def test_findings_are_the_sentences_of_the_report_as_data(run: Run) -> None:
    every = [finding for found in assembly.findings_by_topic(run).values() for finding in found]
    told = run.findings()
    assert list(told) == ["model", "topic", "text"]
    assert [*told.itertuples(index=False, name=None)] == [(each.model, each.topic, each.text) for each in every]
    assert len(told) > 10


def test_charts_are_the_report_s_with_their_captions_of_a_topic(run: Run) -> None:
    chapters = assembly.collect_chapters(assembly.render_context(run))
    loss = [chart for group in chapters["Loss along the context"] for chart in group.charts]
    drawn = run.charts("LOSS along")
    assert titles(drawn) == titles(loss)
    assert [chart.caption for chart in drawn] == [chart.caption for chart in loss]
    with pytest.raises(BadInput, match=r"no chart .* is about 'lose'.*; its topics are: .*Loss along the context"):
        run.charts("lose")


def test_a_head_is_what_the_app_says_and_draws_of_it(run: Run) -> None:
    first, more = assembly.head_sentences(run, "base", 1, 2)
    shown = run.head(1, 2, "base")
    assert shown.sentences == [*first, *more]
    drawn = [part for part in assembly.head_blocks(run, "base", 1, 2) if isinstance(part, Chart)]
    assert titles(shown) == titles(drawn)
    assert len(shown.blocks) >= len(shown) == len(drawn) > 4
    assert run.head(1, 2).title == f"Layer 1, head 2: {HOSTILE}", "the last model, as in the app"
    with pytest.raises(BadInput, match=r"no head 9 in layer 1: see run\.heads"):
        run.head(1, 9)
    with pytest.raises(BadInput, match=r"no model 'bass' \(did you mean 'base'\?\)"):
        run.head(1, 2, "bass")


def test_runs_that_are_read_as_one_show_themselves_too(run: Run, tmp_path: Path) -> None:
    other = synthetic_run(tmp_path, ("later",), layers=2, heads=4, pairs=4)
    told = concatenate([run, other]).findings()
    assert {"later", "base"} <= {*told["model"]}


@pytest.mark.browser
def test_what_a_notebook_shows_is_drawn_and_asks_no_other_host(run: Run, chromium: Browser, tmp_path: Path) -> None:
    outputs = [shown._repr_html_() for shown in (run, run.head(0, 1), run.charts("loss")[0])]
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset=utf-8>{''.join(outputs)}", encoding="utf-8")
    page = chromium.new_page(viewport={"width": 1000, "height": 900})
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else noise.append(asked.url))
    page.goto((tmp_path / "notebook.html").as_uri())
    for at, (frame, heading) in enumerate(
        zip(page.frames[1:], (run.name, f"Layer 0, head 1: {HOSTILE}", titles(run.charts("loss"))[0]), strict=True)
    ):
        frame.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
        assert frame.inner_text("h1") == heading
        assert frame.locator(".main-svg").count() > 0
        height = page.locator("iframe").nth(at).bounding_box()["height"]
        assert abs(height - frame.evaluate("document.body.offsetHeight")) < 2, "no bars to scroll within"
    page.frames[1].click("summary >> nth=0")
    assert page.frames[1].locator("details[open] li").first.is_visible()
    assert noise == []
    page.close()


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The notebook of the documentation, run from top to bottom, and where it was."""
    place = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4), timeout=300, resources={"metadata": {"path": str(place)}}
    )
    return client.execute(), place


@pytest.mark.model
@pytest.mark.browser
def test_the_notebook_walks_from_a_checkpoint_to_a_figure(executed: tuple[Any, Path]) -> None:
    done, place = executed
    shown = {
        cell.source.splitlines()[-1]: cell.outputs[-1]["data"] if cell.outputs else {}
        for cell in done.cells
        if cell.cell_type == "code"
    }
    for last in ("run", "charts", "chosen"):
        assert shown[last]["text/html"].startswith("<iframe srcdoc="), last
        assert "https://cdn" not in shown[last]["text/html"]
    assert "nats/token" in shown['found[found.topic == "Loss"]']["text/html"]
    (run,) = (Run.open(path.parent) for path in place.glob("runs/*/run.json"))
    heads = run.heads[run.heads["model"] == "base"]
    best = heads.loc[heads["ess2_128"].idxmax()]
    assert f"<Layer {best['layer']}, head {best['head']}: base: " in shown["chosen"]["text/plain"]
    assert (place / "effective-length.pdf").read_bytes().startswith(b"%PDF")


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")

"""Runs in a notebook: findings, charts and self-contained HTML; the example notebook runs."""

import importlib.util
import json
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
import plotly.io as pio
import pytest
from nbclient import NotebookClient
from playwright.sync_api import Browser
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from headscope.cli.flags import EXAMPLES
from headscope.errors import BadInput, ResourceMissing
from headscope.rendering import assembly, notebook, run_results
from headscope.rendering.blocks import Card, Chart
from headscope.rendering.notebook import PLOTLY_MIME_TYPE, run_page
from headscope.results.collection import all_results
from headscope.results.table import COLUMNS
from headscope.results.words import sentence
from headscope.run import Run
from headscope.runs.run import combine_runs

MAX_BYTES = 300_000
"""Largest output of one cell."""
NOTEBOOK = Path(__file__).parents[1] / "headscope" / "examples" / "from-checkpoint-to-figure.ipynb"
HOSTILE = '<b title="x">&amp;</b>'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), ("base", HOSTILE), layers=2, heads=4, pairs=4)


def titles(charts: Any) -> list[str]:
    return [chart.figure.layout.title.text for chart in charts]


@pytest.mark.slow
def test_latex_table_has_the_top_heads_and_their_statistics(run: Run) -> None:
    table = run.to_latex("retrieval", "growth", count=3, model="base")
    lines = table.splitlines()
    assert lines[1] == r"\begin{tabular}{rrrr}"
    assert lines[3].startswith("layer & head & retrieval score & growth exponent")
    assert [tuple(map(int, line.split(" & ")[:2])) for line in lines[5:-2]] == [*run.top_heads("retrieval", 3, "base")]
    assert len(run.to_latex().splitlines()) == 7 + len(run.models)
    for wrong, named in (("x", "'x'"), (None, "model=...")):
        with refuses(BadInput, named, *run.models):
            run.to_latex("retrieval", model=wrong)
    with refuses(BadInput, "'grwth'", "'growth'"):
        run.to_latex("retrieval", "grwth", model="base")


@pytest.mark.slow
def test_notebook_findings_equal_those_of_the_report(run: Run) -> None:
    results = all_results(run)
    frame = run.findings()
    assert [*frame] == [*COLUMNS]
    assert [*frame["text"]] == [sentence(result) for result in results]
    assert [*frame["model"]] == [result.model for result in results]
    assert len(frame) > 10


@pytest.mark.slow
def test_notebook_charts_equal_those_of_the_report(run: Run) -> None:
    chapters = assembly.collect_chapters(assembly.render_context(run))
    loss = [chart for group in chapters["Loss along the context"] for chart in group.charts]
    charts = run.charts("LOSS along")
    assert titles(charts) == titles(loss)
    assert [chart.caption for chart in charts] == [chart.caption for chart in loss]
    with refuses(BadInput, run.name, "'lose'", "Loss along the context"):
        run.charts("lose")


@pytest.mark.slow
def test_charts_are_found_by_words_of_their_title_and_print_it(run: Run) -> None:
    charts = run.charts("position LOSS in the")
    assert "Loss by position in the context" in titles(charts)
    assert all(word in title.casefold() for title in titles(charts) for word in ("position", "loss", "in", "the"))
    assert repr(charts[0]) == f"<chart: {titles(charts)[0]}>"
    assert len(repr(charts)) < 1000


@pytest.mark.slow
def test_a_chart_is_saved_as_a_page_without_any_extra(run: Run, tmp_path: Path) -> None:
    chart = run.charts("loss")[0]
    page = chart.save(tmp_path / "loss.html").read_text(encoding="utf-8")
    assert "Loss by position" in page
    assert '"format":"svg"' in page.replace(" ", ""), "the camera button writes an SVG"


@pytest.mark.slow
def test_the_command_writes_every_matching_chart_to_a_file(run: Run, headscope: Any, tmp_path: Path) -> None:
    expected = titles(run.charts("loss position"))
    out = tmp_path / "loss.html"
    code, printed, _ = headscope("report", run.path, "--chart", "loss position", "--out", out, "--width", "3.25")
    assert code == 0
    files = [out, *(tmp_path / f"loss-{number}.html" for number in range(2, len(expected) + 1))]
    assert len(files) > 1
    assert sorted(tmp_path.glob("*.html")) == sorted(files)
    assert [line.split("  ")[0] for line in printed.splitlines()] == [f"Figure: {file}" for file in files]
    assert "Loss by position in the context" in printed
    assert '"width":312' in out.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_refuses_what_is_no_figure(run: Run, headscope: Any, tmp_path: Path) -> None:
    for options, named in (
        (["--chart", "loss"], ("--chart", "--out")),
        (["--width", "icml"], ("--width icml", "--chart")),
        (["--chart", "lose", "--out", tmp_path / "a.html"], (run.name, "'lose'")),
        (["--chart", "loss", "--out", tmp_path / "a.docx"], ("'.docx'", tmp_path / "a.docx", ".html", ".pdf")),
        (["--chart", "loss", "--out", tmp_path / "a.html", "--width", "imcl"], ("'imcl'", "'icml'")),
    ):
        code, _, err = headscope("report", run.path, *options)
        assert code == 2
        assert_names(err, *named)
    assert not [*tmp_path.iterdir()]


def test_the_command_refuses_a_heading_with_tables_only(headscope: Any, tmp_path: Path) -> None:
    run = next(EXAMPLES.glob("*-budget-*"))
    code, _, err = headscope("report", run, "--chart", "Orders compared", "--out", tmp_path / "a.html")
    assert code == 2
    assert_names(err, "'Orders compared'", "tables")
    assert not [*tmp_path.iterdir()]


@pytest.mark.browser
def test_a_chart_is_saved_as_a_pdf_of_the_width_of_a_column(run: Run, tmp_path: Path) -> None:
    svg = run.charts("loss")[0].save(str(tmp_path / "loss.svg"), width="icml").read_text(encoding="utf-8")
    assert f'width="{3.25 * 96:g}"' in svg
    assert 'class="legend"' in svg, "names at the ends of lines do not fit a column"
    assert "Loss by position" not in svg, "the caption of a paper replaces the title"
    assert run.charts("loss")[0].save(tmp_path / "loss.pdf", width=5.5).read_bytes().startswith(b"%PDF")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "error", "named"),
    [
        ("a.docx", None, BadInput, ("'.docx'", "a.docx", ".html", ".pdf")),
        ("a", None, BadInput, ("format", "''", ".html", ".pdf")),
        ("a.html", "imcl", BadInput, ("width", "'imcl'", "'icml'")),
        ("a.html", 0.1, BadInput, ("width", 0.1, 1, 50)),
        ("a.pdf", None, ResourceMissing, ("kaleido", "pip install 'headscope[export]'", "a.html")),
        ("b.pdf", None, ResourceMissing, ("Chrome", "BROWSER_PATH", "b.html")),
    ],
)
def test_a_chart_that_cannot_be_saved_says_what_is_missing(
    name: str,
    width: Any,
    error: Any,
    named: tuple[object, ...],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "a.pdf":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.\nEither ...")

    monkeypatch.setattr(go.Figure, "to_image", fail)
    with refuses(error, *named) as raised:
        run.charts("loss")[0].save(tmp_path / name, width)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_notebook_head_has_the_findings_and_charts_of_the_app(run: Run) -> None:
    first, more = assembly.head_sentences(run, "base", 1, 2)
    head = run.head(1, 2, "base")
    assert head.sentences == [*first, *more]
    blocks = [*assembly.head_card(run, "base", 1, 2), *assembly.head_blocks(run, "base", 1, 2)]
    charts = [block for block in blocks if isinstance(block, Chart)]
    assert titles(head) == titles(charts)
    assert len(head.blocks) >= len(head) == len(charts) > 4
    assert run.head(1, 2).title == f"Layer 1, head 2: {HOSTILE}", "the last model, as in the app"
    with refuses(BadInput, run.name, 9, 1, "run.heads"):
        run.head(1, 9)
    with refuses(BadInput, run.name, "'bass'", "'base'"):
        run.head(1, 2, "bass")


@pytest.mark.slow
def test_combined_runs_have_findings_too(run: Run, tmp_path: Path) -> None:
    other = synthetic_run(tmp_path, ("later",), layers=2, heads=4, pairs=4)
    findings = notebook.findings(combine_runs([run, other]))
    assert {"later", "base"} <= {*findings["model"]}


@pytest.mark.slow
def test_jupyter_gets_figures_for_its_own_viewer_and_text_without_styles(run: Run) -> None:
    outputs = [*run_page(run).outputs()]
    figures = [output[PLOTLY_MIME_TYPE] for output in outputs if PLOTLY_MIME_TYPE in output]
    page_charts = [block for blocks in run_page(run).sections.values() for block in blocks if isinstance(block, Chart)]
    assert isinstance(page_charts[0], Card), "the page begins with the cards of the overview"
    assert [figure["layout"].get("title", {}).get("text") for figure in figures] == [
        chart.picture.layout.title.text for chart in page_charts
    ]
    assert {figure["layout"]["template"]["layout"]["paper_bgcolor"] for figure in figures} == {"rgba(0,0,0,0)"}
    text = "".join(output.get("text/html", "") for output in outputs)
    assert "<b title" not in text, "labels are escaped"
    assert "<style" not in text
    assert "<script" not in text
    findings = run.findings()
    assert all(finding in unescape(text) for finding in findings.loc[findings["verdict"] == "", "text"])
    assert text.count("<summary>Evidence") == len(run_results.claims(all_results(run)))
    assert len(json.dumps(outputs)) < MAX_BYTES


@pytest.mark.slow
def test_frontends_without_a_viewer_get_a_self_contained_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[dict[str, str]] = []
    chart = run.charts("loss")[0]
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: displayed.append(bundle))
    for renderer, outputs in (("", 1), ("colab", 1), ("plotly_mimetype+notebook", 3), ("vscode", 3)):
        displayed.clear()
        monkeypatch.setattr(type(pio.renderers), "default", renderer)
        chart._ipython_display_()
        assert len(displayed) == outputs, renderer
        assert displayed[0]["text/html"].startswith("<iframe srcdoc=") == (outputs == 1)


@pytest.mark.browser
def test_notebook_output_is_drawn_without_errors_or_requests(run: Run, chromium: Browser, tmp_path: Path) -> None:
    outputs = [displayed._repr_html_() for displayed in (run, run.head(0, 1), run.charts("loss")[0])]
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset=utf-8>{''.join(outputs)}", encoding="utf-8")
    page = chromium.new_page(viewport={"width": 1000, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else problems.append(request.url)
    )
    page.goto((tmp_path / "notebook.html").as_uri())
    for index, (frame, heading) in enumerate(
        zip(page.frames[1:], (run.name, f"Layer 0, head 1: {HOSTILE}", titles(run.charts("loss"))[0]), strict=True)
    ):
        frame.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
        assert frame.inner_text("h1") == heading
        assert frame.locator(".main-svg").count() > 0
        height = page.locator("iframe").nth(index).bounding_box()["height"]
        assert abs(height - frame.evaluate("document.body.offsetHeight")) < 2, "the iframe has a scroll bar"
    folded = page.frames[1].locator("details:has(li)").first
    folded.locator("summary").first.click()
    assert folded.locator("li").first.is_visible()
    assert problems == []
    page.close()


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The example notebook, executed on shorter texts, and its working directory."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("[128]", "[48]").replace("ess2_128", "ess2_48")
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    return client.execute(), folder


@pytest.mark.model
@pytest.mark.browser
def test_example_notebook_runs_from_checkpoint_to_figure(executed: tuple[Any, Path]) -> None:
    notebook, folder = executed
    outputs = {
        cell.source.splitlines()[-1]: output["data"]  # the last one of the cell
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "data" in output  # libraries may write to stderr on a busy machine
    }
    for last in ("run", "charts", "description"):
        (cell,) = (cell for cell in notebook.cells if cell.source.splitlines()[-1] == last)
        assert any(PLOTLY_MIME_TYPE in output.get("data", {}) for output in cell.outputs), last
        assert len(json.dumps(cell.outputs)) < MAX_BYTES, last
    assert "loss.difference" in outputs['findings[findings.topic == "Loss"]']["text/html"]
    (run,) = (Run.open(path.parent) for path in folder.glob("runs/*/run.json"))
    heads = run.heads[run.heads["model"] == "base"]
    best = heads.loc[heads["ess2_48"].idxmax()]
    assert f"Layer {best['layer']}, head {best['head']}: base" in outputs["description"]["text/plain"]
    assert (folder / "effective-length.pdf").read_bytes().startswith(b"%PDF")


def test_the_example_notebook_is_stored_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")

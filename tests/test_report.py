"""The report is one valid self-contained file that shows the contents of the run; the terminal output of a run."""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from support.example_probes import Broken, Foreign, Late
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from headscope import rendering
from headscope.base import plugins
from headscope.errors import BadInput, CannotWrite
from headscope.probe import Probe
from headscope.rendering import assembly, html_page, run_description, run_results, terminal
from headscope.rendering.blocks import Chart
from headscope.rendering.text import column_heading, format_cell
from headscope.results import ranking, words
from headscope.results.collection import all_results
from headscope.results.questions import Question, questions
from headscope.results.result import Result
from headscope.results.words import sentence
from headscope.run import Run
from headscope.runs import summary
from headscope.runs.column_metadata import format_number, statistic
from headscope.runs.run import combine_runs
from probes.measure import results as measuring

pytestmark = pytest.mark.slow


VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = "</script><script>alert(1)</script>"


class Page(HTMLParser):
    """A parsed page: tags, attributes, text and scripts. Fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def headings(self) -> list[int]:
        return [int(tag[1]) for tag, _ in self.tags if re.fullmatch("h[1-6]", tag)]


def sentences(run: Run) -> dict[str, list[str]]:
    return {
        topic: [sentence(result) for result in results] for topic, results in assembly.results_by_topic(run).items()
    }


def results_of(run: Run, question: str, model: str = "", layers: str = "") -> list[Result]:
    """The results to a question; of one model, and of its "global" or "sliding-window" layers, if these are given."""
    return [
        result
        for result in all_results(run)
        if result.question == question and model in ("", result.model) and layers in ("", result.where.get("layers"))
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn", HOSTILE))


@pytest.fixture(scope="module")
def source(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = rendering.write_report([run], tmp_path_factory.mktemp("report") / "deep" / "report.html")
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(source: str) -> Page:
    return Page(source)


def test_the_first_sentence_lists_context_lengths_and_counts_the_documents_of_all_tables(
    run: Run, parsed: Page
) -> None:
    introduction = run_description.describe_run(run)
    assert introduction in parsed.text
    assert_names(introduction, 256, "1,024", "up to 6")


@pytest.mark.parametrize("probes", [["ablation"], ["patching"], ["circuit"], ["patterns", "ablation"]])
def test_the_first_sentence_counts_the_prompts_with_answers(tmp_path: Path, probes: list[str]) -> None:
    run = synthetic_run(tmp_path, probes=probes)
    introduction = run_description.describe_run(run)
    names = run.distinct(probes[-1], ["prompts", "pair"])
    assert_names(introduction, f"on {len(names)} prompts")
    assert ("document" in introduction) == (len(probes) > 1)


def test_report_makes_no_requests_and_contains_plotly_once(source: str, parsed: Page) -> None:
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            value = attributes.get(name) or ""
            assert value == "data:," or value.startswith("#") or not value, (tag, name, value)
    style = re.search(r"<style>(.*?)</style>", source, re.S)
    assert style
    assert not re.search(r"url\(|@import", style[1])
    assert get_plotlyjs()[:2000] not in source
    (packed,) = (script for script in parsed.scripts if script.startswith("H4sI"))  # gzip, in base64
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()


def test_content_security_policy_allows_only_the_two_scripts_of_the_report(parsed: Page) -> None:
    policy = next(
        a["content"] for tag, a in parsed.tags if tag == "meta" and "Content-Security" in str(a.get("http-equiv"))
    )
    assert policy
    (boot_script,) = (script for script in parsed.scripts if script.lstrip().startswith('"use strict"'))
    match = re.fullmatch(r"default-src 'none'; script-src ('sha256-\S+' 'sha256-\S+'); .*", policy)
    assert match
    digests = [hashlib.sha256(script.encode()).digest() for script in (get_plotlyjs(), boot_script)]
    assert match[1].split() == [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


def test_report_has_sections_and_landmarks_in_order(parsed: Page) -> None:
    tags = [tag for tag, _ in parsed.tags]
    assert [a.get("lang") for tag, a in parsed.tags if tag == "html"] == ["en"]
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == tags.count("header") == 1
    levels = parsed.headings()
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    assert len(ids) == len(set(ids))
    links = [str(a["href"])[1:] for tag, a in parsed.tags if tag == "a"]
    assert set(links) <= set(ids)
    titles = ("Overview", "In short", "Models", "Claims of the paper", "Notable heads", "Definitions", "Provenance")
    positions = [parsed.text.rindex(f"\n{title}\n") for title in titles]
    assert positions == sorted(positions)


def test_every_figure_has_a_caption_and_parses(parsed: Page) -> None:
    figures = [a for tag, a in parsed.tags if tag == "figure"]
    ids = {a.get("id") for _, a in parsed.tags}
    assert len(figures) > 15
    assert all(a["aria-labelledby"] in ids for a in figures)
    plotly_figures = [json.loads(script) for script in parsed.scripts if script.startswith("{") and '"data"' in script]
    assert len(plotly_figures) == len(figures)
    cards = sum(str(attributes.get("class")) == "card" for attributes in figures)
    assert cards >= 5
    assert ["text" in figure["layout"].get("title", {}) for figure in plotly_figures] == [
        index >= cards for index in range(len(figures))
    ], "the question of a card replaces the title"
    assert json.loads(parsed.scripts[0])["showSendToCloud"] is False


def test_report_contains_no_nan(parsed: Page) -> None:
    assert not re.search(r"\b(nan|NaN|None)\b", parsed.text)
    assert not any("NaN" in script or "Infinity" in script for script in parsed.scripts if script.startswith("{"))


def test_findings_count_local_heads_and_compare_losses(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"]
    (local,) = results_of(run, "length.local", "base")
    assert (local.value, local.n) == ((heads["ess2_1024"] < 8).sum(), 24)
    for loss in results_of(run, "loss.difference", "yarn"):
        assert (loss.low, loss.value, loss.high) == pytest.approx((0.05,) * 3, abs=5e-4)
        assert loss.n == run.nll[run.nll["context_length"] == loss.where["context_length"]]["doc"].nunique()
    gammas = run.heads["gamma"].gt(0).groupby(run.heads["model"].astype(str)).sum()
    positive = {result.model: result.details["positive"] for result in results_of(run, "positions.gamma")}
    assert positive == gammas[gammas > 0].to_dict() != {}


def windowed_rows(run: Run) -> pd.Series:
    """7 more rows in each bin of layers 1, 3, ... that do not see the first token."""
    return 7 * (run.attention["layer"] % 2)


def test_sliding_window_layers_are_summarised_apart_from_global_ones(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", "yarn"), probes=("measure",))
    layers = run.manifest["models"][0]["geometry"]["layers"]
    for model in run.manifest["models"]:
        model["geometry"]["windows"] = [64 if layer % 2 else None for layer in range(layers)]
    heads = run.heads.astype({"model": "str"}).set_index(["layer", "head"])
    name = "ess2_1024"
    ratio = heads.loc[heads["model"] == "yarn", name] / heads.loc[heads["model"] == "base", name]
    is_global = ratio.index.get_level_values("layer") % 2 == 0
    windowed = run.positions["layer"] % 2 == 1
    kept = run.positions["log_theta"].mask(windowed, run.positions["log_theta_base"])
    run._frames["positions"] = run.positions.assign(log_theta=kept)
    run._frames["attention"] = run.attention.assign(population=run.attention["population"] + windowed_rows(run))
    run._derived.clear()
    (unchanged,) = results_of(run, "positions.windowed_layers")
    assert (unchanged.model, unchanged.n) == ("yarn", layers // 2)
    assert [result.model for result in results_of(run, "length.median", layers="global")] == ["base", "yarn"]
    base = run.heads[run.heads["model"] == "base"]
    for window_label, rows in (
        ("global", base[base["layer"] % 2 == 0]),
        ("sliding-window", base[base["layer"] % 2 == 1]),
    ):
        (sinks,) = results_of(run, "length.sinks", "base", window_label)
        assert (sinks.details["count"], sinks.n) == ((rows["sink_mass"] > 0.5).sum(), len(rows))
        assert bool(sinks.details["sink_rows"]) == (window_label == "sliding-window")
        (growth,) = results_of(run, "growth.median", "base", window_label)
        assert (growth.value, growth.n) == (pytest.approx(rows["growth"].median()), len(rows))
        assert bool(growth.details["growth_limit"]) == (window_label == "sliding-window")
    windowed_head, global_head = (next(measuring.head_results(run, "base", layer, 0)) for layer in (1, 0))
    assert windowed_head.details["layer_window"] == 64
    assert "all rows" not in windowed_head.details["sink_rows"]
    assert not {"layer_window", "sink_rows"} & {*global_head.details}
    for window_label, part in (("global", ratio[is_global]), ("sliding-window", ratio[~is_global])):
        (change,) = results_of(run, "length.ratio", "yarn", window_label)
        assert (change.value, change.n) == (pytest.approx(part.median(), rel=1e-3), len(part))
        assert change.details["longer"] == (part > 1.01).sum()


def test_models_omitted_from_findings_are_named(tmp_path: Path) -> None:
    labels = [f"step-{10 * n}" for n in range(7)]
    run = synthetic_run(tmp_path, models=labels, lengths=(512,), docs=3, probes=("measure",))
    (note,) = assembly.results_by_topic(run)["Models"]
    assert note.question == "models.omitted"
    assert (note.details["shown"], note.details["models"]) == (6, 7)
    assert_names(note.details["omitted"], "step-30")
    assert "Models" not in sentences(
        synthetic_run(tmp_path / "few", models=labels[:6], lengths=(512,), docs=3, probes=("measure",))
    )


def test_losses_under_different_tokenizers_are_not_compared(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", "other", "unknown"), probes=("measure",))
    for model, digest in zip(run.manifest["models"], ("a", "b", None), strict=True):
        model["tokenizer_sha256"] = digest
    (refusal,) = results_of(run, "loss.not_compared")
    assert (refusal.model, refusal.baseline) == ("other", "base")
    assert_names(refusal.details["reason"], "tokenizers")
    compared = {(result.model, result.baseline) for result in results_of(run, "loss.difference")}
    assert compared == {("unknown", "base")}
    table = summary.model_table(run).set_index("model")
    assert np.isnan(table.loc["other", "nll_1024_diff"])
    assert np.isfinite(table.loc["unknown", "nll_1024_diff"])


def test_models_measured_on_other_texts_are_named(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", "yarn", "ntk"), probes=("measure",))
    for model, digest in zip(run.manifest["models"], "aab", strict=True):
        model["texts_sha256"] = {"texts of 512 tokens": digest}
    (note,) = assembly.results_by_topic(run)["Models"]
    assert (note.question, note.baseline, note.details["others"]) == ("models.texts", "base", ["ntk"])


def test_loss_findings_name_the_baseline(run: Run) -> None:
    """Which may be none of those that are texts of, such as the first step of a training."""
    first, *others = run.models
    results = [result for result in measuring.results(run) if result.question.startswith("loss.")]
    losses = [result for result in results if result.question == "loss.mean" and result.model == first]
    differences = [result for result in results if result.question == "loss.difference"]
    assert losses[0].where == {"context_length": 256}
    assert {result.baseline for result in differences} == {first}
    assert [result.model for result in differences] == [label for label in others for _ in losses]


def test_notable_heads_are_the_extremes(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"].set_index(["layer", "head"])
    reasons = assembly.notable_heads(run.heads)
    assert "largest effective length" in reasons[heads["ess2_1024"].idxmax()]
    assert "smallest effective length" in reasons[heads["ess2_1024"].idxmin()]
    assert "highest retrieval score" in reasons[heads["retrieval"].idxmax()]


def test_glossary_explains_what_the_runs_measured_and_nothing_else(run: Run, parsed: Page) -> None:
    def glossary(page: Page) -> str:
        return page.text.partition("How to read this")[2].partition("Statistics of heads")[0]

    other_terms = ("Effective length", "Rotary pair", "CoV", "Effective base", "Head influence")
    assert all(term in glossary(parsed) for term in ("Retrieval score", *other_terms))
    needles = {name: run.manifest["tables"][name] for name in ("needles", "retrieval")}
    page = Page(rendering.render_report([Run(run.path, {**run.manifest, "tables": needles})]))
    assert "Retrieval score" in glossary(page)
    assert not any(term in glossary(page) for term in other_terms)
    assert "highest retrieval score" in page.text


def test_a_single_model_has_no_comparison(parsed: Page, tmp_path: Path) -> None:
    single = Page(rendering.render_report([synthetic_run(tmp_path, models=("base",), docs=1)]))
    for text in (
        "Change against the first model",
        "compared with base",
        "under yarn",
        "+0.050 to",
    ):
        assert text in parsed.text
        assert text not in single.text
    for title in ("relative to base, by position", "of each head, compared with base"):
        assert any(title in script for script in parsed.scripts)
        assert not any(title in script for script in single.scripts)


@pytest.mark.parametrize("table", ["attention", "pairs", "nll", "positions", "scales"])
def test_a_run_of_one_table_makes_a_report(run: Run, tmp_path: Path, table: str) -> None:
    part = Run(run.path, {**run.manifest, "tables": {table: run.manifest["tables"][table]}})
    page = Page(rendering.render_report([part]))
    figures = sum(tag == "figure" for tag, _ in page.tags)
    assert (figures > 0) == (table != "positions")  # these frequencies change equally in every layer
    assert re.findall(r"Table (\w+):", page.text) == [table]
    introduction = run_description.describe_run(part)
    assert introduction in page.text
    assert ("3 documents" in introduction) == (table in {"attention", "pairs", "nll"})


def test_training_steps_have_their_own_section(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=[f"step-{n}" for n in range(8)], lengths=(256,), docs=1, probes=("measure",))
    models = [
        {**model, "step": 100 * n, "scheme": "base", "scheme_options": {}}
        for n, model in enumerate(run.manifest["models"])
    ]
    tables = {"attention": run.manifest["tables"]["attention"]}
    trained = Run(run.path, {**run.manifest, "models": models, "tables": tables})
    parsed = Page(rendering.render_report([trained]))
    assert "During training" in parsed.text
    assert "6 of the" in parsed.text
    (note,) = results_of(trained, "models.omitted")
    assert (note.details["shown"], note.details["models"]) == (6, 8)


def test_a_hostile_label_stays_text(source: str, parsed: Page) -> None:
    assert HOSTILE not in source
    assert "<script>alert" not in source
    assert HOSTILE in parsed.text


def test_numbers_are_short_and_infinity_is_not_a_number() -> None:
    assert html_page.to_json_values(np.array([1 / 3, np.nan, 2.0, np.inf])) == [0.33333, None, 2, None]
    assert format_number(np.inf) == "infinite"
    assert [format_number(x) for x in (738578.9, 45.67, 1.8, 0.01234, -1e-9)] == [
        "738,579",
        "45.7",
        "1.80",
        "0.012",
        "0.000",
    ]


def test_errors_name_the_cause(run: Run, tmp_path: Path) -> None:
    with refuses(BadInput, "report"):
        rendering.write_report([], tmp_path / "page.html")
    out = tmp_path / "file" / "report.html"
    out.parent.write_text("")
    loss = Run(run.path, {**run.manifest, "tables": {"nll": run.manifest["tables"]["nll"]}})
    with refuses(CannotWrite, out, "--out"):
        rendering.write_report([loss], out)


def test_a_report_can_be_written_to_a_file_name_without_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loss = Run(run.path, {**run.manifest, "tables": {"nll": run.manifest["tables"]["nll"]}})
    assert rendering.write_report([loss], "report.html") == Path("report.html")
    assert (tmp_path / "report.html").stat().st_size > 1e6
    rendering.write_report([loss], "report.html")  # an older report is replaced


def test_a_file_that_is_no_report_is_never_overwritten(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headscope: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("report.html")
    own.write_text("<html>my own page</html>")
    with refuses(CannotWrite, own, "--out"):
        rendering.write_report([run], own)
    code, out, err = headscope("demo")
    assert code == CannotWrite.exit_code
    assert_names(err, own, "--report")
    assert out == ""
    assert own.read_text() == "<html>my own page</html>"
    assert not Path("runs").exists()


def test_column_headings_and_cells_as_text() -> None:
    assert column_heading("nll_512_diff") == "loss against the first model at 512 (nats/token)"
    assert column_heading("ess2_1024") == "effective length at 1,024 (tokens)"
    assert column_heading("kv_group") == "kv group"
    row = {"nll_512": 3.14159, "growth": 0.5, "growth_low": 0.4, "growth_high": 0.6, "model": "base", "ess1": np.nan}
    assert format_cell(row, "nll_512") == "3.142"
    assert format_cell(row, "growth") == "0.500 (0.400 to 0.600)"
    assert (format_cell(row, "model"), format_cell(row, "ess1")) == ("base", "–")


# Third-party probes


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install probes for this test, after the probes of headscope."""
    own_probes = dict(plugins.probes())

    def add(*probes: Probe) -> None:
        monkeypatch.setattr(plugins, "probes", lambda: own_probes | {probe.name: probe for probe in probes})
        questions.cache_clear()

    yield add
    monkeypatch.undo()
    questions.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path) -> Run:
    """A run with the tables of two probes and no cached results."""
    return synthetic_run(tmp_path, models=("base", "yarn", HOSTILE), probes=("measure", "detectors"))


def test_a_third_party_probe_has_its_chapter_findings_and_terms(install: Callable[..., None], fresh: Run) -> None:
    before = sentences(fresh)
    install(Foreign())
    run = Run.open(fresh.path)
    findings = sentences(run)
    assert findings["Foreign matters"] == ["There are 3 models.", "Foreign [red]danger."]
    assert findings["Loss"] == [*before["Loss"], "Foreign losses are like ours."], (
        "topics with the same name are joined"
    )
    assert list(findings) == [*before, "Foreign matters"]
    chapters = assembly.collect_chapters(assembly.render_context(run))
    titles = [chart.figure.layout.title.text for group in chapters["Foreign matters"] for chart in group.charts]
    assert titles == ["At home with base", "Abroad"]
    page = Page(rendering.render_report([run]))
    glossary = page.text.partition("How to read this")[2].partition("Statistics of heads")[0]
    assert "How foreign a head is." in glossary
    assert "F = 1" in glossary
    assert "Of a table that no run has." not in glossary
    assert "Said by another probe already." not in glossary
    assert "A foreign caption." in page.text


def test_a_broken_probe_is_reported_and_the_rest_is_unchanged(
    install: Callable[..., None], fresh: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def charts(run: Run) -> list[tuple[str, str]]:
        chapters = assembly.collect_chapters(assembly.render_context(run))
        return [
            (title, getattr(block, "caption", ""))
            for title, groups in chapters.items()
            for group in groups
            for block in group.charts
        ]

    def without_foreign(findings: dict[str, list[str]]) -> dict[str, list[str]]:
        return {topic: [text for text in texts if "oreign" not in text] for topic, texts in findings.items()}

    before, charts_before, terms = sentences(fresh), charts(fresh), assembly.collect_glossary(fresh)
    install(Broken(), Late())
    run = Run.open(fresh.path)
    after = without_foreign(sentences(run))
    assert after.pop("Late matters") == ["There are 3 models."]
    assert after == before
    failed_chart = ("Late matters", "")  # a line in its place
    assert charts(run) == [*charts_before, failed_chart, ("Foreign matters", "A foreign caption.")]
    assert [term for term in assembly.collect_glossary(run) if "oreign" not in term.word] == terms
    log = "\n".join(caplog.messages)
    for part in (
        "'broken': part 'charts'",
        "'broken': part 'results'",
        "'broken': part 'glossary'",
        "'late': part 'charts'",
    ):
        assert log.count(part) == 1, part
    assert "RuntimeError: out of order" in log


# The terminal


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_the_terminal_shows_models_headlines_and_verdicts_and_all_results_on_request(
    install: Callable[..., None], fresh: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Foreign())
    monkeypatch.setenv("COLUMNS", "200")
    terminal.print_summary(fresh)
    output = " ".join(printed(capsys).split())
    assert "growth exponent" in output
    assert "loss against the first model at 1,024 (nats/token)" in output
    assert " ".join(["Headlines", *run_results.headline_lines(fresh)[0].split()]) in output
    assert f"CoV of pairs: {statistic('cov').explanation}" in output, "abbreviations are explained"
    assert "There are 3 models." not in output
    terminal.print_summary(fresh, show_all=True)
    output = " ".join(printed(capsys).split())
    assert all(" ".join(text.split()) in output for texts in sentences(fresh).values() for text in texts)
    terminal.print_warnings(fresh)
    assert capsys.readouterr().err.splitlines()[-1] == "headscope: Foreign [red]danger."
    terminal.print_next_steps(fresh)
    assert printed(capsys).splitlines() == [f"Next: headscope report {fresh.path}", f"Leave: foreign {fresh.path}"]


def test_a_run_of_many_models_is_listed_in_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = synthetic_run(
        tmp_path, models=[f"model-{index:02}" for index in range(12)], lengths=(512,), docs=1, probes=("measure",)
    )
    terminal.print_run_entry(run)
    first, rows = printed(capsys).splitlines()
    assert_names(first, run.name, 12, "model-00", "model-11")
    assert first.count("model-") == 6
    assert f"attention {len(run.attention):,}" in rows


def test_models_with_other_heads_are_not_compared_head_by_head(tmp_path: Path) -> None:
    small, large = (
        synthetic_run(tmp_path / label, models=(label,), layers=layers, probes=("measure", "needle"))
        for label, layers in (("small", 2), ("large", 4))
    )
    combined = combine_runs([small, large])
    assert "Change against the first model" not in sentences(combined)
    assert not results_of(combined, "retrieval.model_agreement")


@pytest.mark.parametrize("count", [4, 6])
def test_model_comparison_fits_80_columns_without_truncation(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than three models have a row each; a table that is too wide continues below."""
    monkeypatch.setenv("COLUMNS", "80")
    labels = [f"model-{index:02}" for index in range(count)]
    run = synthetic_run(tmp_path, models=labels, lengths=(512,), docs=3, probes=("measure", "needle"))
    terminal.print_summary(run)
    table = printed(capsys).partition("Headlines")[0].splitlines()[1:]
    assert "…" not in "".join(table)
    assert max(map(len, table)) <= 80
    assert len([line for line in table if line.startswith(" model-")]) == (2 * count if count == 4 else count)
    terminal.print_summary(run, show_all=True)
    every_statistic = printed(capsys)
    nll = (
        run.nll.assign(sum=run.nll["nll"] * run.nll["tokens"]).groupby("model", observed=True)[["sum", "tokens"]].sum()
    )
    assert all(f"{loss:.3f}" in every_statistic for loss in nll["sum"] / nll["tokens"])


def test_run_to_dict_holds_the_data_of_the_overviews(install: Callable[..., None], run: Run) -> None:
    install(Foreign())
    timed = Run(run.path, {**run.manifest, "timings": {"seconds": 1.0}})
    data = terminal.run_to_dict(timed)
    assert [row["model"] for row in data["summary"]] == ["base", "yarn", HOSTILE]
    assert {row["model"] for row in data["needles"]} == {"base", "yarn", HOSTILE}
    assert data["foreign"] == [{"n": 1}]
    assert [row["text"] for row in data["results"]] == [*timed.findings()["text"]]
    assert json.loads(json.dumps(data)) == data


def test_forty_lines_hold_the_summary_of_four_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    models = ("base", "yarn", "yarn without factor", "adarope")
    run = synthetic_run(tmp_path, models, layers=2, heads=4, lengths=(512, 2048), docs=3, pairs=4)
    terminal.print_summary(run)
    terminal.print_next_steps(run)
    lines = printed(capsys).splitlines()
    assert len(lines) <= 38, "headscope demo adds two lines"
    assert max(map(len, lines)) <= 120 or "/tmp" in max(lines, key=len)
    first, last = lines.index("Headlines"), next(i for i, line in enumerate(lines) if line.startswith("Claims of the"))
    verdicts = r"Claims of the paper: (\d+ [a-z ]+, )*\d+ [a-z ]+ \(headscope report .*\)"
    assert re.fullmatch(verdicts, lines[last])
    assert last - first == 9, "eight headlines of one line each"


def test_a_warning_goes_to_standard_error_and_into_the_report(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"test.limit": Question(name="test.limit", sentence="only {n} trials were run", level="warning", topic="T")}
    monkeypatch.setattr(run_results, "questions", lambda: asked)
    monkeypatch.setattr(words, "questions", lambda: asked)
    monkeypatch.setattr(ranking, "questions", lambda: asked)
    monkeypatch.setattr(run_results, "all_results", lambda run: [Result(question="test.limit", n=2)])
    terminal.print_warnings(run)
    output = capsys.readouterr()
    assert "headscope: Only 2 trials were run." in output.err.splitlines()
    assert output.out == ""
    assert run_results.summary_blocks(run)[0].sentences == ["Only 2 trials were run."]


@pytest.mark.parametrize(
    ("summary_text", "caption", "line", "explanation"),
    [
        ("", "One cell per head. Dark: few tokens.", "One cell per head.", "Dark: few tokens."),
        ("Median 3.", "One cell per head.", "Median 3.", "One cell per head."),
        ("", "One dot per head.", "One dot per head.", ""),
        ("", f"A long {'x' * 130}. End.", "", f"A long {'x' * 130}. End."),
    ],
)
def test_a_caption_shows_one_short_line_and_folds_the_rest(
    summary_text: str, caption: str, line: str, explanation: str
) -> None:
    chart = Chart(go.Figure(), caption, summary_text)
    assert (chart.line, chart.explanation) == (line, explanation)


@pytest.mark.parametrize("name", ["[bold]runs[/bold]", "[/oops]", "[link=https://example.org]x[/link]", ":smile:"])
def test_names_from_users_are_printed_without_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_line("Run: ", name)
    terminal.print_line("Open ", terminal.bold(name), " in a browser")
    terminal.print_table([{"": name, name: 1.0}], title=name)
    lines = printed(capsys).splitlines()
    assert lines[:2] == [f"Run: {name}", f"Open {name} in a browser"]
    assert sum(name in line for line in lines[2:]) == 3


def test_the_first_results_stand_for_the_headlines_of_a_run_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = synthetic_run(tmp_path, models=("base",), layers=1, heads=2, groups=1, pairs=4, lengths=(256,), docs=1)
    monkeypatch.setattr(run_results, "headline_lines", lambda run: [])
    monkeypatch.setattr(run_results, "row_lines", lambda run: [])
    monkeypatch.setattr(run_results, "MAX_ROWS", 2)
    terminal.print_summary(run)
    printed = capsys.readouterr().out
    texts = [sentence(result) for result in all_results(run)]
    assert [text in printed for text in texts] == [True, True, *[False] * (len(texts) - 2)]
    assert f"{len(texts) - 2} more with --all" in printed

"""The report is one valid file that asks no other host for anything, and tells what the run holds."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from headscope import findings, report
from headscope.errors import BadInput, CannotWrite
from headscope.store import Run
from headscope.synthetic import synthetic_run

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects tags, attributes, text and scripts, and complains about tags that do not nest."""

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn", "adarope"))


@pytest.fixture(scope="module")
def html(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = report.write([run], tmp_path_factory.mktemp("report") / "deep" / "report.html")
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(html: str) -> Page:
    return Page(html)


def test_it_loads_nothing_and_inlines_plotly_once(html: str, parsed: Page) -> None:
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            value = attributes.get(name) or ""
            assert value == "data:," or value.startswith("#") or not value, (tag, name, value)
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert style
    assert not re.search(r"url\(|@import", style[1])
    assert html.count(get_plotlyjs()[:2000]) == 1
    assert parsed.scripts.count(get_plotlyjs()) == 1


def test_the_policy_allows_only_its_own_two_scripts(html: str, parsed: Page) -> None:
    policy = next(
        a["content"] for tag, a in parsed.tags if tag == "meta" and "Content-Security" in str(a.get("http-equiv"))
    )
    assert policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    executed = [script for script in parsed.scripts if not script.lstrip().startswith(("{", "["))]
    assert len(executed) == 2
    assert all(f"'{report._sha256(script)}'" in policy for script in executed)


def test_the_sections_and_landmarks_are_there_in_order(parsed: Page) -> None:
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
    for title in ("How to read this", "Findings in words", "Models", "Heads worth a closer look", "Definitions"):
        assert title in parsed.text


def test_every_figure_has_a_caption_and_parses(parsed: Page) -> None:
    figures = [a for tag, a in parsed.tags if tag == "figure"]
    ids = {a.get("id") for _, a in parsed.tags}
    assert len(figures) > 15
    assert all(a["aria-labelledby"] in ids for a in figures)
    drawn = [json.loads(script) for script in parsed.scripts if script.startswith("{") and '"data"' in script]
    assert len(drawn) == len(figures)
    assert all(each["layout"]["title"]["text"] for each in drawn)
    assert json.loads(parsed.scripts[0])["showSendToCloud"] is False


def test_no_nan_reaches_the_reader(parsed: Page) -> None:
    assert not re.search(r"\b(nan|NaN|None)\b", parsed.text)
    assert not any("NaN" in script or "Infinity" in script for script in parsed.scripts if script.startswith("{"))


def test_findings_count_local_heads_and_compare_losses(run: Run) -> None:
    told = findings.sentences(run)
    heads = run.heads[run.heads["model"] == "base"]
    assert (
        f"{(heads['ess2_1024'] < 8).sum()} of 24 heads attend in effect to fewer than 8" in told["Effective length"][0]
    )
    assert "0.050 nats/token higher than that of base (95 % interval +0.050 to +0.050)" in " ".join(told["Loss"])
    assert "gamma is positive" in " ".join(told["Position parameters"])


def test_notable_heads_are_the_extremes(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"].set_index(["layer", "head"])
    chosen = findings.notable(run.heads)
    assert "most global" in chosen[heads["ess2_1024"].idxmax()]
    assert "most local" in chosen[heads["ess2_1024"].idxmin()]
    assert "highest retrieval score" in chosen[heads["retrieval"].idxmax()]


def test_a_report_explains_what_its_runs_measured_and_nothing_else(run: Run) -> None:
    needles = {name: run.manifest["tables"][name] for name in ("needles", "retrieval")}
    page = Page(report.render([Run(run.path, {**run.manifest, "tables": needles})]))
    read = page.text.partition("How to read this")[2].partition("Findings in words")[0]
    assert "Retrieval score" in read
    for absent in ("Effective length", "Rotary pair", "CoV", "Effective base", "Head influence"):
        assert absent not in read
    assert "highest retrieval score" in page.text
    assert "drawn above" not in page.text


def test_a_single_model_has_no_comparison(tmp_path: Path) -> None:
    alone = Page(report.render([synthetic_run(tmp_path, models=("base",), docs=1)]))
    assert "Change against" not in alone.text
    assert "One model" not in alone.text
    assert "against base" not in alone.text


@pytest.mark.parametrize("kept", ["attention", "pairs", "nll", "positions", "scales"])
def test_a_run_of_one_table_makes_a_report(run: Run, tmp_path: Path, kept: str) -> None:
    part = Run(run.path, {**run.manifest, "tables": {kept: run.manifest["tables"][kept]}})
    assert Page(report.render([part])).headings()[0] == 1


def test_training_steps_make_their_own_section(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=[f"step-{n}" for n in range(8)], lengths=(256,), docs=1)
    models = [{**model, "step": 100 * n} for n, model in enumerate(run.manifest["models"])]
    parsed = Page(report.render([Run(run.path, {**run.manifest, "models": models})]))
    assert "During training" in parsed.text
    assert "show 6 of the" in parsed.text


def test_a_hostile_label_stays_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    html = report.render([synthetic_run(tmp_path, models=("base", hostile))])
    assert hostile not in html
    assert "<script>alert" not in html
    assert hostile in Page(html).text


def test_numbers_are_short_and_never_lie_about_infinity() -> None:
    assert report.compact(np.array([1 / 3, np.nan, 2.0, np.inf])) == [0.33333, None, 2, None]
    assert findings.number(np.inf) == "infinite"
    assert [findings.number(x) for x in (738578.9, 45.67, 1.8, 0.01234, -1e-9)] == [
        "738,579",
        "45.7",
        "1.80",
        "0.012",
        "0.000",
    ]


def test_mistakes_are_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least one run"):
        report.write([], tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="choose another --out"):
        report.write([run], tmp_path / "file" / "report.html")

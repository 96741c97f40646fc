"""The shipped runs of spans: small, made from the generated prompts, and quoted by docs/spans.md."""

import json
import random
import sys
from pathlib import Path

import pytest
from support.shipped_runs import open_shipped

from headscope.base.heads import format_head
from headscope.cli.flags import EXAMPLES
from headscope.prompts.spans import parse_prompt
from headscope.results.collection import all_results
from headscope.results.questions import questions
from headscope.results.words import headline

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "spans.md").read_text(encoding="utf-8")
sys.path.insert(0, str(DOCS))
import span_study  # noqa: E402

MODELS = ("base", "yarn", "adarope")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def test_the_runs_are_small_and_have_the_generated_prompts() -> None:
    sizes = [file.stat().st_size for path in EXAMPLES.glob("*-spans-*") for file in path.iterdir()]
    assert sum(sizes) < 1.5e6
    for name, (prompts, options) in span_study.STUDIES.items():
        run = open_shipped(name)
        lines = [json.dumps(prompt) for prompt in prompts(random.Random(span_study.SEED))]
        groups = [parse_prompt(json.loads(line), "p", "p").group for line in lines]
        rows = run.table("span_prompts")
        assert run.manifest["config"]["models"] == span_study.MODELS
        for model in MODELS:
            of_model = rows[rows["model"] == model].sort_values("number")
            assert of_model["group"].astype(str).to_list() == groups
            assert {*zip(of_model["query"], of_model["key"], strict=True)} == {(options["query"], options["key"])}


@pytest.mark.parametrize("name", [*span_study.STUDIES])
def test_the_page_has_the_head_of_largest_mass_and_the_rank_correlation_with_base(name: str) -> None:
    run = open_shipped(name)
    masses = run.heads.pivot(index=["layer", "head"], columns="model", values="spans_mass")
    ranks = masses.corr(method="spearman")["base"]
    for model in MODELS:
        rows = run.heads[run.heads["model"] == model]
        top = rows.loc[rows["spans_mass"].idxmax()]
        unit = format_head(int(top["layer"]), int(top["head"]))
        cells = (unit, percent(top["spans_mass"]), percent(rows["spans_mass"].median()), f"{ranks[model]:.2f}")
        assert f"| {name.removeprefix('spans-')} | {model} | {' | '.join(cells)} |" in PAGE


def test_the_page_quotes_the_findings_about_injections_and_the_heads_of_code() -> None:
    injected = [result for result in all_results(open_shipped("spans-injected")) if result.question == "spans.held_out"]
    assert len(injected) == len(MODELS)
    assert all(f"| {result.model} | {result.value:.2f} |" in PAGE for result in injected)
    rows = open_shipped("spans-code").table("spans")
    means = rows.groupby(["model", "key", "layer", "head"], observed=True)[["mass", "chance"]].mean().reset_index()
    for key, of_key in means[means["model"] == "base"].groupby("key", observed=True):
        top = of_key.loc[of_key["mass"].idxmax()]
        unit = format_head(int(top["layer"]), int(top["head"]))
        assert f"| {key} | {unit} | {percent(top['mass'])} | {percent(top['chance'])} |" in PAGE


@pytest.mark.slow
def test_headlines_of_the_runs_have_at_most_100_characters() -> None:
    for name in span_study.STUDIES:
        shown = [result for result in all_results(open_shipped(name)) if result.question.startswith("spans.")]
        texts = [headline(result) for result in shown if questions()[result.question].level == "headline"]
        assert max(map(len, texts)) <= 100

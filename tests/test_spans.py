"""The spans probe: runs over prompts and texts, two groups, published formulas, results and charts."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import eager_reference, families, tokenizers
from support.measure_laws import full_pass_record, geometry_of, weights
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import WORDS, save_checkpoint, save_texts
from support.tiny_studies import tokenizer as tiny_tokenizer

import headscope as hs
from headscope.base.head_set import HeadSet
from headscope.base.heads import parse_head
from headscope.base.model_identity import WeightDigests
from headscope.errors import BadInput, BadOption
from headscope.measures.span_mass import SpanMass
from headscope.prompts.span_tokens import tokenize_spans
from headscope.prompts.spans import parse_prompt
from headscope.rendering import assembly, run_results
from headscope.rendering.explorer_blocks import LinkChoice
from headscope.results import words as words_of_results
from headscope.results.effects.groups import auroc, auroc_interval, compare_groups, judge_held_out
from headscope.results.result import Result
from headscope.run import Run
from headscope.runs.aggregation import confidence_interval, plain_types
from headscope.study.config import build_study
from probes.spans import results, view
from probes.spans.analysis import head_scores, shown_pairs, span_means
from probes.spans.layout import named_spans
from probes.spans.view import pair_page

PROMPTS = 20


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(WORDS[:120], count))


def write_prompts(path: Path, prompts: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, prompts)))
    return str(path)


def injected_prompts() -> list[dict[str, Any]]:
    """An instruction and data; in half of the prompts the data end with another instruction."""
    rng = np.random.default_rng(0)
    return [
        {
            "segments": [
                {"text": "w1 "},
                {"name": "instruction", "text": words(rng, 6)},
                {"text": " w2 "},
                {"name": "data", "text": words(rng, 9)},
            ],
            "group": "harmless" if number % 2 == 0 else "attack",
            "continuation": " " + words(rng, 5),
        }
        for number in range(PROMPTS)
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("spans")
    models = {"base": str(tiny), "yarn": f"{tiny}@yarn:factor=4"}
    file = write_prompts(folder / "injected.jsonl", injected_prompts())
    return hs.spans(models, prompts=file, query="last", key="instruction", out=folder / "runs", quiet=True)


@pytest.fixture(scope="module")
def alphas(tiny: Path, run: Run) -> list[torch.Tensor]:
    """Eager weights [layers, H, L, L] of every prompt, from token ids of our own."""
    module = hs.load(str(tiny), device="cpu").module
    vocabulary = {word: n + 3 for n, word in enumerate(WORDS)}
    eager = []
    for prompt in injected_prompts():
        text = "".join(segment["text"] for segment in prompt["segments"]) + prompt["continuation"]
        ids = torch.tensor([vocabulary[word] for word in text.split()])
        eager.append(torch.stack([*map(eager_reference.layer_weights, eager_reference.eager_qk(module, ids[None])[1])]))
    return eager


INSTRUCTION, LAST, CONTEXT = slice(1, 7), 16, 17
"""Tokens of the instruction, the last token of the prompt and the length of the prompt: a word is a token."""


# Published formulas ------------------------------------------------------------------------------------------------


def test_attention_tracker_is_the_mean_mass_from_the_last_token_to_the_instruction(
    run: Run, alphas: list[torch.Tensor]
) -> None:
    """Hung et al. 2025: Attn(I) is the sum over I of the weights of the last token; heads are those with
    mean(normal) - 4 sd(normal) above mean(attack) + 4 sd(attack), here those of the largest gap; the focus score is the
    mean of Attn(I) over these heads."""
    attention = torch.stack([alpha[:, :, LAST, INSTRUCTION].sum(-1) for alpha in alphas])
    normal, attack = attention[0::2], attention[1::2]
    gap = normal.mean(0) - 4 * normal.std(0) - (attack.mean(0) + 4 * attack.std(0))
    order = gap.flatten().argsort(descending=True)[:5]
    heads = [(int(n) // families.HEADS, int(n) % families.HEADS) for n in order]
    focus = torch.stack([attention[:, layer, head] for layer, head in heads]).mean(0)
    assert shown_pairs(run)["base"] == ("last", "instruction")
    scores = head_scores(run, "base").droplevel("kv_group").loc[heads]
    np.testing.assert_allclose(scores.mean(), focus, atol=1e-6)


def test_lookback_lens_ratios_equal_the_published_formula(run: Run, alphas: list[torch.Tensor]) -> None:
    """Chuang et al. 2024: mean weight on the context over its sum with the mean weight on new tokens."""
    rows = run.rows("span_lookback", model="base", key="prompt")
    stored = rows.pivot(index=["layer", "head"], columns="doc", values="ratio")
    for number, alpha in enumerate(alphas, start=1):
        steps = []
        for row in range(CONTEXT, alpha.shape[-1]):
            context = alpha[:, :, row, :CONTEXT].mean(-1)
            steps.append(context / (context + alpha[:, :, row, CONTEXT : row + 1].mean(-1)))
        np.testing.assert_allclose(stored[f"injected/{number}"], torch.stack(steps).mean(0).flatten(), atol=5e-6)
    heads = run.heads[run.heads["model"] == "base"].set_index(["layer", "head"])
    np.testing.assert_allclose(heads["lookback_ratio"], stored.mean(axis=1), rtol=1e-5)


# Runs --------------------------------------------------------------------------------------------------------------


def test_the_head_table_has_mass_and_excess_with_intervals_over_prompts(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "yarn"].set_index(["layer", "head"])
    rows = run.rows("spans", model="yarn", query="last", key="instruction").astype({"mass": "float64"})
    np.testing.assert_allclose(heads["spans_mass"], rows.groupby(["layer", "head"])["mass"].mean(), rtol=1e-6)
    assert (heads["spans_mass_low"] < heads["spans_mass"]).all()
    chance = 6 / 17
    np.testing.assert_allclose(heads["spans_mass"] - heads["spans_excess"], chance, rtol=1e-5)
    assert len(run.top_heads("spans_auroc", 10, model="base")) == 10
    assert {*run.table("spans")["query"]} == {"instruction", "data", "generated", "rest", "last", "all"}
    assert {*run.table("span_steps")["step"]} == {1, 2, 4, 8}


def test_steps_average_to_the_generated_span(run: Run) -> None:
    keys = ["model", "doc", "layer", "head", "key"]
    steps = run.table("span_steps").astype({"mass": "float64"})
    sums = steps.assign(total=steps["mass"] * steps["rows"]).groupby(keys, observed=True)[["total", "rows"]].sum()
    spans = run.table("spans").query("query == 'generated'").set_index(keys)["mass"]
    np.testing.assert_allclose(sums["total"] / sums["rows"], spans.sort_index(), atol=1e-6)


def test_results_and_charts_have_the_numbers_of_the_tables(run: Run) -> None:
    answers = {result.question: result for result in results.results(run) if result.model == "base"}
    heads = run.heads[run.heads["model"] == "base"]
    best = heads.loc[heads["spans_mass"].idxmax()]
    top = answers["spans.top_head"]
    assert (top.layer, top.head, top.value) == (best["layer"], best["head"], pytest.approx(best["spans_mass"]))
    names = {"first": "harmless", "second": "attack"}
    assert answers["spans.groups"].details == {**names, "prompts": PROMPTS}, "in the order of the file"
    attack = run.rows("spans", model="base", layer=0, head=0, query="last", key="instruction").set_index("doc")["mass"]
    in_order = attack.astype(float).reindex([f"injected/{number}" for number in range(1, PROMPTS + 1)]).to_numpy()
    first = heads.query("layer == 0 and head == 0")
    assert first["spans_difference"].item() == pytest.approx(in_order[1::2].mean() - in_order[::2].mean(), abs=1e-6)
    assert answers["spans.groups"].value == (heads["spans_p"] < 0.05).sum()
    separating = answers["spans.separating_head"]
    assert abs(separating.value - 0.5) == pytest.approx((heads["spans_auroc"] - 0.5).abs().max())
    assert separating.low < separating.value < separating.high or separating.value in (0, 1)
    context = assembly.render_context(run)
    charts = [chart for group in view.charts(context) for chart in group.charts]
    assert len(charts) == 13
    (passage,) = view.head_card(run, "base", 1, 2)
    assert [row[0] for row in passage.rows] == ["first", "instruction", "rest", "data", "generated"]
    weights = run.rows("span_weights", model="base", layer=1, head=2)["weight"]
    assert weights.sum() == pytest.approx(1, abs=1e-5)
    assert len([*view.head_charts(run, "base", 1, 2)]) == 2
    matrix = span_means(run, "base", 1, 2).set_index(["query", "key"])["mass"]
    assert matrix["last", "instruction"] == pytest.approx(
        run.heads.query("model == 'base' and layer == 1 and head == 2")["spans_mass"].item(), rel=1e-5
    )


@pytest.mark.slow
def test_two_runs_are_compared_prompt_by_prompt_and_checked_by_the_interval(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    file = write_prompts(tmp_path / "injected.jsonl", injected_prompts())
    options = {"query": "last", "key": "instruction", "out": tmp_path, "quiet": True}
    later = hs.spans({"base": f"{tiny}@linear:factor=1.0005"}, prompts=file, **options)
    row = hs.compare(run, later).set_index("question").loc["spans.top_head"]
    head = row["unit_before"]
    assert row["unit_after"] == head, "values of two heads are not paired"
    means = [head_scores(part, "base").droplevel("kv_group").loc[parse_head(head)] for part in (run, later)]
    low, high = confidence_interval(means[0].to_numpy()[None])[:, 0]
    lower, upper = confidence_interval((means[1] - means[0]).to_numpy()[None])[:, 0]
    assert row["paired"] == PROMPTS
    assert [*row[["low", "high"]]] == pytest.approx([lower, upper], rel=1e-6)
    of_head = {"statistic": "spans_mass", "head": head, "model": "base"}
    bounds = [{"at_least": low - 1e-6}, {"at_least": low + 1e-6}, {"at_least": high + 1e-6}]
    assert [*hs.check(run, [of_head | bound for bound in bounds])["outcome"]] == ["passes", "undecided", "fails"]
    bounds = [{"rises_at_most": upper + 1e-6}, {"rises_at_most": upper - 1e-6}, {"rises_at_most": lower - 1e-6}]
    outcomes = hs.check(later, [of_head | bound for bound in bounds], against=run)["outcome"]
    assert [*outcomes] == ["passes", "undecided", "fails"]
    assert [*hs.check(run, [{"result": "spans.top_head", "at_least": 0.0}])["outcome"]] == ["passes", "passes"]


def test_any_pair_of_spans_shows_all_heads(run: Run) -> None:
    page = pair_page(assembly.render_context(run, "yarn"), {"from": "data", "to": "first"})
    query, key = page.sections[""]
    assert isinstance(query, LinkChoice)
    assert (query.links[query.selected_index].text, key.links[key.selected_index].text) == ("data", "first")
    table = run.table("spans")
    rows = table[(table["model"] == "yarn") & (table["query"] == "data") & (table["key"] == "first")]
    means = rows.groupby(["layer", "head"], observed=True)["mass"].mean()
    np.testing.assert_allclose(page.sections["All heads"][-1].figure.data[0].x, np.sort(means)[::-1], rtol=1e-6)
    default = pair_page(assembly.render_context(run), {"to": "none"})
    masses = run.heads[run.heads["model"] == "base"]["spans_mass"]
    np.testing.assert_allclose(default.sections["All heads"][-1].figure.data[0].x, np.sort(masses)[::-1], rtol=1e-6)
    assert_names(" ".join(default.sections[""][2].sentences), "‘none’", "instruction")


def test_generated_tokens_are_greedy_and_a_span(tiny: Path, tmp_path: Path) -> None:
    prompts = [
        {"text": f"w1 [[context]]{words(np.random.default_rng(n), 8)}[[/context]]", "generate": 4} for n in (0, 1)
    ]
    file = write_prompts(tmp_path / "p.jsonl", prompts)
    run = hs.spans(str(tiny), prompts=file, out=tmp_path / "runs", quiet=True)
    assert [*shown_pairs(run).values()] == [("generated", "context")]
    model = hs.load(str(tiny), device="cpu")
    ids = model.tokenizer(prompts[0]["text"].replace("[[context]]", "").replace("[[/context]]", ""))["input_ids"]
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model.module(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.tokenizer.eos_token_id:
            break
    assert ids.pop() == model.tokenizer.eos_token_id, "the end token is no text"
    stored = run.table("span_tokens").sort_values("position")
    assert stored["text"].str.strip().tolist() == model.tokenizer.convert_ids_to_tokens(ids)
    assert (stored["span"] == "generated").sum() == len(ids) - 9
    (rows,) = {*run.rows("span_lookback", doc="p/1", key="prompt")["rows"]}
    assert rows == len(ids) - 9


def test_an_end_token_that_is_the_only_generated_token_is_kept(tiny: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(tiny, checkpoint)
    prompt = {"text": f"w1 [[context]]{words(np.random.default_rng(0), 8)}[[/context]]", "generate": 4}
    file = write_prompts(tmp_path / "p.jsonl", [prompt])
    model = hs.load(str(tiny), device="cpu")
    ids = model.tokenizer(prompt["text"].replace("[[context]]", "").replace("[[/context]]", ""))["input_ids"]
    first = int(model.module(torch.tensor([ids])).logits[0, -1].argmax())
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    run = hs.spans(str(checkpoint), prompts=file, out=tmp_path / "runs", quiet=True)
    assert (run.table("span_tokens")["span"] == "generated").sum() == 1


def test_the_first_token_is_no_key_of_classes_and_relations() -> None:
    """A digit, a comma or a bracket at position 0 is a sink: it counts as `first` only."""
    tokenizer = tokenizers.tokenizer("characters")
    for text in ("1a1b1c", "(a)(b)"):
        tokens = tokenize_spans(tokenizer, parse_prompt({"text": text}, "p", "line 1"))
        spans = named_spans(tokens, tokenizer, ["digit", "bracket", "same", "matching"])
        length = len(text)
        is_of = {"digit": str.isdigit, "bracket": "()".__contains__}
        for name, belongs in is_of.items():
            expected = [at > 0 and belongs(character) for at, character in enumerate(text)]
            for masks in (spans.queries, spans.keys):
                assert masks.get(name, np.zeros(length, bool)).tolist() == expected
        q, k = torch.randn(2, length, 8), torch.randn(1, length, 8)
        mass = SpanMass(geometry_of(2, 1, windows=(None,)), spans.layout)
        mass.update(full_pass_record(q, k))
        frame = pd.DataFrame(mass.compute())
        alpha, row = weights(full_pass_record(q, k)), [*spans.queries].index("all")
        same = [[at for at in range(1, i) if text[at] == text[i]] for i in range(length)]
        rows = [i for i in range(length) if same[i]]
        stored = frame[(frame["query"] == row) & (frame["key"] == spans.key_names.index("same"))]
        expected_mass = torch.stack([alpha[:, i, same[i]].sum(-1) for i in rows]).mean(0)
        np.testing.assert_allclose(stored["mass"], expected_mass, atol=1e-5)
        assert {*stored["rows"]} == {len(rows)}
        assert spans.matching.tolist() == ([-1] * 5 + [3] if text[0] == "(" else [-1] * 6)


def test_texts_without_the_pair_and_heads_that_hide_it_are_a_warning(tmp_path: Path) -> None:
    """Layers with a window do not see the context of a long prompt; one prompt has no context."""
    families.MEASURABLE["gemma3"]().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    prompts = [{"text": f"w1 [[context]]w2 w3[[/context]] {words(rng, count)}"} for count in (2, 40)]
    prompts.append({"text": f"w1 [[question]]{words(rng, 6)}[[/question]]"})
    file = write_prompts(tmp_path / "p.jsonl", prompts)
    run = hs.spans(str(tmp_path / "model"), prompts=file, key="context", out=tmp_path / "runs", quiet=True)
    answers = {result.question: result for result in results.results(run)}
    rows = run.rows("spans", query="last", key="context")
    counts = rows.groupby(["layer", "head"])["doc"].nunique()
    every = run.table("spans")[["layer", "head"]].drop_duplicates()
    complete = counts[counts == 2]
    assert 0 < len(complete) < len(every)
    warning = answers["spans.incomplete"]
    assert (warning.value, warning.n) == (1, 3)
    assert warning.details == {"left_out": len(every) - len(complete), "heads": len(every)}
    heads = run.heads.dropna(subset=["spans_mass"])
    assert {*zip(heads["layer"], heads["head"], strict=True)} == {*complete.index}
    best, top = heads.loc[heads["spans_mass"].idxmax()], answers["spans.top_head"]
    assert (top.layer, top.head, top.value) == (best["layer"], best["head"], pytest.approx(best["spans_mass"]))
    assert top.selected_from == len(complete)


def test_the_headline_names_another_span(run: Run) -> None:
    (top,) = (r for r in results.results(run) if r.question == "spans.top_head" and r.model == "base")
    assert (top.details["spans"], top.details["other"]) == (2, "data")
    assert "--key data" in " ".join(run.findings().query("question == 'spans.top_head'")["text"])
    assert "spans.incomplete" not in {result.question for result in results.results(run)}


def test_ordinary_texts_are_measured_by_token_class_in_a_shared_pass(tiny: Path, tmp_path: Path) -> None:
    source = save_texts(tmp_path / "texts")
    content = {
        "models": {"base": str(tiny)},
        "texts": {"source": source, "docs": 3},
        "device": "cpu",
        "patterns": {"lengths": [24, 40], "rows": 8},
        "spans": {"lengths": [24, 40], "classes": ["end=[.]$", "same", "odd=[13579]$", "digit"]},
    }
    run = hs.run_study(content, tmp_path / "runs")
    rows = run.table("spans")
    assert {*rows["query"]} == {"end", "odd", "digit", "all"}
    assert {*rows["key"]} == {"first", "rest", "end", "odd", "digit", "same"}
    assert [*shown_pairs(run).values()] == [("all", "end")]
    assert len(json.loads((run.path / "run.json").read_text())["models"]) == 1
    everything = rows.query("query == 'all' and key in ('first', 'rest')")
    weighted = everything.assign(mass=everything["mass"] * everything["rows"]).astype({"mass": "float64"})
    sums = weighted.groupby(["context_length", "doc", "layer", "head"], observed=True)["mass"].sum()
    np.testing.assert_allclose(sums, sums.index.get_level_values("context_length"), rtol=1e-5)


def test_a_prompt_with_marks_and_its_own_chat_template(tmp_path: Path) -> None:
    families.SPECS["llama-gqa"].build(0).save_pretrained(tmp_path / "model")
    tokenizer = tokenizers.tokenizer.__wrapped__("characters")
    tokenizer.chat_template = "<s>{{ messages[0]['content'] }}</s>{% if add_generation_prompt %}A{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    run = hs.spans(
        str(tmp_path / "model"), prompt="Do [[data]]it[[/data]] now", template=True, out=tmp_path / "runs", quiet=True
    )
    stored = run.table("span_tokens").sort_values("position")
    assert stored["span"].tolist() == ["first", *["user"] * 3, *["data"] * 2, *["user"] * 4, *["template"] * 2]
    assert [*shown_pairs(run).values()] == [("last", "user")]
    with refuses(BadInput, "prompt", "'user'", "mark"):
        hs.spans(str(tmp_path / "model"), prompt="Do [[user]]it[[/user]]", template=True, out=tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, ("'prompts'", "'prompt'", "'classes'")),
        ({"classes": ["digits"]}, ("spans.classes", "'digits'", "'digit'")),
        ({"classes": ["x=("]}, ("spans.classes", "'x'", "'('")),
    ],
)
def test_bad_options_are_refused_in_one_line(options: Any, named: tuple[str, ...]) -> None:
    with refuses(BadOption, *named) as raised:
        build_study({"spans": options})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ([{"text": "w1 [[a]]w2[[/a]]"}], {"key": "b"}, ("key", "'b'", "first", "a")),
        ([{"text": "w1 [[a]]w2[[/a]]"}], {"query": "lst"}, ("query", "'lst'", "'last'")),
        ([{"text": "w1 [[a]]w2[[/a]]"}, {"text": "w1 [[b]]w2[[/b]]"}], {}, ("line 2", "line 1")),
        ([{"text": "w1 [[digit]]w2[[/digit]]"}], {"classes": ["digit"]}, ("line 1", "'digit'", "class")),
        (
            [{"text": "w1 [[a]]w2[[/a]]"}, {"messages": [{"role": "user", "content": "w1"}]}],
            {"classes": ["user=w"]},
            ("line 2", "'user'", "class"),
        ),
        (
            [{"messages": [{"role": "user", "content": text} for text in ("w1", "w2")]}],
            {"classes": ["user 2=w"]},
            ("line 1", "'user 2'", "class"),
        ),
    ],
)
def test_prompts_that_cannot_be_measured_are_refused(
    tiny: Path, tmp_path: Path, prompts: Any, options: Any, named: tuple[str, ...]
) -> None:
    with refuses(BadInput, *named):
        hs.spans(str(tiny), prompts=write_prompts(tmp_path / "p.jsonl", prompts), out=tmp_path, quiet=True, **options)


def test_a_class_without_tokens_is_a_warning(tiny: Path, tmp_path: Path) -> None:
    prompt = write_prompts(tmp_path / "p.jsonl", [{"text": "w1 [[a]]w2 w3[[/a]]"}])
    run = hs.spans(str(tiny), prompts=prompt, classes=["newline"], key="newline", out=tmp_path, quiet=True)
    (result,) = results.results(run)
    assert (result.question, result.details) == ("spans.missing", {"query": "last", "key": "newline"})
    assert "spans_mass" not in run.heads
    assert len([*view.head_charts(run, "base", 0, 0)]) == 1


def test_a_prompt_without_marks_is_refused(tiny: Path, tmp_path: Path) -> None:
    with refuses(BadInput, "[[context]]...[[/context]]", "'classes'"):
        hs.spans(str(tiny), prompt="w1 w2 w3", out=tmp_path, quiet=True)


def test_synthetic_runs_have_every_part(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, probes=("spans",))
    assert {"spans_mass", "spans_auroc", "lookback_ratio"} <= {*run.heads}
    assert {result.question for result in results.results(run)} >= {"spans.top_head", "spans.held_out"}
    assert all([*group.charts] for group in view.charts(assembly.render_context(run)))
    assert len(head_scores(run, "base")) == 24


# Two groups --------------------------------------------------------------------------------------------------------


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    scores, is_second = rng.integers(0, 6, (5, 17)).astype(float), np.arange(17) % 3 == 0
    pairs = scores[:, is_second][:, :, None] - scores[:, ~is_second][:, None]
    np.testing.assert_allclose(auroc(scores, is_second), ((pairs > 0) + 0.5 * (pairs == 0)).mean((1, 2)))


@pytest.mark.parametrize(("separation", "sizes"), [(0.0, (12, 12)), (1.0, (20, 10)), (2.0, (15, 15))])
def test_intervals_of_the_auroc_cover(separation: float, sizes: tuple[int, int]) -> None:
    """At least 92 % of 2,000 samples of two normal distributions."""
    from scipy.stats import norm

    rng = np.random.default_rng(1)
    is_second = np.arange(sum(sizes)) >= sizes[0]
    scores = rng.normal(size=(2000, sum(sizes))) + separation * is_second
    low, high = auroc_interval(auroc(scores, is_second), *sizes)
    true = norm.cdf(separation / np.sqrt(2))
    assert ((low <= true) & (true <= high)).mean() >= 0.92
    extreme_low, extreme_high = auroc_interval(1.0, *sizes)
    assert extreme_low < 1 == extreme_high


@pytest.mark.slow
def test_random_labels_find_no_head_and_a_planted_difference_is_found() -> None:
    """270 heads that share a prompt effect, 60 prompts a group: in at least 19 of 20 seeds."""
    quiet, found = 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=(270, 120)) + rng.normal(size=(1, 120))
        is_second = rng.permutation(120) < 60
        compared, judged = compare_groups(pd.DataFrame(scores), is_second), judge_held_out(scores, is_second, seed)
        assert judged is not None
        quiet += 0.4 <= judged.auroc <= 0.6 and not (compared["p_adjusted"] < 0.05).any()
        planted = scores.copy()
        planted[7] += 2.5 * is_second
        compared, judged = compare_groups(pd.DataFrame(planted), is_second), judge_held_out(planted, is_second, seed)
        assert judged is not None
        found += bool(
            compared["p_adjusted"][7] < 0.05 and compared["auroc"].idxmax() == 7 and judged.times_chosen[7] == 20
        )
    assert quiet >= 19
    assert found >= 19


def test_too_few_prompts_have_no_interval_and_no_held_out_judgement() -> None:
    scores, is_second = np.random.default_rng(0).normal(size=(4, 6)), np.arange(6) >= 2
    compared = compare_groups(pd.DataFrame(scores), is_second)
    assert compared[["auroc", "difference"]].notna().all(None)
    assert compared[["auroc_low", "difference_low", "p_adjusted"]].isna().all(None)
    assert judge_held_out(scores, is_second) is None


# Steering ----------------------------------------------------------------------------------------------------------


def choice_prompts() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    segments = [[{"text": "w1 "}, {"name": "rule", "text": words(rng, 4)}, {"text": " w2"}] for _ in range(4)]
    return [{"segments": parts, "continuation": " w5 w6", "wrong": " w7"} for parts in segments]


def test_steering_scores_the_continuation_and_the_choice_with_and_without(tiny: Path, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "choice.jsonl", choice_prompts())
    options: dict[str, Any] = {"prompts": file, "key": "rule", "steer": 0.01, "heads": ["L1H2", "L0H1"], "quiet": True}
    run = hs.spans(str(tiny), **options, keep_failing=True, out=tmp_path / "runs")
    stored = run.table("span_steering").pivot(index="doc", columns="metric", values=["plain", "steered"])
    model = hs.load(str(tiny), device="cpu")
    vocabulary = {word: n + 3 for n, word in enumerate(WORDS)}

    def log_probability(ids: list[int], text: str) -> float:
        new = [vocabulary[word] for word in text.split()]
        with torch.no_grad():
            logits = model.module(torch.tensor([ids + new]), use_cache=False).logits[0].double()
        rows = logits[len(ids) - 1 : -1].log_softmax(-1)
        return float(sum(row[token] for row, token in zip(rows, new, strict=True)))

    for number, prompt in enumerate(choice_prompts(), start=1):
        ids = [vocabulary[word] for part in prompt["segments"] for word in part["text"].split()]
        rule = range(1, 5)
        for column in ("plain", "steered"):
            with hs.steered(model, "L1H2,L0H1", rule, 0.01 if column == "steered" else 1):
                right, wrong = (log_probability(ids, prompt[name]) for name in ("continuation", "wrong"))
            row = stored.loc[f"choice/{number}", column]
            np.testing.assert_allclose((row["logprob"], row["lead"]), (right / 2, right - wrong), atol=1e-5)
    changes = {
        result.question: result for result in results.results(run) if result.question.startswith("spans.steered")
    }
    change = stored["steered"] - stored["plain"]
    assert abs(change["logprob"]).min() > 1e-6
    assert changes["spans.steered"].value == pytest.approx(change["logprob"].mean(), abs=1e-6)
    assert changes["spans.steered_choice"].value == pytest.approx(change["lead"].mean(), abs=1e-6)
    assert "L1H2" in assembly.render_context(run).run.findings().query("question == 'spans.steered'")["text"].item()


def exchanged_prompts() -> list[dict[str, Any]]:
    """Three prompts, each also with the continuations exchanged: one of the two leads."""
    segments = [prompt["segments"] for prompt in choice_prompts()[:3]]
    choices = (" w5", " w7"), (" w7", " w5")
    return [
        {"segments": parts, "continuation": right, "wrong": wrong} for parts in segments for right, wrong in choices
    ]


def steer(tiny: Path, out: Path, models: Any = None, count: int = 6, **options: Any) -> Run:
    options = {"key": "rule", "steer": 0.01, "quiet": True, "out": out / "runs"} | options
    out.mkdir(exist_ok=True)
    return hs.spans(
        models or str(tiny), prompts=write_prompts(out / "choice.jsonl", exchanged_prompts()[:count]), **options
    )


def steering_results(run: Run, *questions: str) -> list[Result]:
    return [result for result in results.results(run) if result.question.removeprefix("spans.") in questions]


def test_means_of_steering_are_over_the_prompts_whose_continuation_leads_in_every_model(
    tiny: Path, tmp_path: Path
) -> None:
    run = steer(tiny, tmp_path, {"base": str(tiny), "yarn": f"{tiny}@yarn:factor=4"})
    rows = plain_types(run.table("span_steering"))
    lead = rows[rows["metric"] == "lead"]
    assert [*lead["is_counted"]] == [*(lead["plain"] > 0)]
    assert lead.groupby("model")["is_counted"].sum().to_dict() == {"base": 3, "yarn": 3}
    is_shared = lead.groupby("doc")["is_counted"].transform("all")
    assert is_shared.any()
    means = (lead["steered"] - lead["plain"])[is_shared].groupby(lead["model"]).mean()
    for result in steering_results(run, "steered_choice"):
        assert (result.value, result.n) == (pytest.approx(means[result.model]), is_shared.sum() / 2)
        assert f"Left out: {6 - result.n} prompts" in words_of_results.sentence(result)
    shares = (lead["steered"] > 0).groupby(lead["model"]).mean()
    for result in steering_results(run, "steered_share"):
        assert (result.n, result.details["plain"], result.details["steered"]) == (6, 0.5, shares[result.model])
    warnings = [result for result in steering_results(run, "steering_failing") if result.where["metric"] == "lead"]
    assert [warning.model for warning in warnings] == ["base", "yarn"]
    for warning in warnings:
        failing = lead[(lead["model"] == warning.model) & ~lead["is_counted"]]
        assert (warning.value, {*warning.details["names"]}) == (3, {*failing["doc"]})
        assert_names(words_of_results.sentence(warning), "3 of 6 prompts", "--keep-failing", failing["doc"].iloc[0])


def test_steering_without_a_prompt_that_counts_says_so_and_names_keep_failing(tiny: Path, tmp_path: Path) -> None:
    run = steer(tiny, tmp_path, count=4)
    of_tokens = run.table("span_steering").query("metric == 'logprob'")
    assert of_tokens["plain"].max() < np.log(0.01)
    assert not of_tokens["is_counted"].any()
    (warning,) = steering_results(run, "steering_uncounted")
    assert not steering_results(run, "steered")
    assert warning.where["metric"] == "logprob"
    text = words_of_results.sentence(warning)
    assert_names(text, "no prompt counts", "4 of 4 prompts", "below 1 % per token", "--keep-failing", "choice/1")
    assert text in run_results.warning_lines(run)


def test_keep_failing_keeps_every_prompt_in_means_of_steering(tiny: Path, tmp_path: Path) -> None:
    run = steer(tiny, tmp_path, keep_failing=True)
    assert run.table("span_steering")["is_counted"].all()
    assert [result.n for result in steering_results(run, "steered", "steered_choice")] == [6, 6]
    assert not steering_results(run, "steering_failing", "steering_uncounted")


def test_every_prompt_has_a_line_of_steering_unless_there_are_many(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steer(tiny, tmp_path)
    stored = run.table("span_steering").pivot(index="doc", columns="metric", values=["plain", "steered"])
    lines = {str(result.where["prompt"]): result for result in steering_results(run, "steered_prompt")}
    assert [*lines] == [f"choice/{number}" for number in range(1, 7)]
    endings = {
        (True, True): "to {:+.2f}",
        (True, False): "; left out of the mean lead",
        (False, True): "; left out of the mean log-probability",
        (False, False): "; left out of both means",
    }
    for doc, result in lines.items():
        plain, steered = stored.loc[doc, "plain"], stored.loc[doc, "steered"]
        assert result.value == pytest.approx(steered["logprob"] - plain["logprob"], abs=1e-6)
        text = words_of_results.headline(result)
        assert f"lead {plain['lead']:+.2f} to {steered['lead']:+.2f}" in text
        assert text.endswith(endings[plain["logprob"] > np.log(0.01), plain["lead"] > 0].format(steered["lead"]))
    assert len(run_results.row_lines(run)) == 6
    monkeypatch.setattr(results, "MAX_SUBSETS", 5)
    assert not steering_results(run, "steered_prompt")


def test_heads_to_steer_may_come_from_a_file_a_run_or_a_head_set(tiny: Path, tmp_path: Path, run: Run) -> None:
    top = run.top_heads("spans_mass", 2, "base")
    top.write(tmp_path / "heads.yaml")
    sources = (top.identifiers, [f"file:{tmp_path}/heads.yaml"], [f"run:{run.path}:spans_mass:2:base"], top)
    steered = [steer(tiny, tmp_path / str(number), heads=heads) for number, heads in enumerate(sources)]
    for other in steered[1:]:
        pd.testing.assert_frame_equal(other.table("span_steering"), steered[0].table("span_steering"))
    assert_names(words_of_results.sentence(steering_results(steered[3], "steered_prompt")[0]), *top.identifiers)


def test_heads_of_other_weights_are_steered_only_if_the_options_allow_them(tiny: Path, tmp_path: Path) -> None:
    heads = HeadSet(((1, 2),), model_digests=WeightDigests("0" * 64))
    with refuses(BadInput, "000000000000", "--weights any"):
        steer(tiny, tmp_path, heads=heads)
    assert len(steer(tiny, tmp_path, heads=heads, weights="any").table("span_steering")) == 12


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"heads": ["L9H9"]}, BadInput, ("L9H9",)),
        ({"heads": ["x"]}, BadOption, ("heads", "'x'")),
        ({"steer": 1.5}, BadOption, ("steer", 1.5)),
        ({"key": "first", "steer": 0.5, "prompts": {"text": "w1 w2 w3"}}, BadInput, ("line 1", "'continuation'")),
    ],
)
def test_bad_steering_is_refused(
    change: dict[str, Any], error: type[BadInput], named: tuple[object, ...], tiny: Path, tmp_path: Path
) -> None:
    prompts = [change.pop("prompts")] if "prompts" in change else choice_prompts()
    options = {"prompts": write_prompts(tmp_path / "p.jsonl", prompts), "key": "rule", "steer": 0.01} | change
    with refuses(error, *named):
        hs.spans(str(tiny), **options, out=tmp_path / "runs", quiet=True)

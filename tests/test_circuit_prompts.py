"""Which prompts of a set count in a circuit test, metrics of their answers, and reference prompts of other lengths."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.refusals import assert_names, refuses
from support.tiny_studies import PAIRS, save_checkpoint, tokenizer

import headscope as hs
from headscope.errors import BadInput
from headscope.prompts.pair_sets import file_pairs
from headscope.rendering import assembly
from headscope.results.result import Result
from headscope.results.words import headline, sentence
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.circuit import view
from probes.circuit.reference import corrupted_classes
from probes.circuit.results import results

NAMES = ["L0H1", "L1H2", "L3H0"]
ZERO: dict[str, Any] = {"complement": "zero"}


def exchanged(pair: dict[str, Any]) -> dict[str, Any]:
    """The pair with its answers exchanged: the tiny model prefers the other one."""
    return pair | {"answer": pair["wrong"], "wrong": pair["answer"]}


ONE_FAILS = [exchanged(pair) if number == 1 else pair for number, pair in enumerate(PAIRS)]
COUNTED = ["pair 0", "pair 2", "pair 3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("circuit")
    save_checkpoint(folder / "tiny")
    save_checkpoint(folder / "other", seed=1)
    return folder


def measured(
    folder: Path, out: Path, pairs: Sequence[dict[str, Any]], models: Sequence[str] = ("tiny",), **section: Any
) -> Run:
    file = out / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    content = {
        "models": {name: f"{folder}/{name}" for name in models},
        "device": "cpu",
        "circuit": {"pairs": [str(file)], "heads": NAMES, "random_subsets": 1, **section},
    }
    return runner.run_study(build_study(content), out, progress=NoProgress())


def by_question(run: Run) -> dict[str, list[Result]]:
    questions: dict[str, list[Result]] = {}
    for result in results(run):
        assert sentence(result)
        assert headline(result)
        questions.setdefault(result.question.removeprefix("circuit."), []).append(result)
    return questions


def rows_of(run: Run, subset: str, model: str = "tiny") -> pd.DataFrame:
    rows = run.table("circuit").astype({"subset": str, "model": str, "pair": str})
    return rows[(rows["subset"] == subset) & (rows["model"] == model)].set_index("pair")


# Prompts that count ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(folder, tmp_path_factory.mktemp("failing"), ONE_FAILS, **ZERO)


def test_a_prompt_that_the_model_does_not_answer_is_stored_and_left_out_of_all_means(failing_run: Run) -> None:
    assert validate(failing_run) == []
    members = failing_run.table("circuit_members").astype({"pair": str})
    for table in (rows_of(failing_run, "none"), members.drop_duplicates("pair").set_index("pair")):
        assert sorted(table.index[table["is_counted"]]) == COUNTED
        assert len(table) == len(PAIRS)
    found = by_question(failing_run)
    members = members[members["is_counted"]]
    falls = (members["metric_circuit"] - members["metric_without"]).groupby([members["layer"], members["head"]]).mean()
    column = failing_run.heads.set_index(["layer", "head"])["circuit_zero"].dropna()
    np.testing.assert_allclose(column.sort_index(), falls.sort_index(), atol=1e-6)
    for member in found["member"]:
        assert sorted(member.by_sample) == COUNTED
        assert member.value == pytest.approx(falls[member.layer, member.head], abs=1e-6)
    whole = rows_of(failing_run, "none").loc[COUNTED]
    (random,) = found["random"]
    rows = rows_of(failing_run, "random 1").loc[COUNTED]
    assert random.value == pytest.approx((rows["metric_model"] - rows["metric_circuit"]).mean(), abs=1e-6)
    empty, circuit, model = (whole[f"metric_{name}"].mean() for name in ("empty", "circuit", "model"))
    (whole_result,) = found.get("faithfulness") or found["undefined"]
    expected = (circuit - empty) / (model - empty) if "faithfulness" in found else empty - model
    assert whole_result.value == pytest.approx(expected, abs=1e-5)
    assert whole_result.n == len(COUNTED)


def test_prompts_that_are_left_out_are_named_in_a_warning_and_the_others_have_a_row_each(failing_run: Run) -> None:
    found = by_question(failing_run)
    (warning,) = found["wrong"]
    assert_names(sentence(warning), 1, 4, "pair 1", "--keep-failing")
    assert found["metric"][0].n == found["answered"][0].n == len(PAIRS)
    assert found["answered"][0].value == 0.75
    whole = rows_of(failing_run, "none")
    assert [result.where["pair"] for result in found["prompt"]] == COUNTED
    for result in found["prompt"]:
        row = whole.loc[result.where["pair"]]
        values = (result.value, result.details["model_metric"], result.details["empty"])
        assert values == pytest.approx((row["metric_circuit"], row["metric_model"], row["metric_empty"]))


def test_greedy_subsets_are_chosen_and_tested_on_prompts_that_count(failing_run: Run) -> None:
    greedy = rows_of(failing_run, "greedy 1")
    assert greedy["is_selecting"].to_dict() == {"pair 0": True, "pair 1": False, "pair 2": False, "pair 3": True}
    (result,) = by_question(failing_run)["greedy"]
    assert sorted(result.by_sample) == ["pair 2"]
    whole = rows_of(failing_run, "none").loc["pair 2"]
    assert result.details["whole"] == pytest.approx(whole["metric_model"] - whole["metric_circuit"])


def test_the_greedy_head_is_that_of_the_counting_prompts(folder: Path, tmp_path: Path) -> None:
    """A prompt that fails, and would decide the choice with the others, has no part in it."""
    own = measured(folder, tmp_path, [PAIRS[0], PAIRS[2], PAIRS[3]], **ZERO, greedy=2)
    (tmp_path / "first").mkdir()
    with_failing = measured(folder, tmp_path / "first", [ONE_FAILS[1], PAIRS[0], PAIRS[2], PAIRS[3]], **ZERO, greedy=2)
    for step in ("greedy 1", "greedy 2"):
        assert rows_of(own, step)["heads"].iloc[0] == rows_of(with_failing, step)["heads"].iloc[0]


def test_keep_failing_keeps_every_prompt_in_means(folder: Path, tmp_path: Path) -> None:
    run = measured(folder, tmp_path, ONE_FAILS, **ZERO, keep_failing=True)
    found = by_question(run)
    assert "wrong" not in found
    assert {member.n for member in found["member"]} == {len(PAIRS)}
    assert found["answered"][0].details["unanswered"] == 1
    assert rows_of(run, "greedy 1")["is_selecting"].tolist() == [True, False, True, False]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_prompts_that_count_leave_out_the_greedy_test(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    pairs = [pair if number < count else exchanged(pair) for number, pair in enumerate(PAIRS)]
    run = measured(folder, tmp_path, pairs, **ZERO)
    assert validate(run) == []
    assert not run.table("circuit")["subset"].astype(str).str.startswith("greedy").any()
    (warning,) = (message for message in caplog.messages if "greedy" in message)
    assert_names(warning, "tiny", count, 4, "'pairs'", "--keep-failing")
    found = by_question(run)
    assert ("no_effects" in found) == (count == 0)
    assert ("member" in found) == (count == 1)
    assert len([*view.charts(assembly.render_context(run))]) == count
    if count == 0:
        assert "circuit_zero" not in run.heads or run.heads["circuit_zero"].isna().all()


@pytest.mark.slow
def test_means_are_over_the_prompts_that_count_in_every_model(folder: Path, tmp_path: Path) -> None:
    pairs = [pair | {"answer": f" w{number + 90}"} for number, pair in enumerate(PAIRS)] + [
        exchanged(pair) | {"name": f"{pair['name']}b"} for pair in PAIRS
    ]
    run = measured(folder, tmp_path, pairs, models=("tiny", "other"), **ZERO, greedy=0)
    counted = [{*(rows := rows_of(run, "none", model)).index[rows["metric_model"] > 0]} for model in ("tiny", "other")]
    shared = counted[0] & counted[1]
    assert 1 < len(shared) < min(map(len, counted))
    found = by_question(run)
    for result in [*found["member"], *found["random"]]:
        assert {*result.by_sample} == shared
    assert [result.details["shared"] for result in found["metric"]] == [len(shared)] * 2


# Metrics -----------------------------------------------------------------------------------------------------------


def margin(logits: torch.Tensor, pair: Any) -> torch.Tensor:
    return logits[0, pair.answer[0]] - logits[0].mean()


@pytest.mark.parametrize("metric", ["prob_diff", "rank", "kl", "nll", margin])
def test_every_metric_of_the_unchanged_model_equals_that_of_its_logits(
    folder: Path, tmp_path: Path, metric: Any
) -> None:
    run = measured(folder, tmp_path, PAIRS, **ZERO, metric=metric, greedy=0, keep_failing=True)
    assert {*run.table("circuit")["metric"]} == {metric if isinstance(metric, str) else "own:margin"}
    model, whole = hs.load(f"{folder}/tiny", device="cpu"), rows_of(run, "none")
    for pair in PAIRS:
        ids, answer, wrong = (tokenizer()(pair[name]).input_ids for name in ("clean", "answer", "wrong"))
        with torch.no_grad():
            logits = model.module(torch.tensor([ids])).logits[0, -1].double()
        log_p = logits.log_softmax(-1)
        expected = {
            "prob_diff": (log_p[answer].exp() - log_p[wrong].exp()).item(),
            "rank": (logits > logits[answer]).sum().item(),
            "kl": 0.0,
            "nll": -log_p[answer].item(),
            "margin": (logits[answer] - logits.mean()).item(),
        }[metric if isinstance(metric, str) else "margin"]
        assert whole.loc[pair["name"], "metric_model"] == pytest.approx(expected, abs=1e-5)
    assert by_question(run)["member"]


def test_the_loss_of_an_answer_of_two_tokens_is_measured(folder: Path, tmp_path: Path) -> None:
    pairs = [pair | {"answer": f"{pair['answer']} w5"} for pair in PAIRS]
    run = measured(folder, tmp_path, pairs, **ZERO, metric="nll", greedy=0, keep_failing=True)
    model = hs.load(f"{folder}/tiny", device="cpu")
    ids = tokenizer()(pairs[0]["clean"] + pairs[0]["answer"]).input_ids
    with torch.no_grad():
        log_p = model.module(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = -(log_p[-3, ids[-2]] + log_p[-2, ids[-1]]).item() / 2
    assert rows_of(run, "none").loc["pair 0", "metric_model"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("metric", "sign", "words"), [("logit_diff", 1, ("falls", "rises")), ("nll", -1, ("rises", "falls"))]
)
def test_a_needed_member_lowers_the_loss_or_raises_the_logit_difference(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, sign: int, words: tuple[str, str]
) -> None:
    run = measured(folder, tmp_path, PAIRS, **ZERO, metric=metric, greedy=0, keep_failing=True)
    rows = run.table("circuit_members").copy()
    noise = rows["pair"].astype(str).str[-1].astype(int).map({0: -0.1, 1: 0.1, 2: -0.2, 3: 0.2})
    rows["metric_without"] = rows["metric_circuit"] - sign * rows["layer"].map({0: 2.0, 1: -1.0, 3: 0.0}) - noise
    table = run.table
    monkeypatch.setattr(run, "table", lambda name: rows if name == "circuit_members" else table(name))
    monkeypatch.setattr(run, "derived", lambda function, *arguments: function(run, *arguments))
    found = by_question(run)
    (minimal,) = found["minimal"]
    assert (minimal.value, minimal.details["harmful"], minimal.details["others"]) == (1, "L1H2", "L3H0")
    assert_names(sentence(minimal), f"clearly {words[0]} without 1 of 3", f"clearly {words[1]} without L1H2")
    assert found["member"][0].value == pytest.approx(2 * sign, abs=1e-6)
    (unchanged,) = found.get("undefined") or [None]
    if unchanged is not None:
        whole = rows_of(run, "none")
        assert unchanged.value == pytest.approx((whole["metric_empty"] - whole["metric_model"]).mean(), abs=1e-5)


# Prompts of unequal length -----------------------------------------------------------------------------------------


def longer(pair: dict[str, Any]) -> dict[str, Any]:
    """The pair with a corrupted prompt that is one token longer."""
    return pair | {"corrupted": pair["corrupted"].replace(" w3 ", " w5 w6 ")}


def test_zero_ablation_takes_prompts_of_unequal_length(folder: Path, tmp_path: Path) -> None:
    run = measured(folder, tmp_path, [longer(pair) for pair in PAIRS], **ZERO, greedy=0)
    assert len(rows_of(run, "none")) == len(PAIRS)


@pytest.mark.parametrize("complement", ["mean:prompts", "resample"])
def test_without_a_reference_prompt_of_equal_length_the_advice_is_an_option_that_exists(
    folder: Path, tmp_path: Path, complement: str
) -> None:
    advice = "--by span" if complement == "mean:prompts" else "--complement mean:prompts --by span"
    with refuses(BadInput, "'pair 0'", 5, advice) as caught:
        measured(folder, tmp_path, [longer(pair) for pair in PAIRS], complement=complement)
    assert "align" not in str(caught.value)


def test_a_mean_by_position_is_over_the_reference_prompts_of_equal_length(folder: Path, tmp_path: Path) -> None:
    run = measured(folder, tmp_path, [longer(PAIRS[0]), *PAIRS[1:]], greedy=0, random_subsets=0)
    counts = rows_of(run, "none")["reference_prompts"]
    assert counts.to_dict() == {"pair 0": 3, "pair 1": 2, "pair 2": 2, "pair 3": 2}
    (tmp_path / "equal").mkdir()
    equal = measured(folder, tmp_path / "equal", PAIRS, greedy=0, random_subsets=0)
    np.testing.assert_allclose(  # its own corrupted prompt is in neither mean
        rows_of(run, "none").loc["pair 0", "metric_empty"],
        rows_of(equal, "none").loc["pair 0", "metric_empty"],
        atol=1e-5,
    )


def test_a_mean_by_span_takes_reference_prompts_of_unequal_length(folder: Path, tmp_path: Path) -> None:
    pairs = [longer(pair) for pair in PAIRS]
    run = measured(folder, tmp_path, pairs, by="span", greedy=0, random_subsets=0)
    assert (rows_of(run, "none")["reference_prompts"] == 3).all()


@pytest.mark.parametrize(
    ("corrupted", "spans", "expected"),
    [
        ("w1 w9 w3 w8 w4", {"first": [1, 2]}, ["rest", "first", "rest", "rest", "last"]),
        ("w1 w9 w9 w3 w4 w5", {"first": [1, 2]}, ["rest", "first", "first", "rest", "rest", "last"]),
        ("w1 w9 w9 w4 w5", {"first": [1, 3]}, ["rest", "first", "first", "rest", "last"]),
        ("w1 w9 w9 w9 w4 w5", {"first": [1, 2]}, ["rest", None, None, None, "rest", "last"]),
        ("w1 w2 w3 w9 w4 w5", {"first": [1, 3]}, ["rest", "first", "first", None, "rest", "last"]),
        ("w1 w5", {}, ["rest", "last"]),
    ],
)
def test_tokens_of_a_longer_prompt_have_the_class_of_those_that_they_replace(
    tmp_path: Path, corrupted: str, spans: dict[str, Any], expected: list[str | None]
) -> None:
    clean = "w1 w2 w3 w4 w5" if corrupted != "w1 w9 w3 w8 w4" else "w1 w2 w3 w5 w4"
    pair = {"name": "a", "clean": clean, "corrupted": corrupted, "answer": " w9", "spans": spans}
    (tmp_path / "pair.jsonl").write_text(json.dumps(pair))
    pairs = file_pairs(f"{tmp_path}/pair.jsonl", tokenizer(), "end", needs_one_token=True, needs_wrong=False)
    assert corrupted_classes(pairs.build(0)) == expected

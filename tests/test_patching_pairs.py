"""Pairs of a patching study: failing ones are named and left out of means, and each pair has heads of its own."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.refusals import assert_names, refuses
from support.tiny_studies import save_checkpoint, tokenizer

import headscope as hs
from headscope.errors import BadInput
from headscope.prompts.answers import shows_answer
from headscope.rendering.run_results import headline_lines, row_lines, warning_lines
from headscope.results.effects.prompts import MAX_SUBSETS, subset_names
from headscope.results.effects.sweep import effects_table
from headscope.results.words import headline, sentence
from headscope.runs.run import Run
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.patching.analysis import pair_sweeps, sweeps
from probes.patching.declaration import REFERENCE_SPEED, PairOptions, PatchingOptions
from probes.patching.paths.declaration import PathsOptions
from probes.patching.results import results

ANSWER, WRONG = " w7", " w8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint and a file with four pairs that it answers, one that it does not, and one of one answer."""
    folder = tmp_path_factory.mktemp("pairs")
    save_checkpoint(folder / "tiny")
    model, tiny = hs.load(f"{folder}/tiny", device="cpu"), tokenizer()
    prompts = [f"w{first} w{second} w{first} w4" for first, second in itertools.product(range(9, 14), range(20, 26))]
    ids = torch.tensor(tiny(prompts)["input_ids"])
    answer, wrong = (tiny(text)["input_ids"][0] for text in (ANSWER, WRONG))
    with torch.no_grad():
        logits = model.module(ids, use_cache=False).logits[:, -1]
    by_difference = [prompts[n] for n in (logits[:, answer] - logits[:, wrong]).argsort()]
    pairs = {f"good {n}": (by_difference[-1 - n], by_difference[n]) for n in range(4)}
    positive, negative = (int((sign * (logits[:, answer] - logits[:, wrong]) > 0).sum()) for sign in (1, -1))
    pairs["unanswered"] = by_difference[negative - 1], by_difference[5]
    pairs["one answer"] = by_difference[-6], by_difference[-positive]
    lines = [
        {"name": name, "clean": clean, "corrupted": corrupted, "answer": ANSWER, "wrong": WRONG, "group": name[:4]}
        for name, (clean, corrupted) in pairs.items()
    ]
    swapped = [line | {"answer": WRONG, "wrong": ANSWER} for line in lines[:4]]
    for name, content in (("own", lines), ("swapped", swapped)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    return folder


def patch(folder: Path, out: Path, file: str = "own", **section: Any) -> Run:
    content = {
        "models": {"base": f"{folder}/tiny"},
        "device": "cpu",
        "patching": {"pairs": [f"{folder}/{file}.jsonl"], **section},
    }
    return runner.run_study(build_study(content), out, progress=NoProgress())


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return patch(folder, tmp_path_factory.mktemp("verified"), verify_top=4, verify_random=1)


@pytest.mark.slow
def test_failing_pairs_are_named_and_left_out_of_means(run: Run) -> None:
    (wrong,), (same,) = ([r for r in results(run) if r.question == f"patching.{name}"] for name in ("wrong", "same"))
    assert [*wrong.details["names"]] == ["unanswered"]
    assert [*same.details["names"]] == ["one answer"]
    assert (wrong.value, wrong.n) == (same.value, same.n) == (1, 6)
    assert same.details["names"]["one answer"] > 0
    assert {sentence(wrong), sentence(same)} <= {*warning_lines(run)}
    assert set(effects_table(sweeps(run))["n"]) == {4}


def test_failing_pairs_count_if_the_user_keeps_them(folder: Path, tmp_path: Path) -> None:
    kept = patch(folder, tmp_path, method="estimate", keep_failing=True)
    assert set(effects_table(sweeps(kept))["n"]) == {
        int(kept.table("patching").groupby("pair")["is_normalised"].any().sum())
    }
    by_question = {result.question: result for result in results(kept)}
    assert not {"patching.wrong", "patching.same"} & {*by_question}
    assert by_question["patching.answered"].details["unanswered"] == 1


@pytest.mark.parametrize("command", ["patch", "paths"])
def test_swapped_answers_are_refused_with_the_fix(refused: Callable[..., str], folder: Path, command: str) -> None:
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet")
    message = refused(2, command, *tiny, "--pairs", folder / "swapped.jsonl")
    assert_names(message, "line 1", "4 of 4", "'answer'", "'wrong'", "--keep-failing")


def test_swapped_answers_are_measured_if_the_user_keeps_them(folder: Path, tmp_path: Path) -> None:
    run = patch(folder, tmp_path, "swapped", method="estimate", keep_failing=True)
    (exchanged,) = (result for result in results(run) if result.question == "patching.exchanged")
    assert (exchanged.value, exchanged.n) == (4, 4)
    assert sentence(exchanged) in warning_lines(run)
    with refuses(BadInput, "line 1", "4 of 4", "--keep-failing"):
        patch(folder, tmp_path, "swapped", method="estimate")


def test_each_pair_has_its_own_largest_estimates_patched_exactly(run: Run) -> None:
    rows = run.table("patching").query("is_counted").astype({"effect": float})
    exact = rows[rows["method"] == "exact"]
    shared = set.intersection(
        *({*zip(b["layer"], b["head"], strict=True)} for _, b in exact.groupby("pair", observed=True))
    )
    for pair, estimates in rows[rows["method"] == "estimate"].groupby("pair", observed=True):
        own = exact[exact["pair"] == pair]
        for extreme in (estimates["effect"].idxmax(), estimates["effect"].idxmin()):
            unit = estimates.loc[extreme]
            assert (unit["layer"], unit["head"]) in {*zip(own["layer"], own["head"], strict=True)}
    (pooled,) = sweeps(run)
    units = pooled.exact
    assert {*zip(units["layer"], units["head"], strict=True)} == shared
    assert len(units) < exact.groupby(["layer", "head"]).ngroups, "some heads were patched in one pair only"


def test_a_set_that_takes_less_than_a_minute_is_patched_exactly_by_default(folder: Path, tmp_path: Path) -> None:
    """Every unit of every pair, so that each pair shows its largest effect and its most negative one."""
    run = patch(folder, tmp_path)
    rows = run.table("patching")
    assert set(rows["method"]) == {"exact"}
    assert len(rows) == 6 * 16
    shown = {result.where["pair"]: result for result in results(run) if result.question == "patching.pair"}
    assert {*shown} == {f"good {n}" for n in range(4)}
    for pair, result in shown.items():
        effects = rows[rows["pair"] == pair].astype({"effect": float}).set_index(["layer", "head"])["effect"]
        assert (result.layer, result.head) == effects.idxmax()
        ((name, lowest),) = result.details["negative"].items()
        assert (name, lowest) == ("L{}H{}".format(*effects.idxmin()), pytest.approx(effects.min()))
        assert lowest < 0
        assert f"negative: {name}" in headline(result)


@pytest.mark.parametrize(
    ("options", "seconds", "method"),
    [
        (PatchingOptions(), 59.0, "exact"),
        (PatchingOptions(), 61.0, "verify"),
        (PatchingOptions(verify_top=3), 1.0, "verify"),
        (PatchingOptions(metric="rank"), 1e6, "exact"),
        (PatchingOptions(method="estimate"), 1.0, "estimate"),
        (PathsOptions(), 61.0, "verify"),
        (PathsOptions(metric="kl", directions=["noising"]), 1e6, "exact"),
        (PathsOptions(mlps="recomputed", norms="recomputed"), 1e6, "exact"),
        (PathsOptions(sender_positions=["last"]), 1e6, "exact"),
    ],
)
def test_the_method_follows_from_the_predicted_time_and_from_what_has_estimates(
    options: PairOptions, seconds: float, method: str
) -> None:
    assert options.choose_method(seconds * REFERENCE_SPEED) == method


def test_every_pair_has_a_row_and_the_mean_over_pairs_comes_last(run: Run) -> None:
    rows = [result for result in results(run) if result.question == "patching.pair"]
    assert [row.where["pair"] for row in rows] == [f"good {n}" for n in range(4)]
    effects = {one.key["subset"]: one for one in run.derived(pair_sweeps)}
    for row in rows:
        exact = effects[row.where["pair"]].exact
        assert row.is_exact
        assert row.value == pytest.approx(exact["effect"].max())
    assert len(row_lines(run)) == 4
    (line,) = headline_lines(run)
    assert_names(line.rpartition(":")[0], "base", "z", "own")


def test_a_set_of_many_pairs_has_rows_by_group() -> None:
    many = pd.DataFrame({"pair": [f"p{n}" for n in range(2 * MAX_SUBSETS)], "group": ["a", "b"] * MAX_SUBSETS})
    assert {*subset_names(many)} == {"a", "b"}
    assert {*subset_names(many[:MAX_SUBSETS])} == {f"p{n}" for n in range(MAX_SUBSETS)}
    assert {*subset_names(many.assign(group=""))} == {*subset_names(many[:1])} == {""}


@pytest.mark.parametrize(
    ("metric", "clean", "corrupted", "is_contrast", "counts"),
    [
        ("logit_diff", 2.0, -1.0, True, True),
        ("logit_diff", -0.1, -1.0, True, False),
        ("logit_diff", 2.0, 1.0, True, False),
        ("logit_diff", 2.0, 1.0, False, True),
        ("logprob", -0.1, -0.2, True, True),
        ("logprob", -6.0, -9.0, True, False),
        ("kl", 0.0, 3.0, True, True),
    ],
)
def test_a_pair_counts_if_both_prompts_show_how_the_model_answers(
    metric: str, clean: float, corrupted: float, is_contrast: bool, counts: bool
) -> None:
    """A corrupted prompt that only lacks the information, as in most pairs of ioi, may prefer either answer."""
    assert shows_answer(metric, clean, corrupted, is_contrast) == counts

"""Pairs whose answer a model does not give, and prompts that seem exchanged, are named before any effect."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refusals import assert_names
from support.tiny_studies import PAIRS, save_checkpoint, tokenizer

import headscope as hs
from headscope.prompts.answers import ask_about_exchange, describe_unanswered, gives_answer
from headscope.results.collection import all_results
from headscope.results.words import sentence
from headscope.runs.run import Run


@pytest.mark.parametrize(
    ("metric", "value", "answered"),
    [
        ("logit_diff", 0.1, True),
        ("logit_diff", -7.9, False),
        ("logprob", np.log(0.02), True),
        ("logprob", np.log(0.005), False),
        ("nll", -np.log(0.02), True),
        ("nll", -np.log(0.005), False),
        ("kl", 0.0, True),
    ],
)
def test_an_answer_is_given_if_its_metric_says_so(metric: str, value: float, answered: bool) -> None:
    values = np.array([value])
    assert gives_answer(metric, values).tolist() == [answered]
    assert bool(describe_unanswered(metric, values)) == (not answered)


def test_the_question_is_asked_if_most_corrupted_prompts_favour_the_answer() -> None:
    clean, corrupted = np.array([-7.9, -8.1, 1.0]), np.array([7.4, 7.2, 0.8])
    question = ask_about_exchange("logit_diff", clean, corrupted)
    assert_names(question, "2 of 3", "-5.00", "5.13")
    assert question.index("-5.00") < question.index("5.13"), "clean comes first"
    assert ask_about_exchange("logit_diff", corrupted, clean) == ""
    assert_names(ask_about_exchange("nll", corrupted, clean), "2 of 3")
    assert ask_about_exchange("kl", clean, corrupted) == ""
    question = ask_about_exchange("prob_diff", np.array([-0.1, -0.1, 0.1]), np.array([0.1, 0.0, 0.08]))
    assert_names(question, "2 of 3")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["patch", "paths"])
def test_a_warning_asks_about_exchanged_prompts(
    command: str, headscope: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The prompts of every pair are ordered so that the corrupted one favours the answer."""
    save_checkpoint(tmp_path / "tiny")
    model, tiny = hs.load(f"{tmp_path}/tiny", device="cpu"), tokenizer()

    def difference(prompt: str, pair: dict[str, str]) -> float:
        logits = model.module(torch.tensor([tiny(prompt)["input_ids"]])).logits[0, -1]
        answer, wrong = (tiny(pair[name].strip())["input_ids"][0] for name in ("answer", "wrong"))
        return float(logits[answer] - logits[wrong])

    lines = []
    for pair in PAIRS:
        clean, corrupted = sorted([pair["clean"], pair["corrupted"]], key=lambda text: difference(text, pair))
        lines.append(json.dumps({**pair, "clean": clean, "corrupted": corrupted}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    flags = ("--method", "exact", "--senders", "L0H0", "--through", "logits") if command == "paths" else ()
    code, out, err = headscope(
        *(command, "--model", f"base={tmp_path}/tiny", "--device", "cpu", "--pairs", f"{tmp_path}/pairs.jsonl"),
        *("--out", tmp_path / "runs", "--keep-failing", *flags),
    )
    assert code == 0, err
    (run,) = (Run.open(path) for path in (tmp_path / "runs").iterdir())
    (exchanged,) = (result for result in all_results(run) if result.question.endswith(".exchanged"))
    assert (exchanged.value, exchanged.n) == (len(PAIRS), len(PAIRS))
    assert f"headscope: {sentence(exchanged)}" in err.splitlines()
    assert "Headlines" in out

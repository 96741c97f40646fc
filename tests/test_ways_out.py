"""Refusals of prompt pairs: the way out that a message offers runs, and no model is opened to find the mistake."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import assert_names
from support.tiny_studies import PAIRS, save_checkpoint, tokenizer
from tokenizers import models, pre_tokenizers

from headscope.study import context

SPANS = {"spans": {"subject": [1, 2]}}
UNEQUAL = [pair | {"corrupted": str(pair["corrupted"]).replace(" w3 ", " w5 w6 ")} for pair in PAIRS]
"""Pairs whose corrupted prompt is one token longer."""
SEVERAL = {"answer": " w60 w61"}
NO_WRONG = {"wrong": ""}
LONG = {key: " ".join(["w1"] * 128 + [PAIRS[0][key]]) for key in ("clean", "corrupted")}
PATCH, PATHS, ABLATE = ["patch"], ["paths", "--senders", "L0H0", "--receivers", "L3H1"], ["ablate", "--heads", "L0H1"]
CIRCUIT = ["circuit", "--heads", "L0H1,L1H2", "--random-subsets", 1]
RESAMPLE = ["--complement", "resample", "--draws", 2]
PROMPT = ["ablate", "--heads", "L0H1", "--prompt", "w1 w10", "--answer", " w2 w3"]
METRIC = [PATCH, PATHS, CIRCUIT, [*ABLATE, "--metric", "logit_diff"]]

Lines = list[dict[str, Any]]
WAYS_OUT: list[tuple[str, list[Any], Lines]] = [
    ("--complement zero", CIRCUIT, PAIRS[:1]),
    ("--complement zero without --by", [*CIRCUIT, "--by", "span"], PAIRS[:1]),
    ("--complement zero without --draws", [*CIRCUIT, *RESAMPLE], PAIRS[:1]),
    ("--complement zero without --reference", [*CIRCUIT, "--reference", "PAIRS"], PAIRS[:1]),
    (
        "--complement zero without --reference and --count and --length",
        [*CIRCUIT, "--reference", "induction", "--count", 4, "--length", 12],
        [PAIRS[0] | SPANS, PAIRS[1]],
    ),
    ("--by span", CIRCUIT, UNEQUAL),
    ("--complement mean:prompts --by span without --draws", [*CIRCUIT, *RESAMPLE], UNEQUAL),
    ("--by position", [*CIRCUIT, "--by", "span"], [PAIRS[0] | SPANS, *PAIRS[1:]]),
    ("--complement zero", CIRCUIT, [UNEQUAL[0] | SPANS, *UNEQUAL[1:]]),
    ("--align end", PATCH, UNEQUAL),
    ("--align end", PATHS, UNEQUAL),
    *(("--metric nll", command, [PAIRS[0] | SEVERAL, *PAIRS[1:]]) for command in METRIC),
    *(("--metric nll", command, [PAIRS[0] | SEVERAL | NO_WRONG, *PAIRS[1:]]) for command in METRIC),
    *(("--metric logprob", command, [PAIRS[0] | NO_WRONG, *PAIRS[1:]]) for command in METRIC),
    *(("--metric nll", command, [PAIRS[0] | {"corrupted_answer": " w5"}, *PAIRS[1:]]) for command in (PATCH, PATHS)),
    ("--metric nll", PROMPT, []),
    ("--metric nll without --wrong", [*PROMPT, "--wrong", " w4", "--metric", "logit_diff"], []),
    ("--kinds zero", [*ABLATE, "--kinds", "resample"], PAIRS[:1]),
    ("remove --pattern-entries", [*PATCH, "--activations", "pattern", "--pattern-entries"], [PAIRS[0] | LONG]),
]
"""What a message must offer, and the command and the lines of the file of pairs that it refuses."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("ways-out") / "tiny")


def arguments(tiny: Path, tmp_path: Path, command: list[Any], lines: Lines) -> list[str]:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    pairs = ["--pairs", "PAIRS"] if lines else []
    values = [*command, *pairs, "--model", f"tiny={tiny}", "--device", "cpu", "--quiet"]
    return [str(file) if value == "PAIRS" else str(value) for value in values]


def followed(message: str, command: list[str]) -> list[str]:
    """The command with the options that the last sentence of a message offers, and without those that it removes."""
    remedy = message.rsplit(". ", 1)[-1]
    offered = re.search(r"((?:--[a-z]+ \S+ ?)*)((?:without|remove|and|--[a-z-]+| )*)$", remedy)
    assert offered is not None
    options = [part.split() for part in re.findall(r"--[a-z]+ \S+", offered[1])]
    for name in [name for name, _ in options] + re.findall(r"--[a-z-]+", offered[2]):
        if name in command:
            at = command.index(name)
            command = command[:at] + command[at + (1 if command[at + 1].startswith("--") else 2) :]
    return command + [part for option in options for part in option]


@pytest.mark.exhaustive(sample=8)
@pytest.mark.parametrize(("way", "command", "lines"), WAYS_OUT)
def test_the_way_out_that_a_refusal_offers_runs(
    headscope: Callable[..., tuple[int, str, str]],
    refused: Callable[..., str],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    command: list[Any],
    lines: Lines,
) -> None:
    flags = arguments(tiny, tmp_path, command, lines)
    with monkeypatch.context() as patched:
        patched.delattr(context, "open_checkpoint")  # prompts are read before weights
        message = refused(2, *flags)
    assert message.endswith(way), message
    code, _, err = headscope(*followed(message, flags), "--out", tmp_path / "runs")
    assert code == 0, err


@pytest.mark.parametrize(
    ("command", "change"),
    [
        (["attribution"], SEVERAL),
        (["attribution"], NO_WRONG),
        (["attribution", "--prompt", "w1", "--answer", " w2 w3"], None),
        ([*PATCH, "--activations", "q"], UNEQUAL[0]),
        (PATCH, {"corrupted": "w1 w40 w3 w50 w4 w5"}),
    ],
)
def test_no_option_is_offered_where_none_helps(
    refused: Callable[..., str], tiny: Path, tmp_path: Path, command: list[Any], change: dict[str, Any] | None
) -> None:
    lines = [] if change is None else [PAIRS[0] | change]
    remedy = refused(2, *arguments(tiny, tmp_path, command, lines)).rsplit(". ", 1)[-1]
    assert not re.search("--(metric|align)", remedy), remedy


@pytest.mark.parametrize("command", [PATCH, PATHS, CIRCUIT, ABLATE, ["attribution"]])
def test_answers_are_checked_with_the_tokenizers_of_all_models_before_any_model_is_opened(
    refused: Callable[..., str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[Any]
) -> None:
    other = save_checkpoint(tmp_path / "other", seed=1)
    by_digits = tokenizer()
    vocabulary = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", "w", *"0123456789"])}
    by_digits.backend_tokenizer.model = models.WordLevel(vocabulary, unk_token="<unk>")
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    by_digits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    by_digits.save_pretrained(other)
    monkeypatch.delattr(context, "open_checkpoint")
    flags = arguments(tiny, tmp_path, command, PAIRS)
    assert_names(refused(2, *flags, "--model", f"other={other}"), "'answer'", 3)

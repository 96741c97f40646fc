"""Studies of a tiny checkpoint: weights, tokenizer, texts, study content."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headscope.runs.run import Run
from headscope.study.progress import NoProgress
from support import families

LENGTHS = [24, 40]


WORDS = [*(f"w{n}" for n in range(122)), "w1.", "w2.", "w3."]
"""Three of them end a sentence."""

PAIRS = [
    {
        "name": f"pair {number}",
        "clean": f"w1 w{number + 10} w3 w{number + 20} w4",
        "corrupted": f"w1 w{number + 40} w3 w{number + 50} w4",
        "answer": f" w{number + 60}",
        "wrong": f" w{number + 70}",
        "group": "even" if number % 2 == 0 else "odd",
    }
    for number in range(4)
]
"""Pairs of prompts that differ at two tokens."""
SAME_PAIR = {**PAIRS[0], "name": "same", "corrupted": PAIRS[0]["clean"].replace("w10", "w121")}
"""A pair whose metric does not differ between its prompts, in a checkpoint of `equate_words`."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word of `WORDS`."""
    vocabulary = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def save_checkpoint(folder: Path, seed: int = 0) -> Path:
    families.SPECS["llama-gqa"].build(seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def equate_words(folder: Path, word: str = "w10", other: str = "w121") -> None:
    """Give two words of a checkpoint the same embedding."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    first, second = tokenizer()(f"{word} {other}", add_special_tokens=False)["input_ids"]
    weight = model.get_input_embeddings().weight.data
    weight[second] = weight[first]
    model.save_pretrained(folder)


def save_texts(folder: Path, words: int = 60) -> str:
    folder.mkdir()
    for name in "abcd":
        rng = random.Random(name)
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(words)))
    return f"file:{folder}/*.txt"


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    """A study of one checkpoint under two schemes."""
    tiny = str(folder / "tiny")
    return {
        "name": "tiny",
        "models": {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"},
        "texts": {"source": f"file:{folder}/texts/*.txt", "docs": 2},
        "device": "cpu",
        "measure": {"lengths": LENGTHS, "rows": 8},
        **changes,
    }


def contents(run: Run) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(run.path.glob("*.parquet"))}


def assert_clean(out: Path, *committed: Path) -> None:
    assert sorted(out.iterdir() if out.is_dir() else []) == sorted(committed)


def record_versions(partial: Path, **versions: str) -> None:
    """Change the versions that the finished cell of an interrupted run was measured with."""
    (cell,) = (partial / "cells").iterdir()
    line, _, tables = cell.read_bytes().partition(b"\n")
    header = json.loads(line.partition(b" ")[2])
    header["versions"] |= versions
    text = json.dumps(header).encode()
    cell.write_bytes(hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n" + tables)


class StopsAfter(NoProgress):
    """Simulates Ctrl-C during the cell after `cells` cells."""

    def __init__(self, cells: int):
        self.cells = cells

    def set_activity(self, activity: str, worker: str = "") -> None:
        if self.cells == 0:
            raise KeyboardInterrupt
        self.cells -= 1


TEXT_PROBES: dict[str, dict[str, Any]] = {
    "measure": {"lengths": [24, 40], "rows": 8},
    "patterns": {"lengths": [24, 40], "rows": 4, "keys": 3},
    "attribution": {"lengths": [24, 40]},
}
"""Probes that only observe a text, and so share forward passes."""
PROBES: dict[str, dict[str, Any]] = {
    "measure": {"measure": {"lengths": [24], "tables": ["nll"]}},
    "needle": {"needle": {"lengths": [90], "depths": 1, "needles": 1, "seeds": 1, "template": "plain"}},
    "influence": {
        "influence": {
            "lengths": [24],
            "method": "exact",
            "components": ["joint"],
            "curve": False,
            "models": ["learned"],
        }
    },
    "adapt": {
        "adapt": {
            "factor": 2,
            "phases": [{"length": 16, "steps": 2}],
            "save_every": 1,
            "warmup": 1,
            "validation_length": 24,
        }
    },
}

"""Made-up reads, for tests and timings: heads of low growth find the same word far back."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes

ROWS, KEYS = 16, 4
FAR = 40
WORDS = (" the", " king", ",", " of", "\n", " <b>", " שלום", " é", "", "😀")
"""Some that a page must not read as its own."""


def rows(sizes: Sizes, model: str, number: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """A cell for each length and document; the first model's longest cells bring the tokens."""
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        rng = np.random.default_rng([sizes.seed, number, length, doc])
        keys: dict[str, Any] = {"model": model, "context_length": length, "doc": f"synthetic/{doc}"}
        queries = pd.DataFrame({"query": np.linspace(0, length - 1, min(ROWS, length)).round().astype(int)})
        table = sizes.units.merge(queries, how="cross").assign(**keys)
        far = table[table["query"] >= FAR].copy()
        far["key"] = far["query"] - FAR + 1
        far["weight"] = np.clip(0.8 - 2 * far["growth"] + 0.05 * rng.random(len(far)), 0.001, 1)
        top = table.merge(pd.DataFrame({"rank": range(KEYS)}), how="cross")
        top = top[top["rank"] <= top["query"]].copy()
        top["key"], top["weight"] = top["query"] - top["rank"], 0.5 / 2.0 ** top["rank"]
        stored: dict[str, Rows] = {
            "passages": {**keys, "tokenizer": ["synthetic"], "rows": len(queries)},
            "reads": top.drop(columns="growth"),
            "far_reads": far.drop(columns="growth"),
        }
        if number == 0 and length == max(sizes.lengths):
            stored["pieces"] = _pieces(f"synthetic/{doc}", length)
        yield f"{length}/{doc}", stored


def _pieces(doc: str, length: int) -> Rows:
    token = [0, *(1 + at % len(WORDS) for at in range(length - 1))]
    piece = ["<|endoftext|>", *(WORDS[at % len(WORDS)] for at in range(length - 1))]
    special = [True] + [False] * (length - 1)
    keys = {"tokenizer": "synthetic", "doc": doc, "position": list(range(length))}
    return {**keys, "token": token, "piece": piece, "special": special}

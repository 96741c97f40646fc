"""Made-up reads, for tests and timings: heads of low growth find the same word far back."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes

SYNTHETIC_ROWS, SYNTHETIC_KEYS = 16, 4
FAR_DISTANCE = 40
SYNTHETIC_TOKENS = (" the", " king", ",", " of", "\n", " <b>", " שלום", " é", "", "😀")
"""Some that a page must not read as its own."""


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """A cell for each length and document; the first model's longest cells bring the tokens."""
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        rng = np.random.default_rng([sizes.seed, model_index, length, doc])
        keys: dict[str, Any] = {"model": model, "context_length": length, "doc": f"synthetic/{doc}"}
        queries = pd.DataFrame({"query": np.linspace(0, length - 1, min(SYNTHETIC_ROWS, length)).round().astype(int)})
        table = sizes.units.merge(queries, how="cross").assign(**keys)
        far = table[table["query"] >= FAR_DISTANCE].copy()
        far["key"] = far["query"] - FAR_DISTANCE + 1
        far["weight"] = np.clip(0.8 - 2 * far["growth"] + 0.05 * rng.random(len(far)), 0.001, 1)
        top = table.merge(pd.DataFrame({"rank": range(SYNTHETIC_KEYS)}), how="cross")
        top = top[top["rank"] <= top["query"]].copy()
        top["key"], top["weight"] = top["query"] - top["rank"], 0.5 / 2.0 ** top["rank"]
        stored: dict[str, Rows] = {
            "passages": {**keys, "tokenizer": ["synthetic"], "rows": len(queries)},
            "reads": top.drop(columns="growth"),
            "far_reads": far.drop(columns="growth"),
        }
        if model_index == 0 and length == max(sizes.lengths):
            stored["pieces"] = _token_text_rows(f"synthetic/{doc}", length)
        yield f"{length}/{doc}", stored


def _token_text_rows(doc: str, length: int) -> Rows:
    token = [0, *(1 + at % len(SYNTHETIC_TOKENS) for at in range(length - 1))]
    piece = ["<|endoftext|>", *(SYNTHETIC_TOKENS[at % len(SYNTHETIC_TOKENS)] for at in range(length - 1))]
    special = [True] + [False] * (length - 1)
    keys = {"tokenizer": "synthetic", "doc": doc, "position": list(range(length))}
    return {**keys, "token": token, "piece": piece, "special": special}

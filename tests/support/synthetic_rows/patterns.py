"""Synthetic rows of the patterns probe."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.base.bins import map_blocks
from headscope.runs.arrow import Rows, encode_map

SYNTHETIC_ROWS, SYNTHETIC_KEYS = 16, 4
FAR_DISTANCE = 40
SYNTHETIC_TOKENS = (" the", " king", ",", " of", "\n", " <b>", " שלום", " é", "", "😀")
"""Token texts, some of which a page could mistake for markup."""


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Synthetic rows of each length and document: heads of low growth attend to the same token far back.

    The longest cells of the first model also hold the tokens.
    """
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
        rows: dict[str, Rows] = {
            "pattern_texts": {**keys, "tokenizer": ["synthetic"], "rows": len(queries)},
            "top_keys": top.drop(columns="growth"),
            "far_keys": far.drop(columns="growth"),
        }
        if doc == 0 and length == max(sizes.lengths):
            rows["attention_maps"] = _synthetic_maps(sizes, keys)
        if model_index == 0 and length == max(sizes.lengths):
            rows["token_text"] = _token_text_rows(f"synthetic/{doc}", length)
        yield f"{length}/{doc}", rows


def _synthetic_maps(sizes: Sizes, keys: Mapping[str, Any]) -> Rows:
    """Maps of heads whose weight falls with distance, the faster the smaller their growth; the rest is on block 0."""
    _, blocks = map_blocks(keys["context_length"])
    distance = np.arange(blocks)[:, None] - np.arange(blocks)
    maps = []
    for growth in sizes.units["growth"]:
        local = np.where(distance >= 0, np.exp(-np.abs(distance) / (1 + 8 * growth)), 0)
        pooled = 0.6 * local / local.sum(1, keepdims=True)
        pooled[:, 0] += 0.4
        maps.append(encode_map(pooled))
    units = sizes.units.drop(columns="growth").loc[sizes.units.index.repeat(blocks)]
    return units.assign(
        **keys, query_block=[*range(blocks)] * len(maps), weights=[row for rows in maps for row in rows]
    )


def _token_text_rows(doc: str, length: int) -> Rows:
    token = [0, *(1 + position % len(SYNTHETIC_TOKENS) for position in range(length - 1))]
    text = ["<|endoftext|>", *(SYNTHETIC_TOKENS[position % len(SYNTHETIC_TOKENS)] for position in range(length - 1))]
    special = [True] + [False] * (length - 1)
    keys = {"tokenizer": "synthetic", "doc": doc, "position": list(range(length))}
    return {**keys, "token": token, "text": text, "special": special}

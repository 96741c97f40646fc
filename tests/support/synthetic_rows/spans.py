"""Synthetic rows of the spans probe."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows

SYNTHETIC_DOCS, SYNTHETIC_LENGTH = 8, 24
SYNTHETIC_SPANS = ("first", "context", "question", "rest")
SYNTHETIC_TOKENS = ("<s>", " the", " king", ",", " of", "\n", " <b>", " שלום", " é", "😀")


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Two groups of synthetic prompts with continuations: heads of low growth attend more to the context of group b."""
    heads = sizes.units.drop(columns="growth")
    for doc in range(SYNTHETIC_DOCS):
        rng = np.random.default_rng([sizes.seed, model_index, doc])
        group, name = "ab"[doc % 2], f"synthetic/{doc}"
        keys: dict[str, Any] = {"model": model, "context_length": SYNTHETIC_LENGTH, "doc": name}
        pairs = pd.DataFrame(list(product(("last", "generated"), SYNTHETIC_SPANS)), columns=["query", "key"])
        table = sizes.units.merge(pairs, how="cross").assign(**keys, chance=0.25, rows=4, hidden_rows=0)
        strength = np.where(table["key"] == "context", 0.8 - 0.6 * table["growth"] + 0.1 * (group == "b"), 0.05)
        table["mass"] = np.clip(strength + rng.normal(0, 0.02, len(table)), 0, 1)
        shown = {"query": "generated", "key": "context"}
        rows: dict[str, Rows] = {
            "spans": table.drop(columns="growth"),
            "span_prompts": {**keys, "number": doc, "group": [group], **shown, "prompt_tokens": 20, "is_prompt": True},
        }
        steps = table[table["query"] == "generated"].drop(columns=["growth", "query", "chance", "hidden_rows"])
        rows["span_steps"] = steps.merge(pd.DataFrame({"step": [1, 2, 4]}), how="cross").assign(rows=1)
        ratio = rng.random(len(heads))
        rows["span_lookback"] = heads.assign(**keys, key="prompt", ratio=ratio, rows=4)
        metrics = {"metric": ["logprob", "lead"], "plain": [-2.0 - rng.random(), rng.normal()]}
        steered = [metrics["plain"][0] + 0.5, metrics["plain"][1] + 1]
        is_counted = [metrics["plain"][0] > np.log(0.01), metrics["plain"][1] > 0]
        columns = {**metrics, "steered": steered, "is_counted": is_counted}
        rows["span_steering"] = {**keys, "key": "context", "alpha": 0.01, **columns}
        if doc == 0:
            rows |= _synthetic_text(sizes, model, name)
        yield name, rows


def _synthetic_text(sizes: Sizes, model: str, doc: str) -> dict[str, Rows]:
    position = np.arange(SYNTHETIC_LENGTH)
    spans = np.array(SYNTHETIC_SPANS)[np.minimum(position // 8, 3)]
    tokens = pd.DataFrame({"position": position, "span": spans}).assign(model=model, doc=doc)
    tokens["text"] = [SYNTHETIC_TOKENS[n % len(SYNTHETIC_TOKENS)] for n in position]
    weights = sizes.units.drop(columns="growth").merge(tokens[["position"]], how="cross").assign(model=model, doc=doc)
    weights["weight"] = 1 / (2 + weights["position"] + weights["head"])
    return {"span_tokens": tokens.assign(special=position == 0), "span_weights": weights}

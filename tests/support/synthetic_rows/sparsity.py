"""Synthetic rows of the sparsity probe."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows

SYNTHETIC_RULES = {
    f"{name}:{size}{ending.format(size)}": loss * 64 / size
    for size in (64, 128)
    for name, ending, loss in (
        ("top", "", 0.1),
        ("group-top", "", 0.2),
        ("layer-top", "", 0.3),
        ("streaming:4", "", 0.4),
        ("vertical-slash", ":{}", 0.25),
    )
}
"""Rules with the share of the weight that a head of growth 1 loses under them."""


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Heads of high growth need more keys and lose more under every rule; rows of answers need fewer. The more
    weight a rule loses, the higher is the loss of the whole model, and the fewer answers are right."""
    rules = pd.DataFrame({"rule": [*SYNTHETIC_RULES], "loss": [*SYNTHETIC_RULES.values()]})
    for doc in range(sizes.docs):
        rng = np.random.default_rng([sizes.seed, model_index, doc])
        for rows_of, scale in (("text", 1.0), ("answer", 0.5)):
            keys: dict[str, Any] = {"model": model, "context_length": max(sizes.lengths), "doc": f"synthetic/{doc}"}
            units = sizes.units.assign(**keys, rows_of=rows_of)
            growth = scale * units["growth"].to_numpy()
            needed = 1 + 200 * growth * rng.uniform(0.9, 1.1, len(units))
            table = units.merge(rules, how="cross")
            lost = np.clip(table["loss"] * scale * table["growth"] * rng.uniform(0.9, 1.1, len(table)), 0, 1)
            table["needs_dense"] = table["rule"].str.contains("top")
            table = table.assign(recall=1 - lost, recall_q05=(1 - lost) ** 2, kl=-np.log(1 - lost), top1=1 - lost / 2)
            overlap = units.merge(rules, how="cross").merge(pd.DataFrame({"other": ["query", "layer"]}), how="cross")
            yield (
                f"synthetic/{doc}/{rows_of}",
                {
                    "sparse_rows": table.assign(error=lost, kept=64.0).drop(columns=["growth", "loss"]),
                    "sparse_overlap": overlap.assign(overlap=0.5).drop(columns=["growth", "loss"]),
                    "sparse_keys": units.drop(columns="growth").assign(
                        keys_90=1 + (needed - 1) / 2, keys_95=needed, keys_99=2 * needed
                    ),
                },
            )
        dense = pd.DataFrame({"rule": ["dense"], "loss": [0.0]})
        loss = pd.concat([dense, rules]).rename(columns={"loss": "lost"})
        kept = loss["rule"].str.extract(r":(\d+)$", expand=False).fillna("256").astype(float)
        loss = loss.assign(model=model, context_length=max(sizes.lengths), kept=kept)
        is_right = (rng.random(len(loss)) > loss["lost"]).to_numpy()
        answers = loss.assign(
            pair=f"needle {doc}", nll=1 + loss["lost"] * rng.uniform(1, 3, len(loss)), success=is_right
        )
        bins = loss.merge(pd.DataFrame({"position": [16, 32], "tokens": [15, 16]}), how="cross")
        nll = 3 + bins["lost"] * rng.uniform(0.9, 1.1, len(bins))
        yield (
            f"synthetic/{doc}/whole",
            {
                "sparse_loss": bins.assign(doc=f"synthetic/{doc}", nll=nll).drop(columns="lost"),
                "sparse_answers": answers.drop(columns="lost"),
            },
        )

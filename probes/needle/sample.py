"""Made-up needle trials, for tests and timings: heads of low growth copy, and deep or long trials fail more."""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes

HARDER = 0.15
"""How much less often each model succeeds than the one before."""


def rows(sizes: Sizes, model: str, number: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Trials at 4 depths of 2 needles in 2 haystacks by the model of that number, as one cell."""
    rng = np.random.default_rng([sizes.seed, number])
    trials = pd.DataFrame(
        list(product(("strict", "absent"), ("bell", "ledger"), sizes.lengths, (0.0, 0.33, 0.67, 1.0), (0, 1))),
        columns=["mode", "needle", "context_length", "depth", "seed"],
    ).assign(model=model)
    trials["doc"] = "synthetic/" + trials["seed"].astype(str)
    trials["prompt_tokens"] = trials["context_length"]
    trials["span_start"] = (trials["depth"] * (trials["context_length"] - 60)).astype(int) + 9
    trials["span_end"] = trials["span_start"] + 8
    hidden = trials["mode"] == "strict"
    longest = trials["context_length"] == max(sizes.lengths)
    chance = np.where(hidden, 0.95 - HARDER * number - 0.2 * trials["depth"] * longest, 0.0)
    trials["success"] = rng.random(len(trials)) < chance
    trials["recall"] = np.where(trials["success"], 1.0, 0.1)
    trials["answer"] = np.where(trials["success"], "1847 by Odette Marchbanks.", "the king.")
    trials["steps"] = 10
    keys = ["model", "mode", "needle", "context_length", "depth", "doc", "seed"]
    heads = sizes.units.merge(trials[[*keys, "success"]], how="cross")
    may_copy = np.where(heads["mode"] == "strict", 0.3 + 0.7 * heads["success"], 0)
    skill = np.clip(1 - 4 * heads["growth"], 0, 1) * may_copy
    heads["copies"] = rng.binomial(8, 0.95 * skill)
    heads["score"] = heads["copies"] / 8
    heads["mass"] = np.clip(0.7 * skill + 0.01 * rng.random(len(heads)), 0, 1)
    yield "trials", {"needles": trials, "retrieval": heads.drop(columns=["growth", "success"])}

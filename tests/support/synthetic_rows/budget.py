"""Synthetic rows of the budget probe, for tests and timings of the code that reads runs."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.base.bins import position_bin_edges
from headscope.runs.arrow import Rows
from probes.budget.declaration import (
    ANSWERS,
    CACHE,
    EVERY_ORDER,
    LOSS,
    MEASURED_ORDERS,
    ORDERS,
    RANDOM,
    SCORE_ERRORS,
    SCORES,
    SETTINGS,
    STABILITY,
    TASKS,
)
from probes.budget.streaming_order import UNIT, rank_groups, streaming_count

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
DRAWS = 2
QUALITY = {"effective-length": 3.0, "local-mass": 2.5, "far-mass": 4.0, RANDOM: 1.2}
"""Exponent of the loss as a function of the share, by order; higher is better."""
BOUND, BYTES_PER_TOKEN = 0.01, 128


def synthetic_cells(sizes: Sizes, model: str, number: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Losses that rise with the share, more slowly for better orders; every document has its own scale."""
    rng = np.random.default_rng([sizes.seed, number])
    groups = sizes.units[UNIT].drop_duplicates()
    orders = [*((order, 0) for order in MEASURED_ORDERS), *((RANDOM, draw) for draw in range(DRAWS))]
    for doc in range(sizes.docs):
        blocks = [
            _losses(length, order, draw, share, rng.normal(1, 0.1))
            for length in sizes.lengths
            for order, draw, share in _curve_points(orders)
        ]
        yield f"losses {doc}", {LOSS.name: pd.concat(blocks).assign(model=model, doc=f"text/{doc}")}
        scores = sizes.units.assign(log_ess2=4 * sizes.units["growth"], far_mass=sizes.units["growth"])
        scores["local_mass"] = 1 - scores["far_mass"]
        keys: dict[str, Any] = {"model": model, "context_length": max(sizes.lengths), "doc": f"text/{doc}"}
        errors = sizes.units.assign(log_ess2_se=0.05, local_mass_se=0.01, far_mass_se=0.01)
        tables: dict[str, Rows] = {
            SCORES.name: scores.drop(columns="growth").assign(**keys),
            SCORE_ERRORS.name: errors.drop(columns="growth").assign(**keys),
        }
        yield f"scores {doc}", tables
    scores = sizes.units.rename(columns={"growth": "score"})
    ranks, cache = [], []
    for (order, draw), half in product(orders, (0, 1)):
        keys = {"model": model, "order": order, "draw": draw, "half": half}
        ranks.append(rank_groups(scores.assign(score=rng.normal(scores["score"], 0.1)), "max").assign(**keys))
        cache.append(_cache(sizes, len(groups)).assign(**keys))
    settings: dict[str, Any] = {
        "model": model,
        "sink": 4,
        "recent": 16,
        "bound": BOUND,
        "groups": [len(groups)],
        "reduction": "max",
    }
    stability = [
        {"order": order, "half": half, "share": share, "kept": 0.95, "same_set": 0.6}
        for order, half, share in product(MEASURED_ORDERS, (0, 1), SHARES[1:-1])
    ]
    yield (
        "orders",
        {
            ORDERS.name: pd.concat(ranks),
            CACHE.name: pd.concat(cache),
            SETTINGS.name: settings,
            STABILITY.name: pd.DataFrame(stability).assign(model=model),
        },
    )
    rows = [
        {"order": order, "draw": draw, "share": share, "pair": f"induction {pair}"}
        for (order, draw, share), pair in product(_curve_points(orders), range(6))
    ]
    answers = pd.DataFrame(rows).assign(model=model, prompts="induction")
    answers["nll"] = 0.5 + 3 * answers["share"] + rng.uniform(0, 0.5, len(answers))
    yield "answers", {ANSWERS.name: answers.assign(success=answers["nll"] < 1.8)}
    rows = [
        {"order": order, "draw": draw, "share": share, "document": document, "score": rng.random() > share / 2}
        for (order, draw, share), document in product(_curve_points(orders), range(6))
    ]
    keys = {"task": "arc_easy", "metric": "acc", "filter": "none", "higher_is_better": True}
    yield "tasks", {TASKS.name: pd.DataFrame(rows).assign(model=model, context_length=max(sizes.lengths), **keys)}


def _curve_points(orders: list[tuple[str, int]]) -> list[tuple[str, int, float]]:
    """(order, draw, share) of every measurement: the ends once, the shares between for every order."""
    return [(EVERY_ORDER, 0, SHARES[0]), (EVERY_ORDER, 0, SHARES[-1])] + [
        (*order, share) for order in orders for share in SHARES[1:-1]
    ]


def _losses(length: int, order: str, draw: int, share: float, scale: float) -> pd.DataFrame:
    position = position_bin_edges(length)
    change = 0.5 * scale * share ** QUALITY.get(order, 1.0)
    nll = 4 - 0.2 * np.log(position) + change * np.log1p(position) / np.log1p(length)
    columns: dict[str, Any] = {"context_length": length, "order": order, "draw": draw, "share": share}
    return pd.DataFrame({"position": position, "nll": nll, "tokens": np.diff(position, prepend=0)}).assign(**columns)


def _cache(sizes: Sizes, groups: int) -> pd.DataFrame:
    rows = []
    for length, share in product(sizes.lengths, SHARES):
        count = streaming_count(share, groups)
        kept = (groups - count) * length + count * min(length, 20)
        size = {"cache_bytes": BYTES_PER_TOKEN * kept, "full_bytes": BYTES_PER_TOKEN * groups * length}
        rows.append({"context_length": length, "share": share, "groups": count, **size})
    return pd.DataFrame(rows)

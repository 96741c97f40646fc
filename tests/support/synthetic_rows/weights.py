"""Synthetic rows of the probe `weights`."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.weights.analysis import INPUTS
from probes.weights.declaration import ALL_OTHERS, SIDES

SOURCES = (" king", " <b>")
"""Attended tokens, one of which a page could mistake for markup."""
TOP = 3


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Weights, composition and positional curves; heads of low growth copy and compose most."""
    rng = np.random.default_rng([sizes.seed, model_index])
    units = sizes.units
    heads = units.drop(columns="growth").assign(
        model=model,
        copying=np.clip(0.9 - 1.5 * units["growth"] + rng.normal(0, 0.05, len(units)), -1, 1),
        copying_uncentred=0.0,
        is_centred=True,
        ov_norm=1 + rng.random(len(units)),
        qk_norm=2 + rng.random(len(units)),
    )
    tokens = units.drop(columns="growth").merge(
        pd.DataFrame(
            list(product(SOURCES, ("boosted", "suppressed"), range(TOP))), columns=["source", "effect", "rank"]
        ),
        how="cross",
    )
    tokens = tokens.assign(model=model, token=tokens["rank"], text=" token")
    tokens["value"] = np.where(tokens["effect"] == "boosted", 1.0, -1.0) / (1 + tokens["rank"])
    distances = pd.DataFrame({"distance": [0, 1, 8], "contribution": [0.5, 0.3, -0.1]})
    pairs = (
        units.drop(columns="growth")
        .merge(distances, how="cross")
        .merge(pd.DataFrame({"pair": range(sizes.pairs)}), how="cross")
    )
    yield (
        "weights",
        {
            "head_circuits": heads,
            "ov_tokens": tokens,
            "token_pairs": pairs.assign(model=model, query_token=SOURCES[0], key_token=SOURCES[1]),
        },
    )
    composition = _composition(sizes, model, rng)
    null: Rows = {
        "model": model,
        "input": [*INPUTS],
        "pairs": len(composition) // len(INPUTS),
        "mean": 0.1,
        "bound": 0.12,
    }
    yield "composition", {"head_composition": composition, "composition_null": null}
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        yield f"{length}/{doc}", _positional_rows(sizes, model, length, doc)


def _composition(sizes: Sizes, model: str, rng: np.random.Generator) -> pd.DataFrame:
    senders = sizes.units[["layer", "head"]].add_prefix("sender_")
    rows = senders.merge(sizes.units, how="cross").merge(pd.DataFrame({"input": INPUTS}), how="cross")
    rows = rows[rows["sender_layer"] < rows["layer"]]
    score = 0.1 + 0.2 * (1 - rows["growth"]) * rng.random(len(rows))
    return rows.drop(columns="growth").assign(model=model, score=score, baseline=0.1)


def _positional_rows(sizes: Sizes, model: str, length: int, doc: int) -> Mapping[str, Rows]:
    keys: dict[str, Any] = {"model": model, "context_length": length, "doc": f"synthetic/{doc}"}
    units = sizes.units
    distances = pd.DataFrame({"distance": [0, *(2**power for power in range(length.bit_length() - 1))]})
    curve = units.merge(distances, how="cross").assign(**keys)
    curve["logit"] = -(1 - curve["growth"]) * np.log1p(curve["distance"]) + 0.01 * doc
    summary = units.assign(
        **keys,
        effective_length=np.clip(length ** units["growth"], 1, None),
        preferred_distance=0,
        spread=(1 - units["growth"]) * np.log1p(length),
    )
    return {
        "value_attention": units.assign(
            **keys,
            visible=length,
            **dict.fromkeys(("rows", "population", "sink_rows", "sink_population"), 8),
            log_ess2=units["growth"] * np.log(length),
            sink_share=0.9 * (1 - units["growth"]),
            value_log_ess2=0.5 * (1 + units["growth"]) * np.log(length),
            value_sink_share=0.1 * (1 - units["growth"]),
        ).drop(columns="growth"),
        **_attribution_rows(units.iloc[-1:], keys),
        "positional_preference": curve.drop(columns="growth"),
        "positional_summary": summary.drop(columns="growth"),
    }


def _attribution_rows(heads: pd.DataFrame, keys: Mapping[str, Any]) -> Mapping[str, Rows]:
    """QK attribution of one head."""
    row = heads.drop(columns="growth").assign(**keys, query=60, key=20)
    parts = pd.DataFrame({"component": ["embedding", "bias", "L0H0", "L0 MLP"], "contribution": [1.0, 0.5, 3.0, -0.5]})
    components = row.merge(pd.DataFrame({"side": SIDES}), how="cross").merge(parts, how="cross")
    pairs = pd.DataFrame(
        {
            "query_component": ["embedding", ALL_OTHERS],
            "key_component": ["L0H0", ALL_OTHERS],
            "pair": 0,
            "contribution": [3.0, 1.0],
        }
    )
    return {
        "qk_rows": row.assign(weight=0.8, logit=4.0, query_text="the king <b>", key_text="a king"),
        "qk_components": components,
        "qk_pairs": row.merge(pairs, how="cross"),
    }

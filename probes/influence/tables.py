"""Tables of the influence probe: change of the loss for single units and for sets, of texts and of answers; and
synthetic rows."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.columns import DOC, GROUP, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.synthetic import Sizes

SWEEP_KEYS = ["model", "context_length", "component", "target", "objective"]
"""Keys of one sweep; the table implies the objective."""
UNIT_COLUMNS = ["layer", "kv_group", "head"]
"""Keys of a unit within a sweep."""

UNIT_HEAD = key("head", "index16", "", "query head within the layer, from 0; -1 if the unit is the whole KV group", -1)
COMPONENT = key(
    "component",
    "label",
    "",
    "parameters that were reset: freq (log-frequencies), scale (tau, gamma), joint (both); or the intervention: "
    "zero, mean, uniform, pairs-zero:BAND or pairs-unrotated:BAND for a band of rotary pairs (A-B, or short, middle, "
    "long by wavelength), or a user's own",
    None,
)
TARGET = key(
    "target",
    "label",
    "",
    "what the parameters were reset to: init or base; none for an intervention without reset",
    None,
)

METHOD = key(
    "method",
    "label",
    "",
    "exact: evaluated; estimate: first order in the head's output; curved: with the second order [ours]",
    None,
)
LOSS_BEFORE = Column("nll_before", "value", "nats/token", "mean next-token loss of the unchanged model", 0)
LOSS_CHANGE = Column("delta_nll", "value", "nats/token", "loss after minus loss before; above 0 the loss rises")

NAMED_SET_PREFIX = "set:"
"""Prefix of `choice` for a set that the user named."""
SET_COLUMNS = (
    COMPONENT,
    TARGET,
    key("unit", "label", "", "kind of unit in the set: group or head", None),
    key(
        "choice",
        "label",
        "",
        "top: the units of largest influence over all documents; random: as many of the same layers; set:NAME: the "
        "heads of a named set [ours]",
        None,
    ),
    key("size", "index16", "units", "number of units changed together", 1),
    key("draw", "index16", "", "number of the random draw; 0 for the top set"),
)
TRIAL_COLUMNS = (
    DOC,
    key("fact", "label", "", "name of the fact that is hidden in the document and queried", None),
    key(
        "depth",
        "value",
        "",
        "requested position of the fact as a share of the document; it is inserted at the start of a sentence",
        0,
        1,
    ),
)
TOP1_ACCURACY = Column(
    "hits", "value", "", "share of the answer's tokens that are the unchanged model's top prediction [ours]", 0, 1
)
ANSWER_LOSS_BEFORE = Column(
    "nll_before", "value", "nats/token", "mean loss of the answer's tokens in the unchanged model", 0
)

INFLUENCE = Table(
    "influence",
    "change of a document's loss when one unit, a KV group or a head, is changed: its position parameters are reset, "
    "or it is ablated",
    (MODEL, LENGTH, DOC, LAYER, UNIT_HEAD, GROUP, COMPONENT, TARGET, METHOD, LOSS_BEFORE, LOSS_CHANGE),
)
INFLUENCE_SETS = Table(
    "influence_sets",
    "change of a document's loss when sets of units are changed together: the most influential, random, or all",
    (MODEL, LENGTH, DOC, *SET_COLUMNS, LOSS_BEFORE, LOSS_CHANGE),
)
INFLUENCE_ANSWERS = Table(
    "influence_answers",
    "change of the loss of an answer about a hidden fact when one unit is changed; the answer is the scored part of "
    "the fact, after the prompt",
    (
        MODEL,
        LENGTH,
        *TRIAL_COLUMNS,
        LAYER,
        UNIT_HEAD,
        GROUP,
        COMPONENT,
        TARGET,
        METHOD,
        TOP1_ACCURACY,
        ANSWER_LOSS_BEFORE,
        LOSS_CHANGE,
    ),
)
INFLUENCE_ANSWER_SETS = Table(
    "influence_answer_sets",
    "change of the loss of an answer when sets of units are changed together",
    (MODEL, LENGTH, *TRIAL_COLUMNS, *SET_COLUMNS, TOP1_ACCURACY, ANSWER_LOSS_BEFORE, LOSS_CHANGE),
)

TABLES = (INFLUENCE, INFLUENCE_SETS, INFLUENCE_ANSWERS, INFLUENCE_ANSWER_SETS)
UNIT_TABLES = {"text": INFLUENCE.name, "answer": INFLUENCE_ANSWERS.name}
"""The table of single units, by objective."""
SET_TABLES = {"text": INFLUENCE_SETS.name, "answer": INFLUENCE_ANSWER_SETS.name}


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell per document with every unit of a model at the longest length."""
    for doc in range(sizes.docs):
        keys: dict[str, Any] = {"model": model, "context_length": max(sizes.lengths), "doc": f"synthetic/{doc}"}
        tables = _synthetic_document(sizes.units, np.random.default_rng([sizes.seed, model_index, doc]))
        yield str(doc), {name: table.assign(**keys) for name, table in tables.items()}


def _synthetic_document(units: pd.DataFrame, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    """Estimates equal the exact effects plus a little noise; the effect of a set is a little less than the sum."""
    heads = units.assign(effect=0.05 * np.exp(-12 * units["growth"]))
    groups = heads.groupby(["layer", "kv_group"], as_index=False)["effect"].sum().assign(head=-1)
    blocks, sets = [], []
    for component, members, unit in (("freq", groups, "group"), ("scale", heads, "head"), ("joint", groups, "group")):
        sweep: dict[str, Any] = {"component": component, "target": "init", "nll_before": 3.2}
        delta = members["effect"] + rng.normal(0, 0.0005, len(members))
        block = members[["layer", "head", "kv_group"]].assign(**sweep)
        blocks.append(block.assign(method="exact", delta_nll=delta))
        blocks.append(block.assign(method="estimate", delta_nll=1.2 * delta + rng.normal(0, 0.0002, len(members))))
        ranked = np.sort(members["effect"])[::-1]
        for size in sorted({1, 2, 4, len(members)} & {*range(len(members) + 1)}):
            draws = [("top", 0, ranked[:size].sum())]
            draws += [("random", n, rng.choice(ranked, size, replace=False).sum()) for n in range(2)]
            sets += [
                {**sweep, "unit": unit, "choice": choice, "size": size, "draw": draw, "delta_nll": 0.9 * total}
                for choice, draw, total in draws
            ]
    return {"influence": pd.concat(blocks, ignore_index=True), "influence_sets": pd.DataFrame(sets)}

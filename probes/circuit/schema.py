"""Options, stored tables and synthetic rows of the probe of circuits of heads."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import BeforeValidator, Field, model_validator

from headscope.head_names import head_names
from headscope.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.prompts.pair_sets import unused_pair_options
from headscope.runs.arrow import Rows
from headscope.runs.columns import GROUP, HEAD, LAYER, MODEL, Column, Table, key
from headscope.runs.synthetic import Sizes
from headscope.study.config import Options

WHOLE = "none"
"""The subset without heads, of which the row compares the circuit with the model."""


def _distinct_names(value: Any) -> Any:
    """The heads as names, see `head_names`. Raises ValueError for one that is named twice."""
    names = head_names(value)
    if isinstance(names, list) and (repeated := [name for name in names if names.count(name) > 1]):
        raise ValueError(f"the circuit has {repeated[0]} twice. Name every head once")
    return names


class CircuitOptions(Options):
    """Test a set of heads as a circuit: ablate all other heads, and subsets of the circuit."""

    pairs: list[Annotated[str, Field(min_length=1)]] = Field(
        ["ioi"],
        min_length=1,
        description="sets of prompt pairs whose clean prompts are run: ioi, greater-than, induction, needle, or a JSON "
        "lines file",
    )
    heads: Annotated[list[str], BeforeValidator(_distinct_names)] = Field(
        min_length=1,
        description="the heads of the circuit, such as L18H6; file:FILE: a saved head set; "
        "run:FOLDER:STATISTIC:COUNT[:MODEL]: the top heads of a run",
    )
    complement: Literal["mean", "resample", "zero"] = Field(
        "mean",
        description="outputs of the heads that are ablated: mean: their mean over the reference prompts; resample: "
        "those of one reference prompt of the same number of tokens, averaged over --draws; zero: 0",
    )
    reference: str | None = Field(
        None,
        min_length=1,
        description="set of prompt pairs whose corrupted prompts are the reference prompts; by default the set that is "
        "run",
    )
    by: Literal["position", "span"] = Field(
        "position",
        description="for mean: position: over reference prompts with the same number of tokens, position by position; "
        "span: over all tokens of a named span, over the last tokens, and over all other tokens",
    )
    draws: int = Field(
        4, ge=1, le=1000, description="for resample: number of reference prompts; all if there are fewer"
    )
    random_subsets: int = Field(
        10, ge=0, le=1000, description="random subsets of the circuit that are removed to test completeness"
    )
    greedy: int = Field(
        3,
        ge=0,
        le=1000,
        description="largest greedy subset that is removed to test completeness: each step adds the head that "
        "separates circuit and model most, on half of the prompts; the other half tests it",
    )
    metric: Literal["logit_diff", "logprob"] = Field(
        "logit_diff",
        description="logit_diff: logit of the answer minus logit of the wrong answer; logprob: log-probability of the "
        "answer",
    )
    count: int = Field(32, ge=1, le=1_000_000, description="number of prompts of a generated set")
    length: int = Field(128, ge=4, le=2**20, description="tokens of a prompt of the sets induction and needle")
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)

    @model_validator(mode="after")
    def _refuse_unused_options(self) -> "CircuitOptions":
        unused = unused_pair_options([*self.pairs, *([self.reference] if self.reference else [])])
        if self.complement == "zero":
            unused["reference"] = "zero ablation has no reference prompts"
        if self.complement != "mean":
            unused["by"] = "it is for the complement mean"
        if self.complement != "resample":
            unused["draws"] = "it is for the complement resample"
        for name, reason in unused.items():
            if name in self.model_fields_set:
                raise ValueError(f"'{name}' has no effect here: {reason}. Remove '{name}'")
        return self

    @model_validator(mode="after")
    def _refuse_all_heads(self) -> "CircuitOptions":
        if "all" in self.heads:
            raise ValueError("'heads' is 'all', whose complement is empty. Name the heads of the circuit")
        return self


_KEYS = (
    MODEL,
    key("prompts", "label", "", "set of prompts: a generated set, or the name of a file", None),
    key("pair", "label", "", "name of the prompt within its set", None),
    key("complement", "label", "", "ablation of heads outside of the circuit: mean, resample or zero", None),
    key("metric", "label", "", "logit_diff or logprob", None),
)
CIRCUIT = Table(
    "circuit",
    "metric of a prompt's answer with a subset removed from a circuit of heads, and from the whole model",
    (
        *_KEYS,
        key(
            "subset",
            "label",
            "",
            "removed heads: none; random 1, random 2, ...; greedy 1 (one head), greedy 2, ...",
            None,
        ),
        Column("heads", "text", "", "the removed heads, joined by commas"),
        Column("size", "index16", "heads", "number of heads of the circuit", 1),
        Column("metric_circuit", "value", "logits, nats", "metric of the run with only the rest of the circuit intact"),
        Column("metric_model", "value", "logits, nats", "metric of the run with only these heads ablated"),
        Column("metric_empty", "value", "logits, nats", "metric of the run with all heads ablated"),
        Column("is_selecting", "flag", "", "whether the prompt chose the greedy subset, so that it does not test it"),
    ),
)
CIRCUIT_MEMBERS = Table(
    "circuit_members",
    "metric of a prompt's answer with one head removed from a circuit of heads",
    (
        *_KEYS,
        LAYER,
        HEAD,
        GROUP,
        Column("metric_circuit", "value", "logits, nats", "metric of the run with only the circuit intact"),
        Column("metric_without", "value", "logits, nats", "the same without the head"),
    ),
)
TABLES = (CIRCUIT, CIRCUIT_MEMBERS)


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell: a circuit of three heads with most of the logit difference of every prompt."""
    rng = np.random.default_rng([sizes.seed, model_index])
    keys: dict[str, Any] = {"model": model, "prompts": "ioi", "complement": "mean", "metric": "logit_diff"}
    heads, subsets, members = sizes.heads.drop(columns="growth").head(3), [], []
    for number in range(sizes.docs):
        keys["pair"] = f"ioi {number}"
        for name, circuit, whole in (
            (WHOLE, 3.0, 4.0),
            ("random 1", 1.5, 2.5),
            ("random 2", 1.0, 1.2),
            ("greedy 1", 1, 3),
        ):
            values = np.array([circuit, whole]) + rng.normal(0, 0.1, 2)
            removed = "" if name == WHOLE else "L0H0"
            columns = {"metric_circuit": values[0], "metric_model": values[1], "metric_empty": 0.1, "size": 3}
            is_selecting = name.startswith("greedy") and number % 2 == 0
            subsets.append({**keys, "subset": name, "heads": removed, **columns, "is_selecting": is_selecting})
        without = 3.0 - np.array([1.5, 0.8, 0.0]) + rng.normal(0, 0.1, 3)
        members.append(heads.assign(**keys, metric_circuit=3.0, metric_without=without))
    yield "ioi", {CIRCUIT.name: pd.DataFrame(subsets), CIRCUIT_MEMBERS.name: pd.concat(members, ignore_index=True)}

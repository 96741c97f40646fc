"""Head identifiers such as L18H6, and sets of heads: what selections, ablations and exports exchange."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from headscope.base.model_identity import NO_DIGESTS, WeightDigests
from headscope.base.user_input import quote, read_yaml
from headscope.errors import BadInput, ResourceMissing, did_you_mean

EXACT = "exact"
"""Method of a measured value. Every other method is an estimate."""
ESTIMATE_MARK = "~"
"""Precedes an estimate in tables and charts."""


def method_column(name: str) -> str:
    """The column with the methods of the values in column `name`."""
    return f"{name}_method"


def estimate_mask(heads: pd.DataFrame, name: str) -> pd.Series:
    """Mask of the rows whose value in column `name` is an estimate; all False if the table names no methods."""
    column = method_column(name)
    if column not in heads:
        return pd.Series(False, heads.index)
    return heads[name].notna() & (heads[column] != EXACT)


def mark_of(row: Mapping[Any, Any] | pd.Series, name: str) -> str:
    """`ESTIMATE_MARK` if the value in column `name` of a row is an estimate, else ""."""
    return ESTIMATE_MARK if row.get(method_column(name), EXACT) != EXACT else ""


Head = tuple[int, int]
"""Layer and query head, both from 0."""


def parse_unit(text: Any) -> tuple[int, int, bool]:
    """Parse a head, L18H6 or 18.6, or a KV group, 18.g2: (layer, number, whether it is a KV group).

    Raises ValueError for any other text, and for a number: YAML reads 18.10 and 18.1 as the same one.
    """
    if isinstance(text, Number):  # also those of numpy
        raise ValueError(
            f"{text} is a number, not a head: 1.1 and 1.10 are one number. Write L1H10, or in quotes '1.10'"
        )
    text = str(text)
    match = re.fullmatch(r"[lL]?([0-9]{1,5})(?:\.|[hH])(g?)([0-9]{1,5})", text)
    if match is None:
        raise ValueError(f"'{text[:60]}' is not a head. Write layer and head as in L18H6 or 18.6")
    return int(match[1]), int(match[3]), bool(match[2])


def parse_head(text: Any) -> Head:
    """Parse a head, L18H6 or 18.6. Raises ValueError for a KV group, a number, and any other text."""
    layer, number, is_group = parse_unit(text)
    if is_group:
        raise ValueError(f"'{text}' is a KV group. Name its heads, as in L{layer}H0")
    return layer, number


def format_head(layer: int, head: int) -> str:
    """The identifier of a head, such as L18H6."""
    return f"L{layer}H{head}"


@dataclass(frozen=True)
class HeadSet:
    """Distinct heads in order of rank, with an optional weight each, and where they come from.

    `source` says how they were selected; `model_digests` are those of the weights they were measured on.
    Two sets are equal if they hold the same heads with the same weights in the same order.
    """

    heads: tuple[Head, ...]
    weights: tuple[float, ...] | None = None
    source: str = ""
    model_digests: WeightDigests = NO_DIGESTS

    def __post_init__(self) -> None:
        if len({*self.heads}) < len(self.heads):
            repeated = next(head for head in self.heads if self.heads.count(head) > 1)
            raise BadInput(f"head {format_head(*repeated)} appears twice in one set. List each head once")
        if self.weights is not None and len(self.weights) != len(self.heads):
            raise BadInput(f"{len(self.weights)} weights for {len(self.heads)} heads. Give one weight per head")

    @classmethod
    def parse(cls, text: str | Iterable[str], source: str = "") -> "HeadSet":
        """Parse head identifiers, separated by commas or underscores or given one by one; repeated heads count once.

        Raises ValueError naming the first that is not a head.
        """
        parts = re.split(r"[,_\s]+", text) if isinstance(text, str) else text
        return cls(tuple(dict.fromkeys(parse_head(part.strip()) for part in parts if part.strip())), source=source)

    @classmethod
    def top(
        cls,
        table: pd.DataFrame,
        statistic: str,
        count: int,
        model: str | None = None,
        model_digests: WeightDigests = NO_DIGESTS,
    ) -> "HeadSet":
        """The `count` heads of largest `statistic` in a per-head table such as `run.heads`, with it as weight.

        Heads with estimates follow those that were measured, and `source` counts them. Equal values are ordered by
        layer and head; heads without a value are left out. Raises BadInput if the table has no such column, or holds
        several models and `model` names none.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise BadInput(f"count={count!r}: the number of heads must be a whole number of at least 1. Pass e.g. 5")
        if statistic not in table:
            suggestion = did_you_mean(str(statistic), map(str, table))
            raise BadInput(f"no statistic '{statistic}' in this run{suggestion}. Use a column of run.heads")
        models = [*dict.fromkeys(table["model"].astype(str))]
        if model is None and len(models) > 1:
            raise BadInput(f"several models in this run: {', '.join(models)}. Name one with model=...")
        rows = table[table["model"] == (models[0] if model is None else model)]
        if rows.empty:
            raise BadInput(f"no model '{model}' in this run. Use one of: {', '.join(models)}")
        rows = rows.dropna(subset=[statistic]).sort_values(["layer", "head"])
        ordered = rows.assign(_estimated=estimate_mask(rows, statistic)).sort_values(
            ["_estimated", statistic], ascending=[True, False], kind="stable"
        )
        rows, others = ordered.head(count), ordered.iloc[count:]
        heads = tuple((int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True))
        source = f"top {count} by {statistic}" + (f" of {model}" if model else "")
        source += _describe_estimates(rows, others, statistic)
        return cls(heads, tuple(map(float, rows[statistic])), source, model_digests)

    @classmethod
    def read(cls, file: Path | str) -> "HeadSet":
        """Read a set from a YAML or JSON file that `write` made, or from a plain list of identifiers.

        Raises ResourceMissing without the file, BadInput for content that is not a set of heads.
        """
        try:
            content = read_yaml(Path(file), f"head set '{file}'")  # JSON is YAML
        except FileNotFoundError as error:
            raise ResourceMissing(f"no head set at '{file}'. Check the path") from error
        fields: Mapping[str, Any] = content if isinstance(content, Mapping) else {"heads": content}
        entries = fields.get("heads")
        if not isinstance(entries, list):
            raise BadInput(f"head set '{file}' has no list of heads: {quote(content)}. Write heads: [L18H6, ...]")
        try:
            heads = tuple(parse_head(entry) for entry in entries)
            weights = tuple(float(weight) for weight in fields["weights"]) if fields.get("weights") else None
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"head set '{file}': {error}") from error
        digests = WeightDigests.from_record(fields.get("model_digests"), fields.get("model_digest"))
        return cls(heads, weights, str(fields.get("source", "")), digests)

    def write(self, file: Path | str) -> None:
        """Write the set as YAML, or as JSON if the file ends in .json."""
        fields = {key: value for key, value in self.to_dict().items() if value}
        text = json.dumps(fields, indent=2) if str(file).endswith(".json") else yaml.safe_dump(fields, sort_keys=False)
        Path(file).write_text(text, encoding="utf-8")

    def to_dict(self) -> dict[str, object]:
        """Identifiers, weights, source and digests of the model as plain data."""
        return {
            "heads": self.identifiers,
            "weights": None if self.weights is None else [*self.weights],
            "source": self.source,
            "model_digests": self.model_digests.to_dict(),
        }

    @property
    def identifiers(self) -> list[str]:
        """The heads as L18H6, in order."""
        return [format_head(*head) for head in self.heads]

    def mask(self, layers: Sequence[int], heads: int) -> npt.NDArray[np.bool_]:
        """Which heads are in the set: [len(layers), heads]; `layers` are layer numbers."""
        return np.array([[(layer, head) in self.heads for head in range(heads)] for layer in layers], dtype=bool)

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __contains__(self, head: object) -> bool:
        return head in self.heads

    def __or__(self, other: Collection[Head]) -> "HeadSet":
        heads = (*self.heads, *(head for head in other if head not in self.heads))
        others = getattr(other, "model_digests", NO_DIGESTS)
        if not self.model_digests.matches(others):
            raise BadInput("these heads were measured on two models with different weights. Combine heads of one model")
        return HeadSet(heads, model_digests=self.model_digests.shared_with(others))

    def __and__(self, other: Collection[Head]) -> "HeadSet":
        return HeadSet(tuple(head for head in self.heads if head in other), model_digests=self.model_digests)

    def __sub__(self, other: Collection[Head]) -> "HeadSet":
        return HeadSet(tuple(head for head in self.heads if head not in other), model_digests=self.model_digests)

    def __str__(self) -> str:
        return ",".join(self.identifiers)


def _describe_estimates(top: pd.DataFrame, others: pd.DataFrame, statistic: str) -> str:
    """A text for the source of a list of top heads: how many of them are estimates, or how many others have larger
    estimates; "" if no estimate affects the list."""
    estimated = int(top["_estimated"].sum())
    larger = int((others["_estimated"] & (others[statistic] > top[statistic].min())).sum())
    parts = [f"{estimated} of {len(top)} are estimates"] if estimated else []
    parts += [f"{larger} other heads have larger estimates"] if larger and not estimated else []
    return "".join(f"; {part}" for part in parts)

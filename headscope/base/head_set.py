"""Sets of heads: what selections, ablations and exports exchange."""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from headscope.base.head_files import no_ranking, parse_shape, read_heads
from headscope.base.heads import Head, check_in_shape, check_statistic, estimate_mask, format_head, to_heads
from headscope.base.model_identity import NO_DIGESTS, WeightDigests
from headscope.base.output_files import Output
from headscope.base.public_functions import check_argument, checked_methods
from headscope.base.user_input import check_path, quote
from headscope.errors import BadInput

HEAD_SET = Output("a file of heads", b"heads", "file")


@dataclass(frozen=True)
@checked_methods  # before the constructor exists, which names the head that is wrong
class HeadSet:
    """Distinct heads in order of rank, with an optional weight each, and where they come from.

    `source` says how they were selected; `model_digests` are those of the weights they were measured on, `model` its
    name, and `shape` its number of layers and of heads per layer, where a file says so. Raises BadInput for what is no
    head, appears twice or is not in `shape`, for a weight that is not finite, and for a field of another type.
    """

    heads: tuple[Head, ...]
    weights: tuple[float, ...] | None = None
    source: str = ""
    model_digests: WeightDigests = NO_DIGESTS
    model: str = ""
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, kind, noun in (
            ("source", str, "a text"),
            ("model", str, "a text"),
            ("model_digests", WeightDigests, "WeightDigests"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise BadInput(f"{name}={quote(value)} is not valid. Use {noun}")
        try:
            object.__setattr__(self, "heads", to_heads(self.heads))
            object.__setattr__(self, "shape", None if self.shape is None else parse_shape(self.shape))
            check_in_shape(self.heads, self.shape)
        except (TypeError, ValueError) as error:
            raise BadInput(f"these are not the heads of a set: {error}") from error
        if len({*self.heads}) < len(self.heads):
            repeated = next(head for head in self.heads if self.heads.count(head) > 1)
            raise BadInput(f"head {format_head(*repeated)} appears twice in one set. List each head once")
        if self.weights is not None:
            weights = [*check_argument(Iterable, self.weights, "weights")]
            if len(weights) != len(self.heads):
                raise BadInput(f"{len(weights)} weights for {len(self.heads)} heads. Give one weight per head")
            for head, weight in zip(self.heads, weights, strict=True):
                if not isinstance(weight, Real) or isinstance(weight, bool) or not math.isfinite(weight):
                    raise BadInput(f"the weight of {format_head(*head)} is {quote(weight)}. Give a finite number")
            object.__setattr__(self, "weights", tuple(map(float, weights)))

    @classmethod
    def parse(cls, text: Any, source: str = "") -> "HeadSet":
        """Parse head identifiers, separated by commas or underscores or given one by one; repeated heads count once.

        Raises ValueError naming the first that is not a head.
        """
        names = filter(None, re.split(r"[,_\s]+", text)) if isinstance(text, str) else text
        return cls(tuple(dict.fromkeys(to_heads(names))), source=source)

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
        layer and head; heads without a value are left out. Raises BadInput if the table has no such column of numbers,
        or no value in it, or holds several models and `model` names none.
        """
        if count < 1:
            raise BadInput(f"count={count}: the number of heads must be at least 1. Pass e.g. 5")
        check_statistic(table, statistic)
        models = [*dict.fromkeys(table["model"].astype(str))]
        if model is None and len(models) > 1:
            raise BadInput(f"several models in this run: {', '.join(models)}. Name one with model=...")
        rows = table[table["model"] == (models[0] if model is None else model)]
        if rows.empty:
            raise BadInput(f"no model '{model}' in this run. Use one of: {', '.join(models)}")
        if (rows := rows.dropna(subset=[statistic]).sort_values(["layer", "head"])).empty:
            raise BadInput(f"'{statistic}' has no value in model '{model or models[0]}'. Use another column or model")
        ordered = rows.assign(_estimated=estimate_mask(rows, statistic)).sort_values(
            ["_estimated", statistic], ascending=[True, False], kind="stable"
        )
        rows, others = ordered.head(count), ordered.iloc[count:]
        heads = tuple((int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True))
        source = f"top {count} by {statistic}" + (f" of {model}" if model else "")
        source += _describe_estimates(rows, others, statistic)
        return cls(heads, tuple(map(float, rows[statistic])), source, model_digests)

    @classmethod
    def read(cls, file: Path | str, column: str | None = None) -> "HeadSet":
        """Read the heads of a file in order of rank, with their scores as weights, see `read_heads`.

        Of a mask, such as RTP-LLM's, the selected heads. Raises BadInput for scores of KV groups, too.
        """
        content = read_heads(file, column)
        if content.per_group:
            raise no_ranking(file)
        if not (rows := content.ranked()):
            raise BadInput(f"the mask in '{file}' selects no head. Set some of its values to 1")
        weights = () if content.is_mask else tuple(score for *_, score in rows if score is not None)
        source = content.name if content.is_list else f"{content.name}, {file}"
        heads = tuple((layer, head) for layer, head, _ in rows)
        return cls(heads, weights or None, source, content.digests, content.model, content.shape)

    def write(self, file: Path | str) -> None:
        """Write the set as YAML, or as JSON if the file ends in .json. An older file of a set is replaced.

        Raises BadInput for the ending of a table, which `read` would take it for; CannotWrite if there is another file,
        or if the file cannot be written.
        """
        path = check_path(file, "file")
        if path.suffix in (".csv", ".tsv", ".npy"):
            raise BadInput(f"'{path}' has the ending of a table, and a head set is YAML or JSON. Use .yaml or .json")
        fields = {key: value for key, value in self.to_dict().items() if value or key == "heads"}
        text = json.dumps(fields, indent=2) if path.suffix == ".json" else yaml.safe_dump(fields, sort_keys=False)
        HEAD_SET.write(path, text.encode())

    def to_dict(self) -> dict[str, object]:
        """Identifiers, weights, source and digests of the model as plain data."""
        return {
            "heads": self.identifiers,
            "weights": None if self.weights is None else [*self.weights],
            "source": self.source,
            "model": self.model,
            "shape": None if self.shape is None else [*self.shape],
            "model_digests": self.model_digests.to_dict(),
        }

    @property
    def identifiers(self) -> list[str]:
        """The heads as L18H6, in order."""
        return [format_head(*head) for head in self.heads]

    def mask(self, layers: Sequence[int], heads: int) -> npt.NDArray[np.bool_]:
        """Which heads are in the set: [len(layers), heads]; `layers` are layer numbers. Raises BadInput for a head of
        the set that has no place there."""
        if heads < 1:
            raise BadInput(f"heads={heads}: the number of heads per layer must be at least 1. Pass e.g. 9")
        if outside := [head for head in self.heads if head[0] not in layers or head[1] >= heads]:
            place = f"{heads} heads of layers {quote([*layers])}"
            raise BadInput(f"{format_head(*outside[0])} is not one of {place}. Name all layers and heads of the set")
        return np.array([[(layer, head) in self.heads for head in range(heads)] for layer in layers], dtype=bool)

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __contains__(self, head: object) -> bool:
        return head in self.heads

    def __or__(self, other: Collection[Head]) -> "HeadSet":
        heads = (*self.heads, *(head for head in other if head not in self.heads))
        others = other if isinstance(other, HeadSet) else HeadSet(())
        shape, model = self.shape or others.shape, self.model or others.model
        if not self.model_digests.matches(others.model_digests) or shape != (others.shape or self.shape):
            raise BadInput("these heads were measured on two models with different weights. Combine heads of one model")
        digests = self.model_digests.shared_with(others.model_digests)
        return HeadSet(heads, model_digests=digests, model=model, shape=shape)

    def __and__(self, other: Collection[Head]) -> "HeadSet":
        return replace(self, heads=tuple(head for head in self.heads if head in other), weights=None, source="")

    def __sub__(self, other: Collection[Head]) -> "HeadSet":
        return replace(self, heads=tuple(head for head in self.heads if head not in other), weights=None, source="")

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

"""Units of interventions: query heads and KV groups, and heads by name, in sets and in mappings."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

from headscope.attention.geometry import Geometry
from headscope.base.head_set import HeadSet
from headscope.base.heads import Head, format_head, to_head, to_heads
from headscope.base.model_identity import AcceptedWeights, refuse_other_name, refuse_other_weights
from headscope.base.user_input import quote
from headscope.errors import BadInput, warn_once
from headscope.positions.model import Model

WHOLE_GROUP = -1
"""Value of `head` for a unit that is a whole KV group."""


@dataclass(frozen=True, order=True)
class Unit:
    """One KV group with all its query heads, or one query head. `layer` is the index of the attention layer."""

    layer: int
    kv_group: int
    head: int = WHOLE_GROUP

    def head_slice(self, geometry: Geometry) -> slice:
        """The query heads of the unit within its layer."""
        if self.head != WHOLE_GROUP:
            return slice(self.head, self.head + 1)
        size = geometry.heads_per_group(self.layer)
        return slice(self.kv_group * size, (self.kv_group + 1) * size)

    def heads(self, geometry: Geometry) -> tuple[tuple[int, int], ...]:
        """The query heads of the unit: pairs of its layer and a head."""
        heads = self.head_slice(geometry)
        return tuple((self.layer, head) for head in range(heads.start, heads.stop))


def kv_group_units(geometry: Geometry) -> list[Unit]:
    """Every KV group, layer by layer."""
    return [Unit(layer, group) for layer, groups in enumerate(geometry.layer_kv_groups) for group in range(groups)]


def head_units(geometry: Geometry) -> list[Unit]:
    """Every query head, layer by layer."""
    return [head_unit(geometry, layer, head) for layer, n in enumerate(geometry.layer_heads) for head in range(n)]


def head_unit(geometry: Geometry, layer: int, head: int) -> Unit:
    """One query head as a unit; `layer` is the index of its attention layer."""
    return Unit(layer, geometry.kv_group(layer, head), head)


HEADS_FORMS = "names such as 'L18H6,L5H3', pairs (layer, head), or a mapping from layers to heads"
Heads = Annotated[str | Mapping[int, Iterable[int]] | Iterable[str | Head], HEADS_FORMS]
"""A HeadSet, names such as L18H6 (a list, or separated by commas), "all", pairs (layer, head), or a mapping from layers
to their heads."""
LayerHead = tuple[int, int]
"""Index of an attention layer, and query head."""
ALL_HEADS = "all"


def heads_by_layer(model: Model, heads: Heads) -> dict[int, list[int]]:
    """The heads by index of their attention layer.

    Raises BadInput for a head that the model does not have, and for a HeadSet of a model of another shape.
    """
    geometry = model.geometry
    if isinstance(heads, HeadSet):
        geometry.check_shape(f"'{heads.source}'" if heads.source else "this head set", heads.shape, model.name)
    if isinstance(heads, str) and heads == ALL_HEADS:
        return {layer: [*range(count)] for layer, count in enumerate(geometry.layer_heads)}
    try:
        if isinstance(heads, Mapping):
            pairs = [to_head((layer, head)) for layer, members in heads.items() for head in members]
        else:
            pairs = [*to_heads(re.split(r"[,\s]+", heads) if isinstance(heads, str) else heads)]
    except ValueError as error:
        raise BadInput(str(error)) from error
    except TypeError as error:
        raise BadInput(f"heads={quote(heads)} has no list of a head or more. Write {{18: [6]}}") from error
    if not pairs:
        raise BadInput("no heads are named. Name at least one, e.g. L18H6")
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(set(pairs)):
        if not geometry.has_head(layer, head):
            raise BadInput(f"'{model.name}' has no head {format_head(layer, head)}. {geometry.suggest_heads(layer)}")
        by_layer.setdefault(geometry.layer_numbers.index(layer), []).append(head)
    return by_layer


def layer_heads(model: Model, heads: Heads) -> tuple[LayerHead, ...]:
    """The heads of `heads_by_layer` as pairs."""
    return tuple((layer, head) for layer, members in heads_by_layer(model, heads).items() for head in members)


def describe_heads(model: Model, heads: Sequence[LayerHead]) -> str:
    """The names of heads, separated by commas, or "all heads"."""
    if len({*heads}) == sum(model.geometry.layer_heads):
        return "all heads"
    numbers = model.geometry.layer_numbers
    return ",".join(format_head(numbers[layer], head) for layer, head in heads)


def refuse_other_head_set(
    model: Model, heads: Heads, weights: AcceptedWeights, source: str = "this head set", label: str = ""
) -> bool:
    """Raise BadInput for a HeadSet of other weights, unless `weights` is "any", and for another word than these.

    `source` and `label` name the set and the model in messages. A set without digests that names another model gives a
    warning. Returns whether the weights are other ones.
    """
    label = label or model.name
    if weights not in get_args(AcceptedWeights):
        raise BadInput(f"weights={quote(weights)} is unknown. Use one of: {', '.join(get_args(AcceptedWeights))}")
    if not isinstance(heads, HeadSet):
        return False
    if heads.model_digests:
        return refuse_other_weights(source, heads.model_digests, model.identity, label, weights)
    if refuse_other_name(source, heads.model, label, [model.name], "any"):
        warn_once(
            f"{source} names model '{heads.model}', and its heads are used in '{label}' ({model.name}). Check that "
            "they are the same"
        )
    return False

"""Edits of heads of a model, and the context in which they act.

    with edited(model, [edit(model, Zero(), "L3H1"), edit(model, Steer(TokenSet((3, 4)), 0.01), "L3H2")]):
        model.module(ids)

An edit changes targets of heads at tokens by a kind. Edits of different stages compose (`attention.edits`), whatever
the order in which contexts were entered.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from headscope.attention import backend
from headscope.attention.edits import InputsKind, LayerEdit, Target, TokenSet
from headscope.attention.geometry import Geometry
from headscope.attention.record import LogitKind
from headscope.base.heads import format_head
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers, capturing
from headscope.interventions.heads import Heads, LayerHead, Unit, describe_heads, layer_heads
from headscope.interventions.kinds import targets_of
from headscope.models.checkpoint import LoadedModel
from headscope.positions.model import Model

PARTS = ("resid_pre", "attn_out", "mlp_out")
"""Targets beside heads: the residual stream before a decoder layer, and what its attention or MLP adds to it."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One kind on targets of heads (index of the attention layer, query head) at tokens.

    Tokens are those of the queries for q, logits and z, and those of the keys for k and v. Keys and values of one query
    head are changed for it alone: a KV group is all its heads. For parts of layers, heads are (decoder layer, 0).
    """

    kind: Any
    heads: tuple[LayerHead, ...]
    targets: tuple[str, ...]
    tokens: TokenSet = field(default_factory=TokenSet)
    heads_name: str = ""
    """The heads in labels; by default their names by index of the layer."""
    units: tuple[tuple[LayerHead, ...], ...] = ()
    """The heads whose q, k and v an `InputsKind` changes together; by default it changes each head alone."""

    @property
    def label(self) -> str:
        """What the edit does, for messages."""
        heads = self.heads_name or ",".join(format_head(layer, head) for layer, head in self.heads)
        place = "" if self.tokens.tokens is None else f" at {self.tokens}"
        return f"{self.kind.name} of {heads}{place}"

    @property
    def layers(self) -> list[int]:
        """Indices of the layers, ascending."""
        return sorted({layer for layer, _ in self.heads})

    @property
    def is_of_part(self) -> bool:
        """Whether it changes a part of decoder layers."""
        return self.targets[0] in PARTS

    @property
    def is_of_inputs(self) -> bool:
        """Whether its kind changes q, k and v of a unit together."""
        return isinstance(self.kind, InputsKind)

    def layer_edits(self, layer: int, sequences: range | None = None) -> list[LayerEdit]:
        """The edit of one attention layer, one for each target, in some sequences of the batch."""
        units = (self.units or tuple((place,) for place in self.heads)) if self.is_of_inputs else (self.heads,)
        by_unit = [tuple(head for own, head in unit if own == layer) for unit in units]
        return [
            LayerEdit(self.kind, cast(Target, target), heads, self.tokens, self.label, sequences, layer)
            for target in self.targets
            for heads in by_unit
            if heads
        ]


def edit_units(kind: Any, units: Sequence[Unit], geometry: Geometry) -> Edit:
    """One kind on units, at all tokens."""
    by_unit = tuple(dict.fromkeys(unit.heads(geometry) for unit in units))
    return Edit(kind, tuple(place for heads in by_unit for place in heads), targets_of(kind), units=by_unit)


Run = Sequence[Edit]
"""Edits that act together in one run."""


def edit(model: Model, kind: Any, heads: Heads, tokens: TokenSet | None = None, targets: Sequence[str] = ()) -> Edit:
    """An edit of heads by name, at all tokens by default; "all" is every head. `targets` are by default the kind's.

    Raises BadInput for heads that the model does not have and for a target that the kind cannot change.
    """
    chosen = layer_heads(model, heads)
    targets = tuple(targets) or targets_of(kind)
    if any((target == "logits") != isinstance(kind, LogitKind) for target in targets):
        raise BadInput(f"{kind.name} is not an edit of {', '.join(targets)}. Use another target or kind")
    return Edit(kind, chosen, targets, tokens or TokenSet(), describe_heads(model, chosen))


@contextmanager
def edited(model: Model, edits: Run, description: str = "") -> Iterator[CapturedLayers]:
    """Let edits act in every pass inside the `with`, together with those of other open contexts.

    Runs that measure the model inside record `description`, by default the edits' labels. Leaving raises BadInput if
    no pass had a token at which an edit acts. A pass raises BadInput for two edits of one tensor, head and token.
    """
    name = description or f"edits ({'; '.join(one.label for one in edits)})"
    with capturing(model, name) as layers:
        for one in edits:
            for layer in one.layers:
                for of_layer in one.layer_edits(layer):
                    layers.edit(of_layer)
        yield layers
    refuse_unused(edits)


@contextmanager
def registered(model: LoadedModel, runs: Sequence[Run]) -> Iterator[None]:
    """Let edits act on heads in a batch, one run for each sequence, inside a capture of the model."""
    with ExitStack() as stack:
        for number, run in enumerate(runs):
            for one in run:
                if one.is_of_part:
                    continue
                for layer in one.layers:
                    for of_layer in one.layer_edits(layer, range(number, number + 1)):
                        stack.enter_context(backend.editing(model.attention_modules[layer], of_layer))
        yield


def refuse_unused(edits: Run) -> None:
    """Raise BadInput if no token of any pass was among those of an edit."""
    for one in edits:
        if one.tokens.tokens is not None and not one.tokens.is_used:
            raise BadInput(
                f"no pass of the model had a token at positions '{one.tokens}': {one.kind.name} changed nothing. Use "
                "tokens of the prompt"
            )

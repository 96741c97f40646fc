"""Edits of parts beside heads: the residual stream before a decoder layer, and what its attention or MLP adds to it.

- resid_pre: the residual stream before a decoder layer.
- attn_out, mlp_out: what the layer's attention, or its MLP, adds to the residual stream, after a norm that follows it.

The names are those of TransformerLens (`get_act_patch_block_every`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from headscope.decomposition.residual_inspection import decompose_residual_stream
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.carried_state import batch_axis
from headscope.forward.layer_parts import LayerParts, editing_part
from headscope.interventions.edits import Edit, Run
from headscope.positions.attach import attached
from headscope.positions.model import Model

PartName = Literal["resid_pre", "attn_out", "mlp_out"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)


class RecordedText(Protocol):
    """What edits of parts need of a `Replay`."""

    layers: list[nn.Module]
    parts: LayerParts
    ids: Tensor
    start: int

    @property
    def prompt_length(self) -> int: ...

    def residual_stream_before(self, layer: int) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class ReplacePart:
    """Takes values of another run, by decoder layer: [.., 1, L, D] or [L, D]. Token i takes that of i + shift."""

    name: str
    values: Mapping[int, Tensor]
    shift: int = 0

    def __call__(self, hidden: Tensor, layer: int, tokens: Tensor) -> Tensor:
        """New values of hidden states [.., n, D] at tokens [n]."""
        return self.values[layer].to(hidden)[..., tokens + self.shift, :]


@contextmanager
def editing_parts(text: RecordedText, runs: Sequence[Run]) -> Iterator[None]:
    """Let the edits of parts of a batch of runs act, one run per sequence. Raises BadInput for two of one token."""
    places: dict[tuple[int, str], list[tuple[int, Edit]]] = {}
    for number, run in enumerate(runs):
        for edit in run:
            for layer in edit.layers if edit.is_of_part else ():
                places.setdefault((layer, edit.targets[0]), []).append((number, edit))
    with ExitStack() as stack:
        for (layer, name), members in places.items():
            change = _change(text, layer, members)
            if name == "resid_pre":
                hook = text.layers[layer].register_forward_pre_hook(_replacing_input(change))
                stack.callback(hook.remove)
            else:
                stack.enter_context(editing_part(text.parts[layer][name], change))
        yield


def _replacing_input(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], Any]:
    return lambda module, args: (change(args[0]), *args[1:])


def _change(text: RecordedText, layer: int, members: Sequence[tuple[int, Edit]]) -> Callable[[Tensor], Tensor]:
    """The change of the hidden states of one part of a layer."""
    tokens = torch.arange(text.start, text.ids.shape[1])
    chosen = [(number, edit, edit.tokens.contains(tokens, text.prompt_length)) for number, edit in members]
    for place, (number, edit, own) in enumerate(chosen):
        for other_number, other, others in chosen[:place]:
            if number == other_number and bool((own & others).any()):
                raise BadInput(
                    f"two edits of {edit.targets[0]} of one layer and token: {other.label}, and {edit.label}. Use one"
                )
    axis = batch_axis(text.residual_stream_before(layer)) or 0

    def change(hidden: Tensor) -> Tensor:
        # Some feed-forward modules return the tokens of all sequences in one axis.
        by_run = hidden.reshape(-1, len(tokens), hidden.shape[-1]) if hidden.dim() == 2 else hidden
        batch = 0 if hidden.dim() == 2 else axis
        edited = by_run.clone()
        for number, edit, own in chosen:
            if number < by_run.shape[batch] and bool(own.any()):
                rows = own.nonzero()[:, 0].to(hidden.device)
                of_run = edited.narrow(batch, number, 1)
                old = of_run[..., rows, :]
                of_run[..., rows, :] = edit.kind(old, layer, tokens[own].to(hidden.device)).view_as(old)
        return edited.view_as(hidden)

    return change


def inspect_layer_parts(model: Model, ids: Tensor) -> LayerParts:
    """Find the parts of every decoder layer in a short pass over ids [1, L].

    mlp_out is the last branch of a layer beside its attention. A layer without attention needs two branches to have
    one: a single branch may as well be the mixer of a hybrid model. Raises UnsupportedModel for a model whose layers
    return more than their input plus the outputs of their modules.
    """
    schedule: Any = model.schedule
    with torch.no_grad(), attached(model, schedule), capturing(model) as captured:
        decomposition = decompose_residual_stream(model, captured, ids, "patching of layers", allow_scaled_layers=True)
    parts: list[dict[str, nn.Module]] = []
    for layer in decomposition.layers:
        heads, others = layer.attention_branch, layer.other_branches
        modules: dict[str, nn.Module] = {}
        if heads is not None:
            modules["attn_out"] = heads.projected_module if heads.norm is None else heads.norm.module
        if others and (heads is not None or len(others) > 1):
            modules["mlp_out"] = others[-1].module
        parts.append(modules)
    return parts


def layers_with(name: PartName, layers: int, parts: LayerParts) -> list[int]:
    """The decoder layers that have a part, of all `layers`."""
    return [n for n in range(layers) if name == "resid_pre" or (n < len(parts) and name in parts[n])]

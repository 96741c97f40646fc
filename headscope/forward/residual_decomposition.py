"""Decomposition of the residual stream: which modules add to it, through which norms, and how logits follow from it.

A short forward pass measures the decomposition; it is not derived from the family's name. Every decoder layer must
return its input plus multiples of the outputs of some of its modules, with the heads projected by one matrix; norms
must divide by one number per token; logits must be linear in the last hidden states. Other architectures are refused
with the reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.attention.record import AttentionRecord
from headscope.errors import UnsupportedModel
from headscope.forward.backbone import backbone, check_input_ids, decoder_layers, refuse_non_finite
from headscope.forward.capture import CapturedLayers
from headscope.positions.model import Model

NORM_TEST_SCALE = 1024.0
"""Size of the inputs that test a norm, large enough to make its epsilon negligible."""
MAX_INSPECTED_TOKENS = 16
"""Tokens of the pass that is inspected."""


class DecompositionError(Exception):
    """The reason why a model's logits cannot be decomposed."""


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm or LayerNorm: gain * (x - its mean, if `is_centred`) / scale + shift."""

    module: nn.Module
    gain: Tensor
    shift: Tensor
    is_centred: bool

    @classmethod
    def from_module(cls, module: nn.Module, example: Tensor) -> "Norm":
        """Measure the gain and shift of a norm module on states with the width and dtype of `example`."""
        width = example.shape[-1]
        signs = torch.ones(1, 1, width, device=example.device, dtype=example.dtype)
        signs[..., width // 2 :] = -1
        zero, plain, raised = (
            module(x)[0, 0].float() for x in (0 * signs, NORM_TEST_SCALE * signs, NORM_TEST_SCALE * (signs + 1))
        )
        close = torch.allclose(plain, raised, rtol=1e-2, atol=1e-2 * float(plain.abs().max()))
        return cls(module, (plain - zero) * signs[0, 0].float(), zero, close)

    def pull_back(self, directions: Tensor) -> Tensor:
        """Pull directions [n, D] after the norm back to directions before it, to be divided by `scales`."""
        pulled_back_directions = directions.to(self.gain.device) * self.gain
        return (
            pulled_back_directions - pulled_back_directions.mean(-1, keepdim=True)
            if self.is_centred
            else pulled_back_directions
        )

    def scales(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The divisor of each row of `inputs` [n, D], [n]."""
        x, y = inputs.to(outputs.device).float(), outputs.float() - self.shift
        linear = self.gain * (x - x.mean(-1, keepdim=True) if self.is_centred else x)
        scales: Tensor = linear.square().sum(-1) / torch.linalg.vecdot(y, linear)
        if not _is_close(linear / scales[:, None], y, outputs.dtype):
            raise DecompositionError(f"its {type(self.module).__name__} is neither RMSNorm nor LayerNorm")
        return scales


@dataclass(frozen=True, eq=False)
class ResidualBranch:
    """A module of a decoder layer whose output is added to the stream, multiplied by `factor`."""

    module: nn.Module
    factor: float


@dataclass(frozen=True, eq=False)
class AttentionBranch:
    """Path from the heads of one attention layer to the stream: projection, optional norm, `factor`.

    `projected_module` holds the projection. If `is_gated`, each number of the heads' outputs is multiplied by a gate
    before the projection, as in Qwen3-Next; the gate counts with its value in the pass.
    """

    layer_index: int
    projected_module: nn.Module
    is_gated: bool
    projection: Tensor
    bias: Tensor | None
    norm: Norm | None
    factor: float


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """A decoder layer: its attention branch, None in a layer without attention, and its other branches."""

    module: nn.Module
    attention_branch: AttentionBranch | None
    other_branches: tuple[ResidualBranch, ...]


@dataclass(frozen=True, eq=False)
class ResidualDecomposition:
    """How logits follow from the residual stream.

    Logits are `logit_factor` times (`unembedding` [V, D] - `unembedding_mean` [D]) applied to the final norm of the
    stream, plus `bias` [V] minus its mean.
    """

    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    unembedding: Tensor
    unembedding_mean: Tensor
    bias: Tensor | None
    logit_factor: float


@dataclass(frozen=True, eq=False)
class _ModuleCall:
    """One call of a module; `output` is a copy of `output_tensor`, to which a layer may add afterwards."""

    module: nn.Module
    inputs: list[Tensor]
    output_tensor: Tensor
    output: Tensor


def decompose_residual_stream(model: Model, captured_layers: CapturedLayers, ids: Tensor) -> ResidualDecomposition:
    """Decompose a captured model on the first tokens of ids [1, n]. Raises UnsupportedModel if that is impossible."""
    check_input_ids(model, ids)
    try:
        return _decompose(model, captured_layers, ids[:, :MAX_INSPECTED_TOKENS])
    except DecompositionError as error:
        raise UnsupportedModel(f"direct logit attribution is not possible for {model.name}: {error}") from error


def _decompose(model: Model, captured_layers: CapturedLayers, ids: Tensor) -> ResidualDecomposition:
    stack, inner = decoder_layers(model), backbone(model)
    if not stack:
        raise DecompositionError("its decoder layers are not a single module list")
    z: dict[int, Tensor] = {}

    def record_output(record: AttentionRecord) -> None:
        z.setdefault(record.layer, record.z.transpose(0, 1).flatten(1))  # later passes check gates on edited heads

    captured_layers.listen(record_output)
    with _recording_calls(inner.modules()) as calls:
        logits = model.module(ids, use_cache=False).logits[0]
    refuse_non_finite(model, ids, logits)
    by_module = {call.module: call for call in calls}
    layers: list[DecoderLayer] = []
    for layer in stack:
        if layer not in by_module:
            raise DecompositionError("its decoder layers do not return a single residual stream")
        index = next((n for n, module in enumerate(model.attention_modules) if module in set(layer.modules())), None)
        inner_calls = [
            call for call in calls if call.module in set(layer.children()) and not _consumes_output(call, call)
        ]
        branch_outputs = [
            c for n, c in enumerate(inner_calls) if not any(_consumes_output(d, c) for d in inner_calls[n + 1 :])
        ]
        branch_outputs = [call for call in branch_outputs if call.output.shape == by_module[layer].output.shape]
        factors = _branch_factors(by_module[layer], branch_outputs)
        heads, end = None, None
        if index is not None:
            attention = model.attention_modules[index]
            end, norm = _attention_output_call(
                next(c for c in inner_calls if attention in set(c.module.modules())), inner_calls
            )
            if end not in branch_outputs:
                raise DecompositionError(
                    f"the output of the heads of {type(layer).__name__} is not added to the residual stream"
                )
            heads = _attention_branch(attention, index, z[index], norm, factors[end.module], by_module)
            if heads.is_gated:
                _check_gate(model, ids, heads, by_module[heads.projected_module].inputs[0])
        other_branches = tuple(
            ResidualBranch(module, factor)
            for module, factor in factors.items()
            if end is None or module is not end.module
        )
        layers.append(DecoderLayer(layer, heads, other_branches))
    # The outermost module around the layers: OPT passes over its backbone and calls the decoder inside.
    whole = next(call for call in reversed(calls) if set(stack) <= set(call.module.modules()))
    hidden, last = whole.output, by_module[stack[-1]].output
    final = next(
        (
            c
            for c in calls
            if _is_same_tensor(c.output_tensor, whole.output_tensor) and _consumes_output(c, by_module[stack[-1]])
        ),
        None,
    )
    if final is None:
        raise DecompositionError("it has no norm between its last layer and its logits")
    norm = Norm.from_module(final.module, hidden)
    norm.scales(last[0], hidden[0])
    return _with_unembedding(model, layers, norm, hidden[0], logits)


def _attention_output_call(call: _ModuleCall, calls: Sequence[_ModuleCall]) -> tuple[_ModuleCall, Norm | None]:
    """The module whose output the heads add to the stream: the attention, or a norm after it."""
    consumers = [later for later in calls if _consumes_output(later, call)]
    if not consumers:
        return call, None
    norm = Norm.from_module(consumers[0].module, consumers[0].output)
    norm.scales(call.output[0], consumers[0].output[0])
    return consumers[0], norm


def _branch_factors(layer_call: _ModuleCall, branch_calls: Sequence[_ModuleCall]) -> dict[nn.Module, float]:
    """The factor with which each branch's output was added to the stream."""
    if not branch_calls:
        raise DecompositionError(f"no module of {type(layer_call.module).__name__} adds to its residual stream")
    outputs = torch.stack([call.output.double().flatten() for call in branch_calls], 1).cpu()
    stream, returned = (t.double().flatten().cpu() for t in (layer_call.inputs[0], layer_call.output))
    factors = torch.linalg.lstsq(outputs, (returned - stream)[:, None]).solution[:, 0]
    factors = torch.where((factors - 1).abs() < _relative_tolerance(layer_call.output.dtype), 1.0, factors)
    if not _is_close(stream + outputs @ factors, returned, layer_call.output.dtype):
        for call in branch_calls:
            if torch.equal(call.output, layer_call.output):
                raise DecompositionError(_last_module_reason(layer_call, call))
        raise DecompositionError(
            f"{type(layer_call.module).__name__} returns more than its input and the outputs of its modules"
        )
    return {call.module: float(factor) for call, factor in zip(branch_calls, factors, strict=True)}


def _last_module_reason(layer_call: _ModuleCall, last_call: _ModuleCall) -> str:
    """Why a layer that returns the output of its last module does not return a sum of its modules' outputs."""
    layer, last = type(layer_call.module).__name__, type(last_call.module).__name__
    if len(last_call.inputs) > 1:  # Bloom and MPT pass it the stream beside its own input
        return f"{last} adds the residual stream to its own output"
    return f"{layer} returns the output of its {last}, not the sum of its input and the outputs of its modules"


def _attention_branch(
    attention: nn.Module,
    layer_index: int,
    z: Tensor,
    norm: Norm | None,
    factor: float,
    by_module: dict[nn.Module, _ModuleCall],
) -> AttentionBranch:
    """The branch whose projection takes the heads' outputs and returns the attention's output."""
    returned = by_module[attention].output if attention in by_module else None
    for module in attention.modules():
        call, matrix = by_module.get(module), _weight_matrix(module)
        if call is None or matrix is None or not call.inputs or call.inputs[0][0].shape != z.shape:
            continue
        if returned is None or (call.output.shape == returned.shape and _is_close(call.output, returned, z.dtype)):
            bias, inputs = getattr(module, "bias", None), call.inputs[0][0]
            projected = inputs.float() @ matrix.float().T + (0 if bias is None else bias.float())
            if not _is_close(projected, call.output[0].float(), z.dtype):  # a LoRA, for example
                raise DecompositionError(f"its {type(module).__name__} does more than multiply by its weight")
            is_gated = not torch.equal(inputs, z)
            return AttentionBranch(layer_index, module, is_gated, matrix, bias, norm, factor)
    raise DecompositionError("its attention does not end in one projection of the heads' outputs")


def _check_gate(model: Model, ids: Tensor, heads: AttentionBranch, inputs: Tensor) -> None:
    """Refuse a layer unless factors on its heads' outputs multiply the projection's `inputs` [1, n, H dv] alike."""
    width = inputs.shape[-1]
    factors = torch.rand(width, generator=torch.Generator().manual_seed(0)).to(inputs) + 0.5

    def scale(z: Tensor, call: backend.AttentionCall) -> Tensor:
        return z * factors.view(model.geometry.heads, 1, -1)

    attention = model.attention_modules[heads.layer_index]
    with backend.editing_output(attention, scale), _recording_calls([heads.projected_module]) as calls:
        model.module(ids, use_cache=False)
    if not _is_close(calls[0].inputs[0], inputs * factors, inputs.dtype):
        raise DecompositionError("its attention changes the heads' outputs before the projection by more than a gate")


def _with_unembedding(
    model: Model, layers: list[DecoderLayer], norm: Norm, hidden: Tensor, logits: Tensor
) -> ResidualDecomposition:
    """The complete decomposition. `logits` [n, V] must follow from `hidden` [n, D]."""
    head = model.module.get_output_embeddings()
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    hidden, logits = hidden.to(weight.device), logits.to(weight.device)
    mean = weight.mean(0, dtype=torch.float32)
    computed = hidden.float() @ weight.float().T - (hidden.float() @ mean)[:, None]
    if bias is not None:
        computed += bias.float() - bias.float().mean()
    actual = logits.float() - logits.float().mean(-1, keepdim=True)
    factor = float((computed * actual).sum() / computed.square().sum())
    if not _is_close(factor * computed, actual, logits.dtype):
        raise DecompositionError(
            "its logits are not linear in its last hidden states, for example because of a soft cap"
        )
    factor = 1.0 if abs(factor - 1) < _relative_tolerance(logits.dtype) else factor
    return ResidualDecomposition(tuple(layers), norm, weight, mean, bias, factor)


def _weight_matrix(module: nn.Module) -> Tensor | None:
    """The weight [out, in] of a linear module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    return weight.detach().T if type(module).__name__ == "Conv1D" else weight.detach()


def _is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors agree within the tolerance of `dtype`."""
    return float((actual - expected).abs().max()) <= _relative_tolerance(dtype) * float(expected.abs().max())


def _relative_tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 3e-2


def _consumes_output(later_call: _ModuleCall, call: _ModuleCall) -> bool:
    """Whether a call received the output of another one unchanged."""
    return any(_is_same_tensor(tensor, call.output_tensor) for tensor in later_call.inputs)


def _is_same_tensor(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share the same memory."""
    return first.data_ptr() == second.data_ptr() and first.numel() == second.numel()


@contextmanager
def _recording_calls(modules: Iterable[nn.Module]) -> Iterator[list[_ModuleCall]]:
    """Record every call of these modules, in the order in which they return.

    The tensors are kept, so that memory addresses stay unique.
    """
    calls: list[_ModuleCall] = []

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [state for value in (*args, *kwargs.values()) if (state := _as_hidden_states(value)) is not None]
        if (state := extract_hidden_states(output)) is not None:
            calls.append(_ModuleCall(module, inputs, state, state.clone()))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(record_call, with_kwargs=True).remove)
        yield calls


def extract_hidden_states(output: Any) -> Tensor | None:
    """The hidden states [1, n, D] in a module's output, or None."""
    output = getattr(output, "last_hidden_state", output)
    return _as_hidden_states(output[0] if isinstance(output, tuple) and output else output)


def _as_hidden_states(value: Any) -> Tensor | None:
    """A tensor [1, n, D] or [n, D], the form of some feed-forward modules, as [1, n, D]; None for other values."""
    if not isinstance(value, Tensor) or value.dim() not in (2, 3):
        return None
    return value if value.dim() == 3 else value[None]

"""Measure how a model's residual stream decomposes: which modules add to it, and how logits follow from it.

A short forward pass measures the decomposition; it is not derived from the family's name. Every decoder layer must
return a multiple of its input plus multiples of the outputs of some of its modules, with the heads projected by one
matrix; norms must divide by one number per token; logits must be linear in the last hidden states up to a final soft
cap. Other architectures are refused with the reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.attention.record import AttentionRecord
from headscope.compat.transformer_lens import wrapped_module
from headscope.decomposition.residual_decomposition import (
    AttentionBranch,
    DecoderLayer,
    DecompositionError,
    Norm,
    ResidualBranch,
    ResidualDecomposition,
    is_close,
    relative_tolerance,
)
from headscope.errors import UnsupportedModel
from headscope.forward.backbone import (
    attention_layer_indices,
    backbone,
    check_input_ids,
    decoder_layers,
    refuse_non_finite,
)
from headscope.forward.capture import CapturedLayers, trial_pass
from headscope.forward.layer_parts import ModuleCall, consumes_output, is_same_tensor, recording_calls
from headscope.positions.model import Model

MAX_INSPECTED_TOKENS = 16
"""Tokens of the pass that is inspected."""


def decompose_residual_stream(
    model: Model,
    captured_layers: CapturedLayers,
    ids: Tensor,
    analysis: str = "direct logit attribution",
    *,
    allow_scaled_layers: bool = False,
) -> ResidualDecomposition:
    """Decompose a captured model on the first tokens of ids [1, n].

    Raises UnsupportedModel, naming the `analysis` that needs the decomposition, if that is impossible. A model whose
    layers multiply the stream (`DecoderLayer.stream_factor`) is refused unless `allow_scaled_layers`.
    """
    check_input_ids(model, ids)
    try:
        with trial_pass():
            decomposition = _decompose(model, captured_layers, ids[:, :MAX_INSPECTED_TOKENS])
        if not allow_scaled_layers and any(layer.stream_factor != 1 for layer in decomposition.layers):
            raise DecompositionError("its layers multiply the residual stream by a factor")
        return decomposition
    except DecompositionError as error:
        raise UnsupportedModel(f"{analysis} is not possible for {model.name}: {error}. Use another model") from error


def _decompose(model: Model, captured_layers: CapturedLayers, ids: Tensor) -> ResidualDecomposition:
    stack, inner = decoder_layers(model), backbone(model)
    if not stack:
        raise DecompositionError("its decoder layers are not a single module list")
    z: dict[int, Tensor] = {}

    def record_output(record: AttentionRecord) -> None:
        z.setdefault(record.layer, record.z.transpose(0, 1).flatten(1))  # later passes check gates on edited heads

    captured_layers.listen(record_output)
    with recording_calls(inner.modules()) as calls:
        logits = model.module(ids, use_cache=False).logits[0]
    refuse_non_finite(model, ids, logits)
    by_module = {call.module: call for call in calls}
    layers: list[DecoderLayer] = []
    for layer in stack:
        if layer not in by_module:
            raise DecompositionError("its decoder layers do not return a single residual stream")
        index = next((n for n, module in enumerate(model.attention_modules) if module in set(layer.modules())), None)
        child_calls = [
            call for call in calls if call.module in _child_modules(layer) and not consumes_output(call, call)
        ]
        inner_calls = [_without_residual(call, calls) for call in child_calls]
        branch_outputs = [
            c for n, c in enumerate(inner_calls) if not any(consumes_output(d, c) for d in inner_calls[n + 1 :])
        ]
        branch_outputs = [call for call in branch_outputs if call.output.shape == by_module[layer].output.shape]
        factors, stream_factor, bias = _branch_factors(by_module[layer], branch_outputs)
        heads, end = None, None
        if index is not None:
            attention = model.attention_modules[index]
            child_call = next(c for c in child_calls if attention in set(c.module.modules()))
            end, norm = _attention_output_call(_without_residual(child_call, calls), inner_calls)
            if attention in by_module:
                by_module[attention] = _without_residual(by_module[attention], calls)
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
        layers.append(DecoderLayer(layer, heads, other_branches, stream_factor, bias))
    # The outermost module around the layers: OPT passes over its backbone and calls the decoder inside.
    whole = next(call for call in reversed(calls) if set(stack) <= set(call.module.modules()))
    hidden, last = whole.output, by_module[stack[-1]].output
    final = next(
        (
            c
            for c in calls
            if is_same_tensor(c.output_tensor, whole.output_tensor) and consumes_output(c, by_module[stack[-1]])
        ),
        None,
    )
    if final is None:
        raise DecompositionError("it has no norm between its last layer and its logits")
    norm = Norm.from_module(final.module, hidden)
    norm.scales(last[0], hidden[0])
    return _with_unembedding(model, layers, norm, hidden[0], logits)


def _child_modules(layer: nn.Module) -> set[nn.Module]:
    """The modules that a decoder layer calls. The layer of a TransformerBridge contains the layer that it wraps."""
    return {*(wrapped_module(layer) or layer).children()}


def _attention_output_call(call: ModuleCall, calls: Sequence[ModuleCall]) -> tuple[ModuleCall, Norm | None]:
    """The module whose output the heads add to the stream: the attention, or a norm after it."""
    consumers = [later for later in calls if consumes_output(later, call)]
    if not consumers:
        return call, None
    norm = Norm.from_module(consumers[0].module, consumers[0].output)
    norm.scales(call.output[0], consumers[0].output[0])
    return consumers[0], norm


def _without_residual(call: ModuleCall, calls: Sequence[ModuleCall]) -> ModuleCall:
    """The call of the inner module whose output `call` added to one of its inputs; `call` itself if it adds none.

    Bloom and MPT pass the residual stream to modules that add it to their own output.
    """
    inner_modules = set(call.module.modules()) - {call.module}
    states = [state for state in call.inputs if state.shape == call.output.shape] if len(call.inputs) > 1 else []
    for inner in reversed([c for c in calls if states and c.module in inner_modules]):
        if inner.output.shape == call.output.shape and any(
            is_close(state + inner.output, call.output, call.output.dtype) for state in states
        ):
            return inner
    return call


def _branch_factors(
    layer_call: ModuleCall, branch_calls: Sequence[ModuleCall]
) -> tuple[dict[nn.Module, float], float, Tensor | None]:
    """The factor with which each branch's output was added to the stream, the factor of the stream itself, and a bias
    [D] that the layer added."""
    if not branch_calls:
        raise DecompositionError(f"no module of {type(layer_call.module).__name__} adds to its residual stream")
    stream, returned, *outputs = (
        t[0].double().cpu() for t in (layer_call.inputs[0], layer_call.output, *(call.output for call in branch_calls))
    )
    tolerance = relative_tolerance(layer_call.output.dtype)
    change, largest = returned - stream, float(returned.abs().max())
    factors = [1.0 if abs(factor - 1) < tolerance else factor for factor in _fit(change, outputs)]
    rest, stream_factor, bias = change - _combine(factors, outputs), 1.0, None
    scaled = _fit(returned, [stream, *outputs])
    scaled_rest = returned - _combine(scaled, [stream, *outputs])
    centred = _fit(_without_mean(change), [*map(_without_mean, outputs)])
    biased_rest = change - _combine(centred, outputs)
    # Half precision rounds by as much as a factor near 1 changes: what counts is how much better another fit is.
    is_plain = (
        float(rest.norm()) <= 2 * float(scaled_rest.norm()) or float(rest.abs().max()) <= 1e-2 * tolerance * largest
    )
    if not is_plain or float(rest.abs().max()) > tolerance * largest:
        for call in branch_calls:
            if torch.equal(call.output, layer_call.output):
                raise DecompositionError(_last_module_reason(layer_call, call))
        if len(rest) > 1 and float(_without_mean(biased_rest).norm()) < float(scaled_rest.norm()):
            factors, bias = centred, biased_rest.mean(0)
            rest = biased_rest - bias
        else:
            (stream_factor, *factors), rest = scaled, scaled_rest
        if float(rest.abs().max()) > tolerance * largest or abs(stream_factor) < tolerance:
            raise DecompositionError(
                f"{type(layer_call.module).__name__} returns more than its input and the outputs of its modules"
            )
    by_module = {call.module: factor for call, factor in zip(branch_calls, factors, strict=True)}
    return by_module, stream_factor, None if bias is None else bias.float().to(layer_call.output.device)


def _fit(target: Tensor, terms: Sequence[Tensor]) -> list[float]:
    """The factors whose combination of `terms` is nearest to `target`, all [n, D]."""
    columns = torch.stack([term.flatten() for term in terms], 1)
    factors: list[float] = torch.linalg.lstsq(columns, target.reshape(-1, 1)).solution[:, 0].tolist()
    return factors


def _combine(factors: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([factor * term for factor, term in zip(factors, terms, strict=True)]).sum(0)


def _without_mean(term: Tensor) -> Tensor:
    """A term [n, D] less its mean over tokens."""
    return term - term.mean(0)


def _last_module_reason(layer_call: ModuleCall, last_call: ModuleCall) -> str:
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
    by_module: dict[nn.Module, ModuleCall],
) -> AttentionBranch:
    """The branch whose projection takes the heads' outputs and returns the attention's output."""
    returned = by_module[attention].output if attention in by_module else None
    for module in attention.modules():
        call, matrix = by_module.get(module), weight_matrix(module)
        if call is None or matrix is None or not call.inputs or call.inputs[0][0].shape != z.shape:
            continue
        if returned is None or (call.output.shape == returned.shape and is_close(call.output, returned, z.dtype)):
            if not matrix.is_floating_point():
                raise DecompositionError(f"its {type(module).__name__} keeps quantised weights")
            bias, inputs = getattr(module, "bias", None), call.inputs[0][0]
            projected = inputs.float() @ matrix.float().T + (0 if bias is None else bias.float())
            if not is_close(projected, call.output[0].float(), z.dtype):  # a LoRA, for example
                raise DecompositionError(f"its {type(module).__name__} does more than multiply by its weight")
            is_gated = not torch.equal(inputs, z)
            return AttentionBranch(layer_index, module, is_gated, matrix, bias, norm, factor)
    raise DecompositionError("its attention does not end in one projection of the heads' outputs")


def _check_gate(model: Model, ids: Tensor, heads: AttentionBranch, inputs: Tensor) -> None:
    """Refuse a layer unless factors on its heads' outputs multiply the projection's `inputs` [1, n, H dv] alike."""
    width = inputs.shape[-1]
    factors = torch.rand(width, generator=torch.Generator().manual_seed(0)).to(inputs) + 0.5

    def scale(z: Tensor, call: backend.AttentionCall) -> Tensor:
        return z * factors.view(z.shape[1], 1, -1)

    attention = model.attention_modules[heads.layer_index]
    with backend.editing_output(attention, scale), recording_calls([heads.projected_module]) as calls:
        model.module(ids, use_cache=False)
    if not is_close(calls[0].inputs[0], inputs * factors, inputs.dtype):
        raise DecompositionError("its attention changes the heads' outputs before the projection by more than a gate")


def _with_unembedding(
    model: Model, layers: list[DecoderLayer], norm: Norm, hidden: Tensor, logits: Tensor
) -> ResidualDecomposition:
    """The complete decomposition. `logits` [n, V] must follow from `hidden` [n, D]."""
    head = model.module.get_output_embeddings()
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    hidden, logits = hidden.to(weight.device), logits.to(weight.device)
    mean = weight.mean(0, dtype=torch.float32)
    if (cap := _final_soft_cap(model)) is not None:
        return _with_soft_cap(ResidualDecomposition(tuple(layers), norm, weight, mean, bias, 1.0), hidden, logits, cap)
    computed = hidden.float() @ weight.float().T - (hidden.float() @ mean)[:, None]
    if bias is not None:
        computed += bias.float() - bias.float().mean()
    actual = logits.float() - logits.float().mean(-1, keepdim=True)
    factor = float((computed * actual).sum() / computed.square().sum())
    if not is_close(factor * computed, actual, logits.dtype):
        raise DecompositionError("its logits are not linear in its last hidden states")
    factor = 1.0 if abs(factor - 1) < relative_tolerance(logits.dtype) else factor
    return ResidualDecomposition(tuple(layers), norm, weight, mean, bias, factor)


def _final_soft_cap(model: Model) -> float | None:
    """The soft cap on the logits that the config declares."""
    config = model.module.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return next((float(cap) for cap in caps if cap), None)


def _with_soft_cap(
    decomposition: ResidualDecomposition, hidden: Tensor, logits: Tensor, cap: float
) -> ResidualDecomposition:
    """The decomposition with its logit factor and the soft cap, if they give `logits` [n, V] of `hidden` [n, D]."""
    linear, capped = decomposition.logits(hidden).double(), logits.double()
    far_below = capped.abs() < 0.9 * cap  # elsewhere the inverse of the cap amplifies rounding
    before_cap = cap * torch.atanh(capped / cap)
    factor = float((linear * before_cap)[far_below].sum() / linear[far_below].square().sum())
    factor = 1.0 if abs(factor - 1) < relative_tolerance(logits.dtype) else factor
    decomposition = replace(decomposition, logit_factor=factor, soft_cap=cap)
    if not is_close(decomposition.logits(hidden), logits.float(), logits.dtype):
        raise DecompositionError("its logits are not linear in its last hidden states, up to its final soft cap")
    return decomposition


def weight_matrix(module: nn.Module) -> Tensor | None:
    """The weight [out, in] of a linear module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    return weight.detach().T if type(module).__name__ == "Conv1D" else weight.detach()


def input_norms(model: Model, layers: Sequence[nn.Module], ids: Tensor) -> Iterator[Norm | None]:
    """The norm between the residual stream and the attention of each attention layer."""
    with recording_calls([module for layer in layers for module in (layer, *layer.children())]) as calls:
        model.module(ids, use_cache=False)
    for layer, index in zip(layers, attention_layer_indices(model, layers), strict=True):
        if index is None:
            continue
        children = {*layer.children()}
        stream = next(call for call in calls if call.module is layer).inputs[0]
        readers = [call for call in calls if call.module in children]
        attention = next(call for call in readers if model.attention_modules[index] in {*call.module.modules()})
        reads_stream = _receives(attention, stream)
        norm_calls = [call for call in readers if consumes_output(attention, call) and _receives(call, stream)]
        if reads_stream == bool(norm_calls):
            raise DecompositionError(f"the attention of {type(layer).__name__} does not read one norm of its input")
        if reads_stream:
            yield None
            continue
        norm = Norm.from_module(norm_calls[0].module, norm_calls[0].output)
        norm.scales(norm_calls[0].inputs[0][0], norm_calls[0].output[0])
        yield norm


def _receives(call: ModuleCall, stream: Tensor) -> bool:
    """Whether a call received this residual stream, possibly copied to another device."""
    return any(t.shape == stream.shape and torch.equal(t, stream.to(t.device)) for t in call.inputs)

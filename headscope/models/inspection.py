"""Model inspection: how a checkpoint attends and rotates, measured in a forward pass over three tokens.

The inspection finds the attention modules in order, the layers that rotate, the rotary dimensions and their layout, the
layout of the cos and sin tables, and the frequencies of each layer. It checks that q and k are rotated by these
frequencies. It ignores modules that no text reaches, such as a vision tower.
"""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import backend
from headscope.attention.geometry import RotaryLayout
from headscope.attention.masks import UnsupportedMask
from headscope.errors import HeadscopeError, UnsupportedModel, first_line
from headscope.models.interception import intercepting_rotations
from headscope.models.rope_settings import frequency_change_length
from headscope.models.rotation import MeasuredRotation, RotationCall, TableLayout, measure_rotation
from headscope.models.unsupported import has_attention, refuse_autocast

TOKENS = 3


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Run the module without dropout or gradients; leaving restores the mode of each submodule.

    Raises BadInput inside `torch.autocast`.
    """
    refuse_autocast()
    training = [submodule for submodule in module.modules() if submodule.training]
    if training:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule in training:
            submodule.training = True


@dataclass(frozen=True, eq=False)
class CheckpointRotation:
    """The checkpoint's own rotation.

    `theta` [layers, pairs] is in rad/token, float32, 0 in layers that do not rotate; layer n has the first
    `layer_pairs[n]` pairs. `factors` multiply each layer's cos and sin; they are 1 where they change no logit
    (`factor_scales_logits` is false if q and k are normed after the rotation). `layout` is the order of the pairs in a
    head; they begin at dimension `rotary_start` and rotate in `direction`. `table_layout` is the order of the entries
    of cos and sin. `layer_types` names each layer's frequency set, None if the model has one set. `rotary_modules`
    compute the tables, from other frequencies for texts longer than `frequency_change_length` tokens. `shares_keys`: a
    layer may attend to keys that another layer rotated. `no_pairs_reason` says why there are no pairs.
    """

    theta: Tensor
    factors: tuple[float, ...]
    layout: RotaryLayout
    table_layout: TableLayout
    layer_types: tuple[str | None, ...]
    layer_pairs: tuple[int, ...]
    rotary_start: int = 0
    direction: Literal[1, -1] = 1
    factor_scales_logits: bool = True
    rotary_modules: tuple[nn.Module, ...] = ()
    frequency_change_length: int | None = None
    shares_keys: bool = False
    no_pairs_reason: str = ""

    @classmethod
    def without_pairs(cls, layers: int, reason: str) -> "CheckpointRotation":
        """A rotation with no rotary pairs in any layer."""
        no_types, no_pairs = (None,) * layers, (0,) * layers
        return cls(torch.zeros(layers, 0), (1.0,) * layers, "half", "half", no_types, no_pairs, no_pairs_reason=reason)

    @property
    def pairs(self) -> int:
        return self.theta.shape[1]

    def layer_theta(self, layer: int) -> Tensor:
        """Frequencies of the pairs that one layer has."""
        return self.theta[layer, : self.layer_pairs[layer]]


@dataclass(frozen=True, eq=False)
class ModelInspection:
    """Attention modules by layer, with their layer numbers, heads, KV groups, head dimensions and windows."""

    attention_modules: tuple[nn.Module, ...]
    layer_numbers: tuple[int, ...]
    layer_heads: tuple[int, ...]
    layer_kv_groups: tuple[int, ...]
    layer_head_dims: tuple[int, ...]
    windows: tuple[int | None, ...]
    layer_rotates: tuple[bool, ...]
    rotation: CheckpointRotation


def inspect_model(model: PreTrainedModel) -> ModelInspection:
    """Run three tokens through the attention backend and read the geometry. Raises UnsupportedModel with the reason."""
    calls = _record_attention_calls(model)
    modules = tuple(call.module for call in calls)
    numbers = _layer_numbers(model, modules)
    rotation = _base_rotation(model, calls, numbers)
    return ModelInspection(
        attention_modules=modules,
        layer_numbers=numbers,
        layer_heads=tuple(call.q.shape[1] for call in calls),
        layer_kv_groups=tuple(call.groups for call in calls),
        layer_head_dims=tuple(call.q.shape[3] for call in calls),
        windows=tuple(call.window for call in calls),
        layer_rotates=tuple(bool(call.rotations) and rotation.pairs > 0 for call in calls),
        rotation=rotation,
    )


@dataclass(frozen=True, eq=False)
class _RotationResult:
    """One call of a rotation function, and the first of the vectors [B, H, L, d] that it returned."""

    call: RotationCall
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class _AttentionCall:
    """One call of the attention backend, and the calls of rotation functions since the previous one."""

    module: nn.Module
    q: Tensor
    groups: int
    window: int | None
    rotations: list[_RotationResult]
    has_key_bias: bool

    @property
    def query_rotation(self) -> _RotationResult:
        """The rotation of q; the first one if q is changed after it. Families may rotate k before q."""
        results = (result for result in self.rotations if _start_within(self.q, result.vectors) is not None)
        return next(results, self.rotations[0])


def _record_attention_calls(model: PreTrainedModel) -> list[_AttentionCall]:
    calls: list[_AttentionCall] = []
    rotations: list[_RotationResult] = []

    def record_rotation(_: nn.Module, call: RotationCall) -> Any:
        result = call.run()
        vectors = result if isinstance(result, Tensor) else result[0]
        rotations.append(_RotationResult(call, vectors if call.heads_axis == 1 else vectors.transpose(1, 2)))
        return result

    def record_attention(
        module: nn.Module, q: Tensor, k: Tensor, window: int | None, key_bias: Tensor | None, **kwargs: Any
    ) -> None:
        if getattr(module, "is_causal", True) is False:
            raise unsupported_model_error(model, "it attends in both directions")
        if q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
            raise unsupported_model_error(model, "its q and k heads do not match")
        has_bias = key_bias is not None
        calls.append(_AttentionCall(module, q.detach(), k.shape[1], window, rotations.copy(), has_bias))
        rotations.clear()

    with backend.observing_calls(model.modules(), record_attention), intercepting_rotations([model], record_rotation):
        _run_three_tokens(model)
    if not calls:
        raise unsupported_model_error(model, "none of its layers uses the attention interface of transformers")
    if len({call.module for call in calls}) < len(calls):
        raise unsupported_model_error(model, "one of its attention modules runs several times in a forward pass")
    return calls


def _layer_numbers(model: PreTrainedModel, modules: tuple[nn.Module, ...]) -> tuple[int, ...]:
    """The modules' layer numbers, from their place in the model's list of layers."""
    names = {module: name for name, module in model.named_modules()}
    matches = [re.search(r"\.(\d+)\.", names[module]) for module in modules]
    numbers = tuple(int(match[1]) if match else -1 for match in matches)
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if layer_types is not None and len(layer_types) == config.num_hidden_layers:
        expected = tuple(number for number, layer_type in enumerate(layer_types) if has_attention(layer_type))
    else:
        # A text uses no cross-attention layer, so these are left out.
        layers = range(getattr(config, "decoder_layers", config.num_hidden_layers))
        expected = tuple(layer for layer in layers if layer not in getattr(config, "cross_attention_layers", ()))
    if numbers != expected:
        share = f"{len(set(numbers) & set(expected))} of its {len(expected)} attention layers"
        raise unsupported_model_error(model, f"only {share} use the attention interface of transformers")
    return numbers


def _base_rotation(model: PreTrainedModel, calls: list[_AttentionCall], numbers: tuple[int, ...]) -> CheckpointRotation:
    layers = len(calls)
    rotations = {index: _measured_rotation(model, call) for index, call in enumerate(calls) if call.rotations}
    if not rotations:
        has_alibi = any(call.has_key_bias for call in calls)
        reason = "it uses ALiBi and does not rotate its heads" if has_alibi else "it does not rotate its heads"
        return CheckpointRotation.without_pairs(layers, reason)
    changes = {_change_after_rotation(calls[index]) for index in rotations}
    if "other" in changes:
        return CheckpointRotation.without_pairs(
            layers, "it transforms its heads after the rotation, which mixes the pairs"
        )
    first = next(iter(rotations.values()))
    starts = {_rotary_start(model, calls[index]) for index in rotations}
    layouts = {(r.layout, r.table, r.direction) for r in rotations.values()}
    if len(layouts) > 1 or len(starts) > 1:
        return CheckpointRotation.without_pairs(layers, "its layers differ in the place or order of their rotary pairs")
    candidates = {pairs: [*_frequency_sets(model, pairs)] for pairs in {r.pairs for r in rotations.values()}}
    pairs = max(candidates)
    theta = torch.zeros(layers, pairs)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None)
    frequencies = {
        index: _closest_frequencies(
            model, candidates[rotation.pairs], rotation, layer_types and layer_types[numbers[index]]
        )
        for index, rotation in rotations.items()
    }
    for index, frequency_set in frequencies.items():
        theta[index, : len(frequency_set.theta)] = frequency_set.theta
    scales = changes == {"none"} or _factor_scales_logits(model, calls[next(iter(rotations))])
    modules = tuple(dict.fromkeys(frequency_set.module for frequency_set in frequencies.values()))
    frequency_set_by_layer = [frequencies.get(index) for index in range(layers)]
    return CheckpointRotation(
        theta=theta,
        factors=tuple(
            frequency_set.factor if frequency_set and scales else 1.0 for frequency_set in frequency_set_by_layer
        ),
        layout=first.layout,
        table_layout=first.table,
        layer_types=tuple(
            frequency_set.layer_type if frequency_set else None for frequency_set in frequency_set_by_layer
        ),
        layer_pairs=tuple(
            rotations[index].pairs if index in rotations else min(pairs, call.q.shape[3] // 2)
            for index, call in enumerate(calls)
        ),
        rotary_start=starts.pop(),
        direction=first.direction,
        factor_scales_logits=scales,
        rotary_modules=modules,
        frequency_change_length=min(filter(None, map(frequency_change_length, modules)), default=None),
        shares_keys=len({_single_vector_rotations(calls[index]) for index in rotations}) > 1,
    )


def _measured_rotation(model: PreTrainedModel, call: _AttentionCall) -> MeasuredRotation:
    rotation = measure_rotation(call.query_rotation.call)
    if rotation is None:
        raise unsupported_model_error(model, "it does not rotate pairs of dimensions in a known layout")
    return rotation


def _rotary_start(model: PreTrainedModel, call: _AttentionCall) -> int:
    """The first rotary dimension of a head."""
    rotated = call.query_rotation.vectors
    start = 0 if rotated.shape[-1] == call.q.shape[-1] else _start_within(call.q, rotated)
    if start is None:
        raise unsupported_model_error(model, "its rotary dimensions are neither the first nor the last of its heads")
    return start


def _single_vector_rotations(call: _AttentionCall) -> int:
    """How many rotations took one tensor, q or k alone: a layer that rotates q alone uses the keys of another layer."""
    return sum(len(result.call.vectors) == 1 for result in call.rotations)


def _start_within(q: Tensor, rotated: Tensor) -> int | None:
    """The first dimension at which q [B, H, L, d] has the `rotated` vectors: at its beginning, at its end, or None."""
    if rotated.shape[:-1] != q.shape[:-1]:
        return None
    dims = rotated.shape[-1]
    starts = (start for start in (0, q.shape[-1] - dims) if torch.equal(q[..., start : start + dims], rotated))
    return next(starts, None)


def _change_after_rotation(call: _AttentionCall) -> Literal["none", "multiple", "other"]:
    """What happens to q between rotation and kernel: a norm or a temperature gives a multiple of each vector."""
    rotated, q = call.query_rotation.vectors.float(), call.q.float()
    if rotated.shape[-1] < q.shape[-1] or torch.equal(rotated, q):
        return "none"
    before, after = (nn.functional.normalize(vectors, dim=-1) for vectors in (rotated, q))
    return "multiple" if torch.allclose(before, after, atol=1e-2) else "other"


def _factor_scales_logits(model: PreTrainedModel, call: _AttentionCall) -> bool:
    """Whether doubled cos and sin double q at the kernel; a norm after the rotation would undo the factor."""
    ratios: list[float] = []

    def run_doubled(_: nn.Module, rotation: RotationCall) -> Any:
        return rotation.run(tuple(2 * table for table in rotation.tables))

    def record_ratio(module: nn.Module, q: Tensor, k: Tensor, **kwargs: Any) -> None:
        ratios.append(float(q.norm() / call.q.norm()))

    with backend.observing_calls([call.module], record_ratio), intercepting_rotations([model], run_doubled):
        _run_three_tokens(model)
    return ratios[0] > 1.5


@dataclass(frozen=True, eq=False)
class _FrequencySet:
    """Frequencies [pairs], float32 on CPU, and factor of a module that computes cos and sin."""

    module: nn.Module
    layer_type: str | None
    theta: Tensor
    factor: float


def _frequency_sets(model: PreTrainedModel, pairs: int) -> Iterator[_FrequencySet]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            prefix = name.removesuffix("inv_freq")
            if prefix != name and not prefix.endswith("original_") and buffer.shape == (pairs,):
                factor = float(getattr(module, f"{prefix}attention_scaling", None) or 1.0)
                yield _FrequencySet(module, prefix.removesuffix("_") or None, buffer.detach().float().cpu(), factor)
            if name == "embed_positions" and buffer.shape[-1] == 2 * pairs:
                # GPT-J and CodeGen keep a table of sin and cos by position; at position 1 the angle is the frequency.
                sin, cos = buffer[1].detach().float().cpu().chunk(2)
                yield _FrequencySet(module, None, torch.atan2(sin, cos), 1.0)


def _closest_frequencies(
    model: PreTrainedModel, candidates: list[_FrequencySet], rotation: MeasuredRotation, layer_type: str | None
) -> _FrequencySet:
    """The frequencies that explain the measured rotation; among equal sets, the set of the layer's own type."""

    def error(candidate: _FrequencySet) -> float:
        angles = (TOKENS - 1) * candidate.theta
        expected = torch.stack((angles.cos(), angles.sin())) * candidate.factor
        return float((torch.stack((rotation.cos, rotation.sin)) - expected).abs().max())

    best = min(candidates, key=lambda candidate: (error(candidate), candidate.layer_type != layer_type), default=None)
    if best is None:
        raise unsupported_model_error(model, "it has no rotary embedding module with inv_freq")
    factor = float(torch.hypot(rotation.cos, rotation.sin).mean())
    if abs(factor / best.factor - 1) > 5e-3:  # Phi-3.5-MoE has another factor than its rotary module says
        best = replace(best, factor=factor)
    if error(best) > 2e-2:
        raise unsupported_model_error(model, "its inv_freq does not explain the rotation of its q and k")
    return best


def _run_three_tokens(model: PreTrainedModel) -> None:
    try:
        with evaluation_mode(model), backend.using_backend(model):
            model(torch.arange(TOKENS, device=model.device)[None], use_cache=False)
    except UnsupportedMask as error:
        raise unsupported_model_error(model, "its attention mask is not supported") from error
    except HeadscopeError as error:
        raise name_model_type(model, error) from error
    except Exception as error:  # the model's own code may fail in any way on an odd config
        raise failed_pass_error(model, "a forward pass over three tokens failed", error) from error


def unsupported_model_error(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    """The error for a model that headscope would measure wrongly, with its type."""
    return UnsupportedModel(f"cannot measure this {model.config.model_type} model: {reason}. Use another model")


def failed_pass_error(model: PreTrainedModel, problem: str, error: Exception) -> UnsupportedModel:
    """The error for a model whose pass failed, with the cause, its place and the versions of the libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    # Torch's own frames, such as that of a missing attribute, say less than the last one outside.
    frame = next(
        (f for f in reversed(frames) if Path(torch.__file__).parent not in Path(f.filename).parents), frames[-1]
    )
    place = f"{'/'.join(Path(frame.filename).parts[-3:])}, line {frame.lineno}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    cause = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    return UnsupportedModel(
        f"cannot measure this {model.config.model_type} model: {problem}: {cause} ({place}; {versions}). If the model "
        "runs without headscope, install the versions of these packages that headscope requires; otherwise repair it, "
        "or use another model"
    )


def name_model_type(model: PreTrainedModel, error: HeadscopeError) -> UnsupportedModel:
    """The error of a pass over the model, with the type of the model if it does not name it."""
    message = str(error)
    if not message.startswith("cannot measure"):
        message = f"cannot measure this {model.config.model_type} model: {message}"
    return UnsupportedModel(message)

"""QK attribution: the logit of a row and a key as a sum over what earlier components wrote at both tokens.

With norms frozen at the scale that they had, q and k are linear in the residual stream, and the stream is the sum of
the embedding, the outputs of heads and MLPs, and biases. So the logit q . k is a sum over pairs of components, one on
the side of the query, one on the side of the key, and over rotary pairs. Only the tokens of the chosen rows and keys
are kept: memory is O(components x tokens x D), never L x L.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.base.heads import format_head
from headscope.decomposition.attributed_rows import RowAndKey
from headscope.decomposition.head_weights import HeadProjection, LayerWeights, ModelWeights, inspect_head_weights
from headscope.decomposition.residual_decomposition import AttentionBranch, DecompositionError
from headscope.decomposition.token_pairs import refuse_distance_bias, rotation_phases
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.backbone import attention_layer_indices
from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.layer_parts import extract_hidden_states
from headscope.forward.logits import finite_hidden_states
from headscope.measures.rotary_pairs import pair_coordinates
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.rope_scaling import schedule_at_length
from headscope.positions.schedule import Schedule

BIAS = 1
"""Index of the component that has all constants; the first one is the embedding."""
MEMORY_BYTES = 2**28
"""Size of the components that one forward pass keeps."""
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest allowed gap between a logit and the sum of its parts, relative to the scale of the logits; other dtypes round
at every step."""


@dataclass(frozen=True, eq=False)
class QKAttribution:
    """The logit of a row and a key, before any soft cap, and what each of C components adds through q and through k.

    `query_parts` and `key_parts` [C, F], complex128, are the planes of q and k that each component wrote, rotated and
    scaled so that Re(query_part conj(key_part)) is a contribution to the logit. F are the rotary pairs, then the
    unrotated dimensions as further pairs. `components` are named embedding, L3H5, L3 MLP, and bias for all constants.
    """

    row_and_key: RowAndKey
    components: tuple[str, ...]
    query_parts: Tensor
    key_parts: Tensor
    logit: float

    def contributions(self) -> Tensor:
        """Contribution of each pair of components through each rotary pair: [C, C, F], query side first, float64."""
        return torch.einsum("af,bf->abf", self.query_parts, self.key_parts.conj()).real

    def by_components(self) -> Tensor:
        """Contribution of each pair of components: [C, C], query side first."""
        return (self.query_parts @ self.key_parts.conj().T).real

    def by_query_component(self) -> Tensor:
        """Contribution of what each component wrote at the query's token: [C]."""
        return (self.query_parts @ self.key_parts.sum(0).conj()).real

    def by_key_component(self) -> Tensor:
        """Contribution of what each component wrote at the key's token: [C]."""
        return (self.key_parts.conj() @ self.query_parts.sum(0)).real

    def by_rotary_pair(self) -> Tensor:
        """Contribution of each rotary pair: [F]."""
        return (self.query_parts.sum(0) * self.key_parts.sum(0).conj()).real


def attribute_qk(
    model: Model, ids: Tensor, rows_and_keys: Sequence[RowAndKey], weights: ModelWeights | None = None
) -> list[QKAttribution]:
    """Attribute the logits of rows and keys of a text, ids [L], under the model's scheme.

    `weights` are the model's `inspect_head_weights`, if they are known. Raises BadInput for heads or positions that do
    not exist, UnsupportedModel for heads that are not linear maps, logits with a bias by distance, or parts that do not
    sum to the logit.
    """
    refuse_distance_bias(model, "QK attribution is")
    ids = torch.as_tensor(ids)
    for at in rows_and_keys:
        if not model.geometry.has_head(at.layer, at.head):
            raise BadInput(
                f"'{model.name}' has no head {format_head(at.layer, at.head)}. {model.geometry.suggest_heads(at.layer)}"
            )
        if not 0 <= at.key <= at.query < len(ids):
            raise BadInput(
                f"cannot attribute row {at.query} and key {at.key} of {len(ids)} tokens. "
                f"Use 0 <= key <= row <= {len(ids) - 1}"
            )
    weights = inspect_head_weights(model) if weights is None else weights
    decomposition = weights.decomposition
    components = len(decomposition.layers) * (1 + model.geometry.heads)
    max_tokens = max(2, MEMORY_BYTES // (4 * components * decomposition.unembedding.shape[1]))
    batch = max(1, len(rows_and_keys)) if len(ids) <= max_tokens else max_tokens // 2
    results: list[QKAttribution] = []
    with torch.no_grad():
        for first in range(0, len(rows_and_keys), batch):
            results += _attribute(model, ids, rows_and_keys[first : first + batch], weights)
    _check_sums(model, results)
    return results


def _attribute(
    model: Model, ids: Tensor, rows_and_keys: Sequence[RowAndKey], weights: ModelWeights
) -> Iterator[QKAttribution]:
    positions = torch.tensor(sorted({p for at in rows_and_keys for p in (at.query, at.key)}))
    layer_index = {number: index for index, number in enumerate(model.geometry.layer_numbers)}
    recorder = _StreamRecorder(model, weights, positions, {layer_index[at.layer] for at in rows_and_keys})
    with attached(model) as schedule, evaluating(model), capturing(model) as layers:
        schedule = schedule_at_length(model, schedule, len(ids))
        recorder.listen(layers)
        try:
            finite_hidden_states(model, ids.to(model.device)[None])
        except DecompositionError as error:
            raise UnsupportedModel(
                f"QK attribution is not possible for {model.name}: {error}. Use another model"
            ) from error
        for at in rows_and_keys:
            yield recorder.attribution(at, layer_index[at.layer], schedule)


@dataclass(frozen=True, eq=False)
class _LinearSide:
    """q or k of one layer at n positions, as a linear map of the residual stream: `maps` [heads, d, D] applied to it,
    divided by `divisors` [heads, n], plus `constants` [heads, n, d]."""

    maps: Tensor
    divisors: Tensor
    constants: Tensor

    @classmethod
    def of_projection(cls, projection: HeadProjection, layer: LayerWeights, stream: Tensor) -> "_LinearSide":
        """Freeze the norms of a projection at their scales for the residual stream [n, D]."""
        normed = layer.apply_input_norm(stream)
        norm = layer.input_norm
        scales = stream.new_ones(len(stream)) if norm is None else norm.scales(stream, normed)
        maps = projection.folded_weight(norm).cpu()
        divisors = (scales * projection.norm_scales(normed)).cpu()
        constants = projection.vectors(normed).cpu() - _apply(maps, stream.cpu()) / divisors[..., None]
        return cls(maps, divisors, constants)

    def parts(self, head: int, position: int, components: Tensor) -> Tensor:
        """What components [C, D] add to the vector of a head at a position, [C, d]; BIAS also has the constants."""
        parts = components @ self.maps[head].T / self.divisors[head, position]
        parts[BIAS] += self.constants[head, position]
        return parts


def _apply(maps: Tensor, stream: Tensor) -> Tensor:
    """Maps [heads, d, D] of the stream [n, D]: [heads, n, d]."""
    return torch.einsum("nD,hdD->hnd", stream, maps)


@dataclass(frozen=True, eq=False)
class _LayerInputs:
    """What one attention layer read: its residual stream [positions, D] by component, and q and k as linear maps."""

    added: Mapping[str, Tensor]
    query: _LinearSide
    key: _LinearSide


class _StreamRecorder:
    """Records, at some positions of a text, what each component adds to the residual stream, and what chosen attention
    layers (by index) read of it."""

    def __init__(self, model: Model, weights: ModelWeights, positions: Tensor, layers: set[int]):
        self.model, self.weights, self.positions, self.attention_layers = model, weights, positions, layers
        self._added: dict[str, Tensor] = {}
        self._inputs: dict[int, _LayerInputs] = {}
        self._vectors: dict[int, tuple[Tensor, Tensor]] = {}

    def listen(self, layers: CapturedLayers) -> None:
        decomposition = self.weights.decomposition
        indices = attention_layer_indices(self.model, [layer.module for layer in decomposition.layers])
        for number, (layer, index) in enumerate(zip(decomposition.layers, indices, strict=True)):
            layers.hook_inputs(layer.module, self._stream_hook(number, index))
            if layer.attention_branch is not None:
                self._hook_heads(number, layer.attention_branch, layers)
            for branch in layer.other_branches:
                name = f"L{number} {'other' if index is None else 'MLP'}"
                layers.hook(branch.module, self._branch_hook(name, branch.factor))
            if layer.bias is not None:
                layers.hook(layer.module, self._bias_hook(layer.bias))
        layers.listen(self._record_vectors, sorted(self.attention_layers))

    def attribution(self, row_and_key: RowAndKey, layer: int, schedule: Schedule) -> QKAttribution:
        """The attribution of one row and key of a layer, by its index."""
        geometry, inputs = self.model.geometry.at_layer(layer), self._inputs[layer]
        group = row_and_key.head // self.model.geometry.heads_per_group(layer)
        ends = (row_and_key.query, row_and_key.key)
        row, column = (int(torch.searchsorted(self.positions, position)) for position in ends)
        query, key = (
            _planes(side.parts(head, index, torch.stack([states[index] for states in inputs.added.values()])), geometry)
            for side, head, index in ((inputs.query, row_and_key.head, row), (inputs.key, group, column))
        )
        scaling = self.weights.scalings[layer]
        q, k = self._vectors[layer]
        logit = scaling * float(q[row_and_key.head, row] @ k[group, column])
        if schedule.scales_queries:
            visible = torch.tensor([[row_and_key.query + 1]], device=self.model.device)
            by_head = schedule.query_scale(layer, visible)[0, :, 0]
            scaling *= float(by_head[row_and_key.head if len(by_head) > 1 else 0])
        distance = torch.tensor([row_and_key.query - row_and_key.key])
        phases = rotation_phases(self.model, schedule, layer, distance)[group, :, 0]
        return QKAttribution(row_and_key, tuple(inputs.added), scaling * query * phases, key, logit)

    def _add(self, name: str, state: Tensor) -> None:
        self._added[name] = self._added.get(name, 0) + state.float().cpu()

    def _at_positions(self, state: Tensor) -> Tensor:
        """States [.., L, D] at the recorded positions."""
        return state[..., self.positions.to(state.device), :]

    def _stream_hook(self, number: int, layer: int | None) -> Any:
        def read_stream(module: nn.Module, args: Any, kwargs: Any) -> None:
            stream = self._at_positions((args[0] if args else kwargs["hidden_states"])[0]).float()
            if number == 0:
                self._add("embedding", stream)
                self._add("bias", torch.zeros_like(stream))
            if layer in self.attention_layers:
                assert layer is not None
                weights = self.weights.layers[layer]
                sides = (_LinearSide.of_projection(p, weights, stream) for p in (weights.query, weights.key))
                self._inputs[layer] = _LayerInputs(dict(self._added), *sides)

        return read_stream

    def _record_vectors(self, record: AttentionRecord) -> None:
        q, k = (self._at_positions(t).double().cpu() for t in (record.q, record.k))
        self._vectors[record.layer] = (q, k)

    def _branch_hook(self, name: str, factor: float) -> Any:
        def record_branch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            state = extract_hidden_states(output)
            assert state is not None
            self._add(name, factor * self._at_positions(state[0]).float())

        return record_branch

    def _bias_hook(self, bias: Tensor) -> Any:
        return lambda *_: self._add("bias", bias.expand(len(self.positions), -1))

    def _hook_heads(self, number: int, branch: AttentionBranch, layers: CapturedLayers) -> None:
        norm, latest = branch.norm, dict[str, Tensor]()

        def write_heads(scales: Tensor | None) -> None:
            """Add the outputs of the heads, divided by the scales [positions] of a norm after the projection."""
            z = latest.pop("z")
            divisors = z.new_ones(len(self.positions)) if scales is None else scales.to(z.device)
            written = torch.einsum("hnv,hdv->hnd", z, branch.output_matrices(len(z)).to(z.device)) / divisors[:, None]
            for head, states in enumerate(written):
                self._add(format_head(number, head), states)
            if branch.bias is not None:
                bias = branch.bias.float().to(z.device)
                bias = branch.factor * (bias if norm is None else norm.linear(bias)) / divisors[:, None]
                self._add("bias", bias)
            if norm is not None:
                self._add("bias", branch.factor * norm.shift.expand(len(self.positions), -1))

        def record_z(record: AttentionRecord) -> None:
            latest["z"] = self._at_positions(record.z).float()
            if norm is None:
                write_heads(None)

        layers.listen(record_z, [branch.layer_index])
        if norm is not None:

            def record_scales(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
                write_heads(norm.scales(self._at_positions(args[0][0]), self._at_positions(output[0])))

            layers.hook(norm.module, record_scales)


def _planes(parts: Tensor, geometry: Geometry) -> Tensor:
    """The planes of vectors [C, d] before rotation, as complex numbers: [C, F], complex128."""
    first, second = pair_coordinates(parts[:, None], geometry)[:, :, 0].double()
    return torch.complex(first, second)


def _check_sums(model: Model, attributions: Sequence[QKAttribution]) -> None:
    """Raise UnsupportedModel if the parts of a logit do not sum to it."""
    tolerance = MAX_RELATIVE_ERROR.get(model.module.dtype, 0.1)
    for result in attributions:
        query, key = result.query_parts.sum(0), result.key_parts.sum(0)
        error = abs(float((query * key.conj()).real.sum()) - result.logit)
        scale = float(query.norm() * key.norm())
        if not error <= tolerance * scale:  # NaN fails, too
            raise UnsupportedModel(
                f"QK attribution of '{model.name}' failed its check: the parts of a logit of "
                f"{format_head(result.row_and_key.layer, result.row_and_key.head)} differ from it by "
                f"{error / scale:.2g} of |q| |k|. Use --dtype fp32"
            )

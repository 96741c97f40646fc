"""Direct logit attribution: every term of a logit, recorded as it is added to the residual stream.

The logit of a row is that of the token that comes next, or of an answer, the same in every row; of an answer also minus
the logit of a wrong answer. Its direction is known before the pass, the scale of the final norm only after it, so every
term is divided by it at the end. Memory is O(L) numbers per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headscope.decomposition.residual_decomposition import AttentionBranch, Norm, ResidualDecomposition
from headscope.decomposition.residual_inspection import decompose_residual_stream
from headscope.errors import UnsupportedModel
from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.layer_parts import extract_hidden_states
from headscope.forward.logits import POSITIONS_PER_CHUNK, last_hidden_states
from headscope.forward.observe import FinishedPass, observe
from headscope.measures.logit_attribution import direct_logit_attribution
from headscope.positions.model import Model

MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest allowed gap between the logit and the sum of its terms, relative to the largest logit or term; other dtypes
round at every step."""


class LogitAttribution:
    """The terms of one logit per row for ids [1, L], in logits.

    Without an `answer` it is the logit of the next token, minus the mean over the vocabulary, for L - 1 rows. With it,
    it is the logit of that token in all L rows, minus that of another token, `wrong`, or minus the mean without one.

    After the pass `head_terms` is [layers, H, rows], 0 for heads that a layer does not have, and `part_terms` holds
    [rows] by (part, layer), the heads of a layer summed; the part "logit" is the sum of all others. `layer_biases`
    [decoder layers, rows] and `final_bias` [rows] add up to the part "bias". Raises UnsupportedModel for a model whose
    logits are not such a sum.
    """

    needs_whole_text = True

    def __init__(self, model: Model, ids: Tensor, answer: int | None = None, wrong: int | None = None):
        with capturing(model) as layers:
            decomposition = decompose_residual_stream(model, layers, ids, allow_scaled_layers=True)
            # A final soft cap is linearised at the logits of the run, which only a pass of its own tells in advance.
            hidden = None if decomposition.soft_cap is None else last_hidden_states(model, ids)
        self.decomposition: ResidualDecomposition = decomposition
        geometry = model.geometry
        self.ids, self.geometry = ids, geometry
        targets = ids[0, 1:] if answer is None else torch.full_like(ids[0], answer)
        self.rows = len(targets)
        self.target_directions, self.target_biases, self.capped_logits = self._logit_gradients(targets, hidden)
        if wrong is not None:
            of_wrong = self._logit_gradients(torch.full_like(targets, wrong), hidden)
            self.target_directions = self.target_directions - of_wrong[0]
            self.target_biases = self.target_biases - of_wrong[1]
            self.capped_logits = self.capped_logits - of_wrong[2]
        self.pre_norm_directions = decomposition.final_norm.pull_back(self.target_directions)
        self.head_terms = torch.zeros(geometry.layers, geometry.heads, self.rows, device=ids.device)
        self.part_terms: dict[tuple[str, int], Tensor] = {}
        self.layer_biases = torch.zeros(len(decomposition.layers), self.rows, device=ids.device)
        self.final_bias = torch.zeros(self.rows, device=ids.device)
        self.relative_error = 0.0
        self._norm_scales = torch.ones(self.rows, device=ids.device)
        self._norm_errors: list[tuple[Norm, Tensor]] = []

    def listen(self, layers: CapturedLayers) -> None:
        for number, layer in enumerate(self.decomposition.scaled_layers()):
            if number == 0:
                layers.hook(layer.module, self._record_embedding)
            if layer.attention_branch is not None:
                self._hook_heads(layer.attention_branch, layers)
            if layer.bias is not None:
                directions = self.pre_norm_directions.to(layer.bias.device)
                self.layer_biases[number] += (directions @ layer.bias).to(self.layer_biases.device)
            for part in layer.other_branches:
                layers.hook(part.module, self._part_hook(number, part.factor))
        layers.hook(self.decomposition.final_norm.module, self._record_norm_scale)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Any]:
        """No tables: normalise the terms and check their sum. Raises UnsupportedModel if it is not the logit."""
        self._normalise(finished_pass.hidden)
        if not self.relative_error <= MAX_RELATIVE_ERROR.get(finished_pass.model.module.dtype, 0.1):  # NaN fails, too
            raise UnsupportedModel(
                f"direct logit attribution of '{finished_pass.model.name}' failed its check: the terms differ from the "
                "logits by "
                f"{self.relative_error:.2g} of the largest logit or term. Use --dtype fp32"
            )
        return {}

    def _normalise(self, hidden: Tensor) -> None:
        """Divide by the scale of the final norm and check the sum; `hidden` [1, L, D] are the last hidden states."""
        decomposition, device = self.decomposition, self.ids.device
        errors = torch.stack([error.to(device) for _, error in self._norm_errors]).tolist()
        for (norm, _), error in zip(self._norm_errors, errors, strict=True):
            norm.check_error(error)
        for index, number in enumerate(self.geometry.layer_numbers):
            self.part_terms["heads", number] = self.head_terms[index].sum(0)
        for name in self.part_terms:
            self.part_terms[name] = decomposition.logit_factor * self.part_terms[name] / self._norm_scales
        self.head_terms = (decomposition.logit_factor * self.head_terms / self._norm_scales).cpu()
        self.layer_biases = decomposition.logit_factor * self.layer_biases / self._norm_scales
        directions, biases = self.target_directions.to(device), self.target_biases.to(device)
        shift = torch.linalg.vecdot(directions, decomposition.final_norm.shift.to(device).expand_as(directions))
        self.final_bias = decomposition.logit_factor * (shift + biases)
        self.part_terms["bias", 0] = self.layer_biases.sum(0) + self.final_bias
        logit = torch.linalg.vecdot(hidden[0, : self.rows].to(device).float(), directions) + biases
        terms = torch.stack([*self.part_terms.values()])
        logit = decomposition.logit_factor * logit
        scale = torch.maximum(logit.abs().max(), terms.abs().max())
        self.relative_error = float((terms.sum(0) - logit).abs().max() / scale)
        if decomposition.soft_cap is not None:
            self.part_terms["cap", 0] = self.capped_logits.to(device) - logit
            logit = self.capped_logits.to(device)
        self.part_terms["logit", 0] = logit

    def _logit_gradients(self, targets: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients [rows, D] and bias terms [rows] of the targets' logits, and the logits [rows] after a soft cap.

        A soft cap needs `hidden` [1, L, D]; without one the last tensor is empty.
        """
        targets = targets.to(self.decomposition.unembedding.device)
        if hidden is None:
            return *self.decomposition.logit_gradients(targets, None), targets.new_empty(0)
        chunks = []
        for start in range(0, len(targets), POSITIONS_PER_CHUNK):
            tokens = targets[start : start + POSITIONS_PER_CHUNK]
            logits = self.decomposition.logits(hidden[0, start : start + len(tokens)])
            centred = logits.gather(1, tokens[:, None])[:, 0] - logits.mean(-1)
            chunks.append((*self.decomposition.logit_gradients(tokens, logits), centred))
        gradients, biases, capped_logits = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return gradients, biases, capped_logits

    def _hook_heads(self, heads: AttentionBranch, layers: CapturedLayers) -> None:
        norm = heads.norm
        directions = self.pre_norm_directions if norm is None else norm.pull_back(self.pre_norm_directions)
        directions = directions.to(heads.projection.device)
        layer_bias = self.layer_biases[self.geometry.layer_numbers[heads.layer_index]]  # a view, changed in place

        def record_heads(z: Tensor) -> None:
            terms = direct_logit_attribution(z[:, : self.rows], heads.projection, directions)
            self.head_terms[heads.layer_index, : len(terms)] = heads.factor * terms.to(self.head_terms.device)
            if heads.bias is not None and norm is None:
                layer_bias.add_(heads.factor * (directions @ heads.bias.float()).to(layer_bias.device))

        if heads.is_gated:

            def record_gated(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
                heads_of_layer = self.geometry.layer_heads[heads.layer_index]
                record_heads(args[0][0].unflatten(-1, (heads_of_layer, -1)).transpose(0, 1))

            layers.hook(heads.projected_module, record_gated)
        else:
            layers.listen(lambda record: record_heads(record.z), [heads.layer_index])
        if norm is not None:

            def divide_by_scale(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
                scales = self._scales(norm, args[0][0, : self.rows], output[0, : self.rows])
                self.head_terms[heads.layer_index] /= scales.to(self.head_terms.device)
                bias = 0 if heads.bias is None else directions @ heads.bias.float() / scales
                shift = self.pre_norm_directions.to(norm.shift.device) @ norm.shift
                layer_bias.add_(heads.factor * (bias + shift).to(layer_bias.device))

            layers.hook(norm.module, divide_by_scale)

    def _part_hook(self, layer: int, factor: float) -> Any:
        def record_part(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            state = extract_hidden_states(output)
            assert state is not None
            term = factor * torch.linalg.vecdot(
                state[0, : self.rows].float(), self.pre_norm_directions.to(state.device)
            )
            self.part_terms["other", layer] = self.part_terms.get(("other", layer), 0) + term.to(self.ids.device)

        return record_part

    def _record_embedding(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        term = torch.linalg.vecdot(state[0, : self.rows].float(), self.pre_norm_directions.to(state.device))
        self.part_terms["embedding", 0] = self.decomposition.input_factor * term.to(self.ids.device)

    def _record_norm_scale(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        scales = self._scales(self.decomposition.final_norm, args[0][0, : self.rows], output[0, : self.rows])
        self._norm_scales = scales.to(self.ids.device)

    def _scales(self, norm: Norm, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The divisors of a norm, checked after the pass."""
        scales, error = norm.scales_and_error(inputs, outputs)
        self._norm_errors.append((norm, error))
        return scales


def attribute_logits(
    model: Model, ids: Tensor, answer: int | None = None, wrong: int | None = None
) -> LogitAttribution:
    """All terms of the logit of each next token of ids [L], under the model's scheme.

    With a token `answer`: of the answer's logit in every row, minus that of `wrong` if given. Raises UnsupportedModel
    for a model whose logits are not such a sum.
    """
    observers: list[LogitAttribution] = []

    def create(ids: Tensor) -> LogitAttribution:
        observers.append(LogitAttribution(model, ids, answer, wrong))
        return observers[0]

    observe(model, ids, [create])
    return observers[0]

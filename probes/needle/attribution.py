"""Direct logit attribution of heads to the tokens of an answer, in total and through the needle."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.geometry import stack_layers
from headscope.attention.record import AttentionRecord
from headscope.decomposition.residual_decomposition import AttentionBranch, Norm, ResidualDecomposition
from headscope.decomposition.residual_inspection import decompose_residual_stream
from headscope.forward.capture import capturing
from headscope.forward.prefix_cache import TokenIds
from headscope.measures.copying import TokenSpan
from headscope.measures.logit_attribution import direct_logit_attribution, last_query_outputs
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model


@dataclass(frozen=True, eq=False)
class AnswerAttribution:
    """Mean direct logit attribution to the tokens of an answer, minus the mean over the vocabulary; 0 without a token.

    A final soft cap is linearised at the logits of each step.
    `total` [layers, H]; `through_spans` [S, layers, H], through each of S token spans.
    """

    total: Tensor
    through_spans: Tensor


def decompose_residual(model: Model, ids: TokenIds) -> ResidualDecomposition:
    """The decomposition of the model's logits. Raises UnsupportedModel if they are not a sum over heads."""
    input_ids = torch.from_numpy(ids.astype("int64"))[None].to(model.device)
    with attached(model), evaluating(model), capturing(model) as layers:
        return decompose_residual_stream(model, layers, input_ids, allow_scaled_layers=True)


class AttributionAccumulator:
    """Accumulates head outputs and the inputs and outputs of norms over the steps of one answer.

    `update` receives every layer of each step, inside `hooks_registered`. `compute` needs the answer's tokens.
    """

    def __init__(self, decomposition: ResidualDecomposition, spans: Sequence[TokenSpan]):
        self.decomposition, self.spans = decomposition, spans
        self._head_terms = [
            layer.attention_branch for layer in decomposition.scaled_layers() if layer.attention_branch is not None
        ]
        self._step_outputs: list[dict[int, Tensor]] = []
        self._norm_calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self._current_step: dict[int, Tensor] = {}
        self._row = 0

    @contextmanager
    def hooks_registered(self) -> Iterator[None]:
        """Record the input and output of every norm between a head and the logits at each step."""
        norms = [heads.norm for heads in self._head_terms if heads.norm is not None] + [self.decomposition.final_norm]
        with ExitStack() as stack:
            for norm in norms:
                handle = norm.module.register_forward_hook(self._norm_hook(norm), with_kwargs=True)
                stack.callback(handle.remove)
            for heads in self._head_terms:
                if heads.is_gated:
                    handle = heads.projected_module.register_forward_pre_hook(partial(self._apply_gate, heads))
                    stack.callback(handle.remove)
            yield

    def update(self, record: AttentionRecord, weights: Tensor) -> None:
        """Add one layer of one step, with the weights [H, Lk] of its last query."""
        self._current_step[record.layer] = last_query_outputs(record, weights, self.spans)
        self._row = record.batch_index

    def compute(self, tokens: Tensor) -> AnswerAttribution:
        """Attribution to `tokens` [T], which the first T steps produced."""
        decomposition, steps, spans = self.decomposition, len(tokens), len(self.spans)
        tokens = tokens.to(decomposition.unembedding.device)
        logits = None
        if decomposition.soft_cap is not None and steps:
            logits = decomposition.logits(self._joined_calls(decomposition.final_norm, steps)[1])
        direction = decomposition.final_norm.pull_back(decomposition.logit_gradients(tokens, logits)[0])
        direction = decomposition.logit_factor * direction / self._scales(decomposition.final_norm, steps)
        results = []
        for heads in self._head_terms:
            head_direction = (
                direction if heads.norm is None else heads.norm.pull_back(direction) / self._scales(heads.norm, steps)
            )
            if not steps:
                results.append(torch.zeros(1 + spans, len(self._step_outputs[0][heads.layer_index][0])))
                continue
            z = torch.stack([step[heads.layer_index] for step in self._step_outputs[:steps]])  # T, 1 + S, H, d
            rows = z.flatten(0, 1).transpose(0, 1)
            head_direction = head_direction.to(heads.projection.device)
            attribution = direct_logit_attribution(
                rows, heads.projection, head_direction.repeat_interleave(1 + spans, 0)
            )
            means = attribution.view(len(attribution), steps, 1 + spans).double().mean(1).T
            results.append((heads.factor * means).float().cpu())
        total, *through_spans = stack_layers(results, 0).transpose(0, 1)
        return AnswerAttribution(total, torch.stack(through_spans))

    def _apply_gate(self, heads: AttentionBranch, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Multiply the outputs of the last query's heads by their gates."""
        if (outputs := self._current_step.get(heads.layer_index)) is not None:  # None in other steps
            gated = args[0][self._row, -1].float().view_as(outputs[0])
            self._current_step[heads.layer_index] = outputs * (gated / outputs[0]).nan_to_num()

    def _norm_hook(self, norm: Norm) -> Any:
        def record_call(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if not self._current_step:  # part of a prompt, or a step of another sequence
                return
            call = args[0][self._row, -1:].clone(), output[self._row, -1:].clone()
            self._norm_calls.setdefault(module, []).append(call)
            if norm is self.decomposition.final_norm:
                self._step_outputs.append(self._current_step)
                self._current_step = {}

        return record_call

    def _joined_calls(self, norm: Norm, steps: int) -> tuple[Tensor, Tensor]:
        """Inputs and outputs of a norm at the first steps, [T, D] each."""
        inputs, outputs = zip(*self._norm_calls[norm.module][:steps], strict=True)
        return torch.cat(inputs), torch.cat(outputs)

    def _scales(self, norm: Norm, steps: int) -> Tensor:
        """The divisor of a norm at each step, [T, 1]."""
        return norm.scales(*self._joined_calls(norm, steps))[:, None] if steps else torch.ones(0, 1)

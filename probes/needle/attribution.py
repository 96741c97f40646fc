"""What each head adds to the tokens of an answer, and how much of it comes through the needle."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.record import AttentionRecord
from headscope.forward.capture import capturing
from headscope.forward.prefix_cache import TokenIds
from headscope.forward.residual_decomposition import Norm, ResidualDecomposition, decompose_residual_stream
from headscope.measures.copying import TokenSpan
from headscope.measures.logit_attribution import direct_logit_attribution, last_query_outputs
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model


@dataclass(frozen=True, eq=False)
class AnswerAttribution:
    """What the heads added to the logits of T answered tokens: `whole` [layers, H], and `through` [S, layers, H] each
    span, means over the tokens in logits, less the mean over the vocabulary; 0 without a token."""

    total: Tensor
    through_spans: Tensor


def decompose_residual(model: Model, ids: TokenIds) -> ResidualDecomposition:
    """How the model's logits are a sum. Raises UnsupportedModel where they are none."""
    read = torch.from_numpy(ids.astype("int64"))[None].to(model.device)
    with attached(model), evaluating(model), capturing(model) as layers:
        return decompose_residual_stream(model, layers, read)


class AttributionAccumulator:
    """Accumulates `last_outputs` over the steps of one answer, and what the norms after them divide by.

    `update` listens to every layer of each step, within `listening`. What a head adds is known once the token is.
    """

    def __init__(self, stream: ResidualDecomposition, spans: Sequence[TokenSpan]):
        self.stream, self.spans = stream, torch.tensor(spans)
        self._head_terms = [layer.attention_branch for layer in stream.layers if layer.attention_branch is not None]
        self._step_outputs: list[dict[int, Tensor]] = []
        self._norm_scales: dict[nn.Module, list[Tensor]] = {}
        self._current_step: dict[int, Tensor] = {}

    @contextmanager
    def hooks_registered(self) -> Iterator[None]:
        """Take the scale of every norm between a head and the logit, at each step."""
        norms = [heads.norm for heads in self._head_terms if heads.norm is not None] + [self.stream.final_norm]
        with ExitStack() as stack:
            for norm in norms:
                handle = norm.module.register_forward_hook(self._scale_hook(norm), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def update(self, record: AttentionRecord) -> None:
        """Take one layer of one step."""
        self._current_step[record.layer] = last_query_outputs(record, self.spans)

    def compute(self, tokens: Tensor) -> AnswerAttribution:
        """What was added to the first T tokens, which the first T steps produced; `tokens` [T]."""
        stream, steps, spans = self.stream, len(tokens), len(self.spans)
        tokens = tokens.to(stream.unembedding.device)
        towards = stream.final_norm.pull_back(stream.unembedding[tokens].float() - stream.unembedding_mean)
        towards = stream.logit_factor * towards / self._stacked_scales(stream.final_norm, steps)
        found = []
        for heads in self._head_terms:
            before = (
                towards
                if heads.norm is None
                else heads.norm.pull_back(towards) / self._stacked_scales(heads.norm, steps)
            )
            if not steps:
                found.append(torch.zeros(1 + spans, len(self._step_outputs[0][heads.layer_index][0])))
                continue
            z = torch.stack([step[heads.layer_index] for step in self._step_outputs[:steps]])  # T, 1 + S, H, d
            rows = z.flatten(0, 1).transpose(0, 1)
            before = before.to(heads.projection.device)
            added = direct_logit_attribution(rows, heads.projection, before.repeat_interleave(1 + spans, 0))
            means = added.view(len(added), steps, 1 + spans).double().mean(1).T
            found.append((heads.factor * means).float().cpu())
        whole, *through = torch.stack(found, 1)
        return AnswerAttribution(whole, torch.stack(through))

    def _scale_hook(self, norm: Norm) -> Any:
        def take(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if not self._current_step:  # a part of the prompt, which answers nothing
                return
            scale = norm.scales(args[0][0, -1:], output[0, -1:])
            self._norm_scales.setdefault(module, []).append(scale)
            if norm is self.stream.final_norm:
                self._step_outputs.append(self._current_step)
                self._current_step = {}

        return take

    def _stacked_scales(self, norm: Norm, steps: int) -> Tensor:
        return torch.stack(self._norm_scales[norm.module][:steps]) if steps else torch.ones(0, 1)

"""Writes: a forward pass in which every term of the next token's logit is taken as it is added to the stream.

The direction of a row is known before the pass, from the token that comes next; the scale of the final norm only after
it, so that every term is divided by it in the end. Memory is O(L) numbers a head.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headscope.attention.record import Attention
from headscope.errors import UnsupportedModel
from headscope.forward.capture import Layers, capturing
from headscope.forward.logits import finite_hidden
from headscope.forward.residual_decomposition import Heads, Stream, state_of, survey
from headscope.measures.logit_attribution import WritesByPosition, head_writes
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import Materials
from probes.attribution.options import WritesConfig

OFF = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far, of the largest logit, the terms may be from their sum; coarser numbers round at every step."""


class WritesSection:
    """Cells: each (model, context length, document)."""

    def __init__(self, config: WritesConfig, materials: Materials):
        self.config, self.materials = config, materials

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{label}: {length} tokens, document {doc}", label, 1.5 * pass_cost(length), (length, doc))
            for label in self.materials.labels
            for length in self.config.lengths
            for doc in range(len(self._documents(label)))
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        length, doc = cell.task
        document = self._documents(cell.model)[doc]
        terms = written(model, torch.tensor(document.ids[:length]))
        keys = {"model": cell.model, "context_length": length, "doc": document.name}
        geometry, bins = model.geometry, WritesByPosition(length)
        layers, heads = np.indices(terms.heads.shape[:2]).reshape(2, -1)
        places = {"layer": np.array(geometry.numbers)[layers], "head": heads}
        places["kv_group"] = heads // geometry.heads_per_group
        parts = {"part": np.array([name for name, _ in terms.parts]), "layer": np.array([at for _, at in terms.parts])}
        return {
            "writes": {**keys, **bins.columns(terms.heads.flatten(0, 1), **places)},
            "write_parts": {**keys, **bins.columns(torch.stack([*terms.parts.values()]), **parts)},
        }

    def _documents(self, label: str) -> list[TokenDocument]:
        return self.materials.documents(label, max(self.config.lengths))


class Terms:
    """The terms of the next token's logit, in logits: `heads` [layers, H, L - 1], and all `parts` [L - 1] by name and
    layer, the heads of a layer together among them; "logit" is what the others add up to."""

    def __init__(self, stream: Stream, geometry: Any, ids: Tensor):
        self.stream, self.ids, self.geometry = stream, ids, geometry
        targets = ids[0, 1:].to(stream.unembedding.device)
        self.towards = stream.unembedding[targets].float() - stream.mean
        self.before = stream.final.before(self.towards)
        self.heads = torch.zeros(geometry.layers, geometry.heads, len(targets))
        self.parts: dict[tuple[str, int], Tensor] = {}
        self.bias = torch.zeros(len(targets), device=ids.device)
        self._scales = torch.ones(len(targets), device=ids.device)

    def listen(self, layers: Layers, stack: ExitStack) -> None:
        """Take every term of the next pass as it is added."""

        def hook(module: nn.Module, take: Any) -> None:
            stack.callback(module.register_forward_hook(take, with_kwargs=True).remove)

        for number, layer in enumerate(self.stream.layers):
            if number == 0:
                hook(layer.module, self._take_embedding)
            if layer.heads is not None:
                self._listen_to_heads(layer.heads, layers, hook)
            for part in layer.others:
                hook(part.module, self._taker(number, part.factor))
        hook(self.stream.final.module, self._take_scale)

    def finish(self, hidden: Tensor) -> None:
        """Divide by the scale of the final norm, and add all up; `hidden` [1, L, D] are the last states."""
        stream, geometry = self.stream, self.geometry
        for index, number in enumerate(geometry.numbers):
            self.parts["heads", number] = self.heads[index].sum(0).to(self.ids.device)
        self.parts["bias", 0] = self.bias
        for name in self.parts:
            self.parts[name] = stream.factor * self.parts[name] / self._scales
        self.heads = stream.factor * self.heads / self._scales.cpu()
        towards = self.towards.to(self.ids.device)
        after = torch.linalg.vecdot(towards, stream.final.shift.to(towards.device).expand_as(towards))
        logit = torch.linalg.vecdot(hidden[0, :-1].to(towards.device).float(), towards)
        if stream.bias is not None:
            own = (stream.bias[self.ids[0, 1:].to(stream.bias.device)].float() - stream.bias.float().mean()).to(towards)
            after, logit = after + own, logit + own
        self.parts["bias", 0] = self.parts["bias", 0] + stream.factor * after
        added = torch.stack([*self.parts.values()]).sum(0)
        self.parts["logit", 0] = stream.factor * logit
        self.off = float((added - self.parts["logit", 0]).abs().max() / self.parts["logit", 0].abs().max())

    def _listen_to_heads(self, heads: Heads, layers: Layers, hook: Any) -> None:
        before = (self.before if heads.norm is None else heads.norm.before(self.before)).to(heads.projection.device)

        def hear(heard: Attention) -> None:
            self.heads[heads.index] = heads.factor * head_writes(heard.z[:, :-1], heads.projection, before).cpu()
            if heads.bias is not None and heads.norm is None:
                self.bias += heads.factor * (before @ heads.bias.float()).to(self.bias.device)

        layers.listen(hear, [heads.index])
        if heads.norm is not None:
            norm = heads.norm

            def divide(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
                scales = norm.scales(args[0][0, :-1], output[0, :-1])
                self.heads[heads.index] /= scales.cpu()
                own = 0 if heads.bias is None else before @ heads.bias.float() / scales
                self.bias += heads.factor * (own + self.before.to(norm.shift.device) @ norm.shift).to(self.bias.device)

            hook(norm.module, divide)

    def _taker(self, number: int, factor: float) -> Any:
        def take(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            state = state_of(output)
            assert state is not None
            added = factor * torch.linalg.vecdot(state[0, :-1].float(), self.before.to(state.device))
            self.parts["other", number] = self.parts.get(("other", number), 0) + added.to(self.ids.device)

        return take

    def _take_embedding(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        embedded = torch.linalg.vecdot(state[0, :-1].float(), self.before.to(state.device))
        self.parts["embedding", 0] = embedded.to(self.ids.device)

    def _take_scale(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self._scales = self.stream.final.scales(args[0][0, :-1], output[0, :-1]).to(self.ids.device)


def written(model: Model, ids: Tensor) -> Terms:
    """Every term of the logit of each next token of ids [L], under the model's scheme.

    Raises UnsupportedModel for a model whose logits are not such a sum.
    """
    ids = ids.to(model.device)[None]
    with attached(model), evaluating(model), capturing(model) as layers, ExitStack() as stack:
        with capturing(model) as first:
            stream = survey(model, first, ids)
        terms = Terms(stream, model.geometry, ids)
        terms.listen(layers, stack)
        terms.finish(finite_hidden(model, ids))
    if terms.off > OFF.get(model.module.dtype, 0.1):
        raise UnsupportedModel(
            f"cannot tell what the heads of {model.name} write: the terms of its logits miss their sum by "
            f"{terms.off:.2g} of the largest"
        )
    return terms

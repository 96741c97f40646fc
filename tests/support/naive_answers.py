"""What every part adds to the logit of an answer minus that of a wrong one, the slow and obvious way: in float64, with
eager attention and hooks on named modules.

Shares no code with `headscope.decomposition`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

NORMS_AFTER = {"attention": "post_attention_layernorm", "other": "post_feedforward_layernorm"}
MODULES = {"attention": ("self_attn", "attention"), "other": ("mlp",)}
PROJECTIONS = ("o_proj", "dense")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm")


class AnswerReference:
    """Terms by row, [L] each: `terms` by (part, layer), `heads` by (layer, head), and the model's own `difference`."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, heads: int, answer: int, wrong: int):
        self.module = copy.deepcopy(model).double()
        self.module.set_attn_implementation("eager")
        backbone: Any = self.module.base_model
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        for module in self.module.modules():
            module.register_forward_hook(self._note, with_kwargs=True)
        with torch.no_grad():
            logits = self.module(ids[None], use_cache=False).logits[0]
        self.difference = logits[:, answer] - logits[:, wrong]
        unembedding = self.module.get_output_embeddings()
        direction = (unembedding.weight[answer] - unembedding.weight[wrong]).detach()
        final = next(getattr(backbone, name) for name in FINAL_NORMS if hasattr(backbone, name))
        to_logit = self._frozen(final)
        bias = getattr(final, "bias", None)
        at_end = torch.zeros_like(direction) if bias is None else bias.detach()
        of_vocabulary = 0.0 if unembedding.bias is None else float(unembedding.bias[answer] - unembedding.bias[wrong])
        self.terms = {("bias", 0): (at_end @ direction + of_vocabulary).expand(len(ids))}
        self.terms["embedding", 0] = to_logit(self.inputs[backbone.layers[0]]) @ direction
        self.heads: dict[tuple[int, int], Tensor] = {}
        for number, layer in enumerate(backbone.layers):
            is_normed = hasattr(layer, NORMS_AFTER["other"])  # Gemma and OLMo 2 norm the outputs before they add them
            for part, names in MODULES.items():
                module = next(getattr(layer, name) for name in names if hasattr(layer, name))
                after = getattr(layer, NORMS_AFTER[part]) if is_normed else None
                added = self.outputs[module if after is None else after]
                self.terms[part, number] = to_logit(added) @ direction
                if part == "attention":
                    change: Callable[[Tensor], Tensor] = (lambda x: x) if after is None else self._frozen(after)
                    for head, output in enumerate(self._head_outputs(module, heads)):
                        self.heads[number, head] = to_logit(change(output)) @ direction

    def _head_outputs(self, attention: nn.Module, heads: int) -> list[Tensor]:
        projection = next(getattr(attention, name) for name in PROJECTIONS if hasattr(attention, name))
        z, weight = self.inputs[projection], projection.weight.detach()
        dim = z.shape[-1] // heads
        slices = [slice(head * dim, (head + 1) * dim) for head in range(heads)]
        return [z[:, of_head] @ weight[:, of_head].T for of_head in slices]

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        state, result = args[0] if args else kwargs.get("hidden_states"), output
        if isinstance(state, Tensor) and state.is_floating_point():
            self.inputs[module] = state[0]
        result = result[0] if isinstance(result, tuple) else result
        if isinstance(result, Tensor):
            self.outputs[module] = result[0]

    def _frozen(self, norm: nn.Module) -> Callable[[Tensor], Tensor]:
        """The norm as a linear map of parts of its input, without its bias, by its formula."""
        x = self.inputs[norm]
        eps = next(float(getattr(norm, at)) for at in ("variance_epsilon", "eps") if hasattr(norm, at))
        weight: Any = norm.weight
        if isinstance(norm, nn.LayerNorm):
            scale = (x.var(-1, unbiased=False) + eps).sqrt()[:, None]
            return lambda part: weight.detach() * (part - part.mean(-1, keepdim=True)) / scale
        gain = weight.detach() + (1 if "Gemma" in type(norm).__name__ else 0)
        scale = (x.square().mean(-1) + eps).sqrt()[:, None]
        return lambda part: gain * part / scale

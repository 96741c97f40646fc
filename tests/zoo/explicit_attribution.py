"""Direct logit attribution the slow and obvious way: an explicit sum in float64, from a plain eager forward pass.

What follows the output projection of each family is written here by its name; nothing is taken from headscope's
decomposition of the residual stream.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headscope.positions.model import Model

from .edited_heads import output_projection

BRANCH_NORMS = {
    **dict.fromkeys(("Gemma2", "Gemma3", "Gemma4", "Olmo2", "Olmo3", "Exaone4", "Afmoe"), "post_attention_layernorm"),
    "Glm4Decoder": "post_self_attn_layernorm",
}
"""Norm between attention and residual stream, by the beginning of the decoder layer's class."""
BRANCH_FACTORS = {
    "Granite": "residual_multiplier",
    "FalconH1": "attention_out_multiplier",
}
"""The config's field that multiplies attention before the residual stream."""
LOGIT_FACTORS: dict[str, Callable[[Any], float]] = {
    "Granite": lambda config: 1 / config.logits_scaling,
    "Cohere": lambda config: config.logit_scale,
    "FalconH1": lambda config: config.lm_head_multiplier,
}
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")


class InputRecorder:
    """The last input of every module in one forward pass, float64."""

    def __init__(self, module: nn.Module, ids: Tensor):
        self.inputs: dict[nn.Module, Tensor] = {}
        handles = [part.register_forward_pre_hook(self._record) for part in module.modules()]
        with torch.no_grad():
            self.logits = module(ids[None], use_cache=False).logits[0].double()
        for handle in handles:
            handle.remove()

    def _record(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            self.inputs[module] = args[0].reshape(-1, args[0].shape[-1]).double()


def head_terms(model: Model, ids: Tensor) -> tuple[Tensor, float]:
    """Each head's part of the logit of each next token, [layers, H, L - 1], and the largest of these logits."""
    recorder, config = InputRecorder(model.module, ids), model.module.config.get_text_config()
    unembedding = model.module.get_output_embeddings().weight.detach().double()
    directions = unembedding[ids[1:]] - unembedding.mean(0)
    if cap := getattr(config, "final_logit_softcapping", None):  # linearised at the logits of this pass
        slopes = 1 - (recorder.logits[:-1] / cap).square()
        directions = slopes.gather(1, ids[1:, None]) * unembedding[ids[1:]] - slopes @ unembedding / slopes.shape[1]
    final = _final_norm(model.module, recorder)
    layers = [_decoder_layer(model.module, attention) for attention in model.attention_modules]
    terms = []
    for index, (layer, attention) in enumerate(zip(layers, model.attention_modules, strict=True)):
        kind = type(layer).__name__
        projection = output_projection(attention)
        weight = projection.weight.detach().double()
        weight = weight.T if type(projection).__name__ == "Conv1D" else weight
        z = recorder.inputs[projection][:-1].unflatten(-1, (model.geometry.heads, -1))
        added = torch.einsum("lhd,ohd->hlo", z, weight.unflatten(-1, (model.geometry.heads, -1)))
        norm_name = _value_for(kind, BRANCH_NORMS)
        if norm_name is not None:
            norm = getattr(layer, norm_name)
            added = _through_norm(norm, recorder.inputs[norm][:-1], added)
        factor_name = _value_for(kind, BRANCH_FACTORS)
        added = added * (getattr(config, factor_name) if factor_name else 1.0)
        if hasattr(layer, "layer_scalar"):  # Gemma 4 multiplies the whole stream after each layer
            added = added * float(torch.stack([later.layer_scalar.double() for later in layers[index:]]).prod())
        added = _through_norm(final, recorder.inputs[final][:-1], added)
        terms.append((added * directions).sum(-1))
    logit_factor = _value_for(type(layers[0]).__name__, LOGIT_FACTORS)
    centred = recorder.logits[:-1].gather(-1, ids[1:, None])[:, 0] - recorder.logits[:-1].mean(-1)
    return torch.stack(terms) * (logit_factor(config) if logit_factor else 1.0), float(centred.abs().max())


def _value_for(kind: str, by_prefix: dict[str, Any]) -> Any:
    return next((value for prefix, value in by_prefix.items() if kind.startswith(prefix)), None)


def _decoder_layer(module: nn.Module, attention: nn.Module) -> nn.Module:
    """The innermost module of a list that contains the attention module."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return next(layer for layers in lists for layer in layers if attention in set(layer.modules()))


def _final_norm(module: nn.Module, recorder: InputRecorder) -> nn.Module:
    """The norm after the last layer, by the names that transformers gives it."""
    named = [
        (name, part)
        for name, part in module.named_modules()
        if name.rpartition(".")[2] in FINAL_NORMS and part in recorder.inputs and ".layers." not in name
    ]
    return min(named, key=lambda item: item[0].count("."))[1]


def _through_norm(norm: nn.Module, states: Tensor, added: Tensor) -> Tensor:
    """`added` [H, L, D] through a norm at the scale that it has for `states` [L, D], without its shift."""
    eps = next((float(getattr(norm, at)) for at in ("variance_epsilon", "eps") if hasattr(norm, at)), 1e-5)
    weight = getattr(norm, "weight", None)
    gain = torch.ones(states.shape[-1]).double() if weight is None else weight.detach().double()
    kind = type(norm).__name__
    if isinstance(norm, nn.LayerNorm) or ("LayerNorm" in kind and "RMS" not in kind and kind != "Phi3RMSNorm"):
        scale = (states.var(-1, unbiased=False) + eps).sqrt()
        added = added - added.mean(-1, keepdim=True)
    else:
        scale = (states.square().mean(-1) + eps).sqrt()
    if re.match("(Gemma|Gemma2|Gemma3|Qwen3Next|Qwen3_5|Qwen3_5Moe)RMSNorm", kind):
        gain = 1 + gain
    return added * gain / scale[:, None]

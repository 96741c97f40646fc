"""What heads add to logits, the slow and obvious way: from the inputs of named modules, with eager attention weights.

Shares no code with `headscope.measures.logit_attribution`, nor with how a stream is seen.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headscope.positions.model import Model


class Reference:
    """Inputs and outputs of named modules in a plain eager forward pass, in float64."""

    def __init__(self, model: Model, ids: Tensor):
        self.module, self.config = model.module, model.module.config
        self.inputs: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(lambda _, args, out, name=name: self.note(name, args))
            for name, module in self.module.named_modules()
        ]
        with torch.no_grad():
            self.module(ids[None])
        for handle in handles:
            handle.remove()

    def note(self, name: str, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            self.inputs[name] = args[0][0].double()

    def scale(self, name: str, norm: nn.Module) -> Tensor:
        """What a norm divided each row by, by its formula."""
        x = self.inputs[name]
        eps = next(float(getattr(norm, at)) for at in ("variance_epsilon", "eps") if hasattr(norm, at))
        if isinstance(norm, nn.LayerNorm):
            return (x.var(-1, unbiased=False) + eps).sqrt()
        return (x.square().mean(-1) + eps).sqrt()

    def gain(self, norm: nn.Module) -> Tensor:
        return norm.weight.detach().double() + (1 if "Gemma" in type(norm).__name__ else 0)


def head_contributions(model: Model, ids: Tensor, heads: int, span: tuple[int, int] | None = None) -> Tensor:
    """Each head's part of each next token's logit, [layers, H, L - 1], one head at a time; with a span, of what comes
    through its keys."""
    reference = Reference(model, ids)
    outputs = None if span is None else iter(span_outputs(model, ids, *span))
    modules_by_name = dict(reference.module.named_modules())
    final = next(
        name for name in modules_by_name if name.rpartition(".")[2] in ("norm", "final_layernorm", "final_layer_norm")
    )
    unembedding = reference.module.get_output_embeddings().weight.detach().double()
    directions = unembedding[ids[1:]] - unembedding.mean(0)
    if cap := getattr(reference.config, "final_logit_softcapping", None):
        directions = capped_directions(reference.inputs["lm_head"][:-1], unembedding, ids[1:], cap)
    direction = directions * reference.gain(modules_by_name[final])
    scale = reference.scale(final, modules_by_name[final])[:-1]
    by_layer = []
    for name, module in modules_by_name.items():
        if name.rpartition(".")[2] not in ("o_proj", "dense") or "mlp" in name:
            continue
        z, weight = reference.inputs[name][:-1], module.weight.detach().double()
        z = z if outputs is None else next(outputs)[:-1]
        after = f"{name.partition('.self_attn')[0]}.post_attention_layernorm"
        dim = z.shape[-1] // heads
        of_layer = []
        for head in range(heads):
            head_dims = slice(head * dim, (head + 1) * dim)
            added = z[:, head_dims] @ weight[:, head_dims].T
            if (
                "Gemma3" in type(reference.module).__name__ or "Olmo2" in type(reference.module).__name__
            ):  # normed before added
                added = (
                    added
                    * reference.gain(modules_by_name[after])
                    / reference.scale(after, modules_by_name[after])[:-1, None]
                )
            if isinstance(modules_by_name[final], nn.LayerNorm):
                added = added - added.mean(-1, keepdim=True)
            of_layer.append((added * direction).sum(-1) / scale)
        by_layer.append(torch.stack(of_layer))
    return torch.stack(by_layer)


def capped_directions(hidden: Tensor, unembedding: Tensor, tokens: Tensor, cap: float) -> Tensor:
    """Gradients [n, D] of the soft-capped logits of `tokens` minus the vocabulary's mean, by torch's autograd."""
    hidden = hidden.detach().requires_grad_()
    logits = cap * torch.tanh(hidden @ unembedding.T / cap)
    (logits.gather(1, tokens[:, None])[:, 0] - logits.mean(-1)).sum().backward()
    assert hidden.grad is not None
    return hidden.grad


def span_outputs(model: Model, ids: Tensor, start: int, end: int) -> list[Tensor]:
    """Weight times value, summed over the keys of a span, of every head, layer by layer: [L, H d], float64."""
    eager = copy.deepcopy(model.module)
    eager.set_attn_implementation("eager")
    values: list[Tensor] = []
    for name, module in eager.named_modules():
        if name.endswith("v_proj"):
            module.register_forward_hook(lambda _, args, out: values.append(out[0].double()))
    with torch.no_grad():
        weights = eager(ids[None], output_attentions=True).attentions
    outputs = []
    for weight, value in zip(weights, values, strict=True):
        heads, dim = weight.shape[1], model.geometry.head_dim
        shared = value.view(len(value), -1, dim).repeat_interleave(heads * dim // value.shape[1], 1)
        z = torch.einsum("hij,jhd->ihd", weight[0, :, :, start:end].double(), shared[start:end])
        outputs.append(z.flatten(1))
    return outputs

"""Dense references for circuits: weights read by each family's names, products of full size, float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = ("llama-gqa", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "gpt2", "granite")


@dataclass
class DenseHead:
    """Matrices of one query head with the gains of norms folded in: W_QK and W_OV, [D, D]; q, k and v are W [d, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    @property
    def qk(self) -> Tensor:
        return self.q.T @ self.k

    @property
    def ov(self) -> Tensor:
        return self.o @ self.v


@torch.no_grad()
def dense_heads(module: PreTrainedModel) -> list[list[DenseHead]]:
    """The heads of each layer."""
    config: Any = module.config
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    groups = heads if config.model_type in ("gpt2", "gpt_neox") else groups
    layers = []
    for layer in _layers(module):
        q, k, v, o, norm, centred = _weights(layer, heads, groups)
        fold = torch.diag(norm)
        if centred:
            fold = fold @ (torch.eye(len(norm)) - 1 / len(norm)).double()
        attention = getattr(layer, "self_attn", None)
        q, k, v = (t @ fold for t in (q, k, v))
        if hasattr(attention, "q_norm"):
            offset = 1.0 if "gemma" in config.model_type else 0.0
            q = q * (attention.q_norm.weight.double() + offset)[:, None]
            k = k * (attention.k_norm.weight.double() + offset)[:, None]
        if hasattr(layer, "pre_feedforward_layernorm"):  # so the norm after attention is a post-norm
            o = (1 + layer.post_attention_layernorm.weight.double())[:, None] * o
        o = getattr(config, "residual_multiplier", 1.0) * o
        layers.append([DenseHead(q[h], k[h * groups // heads], v[h * groups // heads], o[h]) for h in range(heads)])
    return layers


def _layers(module: Any) -> Any:
    inner = module.base_model
    return inner.h if hasattr(inner, "h") else inner.layers


def _weights(layer: Any, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]:
    """q [H, d, D], k and v [G, d, D], o [H, D, d], the input norm's gain, and whether that norm is centred."""
    if hasattr(layer, "attn"):  # GPT-2: [D, 3 D], transposed
        q, k, v = layer.attn.c_attn.weight.T.double().chunk(3)
        o, norm, centred = layer.attn.c_proj.weight.T, layer.ln_1.weight, True
    elif hasattr(layer, "attention"):  # GPT-NeoX: q, k, v of each head in turn
        fused = layer.attention.query_key_value.weight.double()
        q, k, v = (part.flatten(0, 1) for part in fused.view(heads, 3, -1, fused.shape[1]).unbind(1))
        o, norm, centred = layer.attention.dense.weight, layer.input_layernorm.weight, True
    else:
        a, norm, centred = layer.self_attn, layer.input_layernorm.weight, False
        if hasattr(a, "qkv_proj"):
            weight = a.qkv_proj.weight.double()
            d = len(weight) // (heads + 2 * groups)
            q, k, v = weight.split([heads * d, groups * d, groups * d])
        else:
            q, k, v = (getattr(a, f"{name}_proj").weight.double() for name in "qkv")
        o = a.o_proj.weight
        norm = norm + 1 if "Gemma" in type(layer).__name__ else norm
    o = o.double().view(len(o), heads, -1).permute(1, 0, 2)
    return (
        q.view(heads, -1, q.shape[1]),
        k.view(groups, -1, k.shape[1]),
        v.view(groups, -1, v.shape[1]),
        o,
        norm.double(),
        centred,
    )


def dense_copying_score(module: Any, head: DenseHead) -> float:
    """From the eigenvalues of the [vocabulary, vocabulary] matrix W_U W_OV W_E, W_U minus its mean over tokens."""
    final = next(
        norm for name in ("norm", "ln_f", "final_layer_norm") if (norm := getattr(module.base_model, name, None))
    )
    gain = final.weight.double() + ("Gemma" in type(final).__name__)
    unembedding = module.get_output_embeddings().weight.double() * gain
    if getattr(final, "bias", None) is not None:
        unembedding = unembedding - unembedding.mean(1, keepdim=True)
    unembedding = unembedding - unembedding.mean(0)
    matrix = unembedding @ head.ov @ module.get_input_embeddings().weight.double().T
    eigenvalues = torch.linalg.eigvals(matrix)
    return float(eigenvalues.real.sum() / eigenvalues.abs().sum())


def dense_composition(receiver: DenseHead, sender: DenseHead, kind: str) -> float:
    """||W_A W_B|| / (||W_A|| ||W_B||) with full matrices (Elhage et al. 2021)."""
    reading = {"q": receiver.qk.T, "k": receiver.qk, "v": receiver.ov}[kind]
    return float((reading @ sender.ov).norm() / (reading.norm() * sender.ov.norm()))

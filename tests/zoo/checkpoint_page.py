"""The page of checkpoints: each published layout, what headscope does with it, and the checkpoints that have it."""

from collections.abc import Mapping
from typing import Any

from .checks import Verdict
from .layout_checks import shared_reason
from .layouts import Layout, full_text_config, kv_groups, layouts

INTRODUCTION = """\
# Published checkpoints

{checkpoints} checkpoints in {layouts} published layouts: {complete} are measured completely, {partly} partly, {refused}
are refused when they are opened. The list has the families that are used most, by the names under which their makers
publish them; it is not ranked by downloads. A checkpoint that was tuned from one of these has the same layout.

A layout is what a checkpoint's config.json says about attention, residual stream and logits. Each one is built small,
with random weights, from its published config: the order of its layers, the ratio of heads to KV groups and of head_dim
to hidden size, its windows, rope scaling, norms, multipliers and experts stay. Then attention, rotary pairs, loss,
position schemes, AdaRoPE, attention patterns, cached decoding, direct logit attribution, influence and patching are
compared with the model's own eager attention or an explicit computation. Patching and influence are compared for the
first and the last head and for every head of the middle layer; patching runs these as one batch of copies, influence
ablates one head at a time. `make docs` writes this page.

A layout is not a checkpoint: the weights of the large models were not opened. When a checkpoint is opened, its own
attention is compared with eager attention again.

## Layouts

| layout | model type | attention | result |
|---|---|---|---|
"""
MEASURED = "measured"


def markdown(verdicts: Mapping[str, Verdict]) -> str:
    """The whole page."""
    by_outcome = {"complete": 0, "partly": 0, "refused": 0}
    layout_rows, checkpoint_rows = [], []
    for name, layout in layouts().items():
        verdict = verdicts[name]
        outcome = _outcome(verdict)
        by_outcome[outcome] += len(layout.checkpoints)
        layout_rows.append(f"| {name} | {layout.type} | {describe_attention(layout)} | {_result(verdict)} |")
        word = {"complete": MEASURED, "partly": "partly", "refused": "refused"}[outcome]
        checkpoint_rows += [f"| {checkpoint} | {name} | {word} |" for checkpoint in layout.checkpoints]
    total = sum(by_outcome.values())
    return (
        INTRODUCTION.format(checkpoints=total, layouts=len(layouts()), **by_outcome)
        + "\n".join(layout_rows)
        + f"\n\n## Checkpoints\n\n<details>\n<summary>{total} checkpoints</summary>\n\n"
        + "| checkpoint | layout | result |\n|---|---|---|\n"
        + "\n".join(sorted(checkpoint_rows, key=str.casefold))
        + "\n\n</details>\n"
    )


def _outcome(verdict: Verdict) -> str:
    if not verdict.kind.startswith("right"):
        return "refused"
    return "partly" if verdict.refused else "complete"


def _result(verdict: Verdict) -> str:
    """In words, with the reasons of what is refused."""
    if not verdict.kind.startswith("right"):
        return f"refused: {verdict.reason}"
    measures: dict[str, list[str]] = {}
    for measure, reason in verdict.refused.items():
        measures.setdefault(shared_reason(reason), []).append(measure)
    return "; ".join((MEASURED, *(f"no {', '.join(names)}: {reason}" for reason, names in measures.items())))


def describe_attention(layout: Layout) -> str:
    """The shape of a published layout's attention in a few words."""
    config = full_text_config(layout)
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    if heads is None:
        return ""
    if _first(config, "kv_lora_rank") is not None:
        shape = f"latent, {heads} heads"
    else:
        groups = kv_groups(vars(config), heads)
        plural = "" if groups == 1 else "s"
        shape = f"{heads} heads on {groups} KV group{plural}, head_dim {_head_dim(config, heads)}"
    return ", ".join([shape, *_details(config)])


def _first(config: Any, *names: str) -> int | None:
    """The first of these fields with a number; Gemma 4 refuses to read a head_dim that not all of its layers have."""
    return next((value for name in names if isinstance(value := vars(config).get(name), int)), None)


def _head_dim(config: Any, heads: int) -> int:
    width = _first(config, "hidden_size", "n_embd", "d_model") or 0
    return _first(config, "head_dim") or width // heads


def _details(config: Any) -> list[str]:
    details = []
    kinds = getattr(config, "layer_types", None) or []
    for kind, words in (
        ("sliding_attention", "windows in {} of {} layers"),
        ("chunked_attention", "chunks in {} of {} layers"),
        ("full_attention", "attention in {} of {} layers"),
    ):
        count = sum(layer_kind == kind for layer_kind in kinds)
        hybrid = kind != "full_attention" or not {"sliding_attention", "chunked_attention"} & set(kinds)
        if 0 < count < len(kinds) and hybrid:
            details.append(words.format(count, len(kinds)))
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", 0)
    if not kinds and isinstance(window, int) and window < context and getattr(config, "use_sliding_window", True):
        details.append(f"windows of {window}")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        if rope.get("rope_type", "default") != "default":
            details.append(f"{rope['rope_type']} rope scaling")
    if ropes.get("partial_rotary_factor", 1.0) < 1:
        details.append(f"{ropes['partial_rotary_factor']:.0%} of the dimensions rotate")
    if getattr(config, "attn_logit_softcapping", None):
        details.append("soft-capped logits")
    if getattr(config, "num_kv_shared_layers", 0):
        details.append(f"{config.num_kv_shared_layers} layers share keys")
    if config.model_type == "gpt_oss":
        details.append("learned sinks")
    if getattr(config, "index_topk", None):
        details.append(f"an indexer chooses {config.index_topk} keys")
    return details

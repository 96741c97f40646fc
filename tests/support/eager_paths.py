"""Path patching by hand: named modules, norms by their formulas, and eager attention with one activation replaced.

Shares no code with `headscope.interventions.path_patching`, nor with how headscope finds the modules.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headscope.interventions.metrics import PairTokens
from headscope.interventions.path_patching import Path
from headscope.positions.model import Model
from support import eager_patching

PROJECTIONS = ("o_proj", "c_proj", "dense", "out_proj")
INPUT_NORMS = ("input_layernorm", "ln_1", "operator_norm")
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "embedding_norm")


def _blocks(model: Model) -> list[nn.Module]:
    """The decoder layers that have attention."""
    stack = next(module for module in model.module.modules() if isinstance(module, nn.ModuleList))
    return [layer for layer in stack if {*layer.modules()} & {*model.attention_modules}]


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _run(model: Model, prompt: Tensor, **options: Any) -> tuple[Tensor, list[Any], dict[nn.Module, Tensor]]:
    """Logits, activations by layer, and the first input of every module."""
    inputs: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if isinstance(value, Tensor):
            inputs[module] = value

    with ExitStack() as stack:
        for module in model.module.modules():
            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        logits, records = eager_patching.run(model, prompt, **options)
    return logits, records, inputs


def _frozen(norm: nn.Module, run_input: Tensor, change: Tensor) -> Tensor:
    """The change of a norm's output when its input changes and its scale stays, by the norm's formula."""
    x, weight = run_input.double(), norm.weight.double() + ("Gemma" in type(norm).__name__)  # type: ignore[operator]
    epsilon = next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))
    if isinstance(norm, nn.LayerNorm):
        return (
            weight
            * (change - change.mean(-1, keepdim=True))
            / (x.var(-1, unbiased=False, keepdim=True) + epsilon).sqrt()
        )
    return weight * change / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def _written(model: Model, layer: int, heads: slice, run: Any, source: Any) -> Tensor:
    """What heads add to the residual stream in the source minus the run, [1, L, D], float64."""
    block, attention = _blocks(model)[layer], model.attention_modules[layer]
    projection = _child(attention, PROJECTIONS)
    weight = projection.weight.double()  # type: ignore[union-attr, operator]
    weight = weight.T if type(projection).__name__ == "Conv1D" else weight
    z = source[1][layer]["z"] - run[1][layer]["z"]
    change = torch.zeros_like(z)
    change[heads] = z[heads]
    written: Tensor = (change.transpose(0, 1).flatten(1) @ weight.T)[None]
    if "Gemma3" in type(block).__name__ or "Olmo2" in type(block).__name__:
        after = block.post_attention_layernorm
        written = _frozen(after, run[2][after], written)
    return written


@torch.no_grad()
def patched(
    model: Model, prompt: Tensor, source_prompt: Tensor, path: Path, is_frozen: bool, runs_mlps: bool = False
) -> Tensor:
    """Logits [L, vocabulary] of a prompt with one path from the run of the other prompt.

    `is_frozen`: norms before receivers are frozen. With `runs_mlps` these are the three runs of Wang et al. 2022,
    appendix B, and of ARENA's IOI notebook: both prompts; one with the outputs of all heads frozen but the sender's,
    which records the inputs of the receivers; one with these inputs.
    """
    run, source = _run(model, prompt), _run(model, source_prompt)
    layer, head = path.sender
    sender_tokens, receiver_tokens = (
        slice(*span) if span else slice(None) for span in (path.sender_span, path.receiver_span)
    )
    if runs_mlps:
        frozen = {index: record["z"].clone() for index, record in enumerate(run[1])}
        frozen[layer][head, sender_tokens] = source[1][layer]["z"][head, sender_tokens]
        replaced = {index: {"z": (slice(None), slice(None), z)} for index, z in frozen.items()}
        changed = _run(model, prompt, replaced=replaced)[2]

        def change(module: nn.Module) -> Tensor:
            return changed[module] - run[2][module]
    else:
        written = torch.zeros_like(_written(model, layer, slice(head, head + 1), run, source))
        written[:, sender_tokens] = _written(model, layer, slice(head, head + 1), run, source)[:, sender_tokens]

        def change(module: nn.Module) -> Tensor:
            return written

    if not path.receivers:
        return _logits(model, run, change(_final_norm(model)), is_frozen)
    new: dict[int, Any] = {}
    for receiver_layer in {layer for layer, _ in path.receivers}:
        heads = [head for layer, head in path.receivers if layer == receiver_layer]
        record = _record_of_layer(model, prompt, run, receiver_layer, change, is_frozen)
        new[receiver_layer] = {path.end: (heads, receiver_tokens, record[path.end])}
    return eager_patching.run(model, prompt, new)[0]


def _record_of_layer(
    model: Model, prompt: Tensor, run: Any, layer: int, change: Callable[[nn.Module], Tensor], is_frozen: bool
) -> Any:
    """The activations of a layer whose residual stream changes."""
    block, attention = _blocks(model)[layer], model.attention_modules[layer]
    norm = None if "Olmo2" in type(block).__name__ else _child(block, INPUT_NORMS)
    reader = block if norm is None else norm
    states = _norm_output(norm, run[2][reader], change(reader), is_frozen)

    def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (states.to(args[0].dtype), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": states.to(kwargs["hidden_states"].dtype)}

    handle = attention.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        return eager_patching.run(model, prompt)[1][layer]
    finally:
        handle.remove()


def _final_norm(model: Model) -> nn.Module:
    norm = _child(model.module.base_model, FINAL_NORMS)
    assert norm is not None
    return norm


def _norm_output(norm: nn.Module | None, stream: Tensor, written: Tensor, is_frozen: bool) -> Tensor:
    if norm is None:
        return stream + written
    if not is_frozen:
        output: Tensor = norm((stream + written).to(stream.dtype))
        return output
    return norm(stream) + _frozen(norm, stream, written)


def _logits(model: Model, run: Any, written: Tensor, is_frozen: bool) -> Tensor:
    """Logits with a change of the output of the last layer alone."""
    norm = _final_norm(model)
    hidden = _norm_output(norm, run[2][norm], written, is_frozen)
    head = model.module.get_output_embeddings()
    bias = getattr(head, "bias", None)
    logits: Tensor = hidden[0].double() @ head.weight.double().T + (0 if bias is None else bias.double())
    return logits


@torch.no_grad()
def direct_effect_of_all_heads(model: Model, pair: PairTokens) -> float:
    """The change of the logit difference when the logits alone receive the clean outputs of all heads together."""
    run, source = (_run(model, ids[:, :-1]) for ids in (pair.corrupted, pair.clean))
    layers = range(len(model.attention_modules))
    written = sum(_written(model, layer, slice(None), run, source) for layer in layers)
    difference = (_logits(model, run, written, True) - _logits(model, run, 0 * written, True))[-1]
    return (difference[pair.answer[0]] - difference[pair.wrong[0]]).item()

"""At opening, every layer's attention is held against the family's own eager attention on a few tokens.

Both passes give each attention module the same input, to the bit, so that what differs is that layer's attention
alone: rounding does not add up over layers, nor send a token to another expert. Windows and chunks are cut to a few
keys meanwhile, for a short text to show whether they are kept: both ways read them from the config as they run.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import backend
from headscope.errors import HeadscopeError, UnsupportedModel, first_line
from headscope.models.eval_mode import inference

TOKENS = 8
KEYS = 3
"""Windows and chunks while this is tried."""
REACHES = ("sliding_window", "attention_chunk_size")
EXACT, ROUNDED = 1e-3, 5e-2
"""What outputs may differ by, as a share of a layer's largest: in float32 and above, and in half precision, where
eager attention rounds logits and weights."""

Given = dict[nn.Module, tuple[Tensor, Tensor]]
"""Input and output of attention modules."""


def refuse_disagreement(model: PreTrainedModel, modules: Sequence[nn.Module], numbers: Sequence[int]) -> None:
    """Raise UnsupportedModel, naming a layer, where attention through the seam is not the family's own.

    `modules` are the attention modules that are measured, `numbers` what their layers are called.
    """
    own: Given = {}
    ours: Given = {}
    with _cut(model.config.get_text_config()):
        for name, kept, given in (("eager", own, None), (backend.BACKEND_NAME, ours, own)):
            try:
                with inference(model), backend.using_attention_implementation(model, name), _kept(modules, kept, given):
                    model.base_model(torch.arange(TOKENS, device=model.device)[None], use_cache=False)
            except HeadscopeError as error:
                raise _refusal(model, str(error)) from error
            except Exception as error:
                why = f"{TOKENS} tokens do not go through its {name} attention ({first_line(error)})"
                raise _refusal(model, why) from error
    for number, module in zip(numbers, modules, strict=True):
        expected, found = own[module][1].float(), ours[module][1].float()
        tolerance = EXACT if own[module][1].dtype.itemsize >= 4 else ROUNDED
        largest = float(expected.abs().nan_to_num(posinf=0).max())
        if not torch.allclose(found, expected, rtol=0, atol=tolerance * largest, equal_nan=True):
            share = float((found - expected).abs().max()) / largest
            raise _refusal(model, f"attention in layer {number} differs from its own eager attention by {share:.1%}")


@contextmanager
def _cut(config: Any) -> Iterator[None]:
    """Windows and chunks of KEYS keys, where the config has longer ones."""
    before = {name: getattr(config, name, None) for name in REACHES}
    longer = {name: reach for name, reach in before.items() if isinstance(reach, int) and reach > KEYS}
    try:
        for name in longer:
            setattr(config, name, KEYS)
        yield
    finally:
        for name, reach in longer.items():
            setattr(config, name, reach)


@contextmanager
def _kept(modules: Sequence[nn.Module], kept: Given, given: Given | None) -> Iterator[None]:
    """Keep what goes into each module and comes out; with `given`, what goes in is what went in there."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if given is None:
            return None
        hidden = given[module][0]
        named = "hidden_states" in kwargs
        return (args, {**kwargs, "hidden_states": hidden}) if named else ((hidden, *args[1:]), kwargs)

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        kept[module] = hidden, output if isinstance(output, Tensor) else output[0]

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModel:
    family = model.config.model_type
    return UnsupportedModel(why if family in why else f"cannot measure this {family} model: {why}")

"""Eager check: when a checkpoint is opened, compare every layer's attention with the family's own eager attention.

Both passes give each attention module the same input, bit for bit, so a difference is that layer's attention alone:
rounding does not accumulate over layers or route a token to another expert. Meanwhile windows and chunks are shortened
to a few keys, so that a short text shows whether they are applied. Both implementations read them from the config at
run time. An override may name another reference than eager attention (`families.reference_implementation`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import backend, families
from headscope.errors import HeadscopeError
from headscope.models.inspection import (
    evaluation_mode,
    failed_pass_error,
    name_model_type,
    unsupported_model_error,
)

TOKENS = 8
SHORT_WINDOW = 3
"""Keys per window and chunk during the check."""
WINDOW_OPTIONS = ("sliding_window", "attention_chunk_size")
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 5e-2
"""Largest difference of outputs, as a share of the layer's largest output. In half precision eager attention rounds
logits and weights."""


@dataclass(frozen=True, eq=False)
class ModuleIO:
    """Input and output of each attention module."""

    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)


def check_against_eager(model: PreTrainedModel, modules: Sequence[nn.Module], layer_numbers: Sequence[int]) -> None:
    """Raise UnsupportedModel, naming the layer, if headscope's backend and eager attention differ.

    `modules` are the attention modules, `layer_numbers` the numbers of their layers.
    """
    eager, backend_run = ModuleIO(), ModuleIO()
    reference = families.reference_implementation(model)
    for implementation, recorded, replayed in (
        (reference, eager, None),
        (backend.BACKEND_NAME, backend_run, eager),
    ):
        try:
            with (
                evaluation_mode(model),
                backend.using_attention_implementation(model, implementation),
                _recording(modules, recorded, replayed),
            ):
                _shorten_windows(model.config.get_text_config())  # of the copy that this context gives the model
                model.base_model(torch.arange(TOKENS, device=model.device)[None], use_cache=False)
        except HeadscopeError as error:
            raise name_model_type(model, error) from error
        except Exception as error:
            problem = f"a forward pass over {TOKENS} tokens with {implementation} attention failed"
            raise failed_pass_error(model, problem, error) from error
    for number, module in zip(layer_numbers, modules, strict=True):
        expected, output = eager.outputs[module].float(), backend_run.outputs[module].float()
        tolerance = TOLERANCE if eager.outputs[module].dtype.itemsize >= 4 else HALF_PRECISION_TOLERANCE
        largest = float(expected.abs().nan_to_num(posinf=0).max())
        if not torch.allclose(output, expected, rtol=0, atol=tolerance * largest, equal_nan=True):
            share = float((output - expected).abs().max()) / largest
            reason = f"attention in layer {number} differs from its own eager attention by {share:.1%}"
            raise unsupported_model_error(model, reason)


def _shorten_windows(config: Any) -> None:
    """Shorten the windows and chunks of a config to SHORT_WINDOW keys."""
    for name in WINDOW_OPTIONS:
        size = getattr(config, name, None)
        if isinstance(size, int) and size > SHORT_WINDOW:
            setattr(config, name, SHORT_WINDOW)


@contextmanager
def _recording(modules: Sequence[nn.Module], recorded: ModuleIO, replayed: ModuleIO | None) -> Iterator[None]:
    """Record input and output of each module; with `replayed`, give each module the input recorded there."""

    def record_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        by_name = "hidden_states" in kwargs
        if replayed is None:
            recorded.inputs[module] = kwargs["hidden_states"] if by_name else args[0]
            return None
        hidden = replayed.inputs[module]
        return (args, {**kwargs, "hidden_states": hidden}) if by_name else ((hidden, *args[1:]), kwargs)

    def record_output(module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            recorded.outputs[module] = output if isinstance(output, Tensor) else output[0]

        return hook

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(record_input, with_kwargs=True).remove)
            stack.callback(families.output_module(module).register_forward_hook(record_output(module)).remove)
        yield

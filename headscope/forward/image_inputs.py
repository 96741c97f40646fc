"""Passes over a text with images: the backbone reads pixel values beside the token ids."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headscope.errors import BadInput, UnsupportedModel, first_line
from headscope.forward.backbone import backbone
from headscope.forward.capture import capturing
from headscope.models.checkpoint import LoadedModel, evaluating

TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 5e-2
"""Largest difference of the last hidden states from those of the family's own attention, as a share of the largest."""


@contextmanager
def adding_inputs(model: LoadedModel, inputs: Mapping[str, Tensor], length: int) -> Iterator[None]:
    """Pass `inputs` to the backbone in every pass over a text of `length` tokens.

    Inputs [1, n] of the first n tokens, such as their types, are filled up with zeros for the others.
    """

    def fill(name: str, value: Tensor) -> Tensor:
        if name.endswith("token_type_ids"):
            return torch.nn.functional.pad(value, (0, length - value.shape[1])).to(model.device)
        return value.to(model.device, model.module.dtype if value.is_floating_point() else value.dtype)

    filled = {name: fill(name, value) for name, value in inputs.items()}

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **filled}

    handle = backbone(model).register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def check_images_are_read_in_order(model: LoadedModel, ids: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedModel if the family reads ids [L] and its images with other attention than headscope measures.

    Some families let the tokens of an image attend to later ones of the same image.
    """
    refusal = (
        f"'{model.name}' lets the tokens of an image attend to later ones, which is not measured. Remove the images"
    )
    with torch.no_grad(), evaluating(model), adding_inputs(model, inputs, len(ids)):
        try:
            own = _hidden_states(model, ids)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"'{model.name}' cannot read the images of a prompt ({first_line(error)})") from error
        try:
            with capturing(model):
                measured = _hidden_states(model, ids)
        except UnsupportedModel as error:  # a mask of the family's own
            raise UnsupportedModel(refusal) from error
    tolerance = TOLERANCE if model.module.dtype == torch.float32 else HALF_PRECISION_TOLERANCE
    if not bool((own - measured).abs().max() <= tolerance * own.abs().max()):
        raise UnsupportedModel(refusal)


def _hidden_states(model: LoadedModel, ids: Tensor) -> Tensor:
    hidden: Tensor = backbone(model)(ids.to(model.device)[None], use_cache=False).last_hidden_state
    return hidden.float()

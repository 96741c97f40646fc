"""Simulated devices: tensors that are on the CPU and report `cpu:1` or `cpu:2` as their device.

Inside `enforcing_devices()` an operation on tensors of two of them, or of one and the CPU, fails as it does between two
GPUs. So what runs here on two such devices leaves every tensor with the layer that it belongs to, and its numbers are
true.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

FIRST, SECOND = torch.device("cpu:1"), torch.device("cpu:2")
MOVES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}
INDEXES = {torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put}
"""Operations that take indices from the CPU, as CUDA's do."""


class DeviceTensor(Tensor):
    """A tensor `inner` of the CPU that says it is elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "DeviceTensor":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: Tensor, device: torch.device) -> None:
        self.inner = inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


class _Enforcing(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    places = {t.device for t in tensors if isinstance(t, DeviceTensor)}
    kind = op.overloadpacket
    strangers = [
        t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0 and t.numel()
    ]  # a cache begins empty
    if kind not in MOVES and (len(places) > 1 or (places and strangers and kind not in INDEXES)):
        shapes = [(tuple(t.shape), str(t.device)) for t in tensors]
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, found {shapes}")
    device = kwargs.get("device")
    target = torch.device(device) if device is not None else next(iter(places), None)
    if kind is torch.ops.aten.copy_:
        target = args[0].device
    inside = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    bare_args, bare = tree_map(_bare, (args, inside))
    result = op(*bare_args, **bare)
    if target is None or target.index is None:
        return result
    wrapped = tree_map(lambda t: DeviceTensor(t, target) if isinstance(t, Tensor) else t, result)
    return return_and_correct_aliasing(op, args, kwargs, wrapped) if places else wrapped


def _bare(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


@contextmanager
def enforcing_devices() -> Iterator[None]:
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # another kind of tensor is another parameter
    try:
        with _Enforcing():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def spread(module: PreTrainedModel, layers_on_first: int) -> PreTrainedModel:
    """The model with its first layers and embeddings on one device and the rest on another, by accelerate's hooks."""
    names = {name: FIRST for name, _ in module.named_modules() if name.endswith("embed_tokens")}
    for number in range(module.config.num_hidden_layers):
        names[f"model.layers.{number}"] = FIRST if number < layers_on_first else SECOND
    tied = module.config.tie_word_embeddings  # with the embeddings
    names |= {"model.norm": SECOND, "model.rotary_emb": FIRST, "lm_head": FIRST if tied else SECOND}
    with enforcing_devices():
        return dispatch_model(
            module, {name: str(device) for name, device in names.items()}, skip_keys=module._skip_keys_device_placement
        )

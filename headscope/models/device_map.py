"""Where a checkpoint's weights go: to one device, layer by layer to several, or nowhere, told before any is read.

What weights need is read from the headers of their files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headscope.errors import BadInput
from headscope.models.memory import free_bytes

ROOM = 0.9
"""The share of a device's free memory that weights may fill; a pass needs the rest."""
STORED = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of a stored number; 1 of any other."""
REAL = {"F64", "F32", "F16", "BF16"}
"""Numbers that are opened in the dtype that is asked for."""


def placement(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype, spread: bool, quantised: bool
) -> dict[str, Any]:
    """How transformers is to place the weights; with nothing said they are opened in memory, to be moved to `device`.

    With `spread`, weights that do not fit that GPU go to all of them, by accelerate's device map. Quantised ones stay
    where they were put, and as they are. Raises BadInput where weights do not fit.
    """
    free = free_bytes(device)
    whole = {"device_map": {"": device}} if quantised else {}
    if free is None:
        return whole
    kind = None if quantised else dtype
    needed = weight_bytes(folder, kind)
    if needed <= ROOM * free:
        return whole
    together = _free_of_all() if spread and device.type == "cuda" else {}
    if needed <= ROOM * sum(together.values()):
        return {"device_map": "auto", "max_memory": {gpu: int(ROOM * left) for gpu, left in together.items()}}
    raise _cannot_fit(name, folder, device, kind, needed, together or {0: free})


def refuse_offloaded(module: Any, name: str) -> None:
    """Layers that found no room are not read from disk at every pass: nobody would wait for it."""
    if "disk" in getattr(module, "hf_device_map", {}).values():
        raise BadInput(
            f"cannot open '{name}': its layers, which stay whole, do not go into what the GPUs have free; use a "
            "smaller --dtype, --device cpu or a smaller checkpoint"
        )


def _cannot_fit(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype | None, needed: int, free: Mapping[int, int]
) -> BadInput:
    """One line that says what is needed, what there is, and what to do."""
    there = f"{device} has" if len(free) == 1 else f"{len(free)} GPUs have"
    of = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
    less = "" if dtype != torch.float32 else f"--dtype bf16 ({_told(weight_bytes(folder, torch.bfloat16))}), "
    return BadInput(
        f"cannot open '{name}': its weights take {_told(needed)}{of}, and may fill {ROOM:.0%} of the "
        f"{_told(sum(free.values()))} that {there} free; use {less}another --device or a smaller checkpoint"
    )


def weight_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """Bytes of the weights in memory, in that dtype; None for as they are stored."""
    total = 0
    for file in _files(folder):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a mapping)
                stored = opened.get_slice(key)
                kind = stored.get_dtype()
                each = dtype.itemsize if dtype is not None and kind in REAL else STORED.get(kind, 1)
                total += torch.Size(stored.get_shape()).numel() * each
    return total


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads; others may lie beside them."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / shard for shard in sorted({*shards})]
    return []


def _free_of_all() -> dict[int, int]:
    return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())}


def _told(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

"""Device map: place a checkpoint's weights on one device or on several, or refuse them before any is read.

The size of the weights is read from the headers of their files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from safetensors import safe_open
from torch import nn

from headscope.errors import BadInput
from headscope.models.quantization import PLAIN_FORMATS

MAX_FILL = 0.9
"""Share of a device's free memory that weights may fill; a forward pass needs the rest."""
BYTES_PER_NUMBER = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes per stored number, by safetensors format; 1 for all other formats."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Root of Linux control groups (version 2), which limit the memory of containers and Slurm jobs."""
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def placement_options(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype, spread: bool, quantized: bool
) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that place the weights; empty to load into memory and move to `device`.

    With `spread`, weights that do not fit the GPU `device` are spread over all GPUs by accelerate's device map.
    Quantized weights keep their dtype and cannot be moved later. Raises BadInput if the weights do not fit.
    """
    free = free_bytes(device)
    on_device = {"device_map": {"": device}} if quantized else {}
    if free is None:
        return on_device
    target_dtype = None if quantized else dtype
    needed = weight_bytes(folder, target_dtype)
    if needed <= MAX_FILL * free:
        return on_device
    free_by_gpu = _free_bytes_by_gpu() if spread and device.type == "cuda" else {}
    if needed <= MAX_FILL * sum(free_by_gpu.values()):
        max_memory = {gpu: int(MAX_FILL * size) for gpu, size in free_by_gpu.items()}
        return {"device_map": "auto", "max_memory": max_memory}
    raise _does_not_fit_error(name, folder, device, target_dtype, needed, free_by_gpu or {0: free})


def refuse_offloaded(module: nn.Module, name: str) -> None:
    """Refuse a model with weights without values, which accelerate offloads to disk or CPU between its passes."""
    offloaded = next((key for key, parameter in module.named_parameters() if parameter.is_meta), None)
    if offloaded is not None:
        raise BadInput(
            f"cannot open '{name}': its weights are offloaded, first '{offloaded}', and headscope also reads weights "
            "outside of passes. Load all of them on GPUs or on the CPU, in bf16, or use a smaller checkpoint"
        )


def _does_not_fit_error(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype | None, needed: int, free: Mapping[int, int]
) -> BadInput:
    owner = f"{device} has" if len(free) == 1 else f"{len(free)} GPUs have"
    in_dtype = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
    smaller = f"--dtype bf16 ({format_bytes(weight_bytes(folder, torch.bfloat16))}), "
    return BadInput(
        f"cannot open '{name}': its weights take {format_bytes(needed)}{in_dtype}, more than {MAX_FILL:.0%} of the "
        f"{format_bytes(sum(free.values()))} that {owner} free. Use {smaller if dtype == torch.float32 else ''}"
        "another --device or a smaller checkpoint"
    )


def weight_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """Bytes of the weights in memory in that dtype; None is the stored dtype."""
    total = 0
    for file in weight_files(folder):
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (not a mapping)
                tensor = weights.get_slice(key)
                stored = tensor.get_dtype()
                converted = dtype if stored in PLAIN_FORMATS else None
                size = converted.itemsize if converted is not None else BYTES_PER_NUMBER.get(stored, 1)
                total += torch.Size(tensor.get_shape()).numel() * size
    return total


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers reads; the folder may hold others."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / shard for shard in sorted({*shards})]
    return []


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or of the machine as far as this process may use it; None for other devices."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    return min([int(psutil.virtual_memory().available), *_free_bytes_by_cgroup()])


def _free_bytes_by_gpu() -> dict[int, int]:
    return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())}


def _free_bytes_by_cgroup() -> list[int]:
    """Memory left under the limit of this process's control group and of each of its parents.

    The kernel counts cached files as used, but frees them on demand, so inactive ones are subtracted.
    """
    lines = CGROUP_MEMBERSHIP.read_text().splitlines() if CGROUP_MEMBERSHIP.is_file() else []
    free = []
    for group in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        folder = CGROUP_ROOT / group
        for parent in (folder, *folder.parents):
            limit_file = parent / "memory.max"
            if limit_file.is_file() and (limit := limit_file.read_text().strip()) != "max":
                stat = dict(line.split() for line in (parent / "memory.stat").read_text().splitlines())
                used = int((parent / "memory.current").read_text()) - int(stat["inactive_file"])
                free.append(max(int(limit) - used, 0))
    return free


def format_bytes(size: float) -> str:
    """A size in memory as text, such as 1.5 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

"""Ways to do a thing, timed beside each other: seconds and peak memory, and their ratios to the first way.

Repeats are interleaved and the median counts, so a machine that slows down slows everything alike.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def compared(
    length: int, ways: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device, warm: bool = True
) -> list[dict[str, Any]]:
    """One row per way: seconds, ratio to the first way, peak MiB and its ratio. `warm` runs the first once before."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    if warm:
        next(iter(ways.values()))()  # the first pass of a process pays for page faults and thread pools
    for _ in range(repeats):
        for name, way in ways.items():
            elapsed, peak = _timed(way, device)
            seconds[name].append(elapsed)
            peaks[name].append(peak)
    time_of = {name: statistics.median(values) for name, values in seconds.items()}
    peak_of = {name: statistics.median(values) for name, values in peaks.items()}
    plain = next(iter(ways))
    return [
        {
            "length": length,
            "what": name,
            "seconds": round(time_of[name], 3),
            "ratio": round(time_of[name] / time_of[plain], 3),
            "peak_MiB": round(peak_of[name]),
            "peak_ratio": round(peak_of[name] / peak_of[plain], 3),
        }
        for name in ways
    ]


def _timed(way: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds and peak MiB of one call: allocated on CUDA, resident on Linux, NaN elsewhere."""
    gc.collect()
    on_cuda = device.type == "cuda"
    gpus = range(torch.cuda.device_count()) if on_cuda else ()  # a model may be spread over them
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
        torch.cuda.synchronize(gpu)
    if not on_cuda:
        _reset_peak()
    began = time.perf_counter()
    way()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    elapsed = time.perf_counter() - began
    return elapsed, sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**20 if on_cuda else _peak()


def _reset_peak() -> None:
    """Give freed memory back and reset the kernel's high-water mark of resident memory (Linux)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")


def _peak() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

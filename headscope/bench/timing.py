"""Time and peak memory of several calls, as ratios to the first call.

Repeats are interleaved and medians are taken, so a machine that slows down affects all calls alike.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def time_calls(
    length: int, calls: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device, warm_up: bool = True
) -> list[dict[str, Any]]:
    """One row per call: median seconds, ratio to the first call, peak MiB and its ratio.

    `length` is copied to the rows. With `warm_up` the first call runs once more, before the timing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, list[float]] = {name: [] for name in calls}
    if warm_up:
        next(iter(calls.values()))()  # the first pass of a process pays for page faults and thread pools
    for _ in range(repeats):
        for name, call in calls.items():
            elapsed, peak = _time_call(call, device)
            seconds[name].append(elapsed)
            peaks[name].append(peak)
    median_seconds = {name: statistics.median(values) for name, values in seconds.items()}
    median_peaks = {name: statistics.median(values) for name, values in peaks.items()}
    first = next(iter(calls))
    return [
        {
            "length": length,
            "what": name,
            "seconds": round(median_seconds[name], 3),
            "ratio": round(median_seconds[name] / median_seconds[first], 3),
            "peak_MiB": round(median_peaks[name]),
            "peak_ratio": round(median_peaks[name] / median_peaks[first], 3),
        }
        for name in calls
    ]


def _time_call(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds and peak MiB of one call: allocated memory on CUDA, resident memory on Linux, NaN elsewhere."""
    gc.collect()
    on_cuda = device.type == "cuda"
    gpus = range(torch.cuda.device_count()) if on_cuda else ()  # a model may use several
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
        torch.cuda.synchronize(gpu)
    if not on_cuda:
        _reset_peak_memory()
    start = time.perf_counter()
    call()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    elapsed = time.perf_counter() - start
    return elapsed, sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**20 if on_cuda else _peak_memory()


def _reset_peak_memory() -> None:
    """Return freed memory to the system and reset the kernel's high-water mark of resident memory (Linux)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")


def _peak_memory() -> float:
    """Peak resident memory in MiB; NaN outside Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

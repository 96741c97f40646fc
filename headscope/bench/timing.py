"""Time and peak memory of several calls, as ratios to the first call.

Repeats are interleaved and medians are taken, so a machine that slows down affects all calls alike.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from headscope.study import process_memory
from headscope.study.progress import console_progress


def time_calls(
    length: int, calls: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device, warm_up: bool = True
) -> list[dict[str, Any]]:
    """One row per call: median seconds, ratio to the first call, peak MiB and its ratio.

    `length` is copied to the rows. With `warm_up` the first call runs once more, before the timing. Shows progress on
    standard error.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, list[float]] = {name: [] for name in calls}
    progress = console_progress(quiet=False, can_resume=False)
    progress.start(repeats * len(calls) + warm_up, 0)
    progress.set_activity(f"timing {len(calls)} calls of {length:,} tokens")
    try:
        if warm_up:
            next(iter(calls.values()))()  # the first pass of a process pays for page faults and thread pools
            progress.advance(1)
        for _ in range(repeats):
            for name, call in calls.items():
                elapsed, peak = _time_call(call, device)
                seconds[name].append(elapsed)
                peaks[name].append(peak)
                progress.advance(1)
    finally:
        progress.stop()
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
        process_memory.reset_peak()
    start = time.perf_counter()
    call()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    elapsed = time.perf_counter() - start
    if on_cuda:
        return elapsed, sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**20
    return elapsed, process_memory.peak_bytes() / 2**20 if process_memory.CAN_RESET_PEAK else float("nan")

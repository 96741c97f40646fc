"""Cost of position schemes, of training an adapter, of TransformerLens, of probes and of engines."""

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import lens
from headscope.base.user_input import quote
from headscope.bench.measuring import (
    EXACT_STATISTICS,
    PLAIN,
    SAMPLED_STATISTICS,
    document_tokens,
    measuring_calls,
    warm_up_kernels,
)
from headscope.bench.timing import time_calls
from headscope.errors import BadInput
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve_schedule
from headscope.positions.model import Model, load
from headscope.study.config import EngineOptions, build_study
from headscope.study.progress import NoProgress
from headscope.study.runner import create_engine, run_study
from headscope.training.adapter_trainer import AdapterTrainer, frozen_weights

PATCHED_TOKENS = 15
"""Tokens of the pair whose layers are patched in TransformerLens and in headscope."""
ENGINE_DOCS = 8
"""Number of documents of the study that compares engines."""
PROBES = sorted(file.stem for file in (Path(__file__).parent / "probes").glob("[!_]*.py"))
"""Probes that can be timed."""


def compare_schemes(model: Model, length: int, repeats: int) -> list[dict[str, Any]]:
    """A forward pass under YaRN, one under an adapter, and an optimiser step of an adapter."""
    ids = document_tokens(model, length)
    yarn = resolve_schedule(model, "yarn:factor=8")
    adapter = AdaRoPE.from_schedule(model, yarn).to(model.device)

    def run_forward(schedule: Any) -> None:
        with attached(model, schedule), torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    def take_step() -> None:
        adarope = AdaRoPE.from_schedule(model, yarn).to(model.device)
        with frozen_weights(model):
            AdapterTrainer(model, adarope, (0.03, 0.003, 0.0)).step([ids], 1.0)

    calls: dict[str, Callable[[], Any]] = {
        "forward under YaRN": lambda: run_forward(yarn),
        "forward under an AdaRoPE adapter": lambda: run_forward(adapter),
        "training step of an adapter, activations recomputed": take_step,
    }
    return time_calls(length, calls, repeats, model.device)


def compare_lens(spec: str, length: int, repeats: int, device: str = "auto") -> Iterator[list[dict[str, Any]]]:
    """TransformerLens's run_with_cache of hook_pattern against measuring; then the same patches of layers of a pair of
    `PATCHED_TOKENS` tokens in both, timed once. Raises ResourceMissing before any measurement without TransformerLens.
    """
    lens.bridge_class()
    model = load(spec, device=device)
    ids = document_tokens(model, length)
    warm_up_kernels(model, ids)
    calls = measuring_calls(model, ids)
    compared_calls = {name: calls[name] for name in (PLAIN, SAMPLED_STATISTICS, EXACT_STATISTICS)}
    bridge = lens.wrap_model(load(spec, device=device))  # the bridge alters its model, so it gets its own
    compared_calls["transformer-lens run_with_cache(hook_pattern)"] = lens.cached_patterns(bridge, ids)
    yield time_calls(length, compared_calls, repeats, model.device)
    patching_calls = lens.layer_patching_calls(model, bridge, lens.text_pair(model, PATCHED_TOKENS))
    yield time_calls(PATCHED_TOKENS, patching_calls, 1, model.device, warm_up=False)


def time_probe(name: str, model: Model, length: int) -> list[dict[str, Any]]:
    """The calls of a probe up to a context length, timed once. Raises BadInput for a probe without calls."""
    if name not in PROBES:
        raise BadInput(f"no benchmark of a probe {quote(name)}. Use one of: {', '.join(PROBES)}")
    calls = import_module(f"benchmarks.probes.{name}").benchmark_variants(model, length)
    return time_calls(length, calls, 1, model.device, warm_up=False)


def compare_engines(spec: str, length: int, device: str = "auto") -> list[dict[str, Any]]:
    """One row per engine: seconds of one study in this process with all threads, and on single-threaded Ray workers.

    There are as many workers as threads. `ratio` is the throughput relative to one process. `before` is the time before
    the first work item, which a study spends once; `seconds` excludes it. Raises ResourceMissing before any measurement
    if Ray is not installed.
    """
    threads = torch.get_num_threads()
    create_engine(EngineOptions(name="ray"))
    texts, measure = {"docs": ENGINE_DOCS}, {"lengths": [length]}
    study = {"name": "bench", "device": device, "models": {"base": spec}, "texts": texts, "measure": measure}
    clocks = {}
    for description, engine in (
        (f"one process, {threads} threads", {"name": "plain"}),
        (f"{threads} workers, one thread each", {"name": "ray", "workers": threads}),
    ):
        clocks[description] = _StudyClock()
        with TemporaryDirectory() as folder:
            run_study(build_study({**study, "engine": engine}), folder, progress=clocks[description])
    one_process_seconds = next(iter(clocks.values())).seconds
    return [
        {
            "length": length,
            "what": description,
            "seconds": round(clock.seconds, 1),
            "before": round(clock.startup_seconds, 1),
            "ratio": round(one_process_seconds / clock.seconds, 2),
        }
        for description, clock in clocks.items()
    ]


class _StudyClock(NoProgress):
    """Seconds from the start of the first work item to the end of the last, and seconds before the first."""

    def __init__(self) -> None:
        self._created, self._first_start, self._last_end = time.monotonic(), 0.0, 0.0

    def set_activity(self, activity: str, worker: str = "") -> None:
        self._first_start = self._first_start or time.monotonic()

    def advance(self, cost: float) -> None:
        self._last_end = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._last_end - self._first_start

    @property
    def startup_seconds(self) -> float:
        return self._first_start - self._created

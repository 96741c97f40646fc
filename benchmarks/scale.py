"""How the cost of the steps around measuring grows with the size of a study: time and memory at twice the size.

Each step runs in a process of its own, on synthetic rows: `python -m benchmarks.scale STEP SIZE FOLDER`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.synthetic_run import Sizes, rope_frequencies, synthetic_manifest, synthetic_run
from headscope.runs.run import Run, combine_runs
from headscope.study import process_memory

ROOT = Path(__file__).parents[1]
MAX_TIME_RATIO, MAX_MEMORY_RATIO = 2.3, 1.2
"""Bounds of the ratios at twice the size."""
LAYERS, HEADS, GROUPS, PAIRS, LENGTH = 16, 16, 4, 32, 8192
DISTANCES = np.unique(np.concatenate([[0], np.round(2 ** np.arange(0, np.log2(LENGTH), 0.5))])).astype(int)
FREE_MEGABYTES = 64.0
"""Memory that is added to both sides of a ratio: about a block of rows, up to which the memory of a merge may grow."""


def compare_growth() -> Iterator[list[dict[str, Any]]]:
    """A table per step: its seconds of processor time and peak memory at a size and at twice the size."""
    with TemporaryDirectory() as folder:
        for step, size in SIZES.items():
            small, large = (_run_step(step, number, Path(folder)) for number in (size, 2 * size))
            yield [
                {
                    "step": step,
                    "size": f"{size} and {2 * size} {UNITS[step]}",
                    "seconds": f"{small['seconds']:.2f}, {large['seconds']:.2f}",
                    "megabytes": f"{small['megabytes']:.0f}, {large['megabytes']:.0f}",
                    "time_ratio": round(large["seconds"] / small["seconds"], 2),
                    "time_bound": MAX_TIME_RATIO,
                    "memory_ratio": round(
                        (large["megabytes"] + FREE_MEGABYTES) / (small["megabytes"] + FREE_MEGABYTES), 2
                    ),
                    "memory_bound": MAX_MEMORY_RATIO,
                }
            ]


def _run_step(step: str, size: int, folder: Path) -> dict[str, float]:
    """Seconds of processor time and megabytes of a step, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", step, str(size), str(folder)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT
    )  # errors are shown as they come
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


class Clock:
    """Processor time and peak memory, above that before it, of a block of code."""

    def __init__(self) -> None:
        self.measured: Mapping[str, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        process_memory.reset_peak()
        before, start = process_memory.peak_bytes(), time.process_time()
        yield
        megabytes = (process_memory.peak_bytes() - before) / 1e6
        self.measured = {"seconds": time.process_time() - start, "megabytes": megabytes}


def _commit(size: int, folder: Path, clock: Clock) -> None:
    """Merge the distance profiles of two documents of `size` models."""
    from headscope.runs.writer import RunWriter

    grid = np.meshgrid(range(LAYERS), range(HEADS), range(PAIRS), DISTANCES, indexing="ij")
    layer, head, pair, distance = (axis.ravel() for axis in grid)
    keys = {"context_length": LENGTH, "layer": layer, "head": head, "kv_group": head // (HEADS // GROUPS)}
    keys |= {"pair": pair, "distance": distance, "n": LENGTH - distance}
    signed = np.cos(rope_frequencies(PAIRS)[pair] * distance)
    models = [f"model {number}" for number in range(size)]
    jobs = [f"{model}: {document}" for model, document in product(models, range(2))]
    with RunWriter.open(_folder(folder, size), "profiles", {"models": models}) as writer:
        for number, job in enumerate(jobs):
            rows = {**keys, "model": job.partition(":")[0], "mean_signed": signed + number}
            writer.add(job, {"distance": rows})
        with clock.running():
            writer.commit(jobs, synthetic_manifest(models, LAYERS, HEADS, GROUPS))


def _validate(size: int, folder: Path, clock: Clock) -> None:
    from headscope.runs.run_tables import validate

    run = _open(folder, size)
    with clock.running():
        assert validate(run) == []


def _head(size: int, folder: Path, clock: Clock) -> None:
    """The rows of one head, with the check of the file, as a head page reads them."""
    run = _open(folder, size)
    with clock.running():
        run.check()
        rows = run.rows("distance", layer=LAYERS // 2, head=1, model=run.models[:6])
    assert len(rows) == 6 * PAIRS * len(DISTANCES)


def _list(size: int, folder: Path, clock: Clock) -> None:
    """List a folder of `size` runs in the app, for the second time."""
    import shutil

    from dashboards.run_store import RunStore

    runs = folder / f"runs {size}"
    path = synthetic_run(runs, ["base", "yarn"], Sizes(1, 2, 1, 2, lengths=(64,), docs=1)).path
    for number in range(1, size):
        shutil.copytree(path, path.with_name(f"{path.name}-{number}"))
    store = RunStore(runs)
    store.list_runs()
    with clock.running():
        for _ in range(10):
            store.forget_scan()
            assert len(store.list_runs()) == size


def _bootstrap(size: int, folder: Path, clock: Clock) -> None:
    from headscope.runs.aggregation import statistic_interval

    values = np.random.default_rng(0).normal(size=size)
    with clock.running():
        statistic_interval(lambda resampled: resampled.mean(-1), values)


def _join(size: int, folder: Path, clock: Clock) -> None:
    """Join `size` runs of one model each."""
    from headscope.runs.writer import join_runs

    out = folder / f"parts {size}"
    sizes = [Sizes(LAYERS, HEADS, GROUPS, PAIRS, docs=2, seed=n) for n in range(size)]  # more than a block of rows
    parts = [synthetic_run(out, [f"model {run_sizes.seed}"], run_sizes) for run_sizes in sizes]
    opened = [Run.open(run.path) for run in parts]
    with clock.running():
        join_runs(opened, folder / f"joined {size}", "joined")


def _report(size: int, folder: Path, clock: Clock) -> None:
    from headscope.rendering.html_page import render_report

    run = _measured_run(size, folder)
    with clock.running():
        render_report([run])


def _first_head_page(size: int, folder: Path, clock: Clock) -> None:
    """The first page of a head in the app, with all its charts."""
    from dashboards.app import create_app
    from dashboards.layout import resolve_url

    run = _measured_run(size, folder)
    with create_app(run.path.parent).server.app_context(), clock.running():
        content = resolve_url("/head/1.1", {})[3]
        assert sum(len(blocks) for blocks in content.sections.values())


def _bundle(size: int, folder: Path, clock: Clock) -> None:
    """The pages of a static site of `size` small runs, in one process."""
    from headscope.cli.site_pages import SitePages
    from headscope.rendering.static_site import render_page

    out = folder / f"site {size}"
    runs = [synthetic_run(out, [f"model {n}"], Sizes(1, 4, 2, 4, seed=n)) for n in range(size)]
    with clock.running():
        site = SitePages(combine_runs(runs))
        for address in site.addresses():
            render_page(site.page(address), site.pages, [run.name for run in runs])


STEPS: Mapping[str, Callable[[int, Path, Clock], None]] = {
    "commit": _commit,
    "validate": _validate,
    "rows of a head": _head,
    "join": _join,
    "list of runs": _list,
    "bootstrap": _bootstrap,
    "report": _report,
    "first head page": _first_head_page,
    "bundle": _bundle,
}
SIZES = {"commit": 32, "validate": 32, "rows of a head": 32, "join": 8, "list of runs": 100, "bootstrap": 5000}
SIZES |= dict.fromkeys(("report", "first head page", "bundle"), 8)
"""The smaller size of each step. `validate` and rows of a head read the runs that `commit` leaves."""
UNITS = {
    **dict.fromkeys(("commit", "validate", "rows of a head", "report", "first head page"), "models"),
    **dict.fromkeys(("join", "list of runs", "bundle"), "runs"),
    "bootstrap": "units",
}


def _folder(folder: Path, size: int) -> Path:
    return folder / f"models {size}"


def _measured_run(size: int, folder: Path) -> Run:
    """A run of `size` models with the tables of the probe `measure`, written by another process, whose memory does not
    count."""
    out, models = folder / f"measured {size}", [f"model {number}" for number in range(size)]
    if not out.exists():  # two steps read the same run
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(synthetic_run, out, models, Sizes(LAYERS, HEADS, GROUPS, PAIRS)).result()
    (path,) = out.glob("[!.]*")
    return Run.open(path)


def _open(folder: Path, size: int) -> Run:
    (path,) = _folder(folder, size).glob("[!.]*")
    return Run.open(path)


def main(arguments: Sequence[str]) -> None:
    """Run one step and print what it took as JSON."""
    step, size, folder = arguments
    clock = Clock()
    STEPS[step](int(size), Path(folder), clock)
    print(json.dumps(clock.measured))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every figure of docs/performance.md in one session on a machine with a GPU: `python -m benchmarks.gpu_session`.

Each step is a process of its own with a time limit, and is printed as soon as it ends, so that a session that is cut
off keeps what it has measured. `--compare RUN RUN` compares the tables of two runs of the same study.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.comparison import GPU_BOUNDS

STUDY = Path(__file__).parents[1] / "headscope" / "study_files" / "gpu.yaml"
LENGTHS = sorted({length for _, length in GPU_BOUNDS})
SHORT = 8192
"""Longest context that is timed three times; longer ones are timed once."""
RELATIVE_TOLERANCE = 1e-4
"""Largest difference of two runs, as a share of the largest value of a column."""


def run_session(arguments: argparse.Namespace) -> None:
    """Run every step and print it, the table of the ratios last."""
    device = ["--device", arguments.device]
    if arguments.device == "cuda":
        _run(
            "kernels and tables against eager attention",
            ["headscope", "selfcheck", *device, "--longest", "0", "--json"],
            120,
        )
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        repeats = "3" if length <= SHORT else "1"
        command = ["benchmarks", "measuring", *device, "--shape", arguments.shape, "--length", str(length)]
        if output := _run(f"{length:,} tokens", [*command, "--repeats", repeats, "--json"], 240):
            rows += json.loads(output.splitlines()[-1])["rows"]
    print(*ratio_table(rows), sep="\n", flush=True)
    if arguments.study:
        study = [
            "headscope",
            "run",
            "--config",
            str(arguments.study),
            *device,
            "--dtype",
            "fp32",
            "--out",
            str(arguments.out),
        ]
        _run("the study", study, 240)


def _run(name: str, command: Sequence[str], limit: int) -> str:
    """The output of a module with arguments; prints its time, its output and what went wrong."""
    start = time.monotonic()
    try:
        result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=limit)
        status = "" if result.returncode == 0 else f", exit code {result.returncode}: {result.stderr[-500:]}"
        output = result.stdout
    except subprocess.TimeoutExpired:
        status, output = f", stopped after {limit} s", ""
    print(f"{name}: {time.monotonic() - start:.1f} s{status}\n{output}", flush=True)
    return output


def ratio_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of the table of docs/performance.md: time and memory as ratios to the plain pass, with the bound."""
    yield "| call | tokens | seconds | time ratio | bound | memory ratio |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        bound = row.get("bound") or ""
        cells = row["what"], f"{row['length']:,}", row["seconds"], row["ratio"], bound, row["peak_ratio"]
        yield f"| {' | '.join(map(str, cells))} |"


def compare_runs(first: Path, second: Path) -> Iterator[str]:
    """A line for each table of the first run: how its columns differ in the second."""
    for file in sorted(first.glob("*.parquet")):
        ours, theirs = pd.read_parquet(file), pd.read_parquet(second / file.name)
        if ours.shape != theirs.shape:
            yield f"{file.name}: {ours.shape} and {theirs.shape}"
            continue
        differences = [text for name in ours for text in _differences(str(name), ours[name], theirs[name])]
        yield f"{file.name}: {'; '.join(differences) or f'{len(ours):,} rows equal'}"


def _differences(name: str, ours: pd.Series, theirs: pd.Series) -> Iterator[str]:
    if not pd.api.types.is_float_dtype(ours):
        if count := int((ours.astype(str) != theirs.astype(str)).sum()):
            yield f"{name}: {count:,} differ"
        return
    a, b = ours.to_numpy(float), theirs.to_numpy(float)
    if (np.isnan(a) != np.isnan(b)).any():
        yield f"{name}: missing values differ"
    elif (largest := float(np.nanmax(np.abs(a), initial=0))) and len(a):
        share = float(np.nanmax(np.abs(a - b), initial=0)) / largest
        if share > RELATIVE_TOLERANCE:
            yield f"{name}: {share:.1e} of {largest:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=LENGTHS)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--compare", type=Path, nargs=2, metavar="RUN")
    arguments = parser.parse_args()
    if arguments.compare:
        print(*compare_runs(*arguments.compare), sep="\n")
    else:
        run_session(arguments)


if __name__ == "__main__":
    main()

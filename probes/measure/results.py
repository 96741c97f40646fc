"""Results of the probe `measure`: what was measured on these documents, without guesses at causes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.rendering.text import (
    SINK_ROWS,
    WINDOWED,
    head_mask,
    heads_by_model,
    heads_by_window,
    layer_windows,
)
from headscope.results.effects.statistics import rank_correlation
from headscope.results.ranks import head_ranks
from headscope.results.result import Result, Scalar
from headscope.results.samples import extreme_head_result, head_result, mean_result
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.column_metadata import exceeds, falls_below, heads_with_role, measured_roles, parse_column
from headscope.runs.run import Run
from headscope.runs.summary import (
    default_models,
    default_models_with,
    log_ratio_to_first,
    longest_ess_column,
    longest_ess_column_of,
    models_with_same_tokens,
)
from headscope.runs.trainings import has_mixed_lengths, measured_checkpoints, role_onsets, training_checkpoints
from probes.measure.analysis import (
    AGGREGATION_GROWTH,
    LOCAL_LENGTH,
    RETRIEVAL_GROWTH,
    ROLES,
    SINK_MASS,
    document_losses,
    loss_differences,
)

CHANGE_TOLERANCE = 0.01
"""Smallest relative change of an effective length that counts as longer or shorter [ours]."""
CHANGED_HEADS = 3
"""Heads of the highest, and of the lowest ratio that are listed."""


def results(run: Run) -> Iterator[Result]:
    """Results of the default models of the run."""
    labels = default_models(run)
    heads = run.heads[run.heads["model"].isin(labels)]
    if name := longest_ess_column(heads):
        yield from _length_results(run, heads, name)
        yield from _growth_results(run, heads, name)
        yield from _change_results(run, heads, name)
    yield from onset_results(run, run.heads, labels)
    yield from _logit_results(run, labels)
    yield from _loss_results(run, labels)
    for label, rows in heads_by_model(heads, "cov"):
        yield Result(question="pairs.variation", value=float(rows["cov"].median()), n=len(rows), model=label)
    yield from _position_results(run, heads)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The roles and statistics of a head in `model`, and its rank by effective length in each default model."""
    name = longest_ess_column_of(run)
    rows = run.heads[(run.heads["model"] == model) & head_mask(run.heads, layer, head)]
    if name is None or rows.empty or np.isnan(rows[name].iloc[0]):
        return
    row, length, window = rows.iloc[0], _length(name), layer_windows(run, model)[layer]
    roles = [role for role in ROLES if heads_with_role(rows, role).any()]
    details: dict[str, Any] = {"roles": roles, "missing_roles": "" if roles else ", ".join(ROLES)}
    if window is not None and window < length:
        details |= {"sink_rows": SINK_ROWS, "layer_window": window}
    details |= {key: float(row[key]) for key in ("growth", "sink_mass", "local_mass")}
    where = {"context_length": length}
    yield head_result("length.head", row, name, _count_documents(run, model), where=where, details=details)
    yield from head_ranks(run, name, layer, head, default_models_with(run, model))


def median_length(values: pd.Series, name: str, label: str, layers: Mapping[str, str] | None = None) -> Result:
    """The median effective length of some heads of a model, and how many are local."""
    return Result(
        question="length.median",
        value=float(values.median()),
        n=len(values),
        model=label,
        where={"context_length": _length(name), **(layers or {})},
        details={"local": int(falls_below(values, LOCAL_LENGTH).sum()), "limit": LOCAL_LENGTH},
    )


def changed_heads(log_ratios: pd.Series, model: str, baseline: str, where: Mapping[str, Scalar]) -> Result:
    """The heads whose effective length is multiplied most and least; ln ratios by (layer, head)."""
    order = log_ratios.sort_values(ascending=False, kind="stable")
    (layer, head), *_ = order.index
    ends = (order[:CHANGED_HEADS], order[: -CHANGED_HEADS - 1 : -1])
    highest, lowest = (
        {format_head(*unit): math.exp(value) for unit, value in zip(end.index, end, strict=True)} for end in ends
    )
    return Result(
        question="length.changes",
        value=math.exp(order.iloc[0]),
        n=len(order),
        model=model,
        baseline=baseline,
        layer=int(layer),
        head=int(head),
        where=where,
        details={"highest": highest, "lowest": lowest},
    )


def _loss_results(run: Run, labels: Sequence[str]) -> Iterator[Result]:
    """Losses of the first model of the run and of these, and differences to the first; shortest contexts first."""
    if "nll" not in run.tables:
        return
    first = run.models[0]
    losses = document_losses(run)
    vocabularies = {model["label"]: model.get("vocabulary") for model in run.manifest["models"]}
    for label in dict.fromkeys([first, *labels]):
        for length, by_document in _by_length(losses, label):
            result = mean_result("loss.mean", by_document, model=label, where={"context_length": length})
            yield result
            if (size := vocabularies[label]) and result.value > math.log(size):
                details = {"uniform": math.log(size), "vocabulary": size}
                yield replace(result, question="loss.above_uniform", details=details)
    for label in labels:
        if reason := _reason_against_comparison(run, label, first):
            yield Result(question="loss.not_compared", model=label, baseline=first, details={"reason": reason})
    yield from loss_difference_results(run, labels, first)


def loss_difference_results(run: Run, labels: Sequence[str], baseline: str) -> Iterator[Result]:
    """Losses of these models minus that of the baseline, paired by document; shortest contexts first."""
    differences = loss_differences(run, baseline)
    for label in labels:
        for length, by_document in _by_length(differences, label) if label != baseline else ():
            where = {"context_length": length}
            yield mean_result("loss.difference", by_document, model=label, baseline=baseline, where=where)


def _reason_against_comparison(run: Run, label: str, first: str) -> str:
    """Why the losses of two models are not compared; "" if they are, or if one of them has no losses."""
    if label not in models_with_same_tokens(run, first):
        return "their tokenizers differ"
    measured = document_losses(run).index.get_level_values("model")
    has_both = label in measured and first in measured
    is_compared = label in loss_differences(run, first).index.get_level_values("model")
    return "they were measured on different texts" if has_both and not is_compared else ""


def _by_length(values: pd.Series, label: str) -> Iterator[tuple[int, pd.Series]]:
    """The values of a model by document, for each context length."""
    if label in values.index.get_level_values("model"):
        of_model = values.xs(label, level="model")
        for length in of_model.index.unique("context_length"):
            yield length, of_model.xs(length, level="context_length")


def _length(name: str) -> int:
    length = parse_column(name).length
    assert length is not None
    return length


def _count_documents(run: Run, label: str) -> int:
    return int((run.derived(_documents)["model"] == label).sum())


def _documents(run: Run) -> pd.DataFrame:
    """The documents of each model."""
    return run.distinct("attention", ["model", "doc"])


def _parts(
    run: Run, heads: pd.DataFrame, column: str, length: int
) -> Iterator[tuple[str, Mapping[str, str], pd.DataFrame]]:
    """Label, layers and heads of every model with the statistic, split by sliding window."""
    for label, rows in heads_by_model(heads, column):
        for layers, part in heads_by_window(run, rows, length):
            yield label, layers, part


def _length_results(run: Run, heads: pd.DataFrame, name: str) -> Iterator[Result]:
    length = _length(name)
    for label, layers, rows in _parts(run, heads, name, length):
        median = median_length(rows[name], name, label, layers)
        yield median
        yield Result(
            question="length.local",
            value=median.details["local"],
            n=len(rows),
            model=label,
            where=median.where,
            details={"limit": LOCAL_LENGTH},
        )
    label, rows = next(heads_by_model(heads, name))
    for which in ("longest", "shortest"):
        where = {"context_length": length, "which": which}
        documents, limits = _count_documents(run, label), (1.0, math.inf)
        yield extreme_head_result("length.extreme", rows, name, documents, limits, which == "shortest", where=where)
    for label, layers, rows in _parts(run, heads, name, length):
        is_sink = exceeds(rows["sink_mass"], SINK_MASS)
        is_windowed = layers.get("layers") == WINDOWED
        yield Result(
            question="length.sinks",
            value=float(is_sink.mean()),
            n=len(rows),
            model=label,
            where={"context_length": length, **layers},
            details={
                "count": int(is_sink.sum()),
                "sink_rows": SINK_ROWS if is_windowed else "",
            },
        )


def _growth_results(run: Run, heads: pd.DataFrame, name: str) -> Iterator[Result]:
    length = _length(name)
    for label, layers, rows in _parts(run, heads, "growth", length):
        growth = rows["growth"]
        where: dict[str, Scalar] = {"context_length": length, **layers}
        growth_limit = "the length of their windows" if layers.get("layers") == WINDOWED else ""
        values: dict[str, tuple[float, dict[str, Any]]] = {
            "growth.median": (float(growth.median()), {"growth_limit": growth_limit}),
            "growth.constant": (int(falls_below(growth, RETRIEVAL_GROWTH).sum()), {"limit": RETRIEVAL_GROWTH}),
            "growth.widening": (int(exceeds(growth, AGGREGATION_GROWTH).sum()), {"limit": AGGREGATION_GROWTH}),
        }
        for question, (value, details) in values.items():
            yield Result(question=question, value=value, n=len(rows), model=label, where=where, details=details)


def onset_results(run: Run, heads: pd.DataFrame, labels: Sequence[str]) -> Iterator[Result]:
    """For every role and every training of one of the models `labels`: the step from which half of the heads that have
    the role at the last step have it. None if the checkpoints were measured at different context lengths."""
    checkpoints = training_checkpoints(run.manifest["models"])
    shown_trainings = checkpoints["training"][checkpoints["label"].isin(labels)]
    checkpoints = measured_checkpoints(heads, checkpoints[checkpoints["training"].isin(shown_trainings)])
    in_order = checkpoints.sort_values("step", kind="stable")
    last_labels = in_order.drop_duplicates("training", keep="last").set_index("training")["label"]
    heads = heads[heads["model"].isin(checkpoints["label"])]
    if heads.empty or has_mixed_lengths(heads):
        return
    onsets: Any = role_onsets(heads, checkpoints, measured_roles(heads))
    for (role, training), of_role in onsets.groupby(["role", "training"], sort=False):
        steps = of_role["step"]
        yield Result(
            question="roles.onset",
            value=float(steps.quantile(0.5, interpolation="lower")),
            n=len(steps),
            model=str(last_labels[training]),
            where={"training": training, "role": role},
            details={"first": int(steps.min()), "later": int((~of_role["is_first"]).sum()) or None},
        )


def _change_results(run: Run, heads: pd.DataFrame, name: str) -> Iterator[Result]:
    (first, first_rows), *other_models = heads_by_model(heads, name)
    for layers, part in heads_by_window(run, first_rows, _length(name)):
        for label, _ in other_models:
            log_ratios = log_ratio_to_first(heads, name, label)
            log_ratios = log_ratios[log_ratios.index.isin([*part["layer"]], level="layer")]
            if log_ratios.empty:
                continue
            tolerance = np.log(1 + CHANGE_TOLERANCE)
            where: dict[str, Scalar] = {"context_length": _length(name), **layers}
            longer, shorter = int(exceeds(log_ratios, tolerance).sum()), int(falls_below(log_ratios, -tolerance).sum())
            yield Result(
                question="length.ratio",
                value=float(np.exp(log_ratios.median())),
                n=len(log_ratios),
                model=label,
                baseline=first,
                where=where,
                details={
                    "longer": longer,
                    "shorter": shorter,
                    "unchanged": len(log_ratios) - longer - shorter,
                    "tolerance": CHANGE_TOLERANCE,
                },
            )
            yield changed_heads(log_ratios, label, first, where)


def _logit_results(run: Run, labels: Sequence[str]) -> Iterator[Result]:
    if "max_logit" not in run.tables:
        return
    rows = rows_at_longest_length(plain_types(run.max_logit))
    for label, of_model in rows[rows["model"].isin(labels)].groupby("model", sort=False):
        largest = of_model.nlargest(1, "max_logit").iloc[0]
        yield Result(
            question="logits.largest",
            value=float(largest["max_logit"]),
            n=of_model["doc"].nunique(),
            model=str(label),
            layer=int(largest["layer"]),
            head=int(largest["head"]),
            where={"context_length": int(largest["context_length"])},
            details={name: largest[name] for name in ("query", "key", "doc")},
        )


def _position_results(run: Run, heads: pd.DataFrame) -> Iterator[Result]:
    positions = rows_at_longest_length(run.positions) if "positions" in run.tables else pd.DataFrame({"model": []})
    frequencies = {str(label): rows for label, rows in positions.groupby("model", observed=True)}
    for label in heads["model"].unique():
        if label in frequencies and (count := _unchanged_windowed_layers(run, label, frequencies[label])):
            yield Result(question="positions.windowed_layers", n=count, model=label)
    for label, rows in heads_by_model(heads, "effective_base"):
        yield _base_result(label, rows[np.isfinite(rows["effective_base"])], frequencies.get(label))
    for label, rows in heads_by_model(heads, "gamma"):
        if rows["gamma"].abs().max() > 0:
            yield Result(
                question="positions.gamma",
                value=float(rows["gamma"].median()),
                n=len(rows),
                model=label,
                details={"positive": int((rows["gamma"] > 0).sum())},
            )


def _base_result(label: str, heads: pd.DataFrame, frequencies: pd.DataFrame | None) -> Result:
    """The effective base of a model whose heads all have the same, or how it changes with depth."""
    if heads.empty:
        is_still = frequencies is not None and not np.isfinite(frequencies["log_theta"]).any()
        reason = "no rotary pair rotates" if is_still else "some rotary pairs do not rotate"
        return Result(question="positions.no_base", model=label, details={"reason": reason})
    bases = heads["effective_base"]
    smallest, largest = float(bases.min()), float(bases.max())
    if largest / smallest < 1.001:
        is_plain = frequencies is not None and _is_plain_rope(frequencies)
        kind = "use RoPE base" if is_plain else "have an effective base of"
        return Result(question="positions.base", value=largest, n=len(heads), model=label, details={"kind": kind})
    return Result(
        question="positions.base_by_depth",
        value=float(rank_correlation(bases, heads["layer"])[0]),
        n=len(heads),
        model=label,
        details={"smallest": smallest, "largest": largest},
    )


def _unchanged_windowed_layers(run: Run, label: str, frequencies: pd.DataFrame) -> int:
    """Number of sliding-window layers, if the scheme keeps their frequencies and changes those of other layers."""
    is_equal = frequencies["log_theta"].eq(frequencies["log_theta_base"]).groupby(frequencies["layer"]).all()
    windowed = [number for number, window in layer_windows(run, label).items() if window is not None]
    windowed = [number for number in windowed if number in is_equal.index]
    return len(windowed) if is_equal[windowed].all() and not is_equal.all() else 0


def _is_plain_rope(positions: pd.DataFrame) -> bool:
    """Whether the frequencies of a model's first layer are powers of one base, from 1 rad/token down."""
    first = positions[(positions["layer"] == positions["layer"].min()) & (positions["kv_group"] == 0)]
    log_theta = first.sort_values("pair")["log_theta"].to_numpy(dtype=np.float64)
    return bool(abs(log_theta[0]) < 1e-4 and np.allclose(np.diff(log_theta, 2), 0, atol=1e-4))

"""The paper's claims about trained AdaRoPE adapters, tested on a run.

The run needs a checkpoint under its own positions and under an adapter; claims about YaRN also need YaRN with and
without its attention factor. All thresholds are ours. A claim is supported if the whole 95 % confidence interval is on
its side of the threshold: over documents for losses, over heads or KV groups of the one trained model for everything
else.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.report.blocks import FindingData, PaperClaim
from headscope.report.text import format_percent
from headscope.runs.aggregation import (
    Verdict,
    confidence_interval,
    rank_correlations,
    statistic_interval,
    verdict_above,
    verdict_below,
    verdict_of_parts,
)
from headscope.runs.column_metadata import parse_column
from headscope.runs.run import Run
from headscope.runs.summary import latest_checkpoints, longest_ess_column

MIN_SLOW_SHARE = 2 / 3
"""Share of the slower half of the pairs in the squared change of ln theta."""
MAX_TAU_DISTANCE, MIN_POSITIVE_SHARE = 0.1, 0.6
"""Distance of the median tau to 1, and share of heads with positive gamma."""
MIN_CHANGE = 0.1
"""Median change of ln ESS of a third of the heads that counts."""
MAX_COV_RATIO, MIN_DEPTH_CORRELATION = 0.98, 0.5

FloatArray = npt.NDArray[np.float64]
Bounds = tuple[float, float]
"""Low and high end of a confidence interval."""


@dataclass(frozen=True)
class ComparedModels:
    """Labels of the models that an AdaRoPE model is compared with; None if the run does not have them."""

    base: str
    yarn: str | None
    yarn_unscaled: str | None
    adarope: str

    @classmethod
    def find_in(cls, run: Run) -> "Iterator[ComparedModels]":
        """One comparison for every AdaRoPE model whose checkpoint the run also measured under its own positions.

        Of the adapters that one training saved, only the last counts. YaRN is the model with the frequencies from which
        the training started.
        """
        last = latest_checkpoints(run.manifest["models"])
        for model in run.manifest["models"]:
            adarope = model["label"]
            if adarope not in last or model["scheme_name"] != "adarope":
                continue
            schemes = {
                other["label"]: str(other["scheme"])
                for other in run.manifest["models"]
                if other["checkpoint"] == model["checkpoint"]
            }
            bases = [label for label, scheme in schemes.items() if scheme.startswith("base")]
            starts = {label: scheme for label, scheme in schemes.items() if scheme.startswith("yarn:")}
            starts = {label: scheme for label, scheme in starts.items() if _started_from(run, adarope, label)}
            yarn = next((label for label, scheme in starts.items() if "attention_factor" not in scheme), None)
            unscaled = next((label for label, scheme in starts.items() if "attention_factor=1" in scheme), None)
            if bases:
                yield cls(bases[0], yarn, unscaled, adarope)


def _started_from(run: Run, adarope: str, start_model: str) -> bool:
    """Whether the training of `adarope` started from the frequencies of `start_model`."""
    by_model = run.positions.groupby("model", observed=True)
    initial = by_model.get_group(adarope)["log_theta_init"]
    candidate = by_model.get_group(start_model)["log_theta"]
    return len(initial) == len(candidate) and np.allclose(initial, candidate, atol=1e-4)


def adaptation_claims(run: Run) -> Iterator[PaperClaim]:
    """The claims that the run's tables can test, for each AdaRoPE model; none without a base model."""
    for models in ComparedModels.find_in(run):
        for claim in _claims_for(run, models):
            subject = "" if claim.model in {"", models.adarope} else "Comparison with "
            evidence = f"{subject}{models.adarope}: {claim.evidence}"
            yield replace(claim, model=models.adarope, evidence=evidence)


def _claims_for(run: Run, models: ComparedModels) -> Iterator[PaperClaim]:
    if "nll" in run.tables and models.yarn is not None:
        yield from _loss_claims(run, models.adarope, models.yarn)
    yield from _frequency_claims(run.positions[run.positions["model"] == models.adarope])
    heads = run.heads
    if "tau" in heads:
        yarn_tau = heads.loc[heads["model"] == models.yarn, "tau"].median() if models.yarn else None
        yield from _temperature_claims(heads[heads["model"] == models.adarope], yarn_tau)
    if longest_ess_column(heads):
        yield from _effective_length_claims(heads, models, _native_context(run, models.adarope))
    if "cov" in heads:
        yield from _rotary_usage_claims(heads, models)


def _native_context(run: Run, label: str) -> int:
    geometry = next(model["geometry"] for model in run.manifest["models"] if model["label"] == label)
    return int(geometry.get("native_context", 0))


def _is_long_context(length: int, native: int) -> tuple[bool, str]:
    """Whether claims about long context can be judged at this length, and if not, the reason to end the evidence."""
    is_long = length > native / 2
    return is_long, "" if is_long else f"; {length:,} tokens are not beyond half of the native context of {native:,}"


def _loss_claims(run: Run, adarope: str, yarn: str) -> Iterator[PaperClaim]:
    table = paired_loss_difference(run, adarope, yarn).dropna(subset="mean")
    if table.empty:  # the two models have no document in common
        return
    below, last_bin = table["mean"] < 0, table.iloc[-1]
    bounds = zip(table["low"], table["high"], strict=True)
    verdict = verdict_of_parts([verdict_below(low, high) for low, high in bounds])
    is_long, reason = _is_long_context(int(run.nll["context_length"].max()), _native_context(run, adarope))
    certainty = f"in {(table['high'] < 0).sum()} of them with a 95 % confidence interval below 0"
    certainty = certainty if table["high"].notna().any() else "with too few documents for intervals"
    yield PaperClaim(
        "AdaRoPE has a lower loss than YaRN at every position of the extended context",
        verdict if is_long else "inconclusive",
        f"the loss is below YaRN's in {below.sum()} of {len(table)} position bins, {certainty}; in the last bin the "
        f"difference is {last_bin['mean']:+.3f} nats/token{format_interval(last_bin)}{reason}",
    )


def _frequency_claims(positions: pd.DataFrame) -> Iterator[PaperClaim]:
    finite = positions[np.isfinite(positions["log_theta"]) & np.isfinite(positions["log_theta_init"])]
    change = (finite["log_theta"] - finite["log_theta_init"]).astype("float64")
    is_slow = finite["pair"] >= (finite["pair"].max() + 1) // 2
    groups = [finite["layer"], finite["kv_group"]]
    slow, every = (squares.groupby(groups).sum().to_numpy() for squares in (change**2 * is_slow, change**2))
    share = float(slow.sum() / every.sum()) if every.any() else np.nan
    low, high = _group_share_interval(slow, every)
    rms = {name: np.sqrt((change[mask] ** 2).mean()) for name, mask in (("slow", is_slow), ("fast", ~is_slow))}
    yield PaperClaim(
        "Frequencies change mostly in the low-frequency pairs",
        verdict_above(low, high, MIN_SLOW_SHARE),
        f"the slower half of the pairs accounts for {format_percent(share)} of the squared change of the "
        f"log-frequencies{_format_bounds(low, high, format_percent)}; the RMS change is {rms['slow']:.3f} there and "
        f"{rms['fast']:.3f} in the faster half",
        criterion="more than two thirds",
        data=FindingData(share, low, high, len(every)),
    )
    by_group = change.groupby(groups).mean()
    by_layer = by_group.groupby(level="layer").mean()
    third = max(1, len(by_layer) // 3)
    early, late = (by_group[by_group.index.isin([*ends], level="layer")] for ends in _ends(by_layer.index, third))
    intervals = [confidence_interval(group.to_numpy()[None])[:, 0] for group in (early, late)]
    bounds: list[Bounds] = [(float(low), float(high)) for low, high in intervals]
    depth_correlation = by_layer.corr(pd.Series(by_layer.index, by_layer.index), method="spearman")
    yield PaperClaim(
        "Early layers move to lower frequencies, deeper layers to higher ones",
        verdict_of_parts([verdict_below(*bounds[0]), verdict_above(*bounds[1])]),
        f"the mean change of the log-frequency is {early.mean():+.4f}{_format_bounds(*bounds[0], '{:+.4f}'.format)} in "
        f"the first third of the layers and {late.mean():+.4f}{_format_bounds(*bounds[1], '{:+.4f}'.format)} in the "
        f"last third; its rank correlation with depth is {depth_correlation:+.2f}",
    )


def _ends(layers: pd.Index, count: int) -> tuple[pd.Index, pd.Index]:
    return layers[:count], layers[-count:]


def _group_share_interval(parts: FloatArray, totals: FloatArray) -> tuple[float, float]:
    """Interval over KV groups of the share of the sum of `parts` in that of `totals`; NaN if nothing changed."""
    if not totals.any():
        return np.nan, np.nan
    return statistic_interval(lambda index: parts[index].sum(-1) / totals[index].sum(-1), np.arange(len(parts)))


def _temperature_claims(heads: pd.DataFrame, yarn_tau: float | None) -> Iterator[PaperClaim]:
    """Claims about tau and gamma; `yarn_tau` is YaRN's tau, from which training starts."""
    tau, gamma = heads["tau"].astype("float64"), heads["gamma"].astype("float64")
    near_one = ((tau - 1).abs() < MAX_TAU_DISTANCE).mean()
    low, high = statistic_interval(lambda values: np.abs(np.median(values, -1) - 1), tau.to_numpy())
    yield PaperClaim(
        "The median tau is near 1 (the paper also reports a mild right tail, which is not tested)",
        verdict_below(low, high, MAX_TAU_DISTANCE),
        f"the median is {tau.median():.3f}, at a distance of {abs(tau.median() - 1):.3f} from 1"
        f"{_format_bounds(low, high, '{:.3f}'.format)}; the 10 % and 90 % quantiles are {tau.quantile(0.1):.3f} and "
        f"{tau.quantile(0.9):.3f}; {format_percent(near_one)} of heads are within 0.1 of 1"
        + (f". Training starts from YaRN's temperature, tau = {yarn_tau:.3f}, and not from 1" if yarn_tau else ""),
        criterion=f"a distance below {MAX_TAU_DISTANCE}",
    )
    low, high = statistic_interval(lambda values: (values > 0).mean(-1), gamma.to_numpy())
    yield PaperClaim(
        "gamma is mostly positive",
        verdict_above(low, high, MIN_POSITIVE_SHARE),
        f"gamma is positive in {(gamma > 0).sum()} of {len(gamma)} heads"
        f"{_format_bounds(low, high, format_percent)}, with median {gamma.median():+.4f}. Up to the reference "
        "length L_ref, gamma only rescales the logits (by (ln 2)^gamma), so its sign reflects both the temperature up "
        "to L_ref and the growth beyond it",
        criterion=f"more than {format_percent(MIN_POSITIVE_SHARE)}",
        data=FindingData(float((gamma > 0).mean()), low, high, len(gamma)),
    )


def _effective_length_claims(heads: pd.DataFrame, models: ComparedModels, native: int) -> Iterator[PaperClaim]:
    name = longest_ess_column(heads)
    assert name is not None
    wide = (
        heads.pivot(index=["layer", "head"], columns="model", values=name).astype("float64").dropna(axis=1, how="all")
    )
    if not {models.base, models.adarope} <= {*wide}:
        return
    base, length = np.log(wide[models.base]), int(parse_column(name).length or 0)
    small, large = base <= base.quantile(1 / 3), base >= base.quantile(2 / 3)
    is_long, reason = _is_long_context(length, native)
    shorter, longer = math.exp(-MIN_CHANGE), math.exp(MIN_CHANGE)
    criterion = (
        f"longer is a median ratio above {longer:.3f}, unchanged one from {shorter:.3f} to {longer:.3f}; small-ESS and "
        f"large-ESS heads are the lower and the upper third of heads by effective length in {models.base}"
    )

    def claim(statement: str, label: str, verdict_of: Callable[[Bounds, Bounds], str], note: str = "") -> PaperClaim:
        log_ratio = (np.log(wide[label]) - base).dropna()
        changes = [log_ratio[mask.reindex(log_ratio.index)].to_numpy() for mask in (small, large)]
        bounds = [statistic_interval(lambda values: np.median(values, -1), change) for change in changes]
        texts = [
            f"{np.exp(np.median(change)):.2f}"
            f"{_format_bounds(math.exp(low), math.exp(high), '{:.2f}'.format)} in {size}-ESS heads"
            for size, change, (low, high) in zip(("small", "large"), changes, bounds, strict=True)
        ]
        evidence = (
            f"at {length:,} tokens the median ratio of effective lengths, {label} to {models.base}, is "
            f"{' and '.join(texts)}{note}{reason}"
        )
        verdict = verdict_of(*bounds) if is_long else "inconclusive"
        return PaperClaim(statement, verdict, evidence, model=label, criterion=criterion)

    if models.yarn_unscaled and models.yarn_unscaled in wide:
        yield claim(
            "YaRN without its attention factor lengthens large-ESS heads, but also changes the effective length of "
            "small-ESS heads",
            models.yarn_unscaled,
            lambda small, large: verdict_of_parts([verdict_above(*large, MIN_CHANGE), _verdict_changed(small)]),
            "; the paper's text and its caption swap this result and the next",
        )
    if models.yarn and models.yarn in wide:
        yield claim(
            "YaRN with its attention factor keeps small-ESS heads as they are and does not lengthen large-ESS heads",
            models.yarn,
            lambda small, large: verdict_of_parts([_verdict_unchanged(small), verdict_below(*large, MIN_CHANGE)]),
        )
    yield claim(
        "AdaRoPE keeps small-ESS heads as they are and lengthens large-ESS heads",
        models.adarope,
        lambda small, large: verdict_of_parts([_verdict_unchanged(small), verdict_above(*large, MIN_CHANGE)]),
    )


def _verdict_unchanged(bounds: Bounds) -> Verdict:
    """Verdict on the claim that a change is between -MIN_CHANGE and MIN_CHANGE."""
    return verdict_of_parts([verdict_above(*bounds, -MIN_CHANGE), verdict_below(*bounds, MIN_CHANGE)])


def _verdict_changed(bounds: Bounds) -> Verdict:
    """Verdict on the claim that a change is outside -MIN_CHANGE to MIN_CHANGE."""
    unchanged = _verdict_unchanged(bounds)
    if unchanged == "inconclusive":
        return unchanged
    return "supported" if unchanged == "not supported" else "not supported"


def _rotary_usage_claims(heads: pd.DataFrame, models: ComparedModels) -> Iterator[PaperClaim]:
    covs = heads.pivot(index=["layer", "head"], columns="model", values="cov").astype("float64")
    medians = covs.median().dropna()
    if models.adarope in medians and models.base in medians:
        low, high = np.nan, np.nan
        if models.yarn in medians:
            both = covs[[models.adarope, models.yarn]].dropna().to_numpy().T
            low, high = statistic_interval(
                lambda index: np.divide(*np.median(both[:, index], -1)), np.arange(both.shape[1])
            )
        yield PaperClaim(
            "AdaRoPE uses the rotary pairs more evenly (lower CoV; the paper's claim is about pretraining)",
            verdict_below(low, high, MAX_COV_RATIO),
            "the median CoV is "
            + ", ".join(f"{medians[label]:.3f} in {label}" for label in map(str, medians.index))
            + (
                f"; the training started from {models.yarn}, and the ratio to it is "
                f"{medians[models.adarope] / medians[models.yarn]:.3f}"
                f"{_format_bounds(low, high, '{:.3f}'.format)}"
                if models.yarn is not None and models.yarn in medians
                else "; the start of the training is unknown"
            ),
            criterion=f"a ratio below {MAX_COV_RATIO}",
            data=FindingData(float(medians[models.adarope] / medians.get(models.yarn, np.nan)), low, high, len(covs)),
        )
    finite = heads[(heads["model"] == models.adarope) & np.isfinite(heads["effective_base"].astype("float64"))]
    groups = finite.drop_duplicates(["layer", "kv_group"])[["layer", "effective_base"]].to_numpy(np.float64).T
    low, high = statistic_interval(lambda index: rank_correlations(groups[:, index]), np.arange(groups.shape[1]))
    yield PaperClaim(
        "The effective base grows with depth (the paper's claim is about pretraining)",
        verdict_above(low, high, MIN_DEPTH_CORRELATION),
        f"the rank correlation with the layer is {float(rank_correlations(groups)):+.2f}"
        f"{_format_bounds(low, high, '{:+.2f}'.format)}; the values range from "
        f"{finite['effective_base'].min():,.0f} to {finite['effective_base'].max():,.0f}",
        criterion=f"above {MIN_DEPTH_CORRELATION}",
        data=FindingData(float(rank_correlations(groups)), low, high, groups.shape[1]),
    )


def paired_loss_difference(run: Run, label: str, baseline: str) -> pd.DataFrame:
    """Loss of `label` minus that of `baseline` (nats/token) by position at the longest length.

    Columns: mean over documents, and the bounds `low` and `high` of its 95 % confidence interval, paired by document.
    """
    nll = run.nll[run.nll["context_length"] == run.nll["context_length"].max()]
    nll = nll.astype({"nll": "float64", "doc": "str", "model": "str"})
    wide = nll.pivot_table(index=["model", "position"], columns="doc", values="nll")
    if not {label, baseline} <= {*wide.index.get_level_values("model")}:
        return pd.DataFrame(columns=["mean", "low", "high"])
    difference = wide.loc[label] - wide.loc[baseline]
    low, high = confidence_interval(difference.to_numpy(dtype=np.float64))
    return pd.DataFrame({"mean": difference.mean(axis=1), "low": low, "high": high})


def format_interval(row: pd.Series) -> str:
    """An interval in brackets, to follow its mean; "" if there are too few documents for one."""
    return _format_bounds(row["low"], row["high"], "{:+.3f}".format)


def _format_bounds(low: float, high: float, write: Callable[[float], str]) -> str:
    """An interval in brackets, to follow its value; "" without one."""
    return "" if np.isnan(low) else f" (95 % confidence interval {write(low)} to {write(high)})"

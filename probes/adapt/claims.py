"""The paper's claims about trained AdaRoPE adapters, tested on a run.

The run needs a checkpoint under its own positions and under an adapter; claims about YaRN also need YaRN with and
without its factor. All thresholds are ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from headscope.report.blocks import PaperClaim
from headscope.report.text import format_percent
from headscope.runs.aggregation import confidence_interval
from headscope.runs.column_metadata import parse_column
from headscope.runs.run import Run
from headscope.runs.summary import latest_checkpoints, longest_ess_column


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
            yield replace(claim, model=models.adarope, evidence=f"{models.adarope}: {claim.evidence}")


def _claims_for(run: Run, models: ComparedModels) -> Iterator[PaperClaim]:
    if "nll" in run.tables and models.yarn is not None:
        yield from _loss_claims(run, models.adarope, models.yarn)
    yield from _frequency_claims(run.positions[run.positions["model"] == models.adarope])
    heads = run.heads
    if "tau" in heads:
        yarn_tau = heads.loc[heads["model"] == models.yarn, "tau"].median() if models.yarn else None
        yield from _temperature_claims(heads[heads["model"] == models.adarope], yarn_tau)
    if longest_ess_column(heads):
        yield from _effective_length_claims(heads, models)
    if "cov" in heads:
        yield from _rotary_usage_claims(heads, models)


def _loss_claims(run: Run, adarope: str, yarn: str) -> Iterator[PaperClaim]:
    table = paired_loss_difference(run, adarope, yarn).dropna(subset="mean")
    if table.empty:  # the two models have no document in common
        return
    below = table["mean"] < 0
    certainty = f"{(table['high'] < 0).sum()} with a 95 % confidence interval below 0"
    certainty = certainty if table["high"].notna().any() else "too few documents for intervals"
    last_bin = table.iloc[-1]
    yield PaperClaim(
        "AdaRoPE has a lower loss than YaRN at every position of the extended context",
        "supported" if below.all() else "partly supported" if below.mean() >= 0.9 else "not supported",
        f"Loss below YaRN's in {below.sum()} of {len(table)} position bins, {certainty}; "
        f"{last_bin['mean']:+.3f} nats/token{format_interval(last_bin)} in the last bin",
    )


def _frequency_claims(positions: pd.DataFrame) -> Iterator[PaperClaim]:
    finite = positions[np.isfinite(positions["log_theta"]) & np.isfinite(positions["log_theta_init"])]
    change = (finite["log_theta"] - finite["log_theta_init"]).astype("float64")
    pairs = finite["pair"].max() + 1
    is_slow = finite["pair"] >= pairs // 2
    fast, slow = change[~is_slow], change[is_slow]
    share = float((slow**2).sum() / (change**2).sum()) if change.any() else np.nan
    yield PaperClaim(
        "Frequencies change mostly in the low-frequency pairs",
        "supported" if share > 2 / 3 else "not supported" if share < 1 / 3 else "inconclusive",
        f"The slower half of the pairs accounts for {format_percent(share)} of the squared change of the "
        f"log-frequencies (RMS {np.sqrt((slow**2).mean()):.3f}; {np.sqrt((fast**2).mean()):.3f} in the faster half)",
    )
    by_layer = change.groupby(finite["layer"]).mean()
    third = max(1, len(by_layer) // 3)
    early, late = by_layer.iloc[:third].mean(), by_layer.iloc[-third:].mean()
    depth_correlation = by_layer.corr(pd.Series(by_layer.index, by_layer.index), method="spearman")
    yield PaperClaim(
        "Early layers move to lower frequencies, deeper layers to higher ones",
        "supported" if early < 0 < late else "not supported" if early > late else "partly supported",
        f"The mean change of the log-frequency is {early:+.4f} in the first third of the layers and {late:+.4f} in the "
        f"last third; its rank correlation with depth is {depth_correlation:+.2f}",
    )


def _temperature_claims(heads: pd.DataFrame, yarn_tau: float | None) -> Iterator[PaperClaim]:
    """Claims about tau and gamma; `yarn_tau` is YaRN's tau, from which training starts."""
    tau, gamma = heads["tau"].astype("float64"), heads["gamma"].astype("float64")
    near_one = ((tau - 1).abs() < 0.1).mean()
    yield PaperClaim(
        "tau concentrates near 1 with a mild right tail",
        "supported" if abs(tau.median() - 1) < 0.1 else "not supported",
        f"Median {tau.median():.3f}, 10 % to 90 % quantile {tau.quantile(0.1):.3f} to {tau.quantile(0.9):.3f}; "
        f"{format_percent(near_one)} of heads within 0.1 of 1"
        + (f". Training starts from YaRN's temperature, tau = {yarn_tau:.3f}, and not from 1" if yarn_tau else ""),
    )
    yield PaperClaim(
        "gamma is mostly positive",
        "supported" if (gamma > 0).mean() > 0.6 else "not supported" if (gamma > 0).mean() < 0.4 else "inconclusive",
        f"Positive in {(gamma > 0).sum()} of {len(gamma)} heads, median {gamma.median():+.4f}. Up to the "
        "reference length L_ref, gamma only rescales the logits (by (ln 2)^gamma), so its sign reflects both the "
        "temperature up to L_ref and the growth beyond it",
    )


def _effective_length_claims(heads: pd.DataFrame, models: ComparedModels) -> Iterator[PaperClaim]:
    name = longest_ess_column(heads)
    assert name is not None
    wide = (
        heads.pivot(index=["layer", "head"], columns="model", values=name).astype("float64").dropna(axis=1, how="all")
    )
    if not {models.base, models.adarope} <= {*wide}:
        return
    base = np.log(wide[models.base])
    small, large = base <= base.quantile(1 / 3), base >= base.quantile(2 / 3)
    length = f"{parse_column(name).length:,} tokens"

    def median_changes(label: str) -> tuple[float, float, str]:
        log_ratio = np.log(wide[label]) - base
        of_small, of_large = float(log_ratio[small].median()), float(log_ratio[large].median())
        evidence = (
            f"effective length × {np.exp(of_small):.2f} for small-ESS heads, × {np.exp(of_large):.2f} for large-ESS "
            f"heads ({length})"
        )
        return of_small, of_large, evidence

    if models.yarn_unscaled and models.yarn_unscaled in wide:
        of_small, of_large, evidence = median_changes(models.yarn_unscaled)
        yield PaperClaim(
            "YaRN without its temperature lengthens large-ESS heads, but also changes many small-ESS heads",
            "supported" if of_large > 0.1 and abs(of_small) > 0.1 else "not supported",
            evidence + "; the paper's text and its caption swap this result and the next",
        )
    if models.yarn and models.yarn in wide:
        of_small, of_large, evidence = median_changes(models.yarn)
        yield PaperClaim(
            "YaRN with its temperature keeps small-ESS heads as they are and does not lengthen large-ESS heads",
            "supported" if abs(of_small) <= 0.1 and of_large <= 0.1 else "not supported",
            evidence,
        )
    of_small, of_large, evidence = median_changes(models.adarope)
    yield PaperClaim(
        "AdaRoPE keeps small-ESS heads as they are and lengthens large-ESS heads",
        "supported" if abs(of_small) <= 0.1 and of_large > 0.1 else "not supported",
        evidence,
    )


def _rotary_usage_claims(heads: pd.DataFrame, models: ComparedModels) -> Iterator[PaperClaim]:
    medians = heads.groupby("model", observed=True)["cov"].median().dropna()
    if models.adarope in medians and models.base in medians:
        adarope, start = medians[models.adarope], medians.get(models.yarn, np.nan)
        yield PaperClaim(
            "AdaRoPE uses the rotary pairs more evenly (lower CoV; the paper's claim is about pretraining)",
            "supported" if adarope < 0.98 * start else "not supported" if adarope > 1.02 * start else "inconclusive",
            "Median CoV "
            + ", ".join(f"{medians[label]:.3f} ({label})" for label in map(str, medians.index))
            + (
                f"; training started from {models.yarn}"
                if models.yarn in medians
                else "; the start of the training is unknown"
            ),
        )
    finite = heads[(heads["model"] == models.adarope) & np.isfinite(heads["effective_base"].astype("float64"))]
    depth_correlation = finite["layer"].corr(finite["effective_base"], method="spearman")
    yield PaperClaim(
        "The effective base grows with depth (the paper's claim is about pretraining)",
        "supported" if depth_correlation > 0.5 else "not supported" if depth_correlation < -0.1 else "inconclusive",
        f"Rank correlation with the layer {depth_correlation:+.2f}; range {finite['effective_base'].min():,.0f} to "
        f"{finite['effective_base'].max():,.0f}",
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
    if np.isnan(row["low"]):
        return ""
    return f" (95 % confidence interval {row['low']:+.3f} to {row['high']:+.3f})"

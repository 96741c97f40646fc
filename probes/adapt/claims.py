"""What the paper says of learned AdaRoPE, claim by claim, against a run: holds, differs, or cannot be told.

Reads a run that measured a checkpoint under its own positions, YaRN, YaRN without its factor and learned adapters.
Thresholds are ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from headscope.report.blocks import PaperClaim
from headscope.runs.aggregation import confidence_interval
from headscope.runs.column_metadata import parse_column
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column
from headscope.runs.training_runs import latest_checkpoints


@dataclass(frozen=True)
class ComparedModels:
    """Labels of the run's models by the part they play for a learned one; None where the run has none."""

    base: str
    yarn: str | None
    yarn_unscaled: str | None
    adarope: str

    @classmethod
    def find_in(cls, run: Run) -> "Iterator[ComparedModels]":
        """One for every learned model whose checkpoint was measured under its own positions, too; of the adapters that
        a training kept, the last. YaRN is the one that learning started from, told by its frequencies."""
        last = latest_checkpoints(run.manifest["models"])
        for model in run.manifest["models"]:
            learned = model["label"]
            if learned not in last or not str(model["scheme"]).startswith("adarope:"):
                continue
            schemes = {
                other["label"]: str(other["scheme"])
                for other in run.manifest["models"]
                if other["checkpoint"] == model["checkpoint"]
            }
            bases = [label for label, scheme in schemes.items() if scheme.startswith("base")]
            starts = {label: scheme for label, scheme in schemes.items() if scheme.startswith("yarn:")}
            starts = {label: scheme for label, scheme in starts.items() if _started_from(run, learned, label)}
            yarn = next((label for label, scheme in starts.items() if "attention_factor" not in scheme), None)
            unscaled = next((label for label, scheme in starts.items() if "attention_factor=1" in scheme), None)
            if bases:
                yield cls(bases[0], yarn, unscaled, learned)


def _started_from(run: Run, learned: str, start_model: str) -> bool:
    """Whether learning started from the other model's frequencies."""
    by_model = run.positions.groupby("model", observed=True)
    start, there = by_model.get_group(learned)["log_theta_init"], by_model.get_group(start_model)["log_theta"]
    return len(start) == len(there) and np.allclose(start, there, atol=1e-4)


def adaptation_claims(run: Run) -> Iterator[PaperClaim]:
    """The claims that the run's tables can speak to, of each learned model; none without a base model."""
    for cast in ComparedModels.find_in(run):
        for claim in _claims_for(run, cast):
            yield replace(claim, model=cast.adarope, evidence=f"{cast.adarope}: {claim.evidence}")


def _claims_for(run: Run, models: ComparedModels) -> Iterator[PaperClaim]:
    if "nll" in run.tables and models.yarn is not None:
        yield from _loss_claims(run, models.adarope, models.yarn)
    yield from _frequency_claims(run.positions[run.positions["model"] == models.adarope])
    heads = run.heads
    if "tau" in heads:
        start = heads.loc[heads["model"] == models.yarn, "tau"].median() if models.yarn else None
        yield from _temperature_claims(heads[heads["model"] == models.adarope], start)
    if longest_ess_column(heads):
        yield from _effective_length_claims(heads, models)
    if "cov" in heads:
        yield from _rotary_usage_claims(heads, models)


def _loss_claims(run: Run, learned: str, yarn: str) -> Iterator[PaperClaim]:
    table = paired_loss_difference(run, learned, yarn).dropna(subset="mean")
    if table.empty:  # of texts that both models read
        return
    below = table["mean"] < 0
    sure = f"{(table['high'] < 0).sum()} with a 95 % interval below 0"
    sure = sure if table["high"].notna().any() else "too few documents for intervals"
    beyond = table.iloc[-1]
    yield PaperClaim(
        "Learned positions predict better than YaRN at every position of the extended context",
        "holds" if below.all() else "holds mostly" if below.mean() >= 0.9 else "differs",
        f"Loss below YaRN's in {below.sum()} of {len(table)} bins of position, {sure}; "
        f"{beyond['mean']:+.3f} nats/token{format_interval(beyond)} in the last bin",
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
        "holds" if share > 2 / 3 else "differs" if share < 1 / 3 else "cannot be told",
        f"The slower half of the pairs holds {share:.0%} of the squared change of ln theta since the start "
        f"(rms {np.sqrt((slow**2).mean()):.3f} against {np.sqrt((fast**2).mean()):.3f})",
    )
    by_layer = change.groupby(finite["layer"]).mean()
    third = max(1, len(by_layer) // 3)
    early, late = by_layer.iloc[:third].mean(), by_layer.iloc[-third:].mean()
    depth = by_layer.corr(pd.Series(by_layer.index, by_layer.index), method="spearman")
    yield PaperClaim(
        "Early layers move to lower frequencies, deeper layers to higher ones",
        "holds" if early < 0 < late else "differs" if early > late else "holds in part",
        f"Mean change of ln theta {early:+.4f} in the first third of the layers, {late:+.4f} in the last; rank "
        f"correlation with depth {depth:+.2f}",
    )


def _temperature_claims(heads: pd.DataFrame, yarn_tau: float | None) -> Iterator[PaperClaim]:
    """`start` is YaRN's tau, from which learning starts."""
    tau, gamma = heads["tau"].astype("float64"), heads["gamma"].astype("float64")
    near = ((tau - 1).abs() < 0.1).mean()
    yield PaperClaim(
        "tau concentrates near 1 with a mild right tail",
        "holds" if abs(tau.median() - 1) < 0.1 else "differs",
        f"Median {tau.median():.3f}, middle 80 % {tau.quantile(0.1):.3f} to {tau.quantile(0.9):.3f}; "
        f"{near:.0%} within 0.1 of 1"
        + (f". Learning starts from YaRN's temperature, tau = {yarn_tau:.3f}, and not from 1" if yarn_tau else ""),
    )
    yield PaperClaim(
        "gamma is mostly positive",
        "holds" if (gamma > 0).mean() > 0.6 else "differs" if (gamma > 0).mean() < 0.4 else "cannot be told",
        f"Positive in {(gamma > 0).sum()} of {len(gamma)} heads, median {gamma.median():+.4f}. Up to L_ref gamma acts "
        "as a second temperature, lambda = (ln 2)^gamma / tau, so that its sign follows what heads want of their "
        "temperature there as well as how they grow beyond",
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

    def moved(label: str) -> tuple[float, float, str]:
        ratio = np.log(wide[label]) - base
        near, far = float(ratio[small].median()), float(ratio[large].median())
        return near, far, f"small heads × {np.exp(near):.2f}, large heads × {np.exp(far):.2f} ({length})"

    if models.yarn_unscaled and models.yarn_unscaled in wide:
        near, far, told = moved(models.yarn_unscaled)
        yield PaperClaim(
            "Without its temperature YaRN moves large-ESS heads up, at the cost of many small ones",
            "holds" if far > 0.1 and abs(near) > 0.1 else "differs",
            told + "; the paper's text and its caption tell this panel and the next the other way round",
        )
    if models.yarn and models.yarn in wide:
        near, far, told = moved(models.yarn)
        verdict = "holds" if abs(near) <= 0.1 and far <= 0.1 else "differs"
        yield PaperClaim("With its temperature YaRN keeps small heads and does not extend large ones", verdict, told)
    near, far, told = moved(models.adarope)
    yield PaperClaim(
        "AdaRoPE keeps small-ESS heads near the diagonal and pushes large ones above it",
        "holds" if abs(near) <= 0.1 and far > 0.1 else "differs",
        told,
    )


def _rotary_usage_claims(heads: pd.DataFrame, models: ComparedModels) -> Iterator[PaperClaim]:
    medians = heads.groupby("model", observed=True)["cov"].median().dropna()
    if models.adarope in medians and models.base in medians:
        learned, start = medians[models.adarope], medians.get(models.yarn, np.nan)
        yield PaperClaim(
            "AdaRoPE uses the rotary pairs more evenly (lower CoV); said of pretraining",
            "holds" if learned < 0.98 * start else "differs" if learned > 1.02 * start else "cannot be told",
            "Median CoV "
            + ", ".join(f"{medians[label]:.3f} ({label})" for label in map(str, medians.index))
            + (
                f"; learning started from {models.yarn}"
                if models.yarn in medians
                else "; where learning started is unknown"
            ),
        )
    mine = heads[(heads["model"] == models.adarope) & np.isfinite(heads["effective_base"].astype("float64"))]
    depth = mine["layer"].corr(mine["effective_base"], method="spearman")
    yield PaperClaim(
        "The effective base grows with depth; said of pretraining",
        "holds" if depth > 0.5 else "differs" if depth < -0.1 else "cannot be told",
        f"Rank correlation with the layer {depth:+.2f}; {mine['effective_base'].min():,.0f} to "
        f"{mine['effective_base'].max():,.0f}",
    )


def paired_loss_difference(run: Run, label: str, baseline: str) -> pd.DataFrame:
    """Loss of `label` less that of `baseline` by position at the longest length: mean over documents, low, high."""
    nll = run.nll[run.nll["context_length"] == run.nll["context_length"].max()]
    nll = nll.astype({"nll": "float64", "doc": "str", "model": "str"})
    wide = nll.pivot_table(index=["model", "position"], columns="doc", values="nll")
    if not {label, baseline} <= {*wide.index.get_level_values("model")}:
        return pd.DataFrame(columns=["mean", "low", "high"])
    gap = wide.loc[label] - wide.loc[baseline]
    low, high = confidence_interval(gap.to_numpy(dtype=np.float64))
    return pd.DataFrame({"mean": gap.mean(axis=1), "low": low, "high": high})


def format_interval(row: pd.Series) -> str:
    """An interval as it follows its mean; "" where the documents are too few for one."""
    return "" if np.isnan(row["low"]) else f" [{row['low']:+.3f}, {row['high']:+.3f}]"

"""Results of the adapt probe: the validation loss of a training, and the paper's claims about trained adapters.

Claims need a checkpoint under its own positions and under an adapter; those about YaRN also need YaRN with and
without its attention factor. All thresholds are ours. A claim is supported if the whole 95 % confidence interval is on
its side of the threshold: over documents for losses, over heads or KV groups of the one trained model for everything
else. Those verdicts are about the measured adapter: they do not tell what another training would learn.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from headscope.results.effects.statistics import rank_correlation
from headscope.results.result import Bound, Result, Scalar
from headscope.results.samples import mean_result, share_result
from headscope.results.verdicts import judge, judge_by_parts
from headscope.runs.aggregation import (
    MIN_SUMMED_UNITS,
    confidence_interval,
    mean_losses,
    rank_correlations,
    share_interval_of_units,
    statistic_interval,
)
from headscope.runs.column_metadata import falls_below, parse_column
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column
from headscope.runs.trainings import latest_checkpoints


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


MIN_SLOW_SHARE = 2 / 3
"""Share of the slower half of the pairs in the squared change of ln theta."""
MAX_TAU_DISTANCE, MIN_POSITIVE_SHARE = 0.1, 0.6
"""Distance of the median tau to 1, and share of heads with positive gamma."""
MIN_CHANGE = 0.1
"""Median change of ln ESS of a third of the heads that counts."""
MAX_COV_RATIO, MIN_DEPTH_CORRELATION = 0.98, 0.5


def results(run: Run) -> Iterator[Result]:
    """The validation loss of every training, and the paper's claims about every AdaRoPE model; each result once."""
    if "validation" in run.tables:
        yield from _training_results(run)
    yield from {
        claim.key: claim for models in ComparedModels.find_in(run) for claim in _claims_for(run, models)
    }.values()


def _training_results(run: Run) -> Iterator[Result]:
    """Change of the validation loss from the first to the last step of each training."""
    losses = mean_losses(run.validation.astype({"nll": "float64", "doc": "str"}), ["adapter", "step", "doc"])
    for training, rows in losses.groupby(level="adapter", observed=True):
        by_step = rows.droplevel("adapter").unstack("doc").sort_index()
        means, change = by_step.mean(axis=1), by_step.iloc[-1] - by_step.iloc[0]
        best = means.sort_values().head(1)
        details = {"step": means.index[-1], "start": means.iloc[0], "last": means.iloc[-1]}
        details |= {"best_step": best.index[0], "best": best.iloc[0]}
        yield mean_result("adapt.validation_loss", change, where={"training": str(training)}, details=details)


def _claims_for(run: Run, models: ComparedModels) -> Iterator[Result]:
    """The claims that the run's tables can test for one AdaRoPE model."""
    if "nll" in run.tables and models.yarn is not None:
        yield from _loss_claims(run, models.adarope, models.yarn)
    yield from _frequency_claims(run.positions[run.positions["model"] == models.adarope], models.adarope)
    heads = run.heads
    if "tau" in heads:
        yarn_tau = heads.loc[heads["model"] == models.yarn, "tau"].median() if models.yarn else None
        yield from _temperature_claims(heads[heads["model"] == models.adarope], models.adarope, yarn_tau)
    if longest_ess_column(heads):
        yield from _effective_length_claims(heads, models, _native_context(run, models.adarope))
    if "cov" in heads:
        yield from _evenness_claim(heads, models)
        yield _base_claim(heads[heads["model"] == models.adarope], models.adarope)


def _native_context(run: Run, label: str) -> int:
    geometry = next(model["geometry"] for model in run.manifest["models"] if model["label"] == label)
    return int(geometry.get("native_context", 0))


def _judged_in_long_context(result: Result, bound: Bound, native: int) -> Result:
    """The result with its verdict, which needs a context length beyond half of the native context."""
    is_long = int(result.where["context_length"]) > native / 2
    lengths = {"native_context": native, "half_context": native // 2}
    return judge(replace(result, details={**result.details, **lengths}), bound, "" if is_long else "short")


def _loss_claims(run: Run, adarope: str, yarn: str) -> Iterator[Result]:
    native, bound = _native_context(run, adarope), Bound("below")
    parts = [_judged_in_long_context(part, bound, native) for part in losses_by_position(run, adarope, yarn)]
    if not parts:  # the two models have no document in common
        return
    last = parts[-1]
    details = {"bins": len(parts), "below": sum(part.value < 0 for part in parts)}
    if any(part.has_interval for part in parts):
        details["certain"] = sum(part.high < 0 for part in parts)
    where = {"context_length": last.where["context_length"]}
    claim = replace(last, question="adapt.claim.loss", where=where, details=details, bound=None, reason="")
    yield judge_by_parts(claim, parts)


def losses_by_position(run: Run, label: str, baseline: str) -> Iterator[Result]:
    """Loss of `label` minus that of `baseline` (nats/token), paired by document, at the longest length, a result per
    position bin; none without a common document."""
    length = int(run.nll["context_length"].max())
    nll = run.nll[run.nll["context_length"] == length].astype({"nll": "float64", "doc": "str", "model": "str"})
    wide = nll.pivot_table(index=["model", "position"], columns="doc", values="nll")
    if not {label, baseline} <= {*wide.index.get_level_values("model")}:
        return
    difference = pd.DataFrame(wide.loc[label] - wide.loc[baseline]).dropna(how="all")
    for position in difference.index:
        where = {"context_length": length, "position": int(position)}
        differences = difference.loc[position].dropna()
        yield mean_result("adapt.loss_at_position", differences, model=label, baseline=baseline, where=where)


def _frequency_claims(positions: pd.DataFrame, model: str) -> Iterator[Result]:
    finite = positions[np.isfinite(positions["log_theta"]) & np.isfinite(positions["log_theta_init"])]
    change = (finite["log_theta"] - finite["log_theta_init"]).astype("float64")
    is_slow = finite["pair"] >= (finite["pair"].max() + 1) // 2
    groups = [finite["layer"], finite["kv_group"]]
    slow, every = (squares.groupby(groups).sum().to_numpy() for squares in (change**2 * is_slow, change**2))
    share = float(slow.sum() / every.sum()) if every.any() else np.nan
    low, high = share_interval_of_units(slow, every) if every.any() else (np.nan, np.nan)
    rms = {name: np.sqrt((change[mask] ** 2).mean()) for name, mask in (("slow", is_slow), ("fast", ~is_slow))}
    details = {**rms, "needed": MIN_SUMMED_UNITS}
    claim = Result(question="adapt.claim.slow_pairs", model=model, value=share, low=low, high=high, n=len(every))
    few = "few_units" if len(every) < MIN_SUMMED_UNITS else ""
    yield judge(replace(claim, details=details), Bound("above", MIN_SLOW_SHARE), few)
    by_group = change.groupby(groups).mean()
    by_layer = by_group.groupby(level="layer").mean()
    third = max(1, len(by_layer) // 3)
    parts = []
    for name, layers, bound in (
        ("first third", by_layer.index[:third], Bound("below")),
        ("last third", by_layer.index[-third:], Bound("above")),
    ):
        values = by_group[by_group.index.isin([*layers], level="layer")].to_numpy()
        (low,), (high,) = confidence_interval(values[None])
        part = Result(
            question="adapt.frequency_change",
            model=model,
            value=float(values.mean()),
            low=low,
            high=high,
            n=len(values),
            where={"layers": name},
        )
        parts.append(judge(part, bound))
    correlation = rank_correlation(by_layer, pd.Series(by_layer.index, by_layer.index))[0]
    claim = Result(question="adapt.claim.depth", model=model, details={"correlation": correlation})
    yield judge_by_parts(claim, parts)


def _temperature_claims(heads: pd.DataFrame, model: str, yarn_tau: float | None) -> Iterator[Result]:
    """Claims about tau and gamma; `yarn_tau` is YaRN's tau, from which training starts."""
    tau, gamma = heads["tau"].astype("float64"), heads["gamma"].astype("float64")
    low, high = statistic_interval(lambda values: np.abs(np.median(values, -1) - 1), tau.to_numpy())
    details = {
        "median": tau.median(),
        "low_tau": tau.quantile(0.1),
        "high_tau": tau.quantile(0.9),
        "near_one": falls_below((tau - 1).abs(), MAX_TAU_DISTANCE).mean(),
        "yarn_tau": yarn_tau,
    }
    distance = abs(tau.median() - 1)
    yield judge(
        Result(
            question="adapt.claim.tau", model=model, value=distance, low=low, high=high, n=len(tau), details=details
        ),
        Bound("below", MAX_TAU_DISTANCE),
    )
    is_positive = share_result("adapt.claim.gamma", gamma > 0, model=model, details={"median": gamma.median()})
    yield judge(is_positive, Bound("above", MIN_POSITIVE_SHARE))


def _effective_length_claims(heads: pd.DataFrame, models: ComparedModels, native: int) -> Iterator[Result]:
    """For every model that was measured: what its position scheme does to short and long effective lengths."""
    name = longest_ess_column(heads)
    assert name is not None
    wide = (
        heads.pivot(index=["layer", "head"], columns="model", values=name).astype("float64").dropna(axis=1, how="all")
    )
    if not {models.base, models.adarope} <= {*wide}:
        return
    where = {"context_length": int(parse_column(name).length or 0)}
    shorter, longer = math.exp(-MIN_CHANGE), math.exp(MIN_CHANGE)
    unchanged, changed = Bound("between", shorter, longer), Bound("outside", shorter, longer)
    for question, label, small, large in (
        ("adapt.claim.lengths_without_factor", models.yarn_unscaled, changed, Bound("above", longer)),
        ("adapt.claim.lengths_yarn", models.yarn, unchanged, Bound("below", longer)),
        ("adapt.claim.lengths_adarope", models.adarope, unchanged, Bound("above", longer)),
    ):
        if label is None or label not in wide:
            continue
        ratios = _length_ratios(wide, label, models.base, where)
        parts = [
            _judged_in_long_context(ratio, bound, native) for ratio, bound in zip(ratios, (small, large), strict=True)
        ]
        details = {"shorter": shorter, "longer": longer}
        claim = Result(question=question, model=label, baseline=models.base, where=where, details=details)
        yield judge_by_parts(claim, parts)


def _length_ratios(wide: pd.DataFrame, label: str, base: str, where: Mapping[str, Scalar]) -> Iterator[Result]:
    """Median ratio of effective lengths of a model to those of the base model, in its small-ESS and large-ESS heads."""
    log_base = np.log(wide[base])
    log_ratio = (np.log(wide[label]) - log_base).dropna()
    for size, mask in (
        ("small-ESS", log_base <= log_base.quantile(1 / 3)),
        ("large-ESS", log_base >= log_base.quantile(2 / 3)),
    ):
        changes = log_ratio[mask.reindex(log_ratio.index)].to_numpy()
        low, high = statistic_interval(lambda values: np.median(values, -1), changes)
        yield Result(
            question="adapt.length_ratio",
            model=label,
            baseline=base,
            value=math.exp(np.median(changes)),
            low=math.exp(low),
            high=math.exp(high),
            n=len(changes),
            where={**where, "heads": size},
        )


def _evenness_claim(heads: pd.DataFrame, models: ComparedModels) -> Iterator[Result]:
    """Whether AdaRoPE's CoV is below that of YaRN, from which the training started."""
    covs = heads.pivot(index=["layer", "head"], columns="model", values="cov").astype("float64")
    medians = {str(label): median for label, median in covs.median().dropna().items()}
    if not {models.base, models.adarope} <= {*medians}:
        return
    claim = Result(question="adapt.claim.evenness", model=models.adarope, n=len(covs), details={"medians": medians})
    bound = Bound("below", MAX_COV_RATIO)
    if models.yarn is None or models.yarn not in medians:
        yield judge(claim, bound, "start")
        return
    both = covs[[models.adarope, models.yarn]].dropna().to_numpy().T
    low, high = statistic_interval(lambda index: np.divide(*np.median(both[:, index], -1)), np.arange(both.shape[1]))
    ratio = medians[models.adarope] / medians[models.yarn]
    yield judge(replace(claim, baseline=models.yarn, value=ratio, low=low, high=high), bound)


def _base_claim(heads: pd.DataFrame, model: str) -> Result:
    """Whether the effective base grows with depth."""
    finite = heads[np.isfinite(heads["effective_base"].astype("float64"))]
    groups = finite.drop_duplicates(["layer", "kv_group"])[["layer", "effective_base"]].to_numpy(np.float64).T
    low, high = statistic_interval(lambda index: rank_correlations(groups[:, index]), np.arange(groups.shape[1]))
    claim = Result(
        question="adapt.claim.base_by_depth",
        model=model,
        value=float(rank_correlations(groups)),
        low=low,
        high=high,
        n=groups.shape[1],
        details={"lowest": finite["effective_base"].min(), "highest": finite["effective_base"].max()},
    )
    return judge(claim, Bound("above", MIN_DEPTH_CORRELATION))


def next_steps(run: Run) -> Iterator[str]:
    """Commands that measure the last adapter, and all saved adapters."""
    folder = run.path / "adapters"
    files = sorted(folder.glob("step-*.safetensors"), key=lambda file: int(file.stem.removeprefix("step-")))
    if files:
        checkpoint = run.manifest["models"][0]["spec"]
        models = f"--model base={checkpoint} --model adarope={checkpoint}@adarope:adapter={files[-1]}"
        yield f"Adapter: {files[-1]}"
        yield f"Measure it: headscope run {models}"
        yield f"Measure every saved step: headscope run --checkpoints '{checkpoint}@adarope:adapter={folder}/step-*'"

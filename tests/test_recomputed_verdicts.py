"""The verdicts of the shipped runs, recomputed from their stored tables with scipy alone.

Nothing here uses headscope's intervals or verdicts: t-tests, Wilson intervals of `binomtest`, scipy's bootstrap, ranks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.shipped_runs import open_shipped

from headscope.results.collection import all_results
from headscope.results.result import Result
from headscope.runs.run import Run

RUNS = ("from-scratch", "from-scratch-seeds", "example", "causes", "needle", "head-influence")
BASE, YARN, BARE, ADAROPE = "base", "yarn", "yarn without factor", "adarope"
MIN_CHANGE = 0.1
Verdict = str


def from_interval(low: float, high: float, threshold: float, claims_above: bool = True) -> Verdict:
    if low > threshold:
        return "supported" if claims_above else "not supported"
    if high < threshold:
        return "not supported" if claims_above else "supported"
    return "inconclusive"


def from_tests(values: Any, threshold: float, claims_above: bool, parts: int = 1) -> Verdict:
    """One-sided t-tests at 2.5 %; the one that refutes shares its level between `parts`."""
    if len(values) < 3:
        return "inconclusive"
    above = stats.ttest_1samp(values, threshold, alternative="greater").pvalue
    below = stats.ttest_1samp(values, threshold, alternative="less").pvalue
    agrees, refutes = (above, below) if claims_above else (below, above)
    return "supported" if agrees < 0.025 else "not supported" if refutes < 0.025 / parts else "inconclusive"


def all_of(parts: list[Verdict]) -> Verdict:
    if "not supported" in parts:
        return "not supported"
    return "supported" if {*parts} == {"supported"} else "inconclusive"


def bootstrapped(statistic: Any, *samples: Any, paired: bool = False, parts: int = 1) -> tuple[float, float]:
    result = stats.bootstrap(
        samples,
        statistic,
        paired=paired,
        method="percentile",
        n_resamples=4000,
        confidence_level=1 - 0.05 / parts,
        vectorized=False,
        rng=np.random.default_rng(1),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def adapter_verdicts(run: Run) -> Iterator[tuple[str, Verdict]]:
    positions = run.positions.astype({"model": "str"})
    positions = positions[positions["model"] == ADAROPE]
    change = (positions["log_theta"] - positions["log_theta_init"]).astype(float)
    slow = (change**2).where(positions["pair"] >= (positions["pair"].max() + 1) // 2, 0.0)
    groups = [positions["layer"], positions["kv_group"]]
    slow_sums, sums = slow.groupby(groups).sum(), (change**2).groupby(groups).sum()
    excess = (slow_sums - 2 / 3 * sums).to_numpy()
    ends = [[*excess, *[extreme] * 3] for extreme in (excess.min(), excess.max())]  # the groups that were not drawn
    agrees, refutes = (from_tests(values, 0, claims_above=True) for values in ends)
    yield "adapt.claim.slow_pairs", agrees if agrees == "supported" else refutes
    means = change.groupby(groups).mean()
    layers = means.index.get_level_values("layer")
    third = len({*layers}) // 3
    yield (
        "adapt.claim.depth",
        all_of(
            [
                from_tests(means[layers < third], 0, claims_above=False, parts=2),
                from_tests(means[layers >= len({*layers}) - third], 0, claims_above=True, parts=2),
            ]
        ),
    )
    scales = run.scales.astype({"model": "str"})
    scales = scales[scales["model"] == ADAROPE].drop_duplicates(["layer", "head"])
    low, high = bootstrapped(lambda tau: abs(np.median(tau) - 1), scales["tau"].to_numpy(float))
    yield "adapt.claim.tau", from_interval(low, high, 0.1, claims_above=False)
    positive = stats.binomtest(int((scales["gamma"] > 0).sum()), len(scales)).proportion_ci(method="wilson")
    yield "adapt.claim.gamma", from_interval(positive.low, positive.high, 0.6)


def measured_verdicts(run: Run) -> Iterator[tuple[str, Verdict]]:
    """Claims about losses and the per-head table of the example."""
    nll = run.nll.astype({"model": "str", "doc": "str", "nll": "float64"})
    nll = nll[nll["context_length"] == nll["context_length"].max()].pivot(
        index=["position", "doc"], columns="model", values="nll"
    )
    difference = (nll[ADAROPE] - nll[YARN]).unstack("doc")
    parts = [from_tests(row, 0, claims_above=False, parts=len(difference)) for row in difference.to_numpy()]
    yield "adapt.claim.loss", all_of(parts)
    heads = run.heads.astype({"model": "str"}).set_index(["layer", "head"])
    by_model = {name: heads[heads["model"] == name] for name in (BASE, YARN, BARE, ADAROPE)}
    ess = pd.DataFrame({name: np.log(rows["ess2_12288"].astype(float)) for name, rows in by_model.items()})
    is_small = ess[BASE] <= ess[BASE].quantile(1 / 3)
    is_large = ess[BASE] >= ess[BASE].quantile(2 / 3)

    def ratio(model: str, mask: pd.Series) -> tuple[float, float]:
        return bootstrapped(np.median, (ess[model] - ess[BASE])[mask].to_numpy())

    def unchanged(ends: tuple[float, float]) -> Verdict:
        return all_of([from_interval(*ends, -MIN_CHANGE), from_interval(*ends, MIN_CHANGE, claims_above=False)])

    opposite = {"supported": "not supported", "not supported": "supported", "inconclusive": "inconclusive"}
    changed = opposite[unchanged(ratio(BARE, is_small))]
    yield "adapt.claim.lengths_without_factor", all_of([changed, from_interval(*ratio(BARE, is_large), MIN_CHANGE)])
    yarn = from_interval(*ratio(YARN, is_large), MIN_CHANGE, claims_above=False)
    yield "adapt.claim.lengths_yarn", all_of([unchanged(ratio(YARN, is_small)), yarn])
    adarope = from_interval(*ratio(ADAROPE, is_large), MIN_CHANGE)
    yield "adapt.claim.lengths_adarope", all_of([unchanged(ratio(ADAROPE, is_small)), adarope])
    covs = [by_model[name]["cov"].astype(float).to_numpy() for name in (ADAROPE, YARN)]
    ends = bootstrapped(lambda first, second: np.median(first) / np.median(second), *covs, paired=True)
    yield "adapt.claim.evenness", from_interval(*ends, 0.98, claims_above=False)
    groups = by_model[ADAROPE].reset_index().drop_duplicates(["layer", "kv_group"])
    groups = groups[np.isfinite(groups["effective_base"].astype(float))]
    pairs = groups["layer"].to_numpy(float), groups["effective_base"].to_numpy(float)
    ends = bootstrapped(lambda layer, base: stats.spearmanr(layer, base).statistic, *pairs, paired=True)
    yield "adapt.claim.base_by_depth", from_interval(*ends, 0.5)


def influence_verdicts(run: Run, table: str) -> Iterator[tuple[str, Verdict]]:
    """A sweep with units that were only estimated decides nothing."""
    rows = run.table(table).astype({"method": "str", "component": "str", "model": "str", "doc": "str"})
    rows = rows[~rows["component"].str.contains(":")]  # bands of rotary pairs are not the subject of a claim
    units = ["layer", "kv_group", "head"]
    for (_, component), sweep in rows.groupby(["model", "component"]):
        exact = sweep[sweep["method"] == "exact"]
        if len(exact[units].drop_duplicates()) == len(sweep[units].drop_duplicates()):
            yield from exact_verdicts(run, exact.pivot(index=units, columns="doc", values="delta_nll"))
        elif table == "influence_answers":
            yield "answer_influence.largest_head", "inconclusive"
        else:
            yield "influence.heavy_tail", "inconclusive"
            yield "influence.tail_head", "inconclusive"
            if component == "joint":
                yield "influence.small_parts", "inconclusive"


def exact_verdicts(run: Run, effects: pd.DataFrame) -> Iterator[tuple[str, Verdict]]:
    """Claims about the exact effects [KV groups, documents] of resetting all parameters of a KV group."""
    values, top = effects.to_numpy(float), -(-len(effects) // 20)
    halves = np.arange(values.shape[1]) % 2
    seeming, judged = np.zeros((2, values.shape[1])), np.zeros((2, values.shape[1]))  # sums over the top, over rises
    seeming[:] = sums_of_chosen(values, values.mean(axis=1), top)
    for half in (0, 1):
        means = values[:, halves != half].mean(axis=1)
        judged[:, halves == half] = sums_of_chosen(values[:, halves == half], means, top)
    supports = stats.ttest_1samp(judged[0] - seeming[1] / 2, 0, alternative="greater").pvalue < 0.025
    refutes = stats.ttest_1samp(seeming[0] - judged[1] / 2, 0, alternative="less").pvalue < 0.025
    yield "influence.heavy_tail", "supported" if supports else "not supported" if refutes else "inconclusive"
    heads = run.heads[run.heads["model"] == ADAROPE].astype({"retrieval": float})
    head = heads.loc[heads["retrieval"].idxmax()]
    key = (head["layer"], head["kv_group"], -1)
    yield "influence.tail_head", among_top(effects.loc[key].to_numpy() - effects.drop(index=[key]).to_numpy(), top)
    sets = run.influence_sets.astype({"choice": "str", "doc": "str"})
    together = sets[(sets["choice"] == "top") & (sets["size"] == len(effects))].set_index("doc")["delta_nll"]
    yield "influence.small_parts", among_top(together[effects.columns].to_numpy() / 4 - values, 1)


def sums_of_chosen(values: Any, means: Any, top: int) -> tuple[Any, Any]:
    """By document: the sum over the units of the `top` largest positive means, and over those of positive means."""
    order = stats.rankdata(-means, method="ordinal")
    return values[(order <= top) & (means > 0)].sum(axis=0), values[means > 0].sum(axis=0)


def among_top(margins: Any, rank: int) -> Verdict:
    """Whether all but `rank` - 1 of the margins [units, documents] are above 0, by partial conjunction tests."""
    above, below = (stats.ttest_1samp(margins, 0, axis=1, alternative=side).pvalue for side in ("greater", "less"))
    if (above < 0.025 / rank).sum() > len(margins) - rank:
        return "supported"
    return "not supported" if (below < 0.025 / (len(margins) - rank + 1)).sum() >= rank else "inconclusive"


def ablation_verdicts(run: Run) -> Iterator[tuple[str, Verdict]]:
    rows = run.needle_ablation.astype({"model": "str", "mode": "str", "success": "float64"})
    trial = ["needle", "context_length", "depth", "doc"]
    for label in run.models:
        of_model = rows[rows["model"] == label]
        for mode in ("strict", "indirect"):
            block = of_model[of_model["mode"] == mode]
            if block.empty:
                continue
            block = block[block["size"] == block.loc[block["size"] <= 16, "size"].max()]
            by_trial = (
                block.assign(is_top=block["draw"] == 0).groupby(["is_top", *trial], observed=True)["success"].mean()
            )
            shares, n = by_trial.groupby("is_top").mean(), len(by_trial[True])
            by_draw = block[block["draw"] > 0].groupby("draw")["success"].mean()
            over_draws = stats.t.ppf(0.975, len(by_draw) - 1) * stats.sem(by_draw)
            random, top = (wilson(shares[is_top], n) for is_top in (False, True))
            value = shares[False] - shares[True]
            below = np.sqrt((shares[False] - random[0]) ** 2 + (top[1] - shares[True]) ** 2 + over_draws**2)
            above = np.sqrt((random[1] - shares[False]) ** 2 + (shares[True] - top[0]) ** 2 + over_draws**2)
            yield "retrieval.ablation_claim", from_interval(value - below, value + above, 0)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Roots of (p - share)² = z² p (1 - p) / n."""
    z = stats.norm.ppf(0.975)
    roots = np.roots([1 + z**2 / n, -(2 * share + z**2 / n), share**2])
    return float(min(roots.real)), float(max(roots.real))


def pretraining_verdicts(run: Run, claims: list[Result]) -> Iterator[tuple[str, Verdict]]:
    """A verdict needs three seeds, which no shipped run has."""
    seeds = {model["pretraining"]["seed"] for model in run.manifest["models"] if model.get("pretraining")}
    assert len(seeds) < 3
    yield from ((claim.question, "inconclusive") for claim in claims)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_scipy_gives_every_verdict_of_the_shipped_runs(name: str) -> None:
    run = open_shipped(name)
    claims = [result for result in all_results(run) if result.verdict]
    expected: list[tuple[str, Verdict]] = []
    if name.startswith("from-scratch"):
        expected += pretraining_verdicts(run, claims)
    elif name in ("example", "causes"):
        expected += adapter_verdicts(run)
    if name == "example":
        expected += measured_verdicts(run)
    if name in ("example", "head-influence"):
        expected += influence_verdicts(run, "influence")
    if name == "causes":
        expected += influence_verdicts(run, "influence_answers")
    if "needle_ablation" in run.tables:
        expected += ablation_verdicts(run)
    assert sorted((claim.question, claim.verdict) for claim in claims) == sorted(expected)

"""The one wide table that report, dashboard and notebooks share: a row per head, and a row per model.

Reads a run's tables, knows neither models nor figures. Every statistic is formed within each document and
then averaged over documents; an interval is the 95 % percentile bootstrap over documents (2000 seeded draws),
which says how far other documents might move the number. From one document there is no interval (NaN);
from two or three it is too narrow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.bins import PER_OCTAVE, last_octave, middle
from headscope.damping import ORDER, with_damped
from headscope.errors import BadInput, nearest
from headscope.schema import TABLES
from headscope.store import Run

HEAD = ["model", "layer", "head", "kv_group"]
"""What names a row of the wide table."""

SWEEP = ["model", "context_length", "component", "target"]
"""What names one sweep of the influence probe."""

DRAWS = 2000
GROWTH_FROM = 64
"""Fewest visible keys, in the middle of a bin, of the rows that the growth exponent is fitted to."""


@dataclass(frozen=True)
class Statistic:
    """How to show one column of the wide table."""

    label: str
    unit: str
    meaning: str
    log_scale: bool = False
    formula: str = ""


_RESET = "reset, of the head or of its whole KV group, as measured; to init where measured, else to base"

HEAD_STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "growth": Statistic(
            "growth exponent",
            "",
            "slope of ln ESS2 on ln n, the visible keys, over bins with n >= 64 at the longest length [ours]; "
            "about 0 for a retrieval head, 1 for an aggregation head",
            formula="ln ESS₂(n) ≈ growth · ln n + const",
        ),
        "ess1": Statistic(
            "ESS1",
            "tokens",
            "mean exp(entropy) of the rows, last octave of visible keys",
            True,
            "ESS₁(i) = exp(−Σⱼ αᵢⱼ ln αᵢⱼ)",
        ),
        "max_weight": Statistic("largest weight", "", "mean of a row's largest weight, last octave of visible keys"),
        "sink_mass": Statistic("sink mass", "", "mean weight on key 0, last octave of visible keys", formula="αᵢ₀"),
        "local_mass": Statistic(
            "local mass",
            "",
            "mean weight on the last 32 keys, last octave of visible keys",
            formula="Σ αᵢⱼ over i − j < 32",
        ),
        "mean_distance": Statistic(
            "mean distance", "tokens", "how far back a head looks on average, same rows", True, "Σⱼ αᵢⱼ (i − j)"
        ),
        "cov": Statistic(
            "CoV of pairs",
            "",
            "spread of usage E|c_f| over rotary pairs; lower is more even",
            formula="CoV = std_f E|c_f| / mean_f E|c_f|, c_f = q_f · k_f",
        ),
        "cov_rms": Statistic(
            "CoV of pairs (rms)", "", "the same of root mean squares", formula="std_f / mean_f of √E c_f²"
        ),
        "cov_norm": Statistic(
            "CoV of pairs (norms)", "", "the same of products of norms", formula="std_f / mean_f of E|q_f||k_f|"
        ),
        "weighted_log_theta": Statistic(
            "weighted mean log-frequency",
            "ln rad/token",
            "mean of ln theta_f weighted by usage E|c_f|, over the pairs that rotate [ours]",
            formula="Σ_f E|c_f| ln θ_f / Σ_f E|c_f|",
        ),
        "mean_log_theta": Statistic("mean log-frequency", "ln rad/token", "mean of ln theta over rotary pairs"),
        "effective_base": Statistic("effective base", "", "base of the plain RoPE with the same mean ln theta", True),
        "retrieval": Statistic(
            "retrieval score",
            "",
            "mean share of the needle's scored tokens that the head copied (strict), over the trials that succeeded; "
            "missing where none did",
            formula="copied needle tokens / needle tokens",
        ),
        "retrieval_mass": Statistic("needle mass", "", "mean weight on the needle at the answer steps, same trials"),
        "retrieval_wu": Statistic("retrieval score (wu)", "", "mean score as the public code of Wu et al. counts it"),
        "retrieval_control": Statistic("retrieval score, no needle", "", "mean strict score in the control trials"),
        "tau": Statistic("temperature tau", "", "lambda(n) = (1/tau) ln(1 + max(n, L_ref)/L_ref)^gamma"),
        "gamma": Statistic("growth of logits gamma", "", "exponent of ln(1 + n/L_ref) in lambda(n)"),
        "influence_joint": Statistic("influence", "nats/token", f"loss added when frequencies and scale are {_RESET}"),
        "influence_freq": Statistic("influence of frequencies", "nats/token", f"loss added when they are {_RESET}"),
        "influence_scale": Statistic("influence of scale", "nats/token", f"loss added when tau, gamma are {_RESET}"),
        "logit_scale": Statistic("logit multiplier", "", "factor on logits up to L_ref, beyond the checkpoint's own"),
    }
)
"""Every column of the wide table that a user may plot, but for `ess2_<length>`: see `statistic`."""


def statistic(name: str) -> Statistic:
    """How to show the column `name` of the wide table. Raises BadInput for a column that cannot be plotted."""
    if _is_length(name):
        length = int(name[5:])
        meaning = f"exp of mean ln ESS2 in contexts of {length} tokens, last octave of visible keys"
        return Statistic(f"effective length at {length:,}", "tokens", meaning, True, "ESS₂(i) = 1 / Σⱼ αᵢⱼ²")
    if name not in HEAD_STATISTICS:
        raise BadInput(f"no statistic '{name}' of a head{nearest(name, HEAD_STATISTICS)}")
    return HEAD_STATISTICS[name]


def heads(run: Run) -> pd.DataFrame:
    """One row per (model, layer, head), in that order, with kv_group and what the run's tables allow.

    From `attention`: `ess2_<L>` (tokens) for every measured length L, the exp of mean ln ESS2 over rows in the
    last octave of visible keys, those that see more than about half of the context [ours]; `growth`; and at the
    model's longest length `ess1`, `max_weight`, `sink_mass`, `local_mass`, `mean_distance` over the same rows.
    From `pairs`, at the longest length: `cov`, `cov_rms`, `cov_norm`, `weighted_log_theta`. From `scales`:
    `tau`, `gamma`, `logit_scale`, `effective_base`, `mean_log_theta`. From `retrieval`: `retrieval`, `retrieval_mass`,
    `retrieval_wu` over successful trials, `retrieval_control`. From `influence`, at the longest length:
    `influence_<component>`. `ess2_<L>`, `growth`, `cov`, `retrieval` and influences come with `_low` and `_high`.
    `HEAD_STATISTICS` tells units and meanings.
    """
    parts = {"attention": _attention, "pairs": _pairs, "scales": _scales}
    found = [part(_plain(run.table(name))) for name, part in parts.items() if name in run.tables]
    if "retrieval" in run.tables:
        found.append(_retrieval(retrieval_rows(run)))
    if "influence" in run.tables:
        found.append(_influence(_plain(run.influence), run))
    if not found:
        return pd.DataFrame(columns=HEAD)
    wide = pd.concat(found, axis=1).reset_index()
    wide["model"] = pd.Categorical(wide["model"], run.models)
    return wide.sort_values(HEAD, ignore_index=True)


def longest(heads: pd.DataFrame) -> str | None:
    """The column `ess2_<L>` of the longest length that the first model was measured at; None without attention."""
    if heads.empty:
        return None
    first = heads[heads["model"] == heads["model"].iloc[0]]
    lengths = [name for name in map(str, first) if name.startswith("ess2_") and name[5:].isdecimal()]
    measured = [name for name in lengths if first[name].notna().any()]
    return max(measured, key=lambda name: int(name[5:]), default=None)


def models(run: Run) -> pd.DataFrame:
    """One row per model, in the order of the study: medians over heads, and the loss.

    `ess2_<L>`, `growth`, `cov` are medians over heads. `nll_<L>` (nats/token) is the mean over documents of the
    mean loss; `nll_<L>_diff` with `_low` and `_high` is its difference to the run's first model, paired by
    document.
    """
    wide = heads(run)
    plotted = [name for name in map(str, wide) if name in ("growth", "cov") or _is_length(name)]
    rows = wide.groupby("model", observed=True)[plotted].median()
    if "nll" in run.tables:
        rows = rows.join(_losses(_plain(run.nll), run.models[0]), how="outer")
    return rows.reindex(run.models).rename_axis("model").reset_index()


def compared(heads: pd.DataFrame, name: str, model: str, baseline: str) -> pd.DataFrame:
    """Rows layer, head, kv_group, `value` of the statistic under `model`, `baseline`, and its `change`.

    The change is the ratio where the statistic is logarithmic, else the difference. Heads that both models have.
    """
    place = HEAD[1:]
    new, old = (heads[heads["model"] == label].set_index(place)[name].astype("float64") for label in (model, baseline))
    both = pd.DataFrame({"value": new, "baseline": old}).dropna(how="all")
    ratio = both["value"] / both["baseline"].where(both["baseline"] > 0)
    both["change"] = ratio if statistic(name).log_scale else both["value"] - both["baseline"]
    return both.reset_index()


def beside(heads: pd.DataFrame, name: str, model: str, baseline: str | None = None) -> pd.DataFrame:
    """The heads of `model` in a row each, `name` with its interval first, every other measured statistic after it.

    With a `baseline`, `baseline` and `change` of `compared` follow the value. Columns without a value are left out.
    """
    place = HEAD[1:]
    mine = heads[heads["model"] == model].drop(columns="model")
    mine = mine.dropna(axis=1, how="all") if len(mine) else mine
    ends = [column for column in (f"{name}_low", f"{name}_high") if column in mine]
    rest = [column for column in mine if column not in (*place, name, *ends)]
    if baseline is None or baseline == model:
        return mine[[*place, name, *ends, *rest]]
    both = compared(heads, name, model, baseline)[[*place, "baseline", "change"]]
    return mine.merge(both, on=place, how="left")[[*place, name, "baseline", "change", *ends, *rest]]


def bootstrap(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """95 % percentile bootstrap [2, units] of the mean of `values` [units, documents]; NaN below two documents.

    All units share the draws, so intervals of units measured on the same documents can be compared.
    """
    units, documents = values.shape
    if documents < 2:
        return np.full((2, units), np.nan)
    draws = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), size=DRAWS)
    interval: npt.NDArray[np.float64] = np.quantile(values @ draws.T / documents, [0.025, 0.975], axis=1)
    return interval


def _is_length(name: str) -> bool:
    return name.startswith("ess2_") and name[5:].isdecimal()


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Labels as strings, so that groups of absent labels do not appear, and float64 for sums."""
    kinds = {name: "float64" for name in frame if frame[name].dtype == "float32"}
    labels = {name: "str" for name in frame if frame[name].dtype == "category"}
    return frame.astype({**kinds, **labels})


def _longest(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["context_length"] == frame.groupby("model")["context_length"].transform("max")]


def _attention(frame: pd.DataFrame) -> pd.DataFrame:
    top = frame.groupby([*HEAD, "context_length"])["visible"].transform("max")
    far = frame[last_octave(frame["visible"], top)]
    names = ["log_ess2", "ess1", "max_weight", "sink_mass", "local_mass", "mean_distance"]
    unit = [*HEAD, "context_length", "doc"]
    total = far[unit].join(far[names].mul(far["rows"], axis=0)).groupby(unit).sum()
    means = total.div(far.groupby(unit)["rows"].sum(), axis=0)
    columns: list[pd.DataFrame] = [
        _with_interval(block.droplevel("context_length"), f"ess2_{length}").apply(np.exp)
        for length, block in means["log_ess2"].groupby(level="context_length")
    ]
    columns.append(_with_interval(_growth(_longest(frame)), "growth"))
    columns.append(_longest(means.reset_index()).groupby(HEAD)[names[1:]].mean())
    return pd.concat(columns, axis=1)


def _growth(frame: pd.DataFrame) -> pd.Series:
    """Least-squares slope of log_ess2 on ln n per head and document; NaN where the bins span less than an octave."""
    unit = [*HEAD, "doc"]
    n = middle(frame["visible"], frame["context_length"])
    points = frame.assign(x=np.log(n))[n >= GROWTH_FROM]
    groups = points.groupby(unit)
    points["x"] -= groups["x"].transform("mean")
    points["xy"] = points["x"] * points["log_ess2"]
    points["xx"] = points["x"] ** 2
    sums = points.groupby(unit)[["xy", "xx"]].sum()
    slopes: pd.Series = sums["xy"] / sums["xx"]
    return slopes[groups.size() >= PER_OCTAVE].reindex(frame.groupby(unit).size().index)


def _pairs(frame: pd.DataFrame) -> pd.DataFrame:
    frame = _longest(frame)
    unit = [*HEAD, "doc"]
    groups = frame.groupby(unit)[["mean_abs", "rms", "norm_product"]]
    cov = groups.std(ddof=0) / groups.mean()
    turning = frame[frame["theta"] > 0]
    turning = turning.assign(weighted=turning["mean_abs"] * np.log(turning["theta"]))
    sums = turning.groupby(unit)[["weighted", "mean_abs"]].sum()
    others = cov[["rms", "norm_product"]].set_axis(["cov_rms", "cov_norm"], axis=1)
    others["weighted_log_theta"] = sums["weighted"] / sums["mean_abs"]
    return pd.concat([_with_interval(cov["mean_abs"], "cov"), others.groupby(HEAD).mean()], axis=1)


def _scales(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.set_index(HEAD)[["tau", "gamma", "logit_scale", "effective_base", "mean_log_theta"]]


def retrieval_rows(run: Run) -> pd.DataFrame:
    """The `retrieval` table with `success` and `trial`, the number of the trial."""
    trials = _plain(run.needles)
    trials["trial"] = np.arange(len(trials))
    keys = TABLES["needles"].keys
    return _plain(run.retrieval).merge(trials[[*keys, "success", "trial"]], on=keys)


def _retrieval(rows: pd.DataFrame) -> pd.DataFrame:
    good = rows[rows["success"]]
    strict = good[good["mode"] == "strict"]
    columns: list[pd.DataFrame | pd.Series] = [
        rows[rows["mode"] == "absent"].groupby(HEAD)["score"].mean().rename("retrieval_control")
    ]
    if len(strict):
        by_trial = strict.set_index([*HEAD, "trial"])["score"].rename_axis(index={"trial": "doc"})
        columns = [_with_interval(by_trial, "retrieval"), strict.groupby(HEAD)["mass"].mean(), *columns]
    if len(counted := good[good["mode"] == "wu"]):
        columns.append(counted.groupby(HEAD)["score"].mean().rename("retrieval_wu"))
    return pd.concat(columns, axis=1).rename(columns={"mass": "retrieval_mass"})


def chosen_influence(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the `influence` table at each model's longest length, each unit by the method that knows it best: exact
    where it was evaluated, else the estimate of highest order, damped."""
    frame = with_damped(_longest(_plain(frame)))
    rank = frame["method"].map(ORDER.index)
    unit = [frame[name] for name in [*SWEEP, "layer", "kv_group", "head"]]
    return frame[rank == rank.groupby(unit).transform("min")]


def _influence(frame: pd.DataFrame, run: Run) -> pd.DataFrame:
    """influence_<component> of every query head; a group's influence is that of each of its heads."""
    frame = chosen_influence(frame)
    order = {"init": 0, "base": 1}
    first = frame["target"].map(order).fillna(0).groupby([frame["model"], frame["component"]]).transform("min")
    frame = frame[frame["target"].map(order).fillna(0) == first]
    members = []
    for model in run.manifest["models"]:
        geometry = model["geometry"]
        heads = np.arange(geometry["heads"])
        group = heads // (geometry["heads"] // geometry["kv_groups"])
        members.append(pd.DataFrame({"model": model["label"], "kv_group": group, "member": heads}))
    rows = frame.merge(pd.concat(members), on=["model", "kv_group"])
    rows = rows[(rows["head"] < 0) | (rows["head"] == rows["member"])].assign(head=lambda f: f["member"])
    return pd.concat(
        [
            _with_interval(block.set_index([*HEAD, "doc"])["delta_nll"], f"influence_{component}")
            for component, block in rows.groupby("component")
        ],
        axis=1,
    )


def _losses(frame: pd.DataFrame, first: str) -> pd.DataFrame:
    sums = frame.assign(nll=frame["nll"] * frame["tokens"])
    sums = sums.groupby(["model", "context_length", "doc"])[["nll", "tokens"]].sum()
    losses: pd.Series = sums["nll"] / sums["tokens"]
    columns: list[pd.DataFrame | pd.Series] = []
    for length, block in losses.groupby(level="context_length"):
        block = block.droplevel("context_length")
        columns.append(block.groupby(level="model").mean().rename(f"nll_{length}"))
        if first in block.index.get_level_values("model"):
            paired = block.sub(block.loc[first], level="doc").dropna()
            columns.append(_with_interval(paired, f"nll_{length}_diff"))
    return pd.concat(columns, axis=1)


def _with_interval(values: pd.Series, name: str) -> pd.DataFrame:
    """Mean over documents of `values` (the last index level is doc) with its interval: name, name_low, name_high."""
    blocks = []
    for _, block in values.groupby(level="model"):
        table = block.unstack("doc")  # one block per model, whose heads all have the same documents
        numbers = table.to_numpy(dtype=np.float64)
        low, high = bootstrap(numbers)
        columns = {name: numbers.mean(axis=1), f"{name}_low": low, f"{name}_high": high}
        blocks.append(pd.DataFrame(columns, index=table.index))
    return pd.concat(blocks)

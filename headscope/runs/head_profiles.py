"""Profiles of heads: their roles by strength, and their statistics on a common scale, to find similar heads.

A profile holds every statistic of the per-head table (at its longest context length), logarithmic where the statistic
has a log scale, minus the mean and divided by the standard deviation over all heads of all models of the run [ours].
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.column_metadata import (
    heads_with_role,
    is_role_measured,
    is_statistic,
    measured_roles,
    parse_column,
    roles,
    statistic,
)
from headscope.runs.run import Run

KEYS = ["model", "layer", "head"]
MIN_MEASURED = 0.5
"""A statistic that fewer of the heads have is not part of the components."""
NO_ROLE = "no role"


@dataclass(frozen=True)
class HeadRole:
    """A role that a head has under a model: the statistic that decides it, its value there, and the head's rank among
    the model's heads by `ordered_by`."""

    name: str
    statistic_name: str
    value: float
    rank: int
    heads: int
    ordered_by: str

    @property
    def rank_text(self) -> str:
        """The rank, with the statistic if it is not the one that decides."""
        by = "" if self.ordered_by == self.statistic_name else f" by {statistic(self.ordered_by).label}"
        return f"rank {self.rank} of {self.heads} heads{by}"


def head_roles(run: Run, model: str, layer: int, head: int) -> list[HeadRole]:
    """The roles of a head under a model, the one in which it ranks highest among the model's heads first.

    Of two roles of the same rank, the one of the larger statistic comes first.
    """
    return run.derived(_roles_by_head, model).get((layer, head), [])


def _roles_by_head(run: Run, model: str) -> dict[tuple[int, int], list[HeadRole]]:
    roles_by_head: dict[tuple[int, int], list[tuple[HeadRole, float]]] = {}
    heads = run.heads[run.heads["model"] == model]
    for name in measured_roles(heads):
        role = roles()[name]
        if not role.order_by:
            continue
        values = heads[role.order_by].astype("float64")
        ranks, measured = values.rank(ascending=role.ascending, method="min"), int(values.notna().sum())
        with_role = heads_with_role(heads, name)
        decides = role.order_by if role.criterion is None else role.criterion(heads)
        members = heads.loc[with_role, ["layer", "head", decides]].assign(by=values, rank=ranks)
        for layer, head, value, by, rank in members.itertuples(index=False, name=None):
            assigned_role = HeadRole(name, decides, value, int(rank), measured, role.order_by)
            roles_by_head.setdefault((layer, head), []).append((assigned_role, by))
    return {
        head: [role for role, _ in sorted(assigned, key=lambda entry: (entry[0].rank, -entry[1]))]
        for head, assigned in roles_by_head.items()
    }


def strongest_roles(run: Run) -> pd.Series:
    """The role in which each head ranks highest among the heads of its model, indexed like `run.heads`."""
    heads, best = run.heads, pd.DataFrame({NO_ROLE: np.inf}, index=run.heads.index)
    for name in measured_roles(heads):
        role = roles()[name]
        if role.order_by and is_role_measured(heads, name):
            ranks = heads.groupby("model", observed=True)[role.order_by].rank(ascending=role.ascending, method="min")
            # Of two roles of the same rank, the one of the larger statistic comes first.
            best[name] = ranks.where(heads_with_role(heads, name)) - heads[role.order_by].clip(-1, 1) / 10
    return best.idxmin(axis=1)


def head_profiles(run: Run) -> pd.DataFrame:
    """Standardised statistics of every head, indexed by (model, layer, head); NaN where one was not measured."""
    return run.derived(_compute_profiles)


def _compute_profiles(run: Run) -> pd.DataFrame:
    longest: dict[str, str] = {}
    for name in map(str, run.heads):
        if is_statistic(name) and not parse_column(name).is_difference:
            stem = parse_column(name).stem
            longest[stem] = max(longest.get(stem, name), name, key=lambda column: parse_column(column).length or 0)
    values = run.heads.set_index(KEYS)[[*longest.values()]].astype("float64")
    for column in longest.values():
        if statistic(column).log_scale:
            values[column] = np.log(values[column].where(values[column] > 0))
    values = values.where(np.isfinite(values))
    spread = values.std(ddof=0)
    standardised: pd.DataFrame = (values - values.mean()) / spread.where(spread > 1e-9)
    return standardised.dropna(axis=1, how="all")


def profile_distances(run: Run, model: str, layer: int, head: int) -> pd.Series:
    """Root mean square difference of every head's profile from that of one head, in standard deviations.

    Over the statistics that both have, indexed by (model, layer, head), nearest first, without the head itself.
    """
    profiles = head_profiles(run)
    if (model, layer, head) not in profiles.index:
        return pd.Series(dtype=float)
    row: Any = profiles.index.get_loc((model, layer, head))
    differences = profiles - profiles.iloc[row]
    distances: pd.Series = (differences**2).mean(axis=1).pow(0.5)
    distances.iloc[row] = np.nan
    return distances.dropna().sort_values(kind="stable")


@dataclass(frozen=True, eq=False)
class Components:
    """The first two principal components of the profiles.

    `coordinates` has the columns x and y, indexed by (model, layer, head); `shares` are the parts of the variance that
    the two explain; `loadings` [statistics, 2] the weight of each statistic in them.
    """

    coordinates: pd.DataFrame
    shares: npt.NDArray[np.float64]
    loadings: pd.DataFrame


def principal_components(run: Run) -> Components | None:
    """The components of the heads of all models, cached; None with fewer than two statistics."""
    return run.derived(_compute_components)


def _compute_components(run: Run) -> Components | None:
    profiles = head_profiles(run)
    profiles = profiles.loc[:, profiles.notna().mean() >= MIN_MEASURED]
    if profiles.shape[1] < 2 or len(profiles) < 3:
        return None
    values = profiles.fillna(0.0)  # 0 is the mean
    _, singular, axes = np.linalg.svd(values.to_numpy(), full_matrices=False)
    # The sign of an axis is arbitrary: its largest loading becomes positive.
    axes = axes[:2] * np.sign(axes[[0, 1], np.abs(axes[:2]).argmax(1)])[:, None]
    coordinates = pd.DataFrame(values.to_numpy() @ axes.T, profiles.index, ["x", "y"])
    return Components(coordinates, (singular**2 / (singular**2).sum())[:2], pd.DataFrame(axes.T, profiles.columns))

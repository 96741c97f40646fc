"""What the needle probe says of a head: its columns of the per-head table, and who is called a retrieval head."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.runs.means import HEAD_KEYS, plain, with_interval
from headscope.runs.roles import Role
from headscope.runs.statistics import Statistic
from headscope.runs.stored import Stored
from probes.needle.tables import NEEDLES

RETRIEVAL_HEAD = 0.1
"""Mean retrieval score above which a head is called a retrieval head (Wu et al. 2024)."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "retrieval": Statistic(
            "retrieval score",
            "",
            "mean share of the needle's scored tokens that the head copied (strict), over the trials that succeeded; "
            "missing where none did",
            formula="copied needle tokens / needle tokens",
            best="top retrieval head",
        ),
        "retrieval_mass": Statistic("needle mass", "", "mean weight on the needle at the answer steps, same trials"),
        "retrieval_wu": Statistic("retrieval score (wu)", "", "mean score as the public code of Wu et al. counts it"),
        "retrieval_control": Statistic("retrieval score, no needle", "", "mean strict score in the control trials"),
    }
)

ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "retrieval": Role(
            f"retrieval score above {RETRIEVAL_HEAD}, over needles",
            lambda heads: heads["retrieval"] > RETRIEVAL_HEAD,
            "retrieval",
        )
    }
)


def heads(run: Stored) -> pd.DataFrame | None:
    """Columns by (model, layer, head, kv_group), over successful trials: `retrieval` with its interval over trials,
    `retrieval_mass`, `retrieval_wu`; and over the trials without a needle `retrieval_control`."""
    if "retrieval" not in run.tables:
        return None
    rows = run.derived(retrieval_rows)
    good = rows[rows["success"]]
    strict = good[good["mode"] == "strict"]
    columns: list[pd.DataFrame | pd.Series] = [
        rows[rows["mode"] == "absent"].groupby(HEAD_KEYS)["score"].mean().rename("retrieval_control")
    ]
    if len(strict):
        by_trial = strict.set_index([*HEAD_KEYS, "trial"])["score"].rename_axis(index={"trial": "doc"})
        columns = [with_interval(by_trial, "retrieval", 0, 1), strict.groupby(HEAD_KEYS)["mass"].mean(), *columns]
    if len(counted := good[good["mode"] == "wu"]):
        columns.append(counted.groupby(HEAD_KEYS)["score"].mean().rename("retrieval_wu"))
    return pd.concat(columns, axis=1).rename(columns={"mass": "retrieval_mass"})


def retrieval_rows(run: Stored) -> pd.DataFrame:
    """The `retrieval` table with `success` and `trial`, the number of the trial."""
    trials = plain(run.table("needles"))
    trials["trial"] = np.arange(len(trials))
    return plain(run.table("retrieval")).merge(trials[[*NEEDLES.keys, "success", "trial"]], on=NEEDLES.keys)

"""Per-head statistics of the detectors probe, and the head roles that follow from them."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import pandas as pd

from headscope.rendering.blocks import Overview
from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Role, Statistic, exceeds
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables

ROLE_THRESHOLD = 0.5
"""Weight on one kind of key above which a head has that role: more than on all other keys together [ours]."""

KIND_COLUMNS: Mapping[str, str] = MappingProxyType(
    {kind: f"{kind}_token" for kind in ("previous", "current", "first", "duplicate", "induction")}
)
"""Kind of key -> column of the per-head table with its score."""

PROMPT_KIND_COLUMNS: Mapping[str, str] = MappingProxyType(
    {**{kind: f"prompt_{column}" for kind, column in KIND_COLUMNS.items()}, "own": "prompt_own_pattern"}
)
"""Kind of key -> column of the per-head table with its score in the user's prompts."""

TARGET_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "previous": "the previous token",
        "current": "the token itself",
        "first": "the first token",
        "duplicate": "an earlier copy of the token",
        "induction": "the token after an earlier copy",
    }
)
"""Kind of key -> what such a head attends to."""


ROLE_AREAS: Mapping[str, str] = MappingProxyType(
    {kind: kind if kind == "induction" else f"{kind}_token" for kind in TARGET_DESCRIPTIONS}
)
"""Kind of key -> the name of its role in questions and columns."""


def role_name(kind: str) -> str:
    """The role of heads that attend to this kind of key, such as "previous-token" or "induction"."""
    return ROLE_AREAS[kind].replace("_", "-")


PROMPT_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        **TARGET_DESCRIPTIONS,
        "duplicate": "all earlier copies of the token",
        "induction": "the tokens after all earlier copies",
        "own": "the keys of your own pattern",
    }
)
"""Kind of key -> what a head attends to in a prompt, in which a token may have several copies."""

_CONDITIONS = "on a repeated random token sequence, at the longest length"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "previous_token": Statistic(
            "previous-token score", "", f"mean weight on the previous token, {_CONDITIONS}", formula="mean αᵢ,ᵢ₋₁"
        ),
        "current_token": Statistic("current-token score", "", f"mean weight on the token itself, {_CONDITIONS}"),
        "first_token": Statistic(
            "first-token score", "", f"mean weight on the first token of the context, {_CONDITIONS}"
        ),
        "duplicate_token": Statistic(
            "duplicate-token score",
            "",
            "mean weight of query rows in the second half on the same token in the first half, "
            f"{_CONDITIONS}; missing if no row sees that far back",
            formula="mean αᵢ,ᵢ₋ₘ over the second m tokens",
        ),
        "induction_token": Statistic(
            "induction score",
            "",
            "mean weight of query rows in the second half on the token after the same token in the first half, "
            f"{_CONDITIONS}; missing if no row sees that far back",
            formula="mean αᵢ,ᵢ₋ₘ₊₁ over the second m tokens",
        ),
        **{
            PROMPT_KIND_COLUMNS[kind]: Statistic(
                f"{'own-pattern' if kind == 'own' else role_name(kind)} score, prompts",
                "",
                f"mean weight on {target}, in your own prompts, over the query rows that see such a key; "
                "with exclude_first the weight on these keys over all weight outside the first token, both summed over "
                "these rows",
            )
            for kind, target in PROMPT_TARGETS.items()
        },
        **{
            f"{ROLE_AREAS[kind]}_heads": Statistic(
                f"{role_name(kind)} heads",
                "",
                f"number of heads with more than half of their weight on {target}, {_CONDITIONS}",
                number_format=".0f",
            )
            for kind, target in TARGET_DESCRIPTIONS.items()
        },
    }
)


def _exceeds_threshold(column: str, heads: pd.DataFrame) -> pd.Series:
    mask: pd.Series = exceeds(heads[column], ROLE_THRESHOLD)
    return mask


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        role_name(name): Role(
            f"more than half of the weight on {target}, {_CONDITIONS}",
            partial(_exceeds_threshold, KIND_COLUMNS[name]),
            KIND_COLUMNS[name],
            threshold=ROLE_THRESHOLD,
        )
        for name, target in TARGET_DESCRIPTIONS.items()
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """One column per kind by (model, layer, head, kv_group): on random tokens at the longest length, and in prompts.

    A score is the mean over sequences or prompts, with the confidence interval over them.
    """
    parts: list[pd.DataFrame] = []
    if "detectors" in run.tables:
        parts += _mean_scores(run.derived(longest_rows).rename(columns={"sequence": "doc"}), KIND_COLUMNS)
    if "prompt_detectors" in run.tables:
        rows = plain_types(run.table("prompt_detectors")).rename(columns={"prompt": "doc"})
        parts += _mean_scores(rows, PROMPT_KIND_COLUMNS)
    return pd.concat(parts, axis=1) if parts else None


def _mean_scores(rows: pd.DataFrame, columns: Mapping[str, str]) -> list[pd.DataFrame]:
    scores = rows.set_index([*HEAD_KEYS, "doc"])["score"]
    by_kind = {column: scores[(rows["kind"] == kind).to_numpy()] for kind, column in columns.items()}
    return [mean_with_interval(values, column, 0, 1) for column, values in by_kind.items() if len(values)]


def model_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by model: the number of heads with the role of each kind, such as `induction_heads`."""
    if "detectors" not in run.tables:
        return None
    heads = head_statistics(run)
    assert heads is not None
    counts = {
        f"{ROLE_AREAS[kind]}_heads": exceeds(heads[name], ROLE_THRESHOLD)
        for kind, name in KIND_COLUMNS.items()
        if name in heads
    }
    return pd.DataFrame(counts).groupby("model").sum().astype("float64")


def longest_rows(run: RunTables) -> pd.DataFrame:
    """The rows of the table `detectors` at the longest length of each model."""
    return rows_at_longest_length(plain_types(run.table("detectors")))


def overview(run: Run) -> Overview | None:
    """Per model: the number of heads with each role, and the top induction head."""
    if "detectors" not in run.tables:
        return None
    records = [_overview_record(run, label) for label in run.models if (run.table("detectors")["model"] == label).any()]
    return Overview("detectors", pd.DataFrame(records))


def _overview_record(run: Run, model: str) -> dict[str, object]:
    heads = run.heads[run.heads["model"] == model]
    counts = {
        f"{kind} > {ROLE_THRESHOLD:g}": int((exceeds(heads[name], ROLE_THRESHOLD)).sum())
        for kind, name in KIND_COLUMNS.items()
        if name in heads
    }
    name, top = KIND_COLUMNS["induction"], "–"
    by_score = heads.dropna(subset=[name]).sort_values(name) if name in heads else heads[:0]
    if len(by_score):
        best = by_score.iloc[-1]
        top = f"L{best['layer']} H{best['head']}: {best[name]:.2f}"
    return {"model": model, **counts, "top induction head": top}

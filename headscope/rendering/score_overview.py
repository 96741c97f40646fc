"""The `--json` data of scores of heads: how many heads have each role, and which lead."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from headscope.base.heads import format_head
from headscope.rendering.blocks import Overview
from headscope.results.scores import HasScores, Score
from headscope.runs.column_metadata import exceeds
from headscope.runs.run import Run


def score_overview(probe: HasScores, run: Run) -> Overview | None:
    """Per model: the number of heads with each role, and the top head of every role that is a headline."""
    with_role = [score for score in probe.scores() if score.role]
    records = []
    for label in run.models:
        heads = run.heads[run.heads["model"] == label]
        measured = [score for score in with_role if score.column in heads and heads[score.column].notna().any()]
        if measured:
            records.append({"model": label, **_overview_record(measured, heads)})
    return Overview(probe.name, pd.DataFrame(records)) if records else None


def _overview_record(scores: Sequence[Score], heads: pd.DataFrame) -> dict[str, Any]:
    roles = {score.column: score.role for score in scores if score.role}
    record: dict[str, Any] = {
        f"{role.name} heads": int(exceeds(heads[column], role.threshold).sum()) for column, role in roles.items()
    }
    for column, role in roles.items():
        if role.level == "headline":
            best = heads.nlargest(1, column).iloc[0]
            record[f"top {role.name} head"] = f"{format_head(best['layer'], best['head'])}: {best[column]:.2f}"
    return record

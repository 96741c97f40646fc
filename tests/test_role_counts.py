"""Results, cards, roles and the app count the same heads, also where a score lies on the threshold of a role."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.fake_runs import fake_run

from headscope.results.check_file import Check
from headscope.results.checks import run_checks
from headscope.results.collection import all_results
from headscope.runs.column_metadata import exceeds, falls_below, heads_with_role, roles
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.detectors.declaration import SCORES
from probes.needle.analysis import retrieval_summary, scores_by_group
from probes.needle.scores import RETRIEVAL_THRESHOLD
from probes.weights.results import _value_results as value_results

EXAMPLES = Path(__file__).parents[1] / "headscope" / "examples"
RUNS = sorted(path.parent for path in EXAMPLES.glob("2*/run.json"))
ROLE_COLUMNS = {"retrieval": "retrieval"} | {score.role.name: score.column for score in SCORES if score.role}
"""Role -> its statistic."""


@pytest.mark.parametrize("value", [0.1, np.float32(0.1), np.nextafter(0.1, 1), np.nextafter(0.1, 0)])
def test_a_value_on_the_threshold_neither_exceeds_it_nor_falls_below_it(value: float) -> None:
    """Means of float32 values that are exactly 0.1 are 0.1 give or take one bit, depending on the order of the sum."""
    values = pd.Series([value, 0.1001, 0.0999])
    assert exceeds(values, 0.1).tolist() == [False, True, False]
    assert falls_below(values, 0.1).tolist() == [False, False, True]
    assert not exceeds(value, 0.1)
    assert not falls_below(value, 0.1)


def test_every_question_about_a_sink_share_on_its_threshold_has_one_answer() -> None:
    shares = np.array([np.nextafter(np.float32(0.5), np.float32(1)), 0.5, 0.51, 0.49], np.float32)
    columns = dict.fromkeys(("sink_mass", "key_sink_mass", "value_sink_mass"), shares)
    lengths = {"key_effective_length": 1.0, "value_effective_length": 1.0, "ess2_64": 20.0}
    heads = pd.DataFrame({"model": "base", "layer": 0, "head": range(4), **columns, **lengths})
    run = fake_run([], ["base"], heads=heads)
    run.manifest["models"][0]["geometry"] = {"numbers": [0], "windows": [None]}
    run.table = {"value_attention": pd.DataFrame({"context_length": [64]})}.__getitem__
    (sinks,) = value_results(run, "base", heads)
    assert heads_with_role(heads, "sink").tolist() == [False, False, True, False]
    assert (sinks.value, sinks.n) == (1, 1)
    for bound, count in (({"count_above": 0.5}, 1), ({"count_below": 0.5}, 1), ({"count_above": 0.49}, 3)):
        check = Check.model_validate({"statistic": "sink_mass", "at_least": 0, **bound})
        assert [result.value for result in run_checks(run, [check])] == [count]


@pytest.mark.exhaustive(sample=4)
@pytest.mark.slow
@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name[17:])
def test_every_place_counts_the_heads_of_a_role_alike(folder: Path) -> None:
    run = Run.open(folder)
    results = all_results(run)
    for model in default_models(run):
        heads = run.heads[run.heads["model"] == model].reset_index(drop=True)
        for role, column in ROLE_COLUMNS.items():
            if column not in heads or heads[column].isna().all():
                continue
            count = int(heads_with_role(heads, role).sum())
            rounded = heads.assign(**{column: heads[column].astype("float32")})
            assert int(heads_with_role(rounded, role).sum()) == count, "the same of stored values"
            question = f"{role.replace('-', '_')}.heads"
            counts = [result.value for result in results if (result.model, result.question) == (model, question)]
            assert counts == ([count] if f"{column}_low" in heads else [])
        if "retrieval" in heads and "needles" in run.tables and heads["retrieval"].notna().any():
            count = int(heads_with_role(heads, "retrieval").sum())
            summary = retrieval_summary(run).query("model == @model and mode == 'strict'").iloc[0]
            assert round(summary["above"] * heads["retrieval"].notna().sum()) == count
            groups = scores_by_group(run.heads).query("model == @model")
            with_role = heads[heads_with_role(heads, "retrieval")][["layer", "kv_group"]].drop_duplicates()
            assert int(exceeds(groups["max"], RETRIEVAL_THRESHOLD).sum()) == len(with_role)
    assert "retrieval" in roles()

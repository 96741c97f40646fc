"""The shipped study of sparse selections: small, and quoted by docs/sparsity.md."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import headscope as hs
from headscope.cli.flags import EXAMPLES

PAGE = (Path(__file__).parents[1] / "docs" / "sparsity.md").read_text(encoding="utf-8")
MODELS = ("base", "yarn", "adarope")
(RUN,) = EXAMPLES.glob("*-sparsity-*")


def cells(row: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def quoted(values: Any, number_format: str) -> str:
    """Mean and t interval, computed by scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():{number_format}} ({low:{number_format}} to {high:{number_format}})"


def test_the_run_has_at_most_a_megabyte_and_a_half() -> None:
    assert sum(file.stat().st_size for file in RUN.iterdir()) < 1.5e6


@pytest.mark.parametrize("length", [2048, 8192])
def test_the_page_has_the_keys_that_the_median_head_needs(length: int) -> None:
    rows: Any = hs.Run.open(RUN).table("sparse_keys")
    rows = rows[(rows["rows_of"] == "text") & (rows["context_length"] == length)]
    medians = rows.groupby(["model", "doc"], observed=True)["keys_95"].median().unstack("model")
    assert cells(f"keys for 95 % of the mass, median head, {length:,} tokens") == [
        f"{medians[m].mean():.0f}" for m in MODELS
    ]
    index = [line for line in PAGE.splitlines() if line.startswith("| the same minus base")][length > 2048]
    found = [cell.strip() for cell in index.strip("|").split("|")][2:]
    sign = "+.0f" if length > 2048 else ".0f"
    assert found == [quoted(medians[model] - medians["base"], sign) for model in MODELS[1:]]


def test_the_page_has_the_recall_of_rules_and_what_shared_sets_lose() -> None:
    rows: Any = hs.Run.open(RUN).table("sparse_rows")
    rows = rows[(rows["rows_of"] == "text") & (rows["context_length"] == 8192)]
    recall = rows.groupby(["model", "doc", "rule"], observed=True)["recall"].mean().unstack("rule").astype(np.float64)
    for rule in ("top:256", "vertical-slash:256:256", "streaming:4:252", "block-mean:64:5"):
        name = "recall of `top:256`, 8,192 tokens" if rule == "top:256" else f"recall of `{rule}`"
        assert cells(name) == [f"{recall.loc[model, rule].mean():.3f}" for model in MODELS]
    for rule, unit in (("group-top:256", "KV group"), ("layer-top:256", "layer")):
        lost = [recall.loc[model, "top:256"] - recall.loc[model, rule] for model in MODELS]
        assert cells(f"recall lost to one set per {unit} (`{rule}`)") == [quoted(values, ".3f") for values in lost]

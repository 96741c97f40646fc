"""Table of the evaluate probe: a score with its standard error by model, task, length and metric; and synthetic
rows."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.columns import LENGTH, MODEL, Column, Table, key
from headscope.runs.synthetic import Sizes

TASKS = Table(
    "tasks",
    "scores of each model on tasks of the lm-evaluation-harness",
    (
        MODEL,
        key("task", "label", "", "name of the task in the harness", None),
        LENGTH,
        key(
            "metric",
            "label",
            "",
            "name of the metric in the harness; match, for tasks generated to a context length: fraction of the "
            "expected strings in the answer, ignoring case",
            None,
        ),
        key("filter", "label", "", "filter that the harness applied to an answer before scoring it", None),
        Column("score", "value", "", "the metric over all documents, in the unit of the metric"),
        Column(
            "stderr",
            "value",
            "",
            "standard error of the score over documents: from the harness or, if it has none, from 1000 seeded "
            "bootstrap samples [ours]",
            0,
        ),
        Column("documents", "count", "documents", "scored documents", 1),
        Column("higher_is_better", "flag", "", "whether a higher score is better"),
    ),
)

TABLES = (TASKS,)


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell of random scores that fall with the length and from model to model.

    Two tasks have every length, and one with two metrics has the longest.
    """
    rng = np.random.default_rng([sizes.seed, model_index])
    keys = [(task, length, "match") for task in ("niah_single_1", "ruler_vt") for length in sizes.lengths]
    keys += [("arc_easy", max(sizes.lengths), metric) for metric in ("acc", "acc_norm")]
    table = pd.DataFrame(keys, columns=["task", "context_length", "metric"])
    mean = 0.8 - 0.1 * model_index - 0.3 * table["context_length"] / max(sizes.lengths)
    table["score"] = (mean + 0.05 * rng.random(len(table))).clip(0, 1)
    table["stderr"] = np.sqrt(table["score"] * (1 - table["score"]) / 100)
    yield f"{model}: tasks", {"tasks": table.assign(model=model, filter="none", documents=100, higher_is_better=True)}

"""Runs as far as comparisons and checks look at them: results, models, and digests of documents and prompts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.aggregation import confidence_interval

DOCUMENTS = [f"doc{index}" for index in range(6)]
QUESTIONS = {
    question.name: question
    for question in (
        Question(name="x.loss", sentence="the loss is {value}", samples="documents", better="lower", topic="X"),
        Question(name="x.share", sentence="the share is {value}", samples="trials", topic="X"),
    )
}


def fake_run(results: list[Result], models: list[str], digest: str = "same", heads: pd.DataFrame | None = None) -> Any:
    """A run with these results, as far as a comparison looks at it."""
    manifest = {
        "models": [{"label": label, "documents_sha256": dict.fromkeys(DOCUMENTS, digest)} for label in models],
        "inputs": {f"the prompt pairs 'ioi' of '{label}'": digest for label in models},
    }
    table = pd.DataFrame(columns=["model", "layer", "head"]) if heads is None else heads
    run = SimpleNamespace(name="run", models=models, manifest=manifest, heads=table, results=results)
    run.parts = [run]
    return run


def mean_of(values: list[float], question: str = "x.loss", names: list[str] = DOCUMENTS, **changes: Any) -> Result:
    (low,), (high,) = confidence_interval(np.array(values)[None])
    by_sample = dict(zip(names, values, strict=True))
    numbers = {"value": float(np.mean(values)), "low": float(low), "high": float(high), "n": len(values)}
    return Result(**{"question": question, "model": "base", "by_sample": by_sample, **numbers, **changes})


BEFORE, AFTER = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.2, 2.1, 3.2, 4.1, 5.2, 6.1]

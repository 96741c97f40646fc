"""Results about the answers of unchanged models to prompts."""

from typing import Any

import pandas as pd

from headscope.results.result import Result
from headscope.results.samples import share_result


def answered_result(
    question: str, criterion: str, is_answered: pd.Series, unanswered: int, doubt: str, **fields: Any
) -> Result:
    """The share of prompts (index) whose answer the unchanged model gives; means include `unanswered` others.

    The model gives an answer by the `criterion`. `doubt` is what may be exchanged if it gives less than half of them.
    """
    details = {
        "answer_criterion": criterion,
        "unanswered": unanswered or None,
        "doubt": doubt if is_answered.mean() < 0.5 else "",
    }
    return share_result(question, is_answered, details=details, **fields)

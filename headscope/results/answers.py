"""Results about the answers of unchanged models to prompts."""

from typing import Any

import pandas as pd

from headscope.prompts.answers import ANSWER_CRITERIA
from headscope.results.result import Result
from headscope.results.samples import share_result


def answered_result(
    question: str, metric: str, is_answered: pd.Series, unanswered: int, doubt: str, **fields: Any
) -> Result:
    """The share of prompts (index) whose answer the unchanged model gives; means include `unanswered` others.

    `doubt` is what may be exchanged if less than half of the answers have a larger logit than the wrong answer.
    """
    details = {
        "answer_criterion": ANSWER_CRITERIA[metric],
        "unanswered": unanswered or None,
        "doubt": doubt if metric == "logit_diff" and is_answered.mean() < 0.5 else "",
    }
    return share_result(question, is_answered, details=details, **fields)

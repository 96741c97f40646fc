"""Results about the answers of unchanged models to prompts."""

from typing import Any

import pandas as pd

from headscope.prompts.answers import ANSWER_CRITERIA, gives_answer
from headscope.results.result import Result
from headscope.results.samples import share_result


def answered_result(question: str, metric: str, values: pd.Series, doubt: str, **fields: Any) -> Result:
    """The share of prompts whose answer the unchanged model gives, from its metric by prompt.

    `doubt` is what may be exchanged if less than half of the answers have a larger logit than the wrong answer.
    """
    is_answered = pd.Series(gives_answer(metric, values.to_numpy()), values.index)
    details = {
        "answer_criterion": ANSWER_CRITERIA[metric],
        "unanswered": int((~is_answered).sum()) or None,
        "doubt": doubt if metric == "logit_diff" and is_answered.mean() < 0.5 else "",
    }
    return share_result(question, is_answered, details=details, **fields)

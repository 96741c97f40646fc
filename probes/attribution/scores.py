"""The scores of direct logit attribution: what each head adds to the logit of the next token, and of answers."""

import pandas as pd

from headscope.results.questions import Question
from headscope.results.scores import Score
from headscope.runs.aggregation import HEAD_KEYS, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.attribution.answers.analysis import heads_at_answer
from probes.attribution.answers.schema import ANSWER_HEADS
from probes.attribution.schema import ATTRIBUTION, mean_over_positions


def next_token_rows(run: RunTables) -> pd.DataFrame | None:
    """The mean contribution over positions of each head in each document, at the longest length."""
    if ATTRIBUTION.name not in run.tables:
        return None
    rows = rows_at_longest_length(plain_types(run.table(ATTRIBUTION.name)))
    return mean_over_positions(rows, *HEAD_KEYS, "context_length", "doc").rename("value").reset_index()


def answer_rows(run: RunTables) -> pd.DataFrame | None:
    """The contribution of each head in the last row of each pair that counts."""
    if ANSWER_HEADS.name not in run.tables:
        return None
    rows = run.derived(heads_at_answer)
    return rows.assign(doc=rows["prompts"] + "/" + rows["pair"], value=rows["contribution"])


NEXT_TOKEN = Score(
    column="next_token_attribution",
    statistic=Statistic(
        "direct logit attribution (next token)",
        "logits",
        "what the head adds directly to the logit of the next token, minus the mean over the vocabulary, averaged "
        "over positions at the longest length; negative if the head lowers the logit",
        formula="(z_h W_h) · g ∘ (U_y − mean U) / scale of the final norm",
        number_format="+.3f",
    ),
    rows=next_token_rows,
    extremes=Question(
        name="attribution.extreme",
        sentence="In {model}, {unit} has the {which} direct logit attribution of the next token: {value}",
        headline="{which:capital} direct logit attribution: {unit}, {value}",
        number="+.3f",
        value_unit="logits",
        samples="documents",
        level="headline",
    ),
    is_ranked=True,
    heading="Contribution of each head to the next token's logit",
    caption="Direct contribution to the logit of the next token, minus the mean over the vocabulary.",
)
ANSWER = Score(
    column="answer_attribution",
    statistic=Statistic(
        "direct logit attribution (answer)",
        "logits",
        "what the head adds directly to the logit of the answer minus that of the wrong answer, in the last row of the "
        "prompt, mean over the pairs of all sets that count in every model (is_counted); negative if the head favours "
        "the wrong answer",
        formula="(z_h W_h) · g ∘ (U_answer − U_wrong) / scale of the final norm",
        number_format="+.3f",
    ),
    rows=answer_rows,
    extremes=Question(
        name="attribution.answer_extreme",
        sentence="In {model}, {prompts}: {unit} has the {which} direct logit attribution of the answer: {value}",
        headline="{prompts}: {which} direct logit attribution of the answer: {unit}, {value}",
        number="+.3f",
        value_unit="logits",
        samples="pairs",
        level="headline",
    ),
    results_by="prompts",
    is_ranked=True,
    heading="What each head adds to the answer",
    caption="Direct contribution to the answer in the last row of the prompt, mean over pairs.",
)
SCORES = (NEXT_TOKEN, ANSWER)

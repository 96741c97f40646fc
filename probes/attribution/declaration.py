"""Options, stored tables, scores and questions of the attribution probe."""

from collections.abc import Mapping
from typing import Any, Self

import pandas as pd
from pydantic import Field, model_validator

from headscope.errors import OptionError
from headscope.prompts.pair_sets import SETS_OF_ANY_LENGTH
from headscope.results.answers import answer_questions
from headscope.results.questions import Question
from headscope.results.scores import Score
from headscope.runs.aggregation import HEAD_KEYS, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.run_tables import RunTables
from headscope.study.answer_options import PromptSetOptions
from headscope.study.config import MAX_PROMPT_TOKENS, Lengths, PromptOptions
from headscope.study.option_rules import Excludes, Needs
from probes.attribution.answers import declaration as answers
from probes.attribution.answers.declaration import ANSWER_HEADS
from probes.attribution.answers.results import heads_at_answer

DEFAULT_PROMPT_LENGTH = 128
"""Tokens of a prompt of the sets induction and needle."""


class AttributionOptions(PromptOptions, PromptSetOptions):
    """What each part adds directly to the logit of the next token, or of an answer."""

    option_rules = (
        Excludes("prompt prompt_file answer wrong", "pairs", "pairs have prompts and answers of their own"),
        Needs("answer", "prompt prompt_file", "a text that it follows; {pairs} have answers of their own"),
        Needs("wrong", "answer"),
    )

    lengths: Lengths = Field(
        default=[2048],
        description="context lengths in tokens; with pairs one length, of a prompt of the sets induction and needle, "
        f"by default {DEFAULT_PROMPT_LENGTH}",
    )
    answer: str | None = Field(
        None,
        min_length=1,
        description="token after the prompt whose logit is attributed in every row, with its leading space; default: "
        "the next token of each row",
    )
    wrong: str | None = Field(
        None,
        min_length=1,
        description="wrong answer, whose logit is subtracted; default: the mean logit of the vocabulary",
    )

    @classmethod
    def replacement_of_texts(cls, values: Mapping[str, Any]) -> str:
        pairs = values.get("pairs") or []
        is_replaced = pairs and "needle" not in pairs  # needles are hidden in the documents
        return "prompt pairs" if is_replaced else super().replacement_of_texts(values)

    @property
    def has_answers(self) -> bool:
        """Whether the logits of answers are attributed, not those of the next tokens."""
        return self.answer is not None or self.pairs is not None

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt of the sets induction and needle."""
        return self.lengths[0] if "lengths" in self.model_fields_set else DEFAULT_PROMPT_LENGTH

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        if self.pairs is None or "lengths" not in self.model_fields_set:
            return self
        takes_length = not {*SETS_OF_ANY_LENGTH}.isdisjoint(self.pairs)
        if not takes_length or len(self.lengths) > 1 or self.prompt_length > MAX_PROMPT_TOKENS:
            raise OptionError(
                "{lengths} {value} and {pairs} {sets} cannot be combined: induction and needle take one length of at "
                "most {most} tokens, and other pairs none. Change or remove {lengths}",
                value=",".join(map(str, self.lengths)),
                sets=",".join(self.pairs),
                most=MAX_PROMPT_TOKENS,
            )
        return self


POSITION = key("position", "index32", "tokens", "last predicted token of the bin; of a prompt every token")
CONTRIBUTION_MEANING = (
    "minus the mean over the vocabulary, which changes no probability; norms are frozen at their observed scale, and a "
    "final soft cap is linearised at the observed logits"
)
TOKENS = Column("tokens", "count", "tokens", "predicted tokens in the bin", 1)

ATTRIBUTION = Table(
    "attribution",
    "what each head adds directly to the logit of the next token, by position",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        POSITION,
        Column(
            "contribution",
            "value",
            "logits",
            f"mean contribution to the next token's logit over the bin; {CONTRIBUTION_MEANING}",
        ),
        TOKENS,
    ),
)

ATTRIBUTION_PARTS = Table(
    "attribution_parts",
    "all terms of the next token's logit, the heads of a layer summed, by position",
    (
        MODEL,
        LENGTH,
        DOC,
        key(
            "part",
            "label",
            "",
            "embedding: the input of the first layer; heads: all heads of a layer; bias: biases of projections and "
            "norms, the same for all tokens; other: everything else that a layer adds (its MLP); cap: what the "
            "linearised soft cap leaves out, in models with a final soft cap; logit: the sum",
            None,
        ),
        key("layer", "index16", "", "decoder layer, from 0; 0 for terms of no layer"),
        POSITION,
        Column("contribution", "value", "logits", f"mean over the bin; {CONTRIBUTION_MEANING}"),
        TOKENS,
    ),
)

TABLES = (ATTRIBUTION, ATTRIBUTION_PARTS, *answers.TABLES)


def mean_over_positions(rows: pd.DataFrame, *group_columns: str) -> pd.Series:
    """Mean of `contribution` over all positions, in logits, by these columns."""
    weighted = rows.assign(contribution=rows["contribution"] * rows["tokens"])
    sums = weighted.groupby([*group_columns], observed=True)[["contribution", "tokens"]].sum()
    means: pd.Series = sums["contribution"] / sums["tokens"]
    return means


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


QUESTIONS = (
    Question(
        name="attribution.logit",
        sentence="In {model}, the logit of the next token is above the mean logit of the vocabulary by {value}. Direct "
        "terms: {heads:+.2f} from heads, {other:+.2f} from MLPs and other layer terms, {embedding:+.2f} from the "
        "embedding and {bias:+.2f} from biases",
        number=".2f",
        samples="documents",
    ),
    Question(
        name="attribution.raising_heads",
        sentence="In {model}, {value} of {n:n heads} raise the logit of the next token directly",
        number=",.0f",
    ),
    Question(
        name="attribution.answer",
        sentence="In {model}, {prompts}: the logit of the answer is above {compared} by {value}. Direct terms: "
        "{heads:+.2f} from heads, {mlps:+.2f} from MLPs and other layer terms, {embedding:+.2f} from the embedding and "
        "{biases:+.2f} from biases",
        headline="{prompts}: logit of the answer above {compared}: {value}",
        number="+.2f",
        value_unit="logits",
        samples="pairs",
        level="headline",
        better="higher",
    ),
    *answer_questions("attribution", "pairs"),
    Question(
        name="attribution.prompt",
        sentence="In {model}, {prompts}, prompt {pair}: the logit of the answer is above {compared} by {value}; of all "
        "heads, {most:+.3f} adds most and {least:+.3f} least",
        headline="{prompts}, {pair}: logit of the answer above {compared} {value}; {most:+.3f} most, {least:+.3f} "
        "least",
        number="+.2f",
        value_unit="logits",
        level="row",
    ),
    Question(
        name="attribution.answer_layer",
        sentence="In {model}, {prompts}: of all layers, the {component} adds most to the logit of the answer: {value}",
        headline="{prompts}: {component} adds most to the answer, {value}",
        number="+.3f",
        value_unit="logits",
        samples="pairs",
        level="headline",
    ),
)

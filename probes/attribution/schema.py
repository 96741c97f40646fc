"""Options and stored tables of the attribution probe, and the mean over the positions of its rows."""

from collections.abc import Mapping
from typing import Any, Self

import pandas as pd
from pydantic import Field, model_validator

from headscope.errors import OptionError
from headscope.prompts.pair_sets import SETS_OF_ANY_LENGTH
from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.study.answer_options import PromptSetOptions
from headscope.study.config import MAX_PROMPT_TOKENS, Lengths, PromptOptions
from headscope.study.option_rules import Excludes, Needs
from probes.attribution.answers import schema as answers

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
        if self.answer is not None and self.answer == self.wrong:
            raise OptionError("{answer} and {wrong} are both '{text}'. Change one", text=self.answer)
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

"""Options, stored tables, score and questions of the patterns probe."""

import pandas as pd
from pydantic import Field, model_validator

from headscope.errors import OptionError
from headscope.results.questions import Question
from headscope.results.scores import Score
from headscope.runs.aggregation import HEAD_KEYS, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.run_tables import RunTables
from headscope.study.config import MAX_PROMPT_TOKENS, Lengths, PromptOptions
from headscope.study.option_rules import Needs


class PatternsOptions(PromptOptions):
    """Top attended tokens of each head."""

    option_rules = (Needs("query key", "prompt prompt_file", "it names a token of a prompt"),)

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")
    rows: int = Field(
        64,
        ge=0,
        le=MAX_PROMPT_TOKENS,
        description="query rows sampled per document, the same for all heads and models; with --map, 0 stores only "
        "the map",
    )
    keys: int = Field(8, ge=1, le=64, description="keys of largest weight stored per row")
    map: bool = Field(
        False,
        description="also store the attention pattern of every head, pooled to at most 128 x 128 blocks of tokens, "
        "over the first document at the longest context length; always stored for a prompt",
    )
    query: str | None = Field(
        None,
        min_length=1,
        description="token of the prompt, by its text, from which to list the strongest attention; default: the last "
        "token",
    )
    key: str | None = Field(
        None, min_length=1, description="token of the prompt, by its text, to which to list the strongest attention"
    )

    @model_validator(mode="after")
    def _check_rows(self) -> "PatternsOptions":
        if self.rows < 2 and not (self.rows == 0 and self.map):
            raise OptionError(
                "{rows} must be at least 2, or 0 together with {map}: {value}. Use more rows", value=self.rows
            )
        return self


TOKENIZER_MEANING = "first digits of a digest of the text and the tokenizer; models with the same value share tokens"
QUERY = key("query", "index32", "tokens", "query position i")

PATTERN_TEXTS = Table(
    "pattern_texts",
    "the texts that were analysed under each model",
    (
        MODEL,
        LENGTH,
        DOC,
        Column("tokenizer", "label", "", TOKENIZER_MEANING),
        Column("rows", "index32", "rows", "stored query rows, the same in every layer and head", 0),
    ),
    describes_inputs=True,
)

TOKEN_TEXT = Table(
    "token_text",
    "the tokens of each analysed text, once per tokenizer, at the longest context length",
    (
        key("tokenizer", "label", "", TOKENIZER_MEANING, None),
        DOC,
        key("position", "index32", "tokens", "position of the token in the text, from 0"),
        Column("token", "index32", "", "token id", 0),
        Column(
            "text",
            "text",
            "",
            "what the token adds to the text: joined, these are the text; a character split over several tokens is "
            "stored with the last of them, the others are empty; a special token is stored by its name",
        ),
        Column("special", "flag", "", "whether it is a special token, whose name is not part of the text"),
    ),
)

TOP_KEYS = Table(
    "top_keys",
    "the keys of largest weight in query rows that are the same for all heads, layers and models",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        QUERY,
        key("rank", "index16", "", "rank by weight, from 0; the later of two keys of equal weight comes first"),
        Column("key", "index32", "tokens", "key position j", 0),
        Column("weight", "value", "", "attention weight of that key in the row", 0, 1),
    ),
)

FAR_KEYS = Table(
    "far_keys",
    "the key of largest weight in each of these rows that is neither the first token nor within 32 tokens; rows "
    "without such a key are left out",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        QUERY,
        Column("key", "index32", "tokens", "key position j", 0),
        Column("weight", "value", "", "attention weight of that key in the row", 0, 1),
    ),
)

ATTENTION_MAPS = Table(
    "attention_maps",
    "the pooled attention map of every head over the first document: M[a, b] is the mean, over the query rows of block "
    "a, of their weight on the keys of block b. Block a holds the tokens a s to a s + s - 1, with "
    "s = ceil(context_length / 128)",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        key("query_block", "index16", "", "block a of query rows, from 0"),
        Column(
            "weights",
            "bytes",
            "",
            "M[a, 0] to M[a, a], one byte each: byte n > 0 is the weight 2^((n - 255) / 12), to within 3 %; byte 0 is "
            "a weight below 1e-4. The weights of a row add up to 1, less the share of a learned sink and these weights",
        ),
    ),
)

TABLES = (PATTERN_TEXTS, TOKEN_TEXT, TOP_KEYS, FAR_KEYS, ATTENTION_MAPS)


def _far_weights(run: RunTables) -> pd.DataFrame | None:
    """The mean largest weight on one far token by head and document, at the longest length of each model."""
    if "far_keys" not in run.tables:
        return None
    keys = [*HEAD_KEYS, "context_length", "doc"]
    rows = rows_at_longest_length(run.table("far_keys")[[*keys, "weight"]])
    # There are millions of rows, so only the means get plain types.
    means = rows.astype({"weight": "float64"}).groupby(keys, observed=True)["weight"].mean()
    return plain_types(means.rename("value").reset_index())


SCORES = (
    Score(
        column="far_weight",
        statistic=Statistic(
            "top far weight",
            "",
            "mean over rows of the largest weight on a token that is neither the first nor within 32 tokens, at the "
            "longest context length [ours]; high if the head singles out one token far back",
            formula="mean max αᵢⱼ over j > 0, i − j ≥ 32",
        ),
        rows=_far_weights,
        limits=(0, 1),
        top=Question(
            name="patterns.far_weight",
            sentence="In {model}, {unit} attends most to single tokens far back: its top far weight is {value}; that "
            "of the median head is {median:number}",
            headline="{unit} attends most to single tokens far back: top far weight {value}",
            samples="documents",
            level="headline",
        ),
        heading="Attention to single tokens far back",
    ),
)


QUESTIONS = (
    Question(
        name="patterns.example",
        sentence="In {doc}, {unit} in {model} attends from “{query}” to “{key}”, {distance:,} tokens back, with weight "
        "{value}",
    ),
    Question(
        name="patterns.maps",
        sentence="In {model}, {value} heads have an attention map",
        number=",.0f",
    ),
    Question(
        name="patterns.unlisted",
        sentence="In {model}, no head has the named key among the {keys} stored keys of a row. Use a larger --keys, or "
        "other tokens",
        level="warning",
    ),
    Question(
        name="patterns.prompt",
        sentence="In {model}, {unit} attends from “{query}” to “{key}” with weight {value}: {weights}",
        headline="{unit} attends from “{query}” to “{key}” with weight {value}: {weights}",
        number=".2f",
        level="headline",
    ),
)

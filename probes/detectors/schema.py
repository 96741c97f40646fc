"""Options and stored table of the detectors probe."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from headscope.errors import OptionError
from headscope.runs.columns import GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.study.config import MAX_PROMPT_TOKENS, MultilineOptions, check_prompt, sorted_lengths
from headscope.study.option_rules import Excludes, Needs
from probes.detectors.own_pattern import describe_pattern

MIN_PERIOD = 8
"""For shorter periods the chance level is high and the kinds of key overlap."""

MAX_PERIOD = 2**20
"""A forward pass over two periods must fit into memory."""


def _as_prompts(value: Any) -> Any:
    """A single prompt as a tuple, all on one line each."""
    prompts = (value,) if isinstance(value, str) else value
    return tuple(check_prompt(text) if isinstance(text, str) else text for text in prompts)


def _as_token_lists(value: Any) -> Any:
    """Token ids of one prompt or of several, also as text "1, 2, 3", as a tuple of prompts."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    elif hasattr(value, "tolist"):
        value = value.tolist()
    return value if value and isinstance(value[0], list | tuple) else (value,)


Prompts = Annotated[str | tuple[str, ...], BeforeValidator(_as_prompts)]
TokenLists = Annotated[
    str | tuple[tuple[Annotated[int, Field(ge=0)], ...], ...],
    BeforeValidator(_as_token_lists),
]


class DetectorsOptions(MultilineOptions):
    """Heads that attend to the previous token, a duplicate or the token after it, on a repeated random token
    sequence, or on your own prompts."""

    option_rules = (
        Excludes("prompt", "tokens"),
        Excludes("periods sequences", "prompt tokens", "{periods} and {sequences} are of random tokens"),
        Needs("pattern exclude_first", "prompt tokens"),
    )

    periods: Annotated[list[Annotated[int, Field(le=MAX_PERIOD)]], sorted_lengths(MIN_PERIOD, "period")] = Field(
        default=[128, 512], description="length of the repeated random token sequence; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences per period")
    prompt: Prompts | None = Field(
        None, description="your own text in place of random tokens; in Python and study files also a list of texts"
    )
    tokens: TokenLists | None = Field(
        None, description="your own token ids, e.g. 504,1297,504; in Python and study files also a list of such lists"
    )
    pattern: Annotated[Any, PlainSerializer(describe_pattern, return_type=str)] = Field(
        None,
        description="detection pattern of the prompts: a file (.npy, or text) with a matrix [L, L] of weights 0 to 1 "
        "by query and key; in Python also the matrix, or a function from token ids to it",
    )
    exclude_first: bool = Field(False, description="leave the first token of a prompt out of the keys")

    @model_validator(mode="after")
    def _check_prompts(self) -> "DetectorsOptions":
        sizes = [len(ids) for ids in self.tokens or ()]
        if sizes and not 2 <= min(sizes) <= max(sizes) <= MAX_PROMPT_TOKENS:
            wrong = next(size for size in sizes if not 2 <= size <= MAX_PROMPT_TOKENS)
            raise OptionError(
                "{tokens} has a prompt of {count} tokens. Use 2 to {limit:,}", count=wrong, limit=MAX_PROMPT_TOKENS
            )
        if self.prompt is not None and (not self.prompt or not all(text.strip() for text in self.prompt)):
            raise ValueError("a prompt is blank. Give some text")
        return self

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts take the place of random token sequences."""
        return self.prompt is not None or self.tokens is not None


DETECTORS = Table(
    "detectors",
    "mean weight of each head on each kind of key, on a repeated random token sequence",
    (
        MODEL,
        LENGTH,
        key("sequence", "index32", "", "number of the random sequence; the same for all models with one tokenizer"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "key of query row i, in a random sequence of m tokens that is repeated once: previous i - 1, current i, "
            "first 0; in the second half also duplicate i - m and induction i - m + 1. Omitted if no row of the layer "
            "sees such a key, e.g. if the layer's window is shorter than m",
            None,
        ),
        Column("score", "value", "", "mean weight on that key over the rows that see it", 0, 1),
        Column("chance", "value", "", "the score of uniform weights: mean of 1 / visible keys", 0, 1),
        Column("rows", "count", "rows", "query rows in the mean", 1),
    ),
)

PROMPT_DETECTORS = Table(
    "prompt_detectors",
    "mean weight of each head on each kind of key, in your own prompts",
    (
        MODEL,
        key("prompt", "index32", "", "number of the prompt, from 0"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "keys of query row i: previous i - 1, current i, first 0, duplicate: all earlier copies of its token, "
            "induction: the tokens after all these copies, own: those of your pattern. Omitted if no row of the layer "
            "sees such a key",
            None,
        ),
        Column(
            "score",
            "value",
            "",
            "weight on these keys, summed over the keys of a row and averaged over the rows that see one; for your own "
            "pattern each weight is multiplied by the pattern. With exclude_first, weight on all keys but the first: "
            "sum over rows of the weight on these keys / sum over rows of the weight on all keys",
            0,
            1,
        ),
        Column("chance", "value", "", "the score of uniform weights", 0, 1),
        Column("rows", "count", "rows", "query rows in the mean: those that see such a key", 1),
        Column("tokens", "count", "tokens", "tokens of the prompt", 2),
    ),
)

TABLES = (DETECTORS, PROMPT_DETECTORS)

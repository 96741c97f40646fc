"""Options and stored tables of the probe `weights`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headscope.base.heads import format_head, parse_head
from headscope.errors import OptionError
from headscope.runs.columns import (
    DISTANCE,
    DOC,
    GROUP,
    HEAD,
    LAYER,
    LENGTH,
    MODEL,
    PAIR,
    ROW_COUNTS,
    SINK_COUNTS,
    VISIBLE,
    Column,
    Table,
    key,
)
from headscope.runs.head_names import head_names
from headscope.study.config import Lengths, PromptOptions
from headscope.study.option_rules import Needs

Part = Literal["weights", "composition", "distance", "values"]
MAX_DISTANCE = 2**24
TOP_FAR_ROWS = 4
"""Rows of each head and text whose logits are attributed."""
MIN_FAR_LENGTH = 34
"""Shortest text in which a row sees a key 32 or more tokens back that is not the first."""
SIDES = ("query", "key")
ALL_OTHERS = "others"
"""Name of the components whose pairs are not stored one by one."""


class WeightsOptions(PromptOptions):
    """OV and QK circuits of heads from their weights, and composition between heads."""

    option_rules = (
        Needs("distances", "pairs"),
        Needs("top", "tokens"),
        Needs("query_rows", "heads"),
        Needs("lengths", "heads parts=distance|values", "the others read no texts"),
        Needs("embedding!=plain", "tokens pairs parts=weights"),
    )

    parts: list[Part] = Field(
        ["weights", "composition", "distance", "values"],
        min_length=1,
        description="weights: OV copying score and norms; composition: Q-, K- and V-composition of all pairs of heads; "
        "distance: the positional logit curve, from texts; values: effective length and weight of the first key with "
        "attention weights times the norms of the values, in sampled rows of texts",
    )
    lengths: Lengths = Field(default=[2048], description="context lengths in tokens, for distance, values and heads")
    embedding: Literal["plain", "first-mlp"] = Field(
        "plain",
        description="plain: token embeddings; first-mlp: token embeddings plus the first MLP's output for them "
        "(effective embedding), for layers after the first",
    )
    tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        max_length=64,
        description="words of one token whose most boosted and suppressed tokens are stored for each head; a leading "
        "space is added if that makes one token",
    )
    top: int = Field(10, ge=1, le=1000, description="tokens stored per word, head and direction")
    pairs: list[str] = Field(
        [],
        max_length=64,
        description="pairs of words of one token, QUERY>KEY, whose logits are stored by distance and rotary pair",
    )
    distances: list[Annotated[int, Field(ge=0, le=MAX_DISTANCE)]] = Field(
        [0, 1, 8, 64, 512], min_length=1, max_length=64, description="distances of the pairs, in tokens"
    )
    heads: Annotated[list[str], BeforeValidator(head_names)] = Field(
        [],
        max_length=64,
        description="heads such as L18H6 whose logits in their top far rows are attributed to earlier components (QK "
        f"attribution): in each text the {TOP_FAR_ROWS} rows of largest weight on a key 32 or more tokens "
        "back that is not the first",
    )
    query_rows: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(
        [],
        max_length=64,
        description="query positions of the rows of the heads that are attributed, with their key of largest weight, "
        "instead of the top far rows",
    )

    @field_validator("pairs")
    @classmethod
    def _check_pairs(cls, pairs: list[str]) -> list[str]:
        for pair in pairs:
            if len(pair.split(">")) != 2 or not all(pair.split(">")):
                raise ValueError(f"'{pair[:60]}' is not a pair of words. Write QUERY>KEY")
        return pairs

    @field_validator("heads")
    @classmethod
    def _name_heads(cls, heads: list[str]) -> list[str]:
        return list(dict.fromkeys(format_head(*parse_head(head)) for head in heads))

    @model_validator(mode="after")
    def _check_unused(self) -> "WeightsOptions":
        if self.heads and not self.query_rows and min(self.lengths) < MIN_FAR_LENGTH:
            raise OptionError(
                "length {length} is too short for {heads}, whose top far rows see keys 32 or more tokens back. Use at "
                "least {minimum} tokens",
                length=min(self.lengths),
                minimum=MIN_FAR_LENGTH,
            )
        return self


SENDER = (
    key("sender_layer", "index16", "", "decoder layer of the earlier head"),
    key("sender_head", "index16", "", "query head of the earlier head"),
)

HEAD_CIRCUITS = Table(
    "head_circuits",
    "OV copying score and norms of each head, from the weights",
    (
        MODEL,
        LAYER,
        HEAD,
        GROUP,
        Column(
            "copying",
            "value",
            "",
            "sum of the real parts of the eigenvalues of W_U W_OV W_E, divided by the sum of their moduli; 0 for a "
            "head whose weights are 0. Norm gains are folded in, norm scales are left out [ours]",
            -1,
            1,
        ),
        Column(
            "is_centred",
            "flag",
            "",
            "whether the mean of W_U over the vocabulary was subtracted, as in direct logit attribution",
        ),
        Column(
            "copying_uncentred",
            "value",
            "",
            "the same without subtracting that mean, as TransformerLens counts without center_unembed",
            -1,
            1,
        ),
        Column("ov_norm", "value", "", "Frobenius norm of W_OV, norm gains folded in", 0),
        Column("qk_norm", "value", "", "Frobenius norm of W_QK at distance 0, without the scale of the logits", 0),
    ),
)

OV_TOKENS = Table(
    "ov_tokens",
    "the tokens whose logit each head raises or lowers most if it attends to a given token",
    (
        MODEL,
        LAYER,
        HEAD,
        GROUP,
        key("source", "label", "", "the attended token", None),
        key("effect", "label", "", "boosted or suppressed", None),
        key("rank", "index16", "", "rank by absolute value, from 0"),
        Column("token", "index32", "", "token id", 0),
        Column("text", "text", "", "the token as text"),
        Column(
            "value",
            "value",
            "",
            "direct contribution to the logit if the weight is 1, minus the mean over the vocabulary; the final norm's "
            "scale is left out, so that only values of one source compare",
        ),
    ),
)

HEAD_COMPOSITION = Table(
    "head_composition",
    "composition of each head with every head of an earlier layer, from the weights (Elhage et al. 2021)",
    (
        MODEL,
        *SENDER,
        LAYER,
        HEAD,
        GROUP,
        key("input", "label", "", "input of the later head: q, k or v", None),
        Column(
            "score",
            "value",
            "",
            "||W_A W_B|| / (||W_A|| ||W_B||), norm gains folded in, at distance 0, in steps of 2^-14",
            0,
            1.001,
        ),
        Column("baseline", "value", "", "mean score of Gaussian random matrices of the same shapes", 0, 1),
    ),
)

COMPOSITION_NULL = Table(
    "composition_null",
    "null distribution of composition scores: the scores of all pairs of heads after each dimension of the residual "
    "stream that the earlier head writes to gets a random sign, which keeps all norms [ours]",
    (
        MODEL,
        key("input", "label", "", "input of the later head: q, k or v", None),
        Column("pairs", "count", "pairs", "pairs of heads", 1),
        Column("mean", "value", "", "mean score of these pairs with random signs", 0, 1.001),
        Column(
            "bound",
            "value",
            "",
            "score that the largest of these pairs exceeds by chance in 5 % of draws of the signs, from the largest "
            "scores of one draw and an exponential tail",
            0,
        ),
    ),
)

POSITIONAL_PREFERENCE = Table(
    "positional_preference",
    "logit of each head's mean query with its mean key by distance, under the model's position scheme",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        DISTANCE,
        Column(
            "logit",
            "value",
            "logits",
            "q and k are rotated back to position 0, averaged over the text without its first token, and rotated to "
            "the distance; after the layer's soft cap [ours]",
        ),
    ),
)

POSITIONAL_SUMMARY = Table(
    "positional_summary",
    "the positional logit curve of each head in three numbers, over all distances at which a query sees keys",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        Column(
            "effective_length",
            "value",
            "tokens",
            "ESS_2 of the weights of a query that sees all these distances, if its logits were the positional ones",
            0.99,
        ),
        Column("preferred_distance", "index32", "tokens", "distance of the largest positional logit", 0),
        Column("spread", "value", "logits", "largest minus smallest positional logit", 0),
    ),
)

TOKEN_PAIRS = Table(
    "token_pairs",
    "logit of a pair of tokens in each head by distance and rotary pair, from the weights",
    (
        MODEL,
        LAYER,
        HEAD,
        GROUP,
        key("query_token", "label", "", "the token that attends", None),
        key("key_token", "label", "", "the token that is attended to, at position 0", None),
        key("distance", "index32", "tokens", "D = i - j"),
        PAIR,
        Column(
            "contribution",
            "value",
            "logits",
            "contribution of the pair to the logit of the two token embeddings, read through the layer's own norm; "
            "exact for texts in the first layer, without context in later ones",
        ),
    ),
)

VALUE_ATTENTION = Table(
    "value_attention",
    "attention rows with plain and with value-weighted weights (weight times |W_O v_j|, renormalised), binned by the "
    "number of visible keys; weights are those of the keys alone, without a learned sink",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        VISIBLE,
        *ROW_COUNTS,
        *SINK_COUNTS,
        Column("log_ess2", "value", "nats", "mean ln ESS_2 of the plain weights", 0),
        Column("sink_share", "value", "", "mean plain weight of key 0, over the rows that see it", 0, 1.001),
        Column("value_log_ess2", "value", "nats", "mean ln ESS_2 of the value-weighted weights", 0),
        Column(
            "value_sink_share", "value", "", "mean value-weighted weight of key 0, over the rows that see it", 0, 1.001
        ),
    ),
)

ROW_KEYS = (
    MODEL,
    LENGTH,
    DOC,
    LAYER,
    HEAD,
    GROUP,
    key("query", "index32", "tokens", "query position i"),
    key("key", "index32", "tokens", "key position j"),
)
CONTRIBUTION = "contribution to the logit before any soft cap, with norms frozen at their scale"

QK_ROWS = Table(
    "qk_rows",
    "rows whose logits are attributed to earlier components: chosen rows with their key of largest weight, or the rows "
    "of each text in which a head has its largest weights on a key 32 or more tokens back that is not the first, at "
    "most one row per key",
    (
        *ROW_KEYS,
        Column("weight", "value", "", "attention weight of the key in the row", 0, 1),
        Column("logit", "value", "logits", "logit of the key, before any soft cap"),
        Column("query_text", "text", "", "the text up to the query token"),
        Column("key_text", "text", "", "the text up to the key token"),
    ),
)

QK_COMPONENTS = Table(
    "qk_components",
    "what each earlier component adds to the logit of a top far row by what it wrote at the token of the query, and at "
    "that of the key; the contributions of either side sum to the logit",
    (
        *ROW_KEYS,
        key("side", "label", "", "query or key: the token at which the component wrote", None),
        key(
            "component",
            "label",
            "",
            "embedding, a head such as L3H5, the MLP of a layer such as L3 MLP, or bias: all constants",
            None,
        ),
        Column("contribution", "value", "logits", CONTRIBUTION),
    ),
)

QK_PAIRS = Table(
    "qk_pairs",
    "the pairs of components that add most to the logit of a top far row, by rotary pair; the contributions of a row "
    "sum to the logit",
    (
        *ROW_KEYS,
        key("query_component", "label", "", f"component at the query's token; {ALL_OTHERS}: all other pairs", None),
        key("key_component", "label", "", f"component at the key's token; {ALL_OTHERS}: all other pairs", None),
        PAIR,
        Column("contribution", "value", "logits", CONTRIBUTION),
    ),
)

TABLES = (
    HEAD_CIRCUITS,
    OV_TOKENS,
    HEAD_COMPOSITION,
    COMPOSITION_NULL,
    POSITIONAL_PREFERENCE,
    POSITIONAL_SUMMARY,
    TOKEN_PAIRS,
    VALUE_ATTENTION,
    QK_ROWS,
    QK_COMPONENTS,
    QK_PAIRS,
)

"""What writing stores: each head's part of the next token's logit by position, and all other parts."""

from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key

POSITION = key("position", "index32", "tokens", "last predicted token of the bin of positions")
CONTRIBUTION_MEANING = (
    "the mean over the vocabulary is taken off, since a constant moves no probability; norms are frozen at the scale "
    "they had"
)
TOKENS = Column("tokens", "count", "tokens", "predicted tokens in the bin", 1)

ATTRIBUTION = Table(
    "writes",
    "what each head adds directly to the logit of the next token, by position",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        POSITION,
        Column("write", "value", "logits", f"mean part of the next token's logit over the bin; {CONTRIBUTION_MEANING}"),
        TOKENS,
    ),
)

ATTRIBUTION_PARTS = Table(
    "write_parts",
    "the parts of the next token's logit, of which the heads are one, by position",
    (
        MODEL,
        LENGTH,
        DOC,
        key(
            "part",
            "label",
            "",
            "embedding: what enters the first layer; heads: all of a layer together; bias: what is the same for all "
            "tokens, of projections and norms; other: all else that a layer adds, which is its MLP; logit: what they "
            "add up to",
            None,
        ),
        key("layer", "index16", "", "decoder layer, from 0; 0 for what is of no layer"),
        POSITION,
        Column("write", "value", "logits", f"mean over the bin; {CONTRIBUTION_MEANING}"),
        TOKENS,
    ),
)

TABLES = (ATTRIBUTION, ATTRIBUTION_PARTS)

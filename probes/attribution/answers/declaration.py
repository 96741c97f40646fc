"""Stored tables of the attribution of answers."""

from headscope.runs.columns import GROUP, HEAD, IS_COUNTED, LAYER, MODEL, Column, Table, key

PROMPTS = key("prompts", "label", "", "set of prompts: a generated set, the name of a file, or prompt", None)
PAIR_NAME = key("pair", "label", "", "name of the prompt within its set", None)
ROW = key("position", "index32", "tokens", "row: the position in the prompt, from 0; the last one predicts the answer")
COUNTED_BY = "logit_diff"
"""The metric that says whether a model gives the answer of a pair."""
CONTRIBUTION_MEANING = (
    "to the logit of the answer minus that of the wrong answer, or, without a wrong answer, minus the mean over the "
    "vocabulary; norms are frozen at their scale in this row, and a final soft cap is linearised"
)

ANSWER_HEADS = Table(
    "attribution_answer_heads",
    "what each head adds directly to the logit of the answer, in every row of a prompt",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        LAYER,
        HEAD,
        GROUP,
        ROW,
        Column("contribution", "value", "logits", f"contribution {CONTRIBUTION_MEANING}"),
        IS_COUNTED,
    ),
)
ANSWER_PARTS = Table(
    "attribution_answer_parts",
    "all terms of the logit of the answer, the heads of a layer summed, in every row of a prompt",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        key(
            "part",
            "label",
            "",
            "embedding: the input of the first layer; heads: all heads of a layer; attention_bias: biases after these "
            "heads, if there are any; other: what else a layer adds, its MLP; bias: biases of the final "
            "norm and of the unembedding; cap: what the linearised soft cap leaves out, in models with a final soft "
            "cap; logit: the sum",
            None,
        ),
        key("layer", "index16", "", "decoder layer, from 0; 0 for terms of no layer"),
        ROW,
        Column("contribution", "value", "logits", f"contribution {CONTRIBUTION_MEANING}"),
        IS_COUNTED,
    ),
)
ANSWER_TOKENS = Table(
    "attribution_answer_tokens",
    "tokens of the prompts whose answers were attributed",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        ROW,
        Column("token", "text", "", "token of the prompt"),
        Column("answer", "text", "", "token of the answer"),
        Column("wrong", "text", "", "token of the wrong answer; empty without one"),
    ),
    describes_inputs=True,
)
TABLES = (ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS)

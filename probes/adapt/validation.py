"""The held-out loss of a model in training, by position."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headscope.forward.logits import last_hidden, loss_by_position
from headscope.models.checkpoint import evaluating
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed
from headscope.prompts.texts import TokenDocument


def held_out_loss(model: Model, scheme: str | Fixed | AdaRoPE, documents: Sequence[TokenDocument]) -> dict[str, Any]:
    """Columns of the `validation` table from `context_length` on, for documents of one length."""
    parts = []
    with attached(model, scheme), evaluating(model):
        for document in documents:
            ids = torch.tensor(document.ids, device=model.device)[None]
            columns = loss_by_position(model, ids, last_hidden(model, ids)).compute()
            parts.append({"doc": [document.name] * len(columns["nll"]), **columns})
    joined = {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}
    return {"context_length": len(documents[0].ids), **joined}

"""Answered trials as rows of the needle probe's tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headscope.attention.geometry import Geometry
from headscope.measures.copying import Copies
from headscope.prompts.haystack import NeedlePrompt, NeedlePromptBuilder, decoded
from headscope.runs.arrow import Rows
from probes.needle.attribution import Written
from probes.needle.generation import Answered

IntArray = npt.NDArray[np.int64]
AROUND = 40
"""Tokens of the haystack that are stored on either side of a needle."""


def per_head(copies: Copies, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `retrieval` for every depth, layer and head."""
    scores = {
        "score": copies.score.reshape(-1),
        "copies": copies.copies.reshape(-1),
        "mass": copies.mass.reshape(-1).clamp(max=1),
    }
    return _places(copies.score, geometry, depths) | {name: column.numpy() for name, column in scores.items()}


def writes(written: Written, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `needle_writes` for every depth, layer and head."""
    rest = written.whole - written.through
    columns = {"through": written.through.reshape(-1).numpy(), "rest": rest.reshape(-1).numpy()}
    return _places(written.through, geometry, depths) | columns


def _places(numbers: torch.Tensor, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Key columns of numbers [depths, layers, H]."""
    span, layer, head = np.indices(numbers.shape).reshape(3, -1)
    return _heads(layer, head, geometry) | {"depth": np.array(depths)[span]}


def _heads(layer: IntArray, head: IntArray, geometry: Geometry) -> dict[str, Any]:
    """Key columns of heads, given by the index of their layer."""
    return {"layer": np.array(geometry.numbers)[layer], "head": head, "kv_group": head // geometry.heads_per_group}


def around(prompt: NeedlePrompt, prompter: NeedlePromptBuilder, keys: Mapping[str, Any]) -> Rows:
    """The row of `needle_passages`: the prompt around the needle, and its end."""
    ids, asked = prompt.ids, len(prompt.ids) - len(prompter.after)
    start, needle, end = prompt.start, prompt.start - prompter.given, prompt.end
    parts = {
        "before": ids[max(0, needle - AROUND) : needle],
        "given": ids[needle:start],
        "scored": ids[start:end],
        "after": ids[end : min(asked, end + AROUND)],
        "asked": ids[asked:],
    }
    return {**keys, **{name: [decoded(prompter.tokenizer, part)] for name, part in parts.items()}}


def steps(answer: Answered, geometry: Geometry, keys: Mapping[str, Any]) -> dict[str, Rows]:
    """Rows of `needle_steps` and `needle_copies`, as far as there are any."""
    rows: dict[str, Rows] = {}
    if answer.pieces:
        rows["needle_steps"] = {**keys, "step": list(range(len(answer.pieces))), "piece": answer.pieces}
    _, layer, step, head, key = answer.copies.places.numpy().T
    if len(key):
        rows["needle_copies"] = {**keys, "step": step, **_heads(layer, head, geometry), "key": key}
    return rows

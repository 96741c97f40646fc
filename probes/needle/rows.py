"""Answered trials as rows of the needle probe's tables."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headscope.attention.geometry import Geometry
from headscope.measures.copying import CopyScores
from headscope.prompts.haystack import NeedlePrompt, NeedlePromptBuilder, decode_tokens
from headscope.prompts.token_text import token_texts
from headscope.runs.arrow import Rows
from probes.needle.attribution import AnswerAttribution
from probes.needle.generation import TrialAnswer

IntArray = npt.NDArray[np.int64]
WEIGHT_LEVELS = 128
"""Levels of the weights in `needle_keys`: rounded weights take a third of the space."""
CONTEXT_TOKENS = 40
"""Haystack tokens stored on each side of a needle."""


def retrieval_columns(copies: CopyScores, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `retrieval` for every depth, layer and head."""
    scores = {
        "score": copies.scores.reshape(-1).numpy(),
        "copies": copies.copy_counts.reshape(-1).numpy(),
        "mass": copies.span_mass.reshape(-1).clamp(max=1).numpy(),
    }
    return _existing_heads(_head_and_depth_columns(copies.scores, geometry, depths) | scores, geometry)


def attribution_columns(attribution: AnswerAttribution, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `needle_attribution` for every depth, layer and head."""
    rest = attribution.total - attribution.through_spans
    columns = {"through": attribution.through_spans.reshape(-1).numpy(), "rest": rest.reshape(-1).numpy()}
    return _existing_heads(_head_and_depth_columns(attribution.through_spans, geometry, depths) | columns, geometry)


def _existing_heads(columns: dict[str, Any], geometry: Geometry) -> dict[str, Any]:
    """The rows of heads that their layer has: layers may differ in their number of heads."""
    heads = np.array(geometry.layer_heads)[np.searchsorted(geometry.layer_numbers, columns["layer"])]
    return {name: column[columns["head"] < heads] for name, column in columns.items()}


def _head_and_depth_columns(numbers: torch.Tensor, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Key columns of numbers [depths, layers, H]."""
    span, layer, head = np.indices(numbers.shape).reshape(3, -1)
    return _head_columns(layer, head, geometry) | {"depth": np.array(depths)[span]}


def _head_columns(layer_index: IntArray, head: IntArray, geometry: Geometry) -> dict[str, Any]:
    """Key columns of heads; `layer_index` counts the layers from 0."""
    return {
        "layer": np.array(geometry.layer_numbers)[layer_index],
        "head": head,
        "kv_group": geometry.kv_group(layer_index, head),
    }


def needle_tokens_row(prompt: NeedlePrompt, builder: NeedlePromptBuilder, keys: Mapping[str, Any]) -> Rows:
    """The row of `needle_tokens`: the prompt around the needle, and the question."""
    ids, question_start = prompt.ids, len(prompt.ids) - len(builder.suffix_ids)
    # A span that mode wu finds may start before the scored part, and so the cue before the prompt.
    start, needle, end = prompt.start, max(0, prompt.start - builder.cue_count), prompt.end
    parts = {
        "before": ids[max(0, needle - CONTEXT_TOKENS) : needle],
        "cue": ids[needle:start],
        "scored": ids[start:end],
        "after": ids[end : min(question_start, end + CONTEXT_TOKENS)],
        "question": ids[question_start:],
    }
    return {**keys, **{name: [decode_tokens(builder.tokenizer, part)] for name, part in parts.items()}}


def prompt_row(prompt: NeedlePrompt, builder: NeedlePromptBuilder, keys: Mapping[str, Any]) -> Rows:
    """The row of `needle_prompts`: the text of every token of the prompt."""
    texts, _ = token_texts(builder.tokenizer, prompt.ids.tolist())
    return {**keys, "tokens": [json.dumps(texts, ensure_ascii=False)]}


def answer_step_rows(answer: TrialAnswer, geometry: Geometry, keys: Mapping[str, Any]) -> dict[str, Rows]:
    """Rows of `needle_steps`, `needle_copies` and `needle_keys`; a table without rows is omitted."""
    rows: dict[str, Rows] = {}
    if answer.step_texts:
        rows["needle_steps"] = {**keys, "step": list(range(len(answer.step_texts))), "text": answer.step_texts}
    _, layer, step, head, key = answer.copies.copy_events.numpy().T
    if len(key):
        rows["needle_copies"] = {**keys, "step": step, **_head_columns(layer, head, geometry), "key": key}
    indices, weights = answer.keys
    if len(weights):
        layer, step, head, key = indices.numpy().T
        columns = {"step": step, **_head_columns(layer, head, geometry), "key": key}
        rows["needle_keys"] = {**keys, **columns, "weight": np.round(weights.numpy() * WEIGHT_LEVELS) / WEIGHT_LEVELS}
    return rows

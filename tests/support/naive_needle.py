"""Needle trials the slow, obvious way: one prompt at a time, eager attention weights, counting in plain loops.

Shares no code with the probe but the text source and the needles.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from headscope.prompts import texts
from headscope.prompts.needles import Needle

TIE = 1e-6


@dataclass
class NaiveTrial:
    """One trial: prompt and span, the answer, and for each (layer, head) the score, the copies, the mass on the span,
    and the smallest lead, over the steps, of the largest weight over the next (below TIE it is a tie)."""

    ids: list[int]
    span: tuple[int, int]
    answer: str
    steps: int
    score: torch.Tensor
    copies: torch.Tensor
    mass: torch.Tensor
    lead: torch.Tensor


def strict_prompt(
    tokenizer: Any, source: str, needle: Needle, length: int, depth: float, longest: int
) -> tuple[list[int], int, int]:
    """Token ids and span of a strict trial of a byte-level tokenizer without BOS."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    (document,) = texts.load_token_documents(source, tokenizer, 1, longest, 0)
    hidden, opening = encode(f" {needle.opening} {needle.fact}"), encode(f" {needle.opening}")
    assert hidden[: len(opening)] == opening
    tail = encode(f"\n\nQuestion: {needle.question}\nAnswer:") + opening
    room = length - len(hidden) - len(tail)
    at = int(depth * room)
    while at > 0:
        before, after = tokenizer.decode(document.ids[:at]), tokenizer.decode(document.ids[at : at + 5])
        if re.search(r"[^\sA-Z][.!?…]+[\"'’”)\]»_]*\Z", before) and after[0].isspace():
            break
        at -= 1
    ids = document.ids[:at] + hidden + document.ids[at:room] + tail
    return ids, at + len(opening), at + len(hidden)


def wu_prompt(
    tokenizer: Any, source: str, needle: Needle, length: int, depth: float, longest: int
) -> tuple[list[int], int, int]:
    """Token ids and span of a wu trial: cut 200 short, decoded, tokenised again, found by the overlap of sets."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    (document,) = texts.load_token_documents(source, tokenizer, 1, longest, 0)
    hidden, opening = encode(f" {needle.opening} {needle.fact}"), encode(f" {needle.opening}")
    room = length - 200 - len(hidden)
    at = room if depth == 1 else int(depth * room)
    while 0 < at < room or (at == room and depth != 1):
        before, after = tokenizer.decode(document.ids[:at]), tokenizer.decode(document.ids[at : at + 5])
        if re.search(r"[^\sA-Z][.!?…]+[\"'’”)\]»_]*\Z", before) and after[0].isspace():
            break
        at -= 1
    text = tokenizer.decode(document.ids[:at] + hidden + document.ids[at:room])
    ids = encode(f"{text}\n\nQuestion: {needle.question}\nAnswer: {needle.opening}")
    fact = hidden[len(opening) :]
    for start in range(len(ids)):
        window = set(ids[start : start + len(fact)])
        if len(window & set(fact)) / len(set(fact)) > 0.9:
            return ids, start, start + len(fact)
    raise AssertionError("the needle is gone")


def trial(model: PreTrainedModel, tokenizer: Any, ids: list[int], start: int, end: int, wu: bool) -> NaiveTrial:
    """Prefill all but the last token, then decode greedily with every attention row in hand; `model` is eager."""
    cache = DynamicCache()
    rows: list[torch.Tensor] = []
    tokens: list[int] = []
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]), past_key_values=cache, logits_to_keep=1)
        token = ids[-1]
        for _ in range(50 if wu else end - start + 6):
            out = model(torch.tensor([[token]]), past_key_values=cache, output_attentions=True)
            token = int(out.logits[0, -1].argmax())
            line_break = "\n" in tokenizer.decode([token])
            if not wu and (line_break or token in (tokenizer.eos_token_id, model.generation_config.eos_token_id)):
                break
            rows.append(torch.stack([layer[0, :, 0] for layer in out.attentions]))
            tokens.append(token)
            if wu and line_break:
                break
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    copies, score = torch.zeros(layers, heads), torch.zeros(layers, heads)
    for layer in range(layers):
        for head in range(heads):
            copied = []
            for row, token in zip(rows, tokens, strict=True):
                key = int(row[layer, head].argmax())
                if start <= key < end and ids[key] == token:
                    copied.append(key)
            copies[layer, head] = len(copied)
            score[layer, head] = (len(copied) if wu else len(set(copied))) / (end - start)
    mass, lead = torch.zeros(layers, heads), torch.ones(layers, heads)
    for row in rows:
        mass += row[:, :, start:end].sum(-1) / len(rows)
        best = row.topk(2).values
        lead = torch.minimum(lead, best[..., 0] - best[..., 1])
    answer_tokens = tokens[:-1] if wu and tokens and "\n" in tokenizer.decode([tokens[-1]]) else tokens
    return NaiveTrial(ids, (start, end), tokenizer.decode(answer_tokens).strip(), len(rows), score, copies, mass, lead)

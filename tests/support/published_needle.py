"""Trials of Retrieval_Head's code, written anew from its description, for a byte-level tokenizer without BOS.

Shares no code with the probe but the text source. Three differences are those that the probe documents: sentence ends
instead of fixed token ids, a space before the needle, and recall without stemming.
"""

import re
from collections import Counter
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from headscope.prompts import texts


def published_prompt(
    tokenizer: Any, source: str, needle: dict[str, str], length: int, depth: float, longest: int
) -> tuple[list[int], int, int]:
    """Token ids of a prompt, and the span of its needle."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    (document,) = texts.load_token_documents(source, tokenizer, 1, longest, 0)
    hidden = encode(f" {needle['needle']}")
    room = length - 200 - len(hidden)
    at = room if depth == 1 else int(depth * room)
    while at > 0 and depth != 1:
        before, after = tokenizer.decode(document.ids[:at]), tokenizer.decode(document.ids[at : at + 5])
        if re.search(r"[^\sA-Z][.!?…]+[\"'’”)\]»_]*\Z", before) and after[0].isspace():
            break
        at -= 1
    context = tokenizer.decode(document.ids[:at] + hidden + document.ids[at:room])
    ids = encode(f"{context}Based on the content of the book, Question: {needle['question']}\nAnswer:")
    real = encode(needle["real_needle"])
    for start in range(len(ids)):
        if len(set(ids[start : start + len(real)]) & set(real)) / len(set(real)) > 0.9:
            return ids, start, start + len(real)
    raise AssertionError("the needle is gone")


def published_scores(
    model: PreTrainedModel, tokenizer: Any, ids: list[int], start: int, end: int
) -> tuple[torch.Tensor, str, int]:
    """Scores [layers, heads] of one trial, the answer, and its number of steps; `model` is eager."""
    config, cache = model.config, DynamicCache()
    scores, answer = torch.zeros(config.num_hidden_layers, config.num_attention_heads), []
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]), past_key_values=cache, logits_to_keep=1)
        token = ids[-1]
        for _ in range(50):
            output = model(torch.tensor([[token]]), past_key_values=cache, output_attentions=True)
            token = int(output.logits[0, -1].argmax())
            answer.append(token)
            for layer, weights in enumerate(output.attentions):
                for head, key in enumerate(weights[0, :, -1].argmax(-1).tolist()):
                    if start <= key < end and ids[key] == token:
                        scores[layer, head] += 1 / (end - start)
            if tokenizer.convert_ids_to_tokens(token) == "<0x0A>" or token == 144:
                break
    return scores, tokenizer.decode(answer).strip(), len(answer)


def word_recall(reference: str, answer: str) -> float:
    """Share of the words of the reference, counted with repeats, in the answer."""
    reference_words, answer_words = (Counter(re.findall(r"\w+", text.lower())) for text in (reference, answer))
    return sum((reference_words & answer_words).values()) / sum(reference_words.values())

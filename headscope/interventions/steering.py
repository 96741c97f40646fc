"""Attention steering: chosen heads attend more to a span of the prompt (PASTA, Zhang et al. 2024).

    with steered(model, ["L18H6", "L20H1"], "rule", prompt="[[rule]]Answer in French.[[/rule]] Hello") as ids:
        model.module.generate(ids)

The weights of all keys outside the span are multiplied by alpha and the row is renormalised. This adds ln(alpha) to
their logits: biases of several contexts add up, and listeners get the weights that the heads use.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.edits import TokenSet
from headscope.base.model_identity import AcceptedWeights
from headscope.base.public_functions import public_context
from headscope.base.user_input import quote
from headscope.errors import BadInput, did_you_mean
from headscope.forward.capture import is_trial_pass
from headscope.interventions.edits import Edit, edited
from headscope.interventions.heads import Heads, describe_heads, layer_heads, refuse_other_head_set
from headscope.interventions.kinds import Steer, targets_of
from headscope.positions.model import Model
from headscope.prompts.span_tokens import tokenize_spans
from headscope.prompts.spans import parse_prompt


class _PromptCheck:
    """Refuses passes over texts that end before the last token of the span; an output edit that changes nothing.

    A text may be read in chunks, so it has ended when the next one starts, the first token is decoded or `finish` is
    called. A single token after a longer part of a text is a decoded one, unless it ends the span.
    """

    def __init__(self, name: str, last: int):
        self.name, self.last = name, last
        self._unreached = self._queries = 0

    def __call__(self, z: Tensor, call: backend.AttentionCall) -> Tensor:
        if is_trial_pass():
            return z
        queries, keys = call.q.shape[2], call.first_key + call.k.shape[2]
        is_start = queries == keys
        if is_start or (queries == 1 < self._queries and keys <= self.last):
            self.finish()
        if is_start or self._unreached:
            self._unreached = keys if keys <= self.last else 0
        self._queries = queries
        return z

    def finish(self) -> None:
        """Raise BadInput if the text that was read last ended before the span."""
        tokens, self._unreached = self._unreached, 0
        if tokens:
            raise BadInput(
                f"the span {self.name} ends at token {self.last}, beyond the text of {tokens} tokens that the "
                "model reads. Use positions within the prompt, counted from 0"
            )


@public_context
def steered(
    model: Model,
    heads: Heads,
    span: Iterable[int] | str,
    alpha: float = 0.01,
    *,
    prompt: str | Mapping[str, Any] | None = None,
    weights: AcceptedWeights = "same",
) -> Iterator[Tensor | None]:
    """Steer heads to a span of the prompt in every pass inside the `with`; leaving restores the model.

    `heads` is a HeadSet, names such as "L18H6,L5H3" or a list of them, or a mapping from layers to heads; `weights`
    "any" accepts a HeadSet that was measured on other weights. `span` are token positions from 0, such as range(3, 17),
    the same in every sequence of a batch: sequences must not be padded on the left. With `prompt`, a text with marks or
    an object with segments or messages as in a file of `hs.spans`, it is the name of a span; the context then returns
    the prompt's token ids [1, L]. 0 < `alpha` <= 1 multiplies the weights of all other keys, and 1 changes nothing;
    Zhang et al. (2024) use 0.01. Rows that see no key of the span keep their weights, except those of heads with a
    learned sink, whose logit stays. Raises BadInput for an empty or unknown span, a negative position or an alpha
    outside this range, and for a text that ends before the span: in the next pass, in the first step of decoding or at
    the end of the context.
    """
    name, ids = "", None
    if isinstance(span, str):
        name, (ids, span) = f"'{span}'", _span_of_prompt(model, span, prompt)
    elif prompt is not None:
        raise BadInput(
            f"prompt is given with positions, span={quote(span)}. Name a span of the prompt, or leave prompt out"
        )
    positions = sorted({*span})
    if not positions or positions[0] < 0:
        raise BadInput(f"span={quote(span)} has no token position, or one below 0. Use positions such as range(3, 17)")
    if not 0 < alpha <= 1:
        raise BadInput(f"alpha={alpha!r} is not a factor of weights. Use a number above 0 and at most 1")
    refuse_other_head_set(model, heads, weights)
    chosen = layer_heads(model, heads)
    if alpha == 1:
        yield ids
        return
    span_name = _describe(positions)
    kind = Steer(TokenSet(tuple(positions), name=span_name), float(alpha))
    one = Edit(kind, chosen, targets_of(kind), heads_name=describe_heads(model, chosen))
    check = _PromptCheck(name or span_name, positions[-1])
    description = f"hs.steered({one.heads_name}: tokens {span_name}, alpha {alpha:g})"
    with edited(model, [one], description) as layers:
        layers.edit_output(one.layers[0], check)
        yield ids
    check.finish()


def _span_of_prompt(model: Model, name: str, prompt: str | Mapping[str, Any] | None) -> tuple[Tensor, list[int]]:
    """Token ids [1, L] of a prompt, and the positions of one of its spans."""
    if prompt is None:
        raise BadInput(
            f"span='{name}' is a name, but no prompt has it. Give its prompt, with marks [[{name}]]...[[/{name}]]"
        )
    content = {"text": prompt} if isinstance(prompt, str) else dict(prompt)
    tokens = tokenize_spans(model.tokenizer, parse_prompt(content, "prompt", "the prompt"))
    spans = {**tokens.spans, **tokens.messages}
    if name not in spans:
        raise BadInput(f"the prompt has no span '{name}'{did_you_mean(name, spans)}. Use {', '.join(spans)}")
    ids = torch.tensor([tokens.ids], device=model.device)
    return ids, [int(position) for position in spans[name].nonzero()[0]]


def _describe(positions: list[int]) -> str:
    """Positions as ranges, such as 3-16,20: the description tells two spans apart."""
    known = {*positions}
    starts = [position for position in positions if position - 1 not in known]
    ends = [position for position in positions if position + 1 not in known]
    return ",".join(f"{start}-{end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True))

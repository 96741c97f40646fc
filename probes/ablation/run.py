"""Runner of the ablation probe: every head ablated by itself, and named heads together, on one prompt per cell."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from headscope.attention.edits import TokenSet
from headscope.errors import BadInput
from headscope.interventions.ablation import reference_outputs
from headscope.interventions.edits import Edit
from headscope.interventions.heads import ALL_HEADS, LayerHead, heads_by_layer
from headscope.interventions.kinds import Replace, targets_of
from headscope.interventions.pair_runs import AnswerRuns
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.pair_sets import PairSet, single_pair_set
from headscope.prompts.pairs import METRICS_OF_ONE_TOKEN, METRICS_WITH_WRONG, TokenPair, stored_metric_name
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.results.effects.groups import missing_control, random_controls
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.named_heads import NamedHeads, StudyAblations
from headscope.study.prompts import PromptSets
from probes.ablation.declaration import ABLATION, ABLATION_SETS, POSITIONS_MARK, AblationOptions

log = logging.getLogger("headscope")

RESIDUAL_STREAM_MEMORY_BYTES = 2**30
"""Memory for the residual streams of a prompt; the rest is on disk."""


@dataclass(frozen=True)
class _AblationWork:
    prompts: str
    index: int
    length: int


class AblationRunner:
    """Cells: every prompt of every set and model."""

    def __init__(self, options: AblationOptions, context: StudyContext):
        self.options, self.context = options, context
        self.sets = PromptSets(
            context,
            options.pairs,
            count=options.count,
            length=options.length,
            metric=options.metric,
            alignment="free" if callable(options.metric) else "unused",
            open_prompt=None if options.prompt is None else self._open_prompt,
            check=lambda label, pair: self._tokens(pair),  # refuses a pair without the chosen positions
        )
        self._by_length: dict[tuple[str, str], dict[tuple[int, int], list[int]]] = {}
        self._named_heads = NamedHeads(context, options.heads, options.weights) if self._are_heads_named else None
        self._ablations = StudyAblations(context)

    def cells(self) -> list[Cell]:
        sources = self.sets.sources
        cells = []
        for label in self.context.labels:
            sets = self.sets.of_model(label)
            self._ablations.check(self.options.kinds, label)  # before the work begins: a text may be too short
            if "resample" in self.options.kinds:
                for source in sources:
                    self._check_other_prompts(label, source)
            head_count = sum(map(len, self._heads(self.context.model(label), label).values()))
            cells += [
                Cell(
                    f"{label}: {pairs.name}, {name}",
                    label,
                    self._cost(pairs.length, head_count),
                    _AblationWork(source, n, pairs.length),
                )
                for source, pairs in zip(sources, sets, strict=True)
                for n, name in enumerate(pairs.pair_names)
            ]
        return cells

    def compute_rows(self, cell: "Cell[_AblationWork]", model: Model) -> Mapping[str, Rows]:
        pairs = self.sets.open(cell.model, cell.work.prompts)
        pair, heads = pairs.build(cell.work.index), self._heads(model, cell.model)
        replay = AnswerRuns(model, pair, self.options.metric, RESIDUAL_STREAM_MEMORY_BYTES)
        single_heads: list[dict[str, Any]] = []
        sets: list[dict[str, Any]] = []
        units = [_head_columns(model, layer, head) for layer, members in heads.items() for head in members]
        head_sets = self._head_sets(heads, model, cell.work.index)
        for kind in self.options.kinds:
            singles, together = [], []
            for edit in self._edits(kind, cell, model):
                runs = [[self._edit(edit, [place], pair)] for place in _places(heads)]
                share = cell.cost / (len(runs) * self._draw_count + 1)
                singles.append(replay.values(runs, partial(self._advance, share)))
                together.append(replay.values([[self._edit(edit, places, pair)] for places in head_sets]))
            single_heads += [
                {"kind": self._stored_kind(kind), **unit, "metric_after": value}
                for unit, value in zip(units, np.mean(singles, axis=0), strict=True)
            ]
            sets += [
                {"kind": self._stored_kind(kind), "draw": draw, "size": len(units), "metric_after": value}
                for draw, value in enumerate(np.mean(together, axis=0))
            ]
        keys: dict[str, Any] = {"model": cell.model, "prompts": pairs.name, "pair": pair.name}
        metric = stored_metric_name(self.options.metric)
        is_kept = self.options.keep_failing or self.options.prompt is not None  # a single prompt is no mean
        is_counted = is_kept or shows_answer(metric, replay.unchanged)
        keys |= {"metric": metric, "metric_before": replay.unchanged, "is_counted": is_counted}
        tables = {ABLATION.name: pd.DataFrame(single_heads).assign(**keys)}
        if self._are_heads_named:
            tables[ABLATION_SETS.name] = pd.DataFrame(sets).assign(**keys)
        return tables

    def _stored_kind(self, kind: str) -> str:
        """The kind of ablation with its positions, unless these are all."""
        return kind if "all" in self.options.positions else f"{kind}{POSITIONS_MARK}{','.join(self.options.positions)}"

    def _advance(self, share: float, runs: int) -> None:
        self.context.advance(share * runs)

    def _edit(self, kind: Any, places: Sequence[LayerHead], pair: TokenPair) -> Edit:
        """The ablation of heads at the chosen positions of the prompt of a pair."""
        return Edit(kind, tuple(places), targets_of(kind), self._tokens(pair))

    def _tokens(self, pair: TokenPair) -> TokenSet:
        """The chosen positions. Raises BadInput for a pair without them."""
        if ALL_TOKENS in self.options.positions:
            return TokenSet()
        chosen = {token for name in self.options.positions for token in pair.span(name, [ALL_TOKENS])}
        return TokenSet(tuple(sorted(chosen)))

    def _head_sets(self, heads: Mapping[int, list[int]], model: Model, index: int) -> list[list[LayerHead]]:
        """The named heads, then random sets of as many other heads of the same layers, if every layer has so many."""
        if not self._are_heads_named:
            return []
        named, candidates = _places(heads), _places(heads_by_layer(model, ALL_HEADS))
        seeds = [[self.context.seed, index, draw] for draw in range(1, self.options.random_sets + 1)]
        if seeds and index == 0 and (reason := missing_control(named, candidates, model.geometry.layer_numbers)):
            log.warning(
                "ablation of %d named heads has no random control: %s. Name fewer heads of each layer",
                *(len(named), reason),
            )
        return [named, *random_controls(named, candidates, seeds)]

    @property
    def _are_heads_named(self) -> bool:
        return self.options.heads != ["all"]

    def _cost(self, length: int, head_count: int) -> float:
        """The cost of a prompt, in forward passes: half of one per head and draw, and one per set of heads."""
        sets = 1 + self.options.random_sets if self._are_heads_named else 0
        return (1 + (0.5 * head_count + sets) * self._draw_count) * pass_cost(length)

    @property
    def _draw_count(self) -> int:
        """Number of times that every head of a prompt is ablated by itself."""
        kinds = self.options.kinds
        return len(kinds) + (self.options.draws - 1 if "resample" in kinds else 0)

    def _edits(self, kind: str, cell: "Cell[_AblationWork]", model: Model) -> Iterator[Any]:
        """The ablations of a kind: one, or for resample one per other prompt."""
        if kind != "resample":
            yield self._ablations.kind(kind, cell.model, model)
        else:
            for pair in self._other_prompts(cell.model, cell.work):
                with attached(model):
                    layers, tokens = [*self._heads(model, cell.model)], [*pair.clean.tolist(), *pair.answer.tolist()]
                    yield Replace("resample", reference_outputs(model, layers, tokens), length=len(tokens))

    def _other_prompts(self, label: str, work: _AblationWork) -> Iterator[TokenPair]:
        """At most `draws` other prompts of the same number of tokens, drawn with the study's seed."""
        pairs = self.sets.open(label, work.prompts)
        others = self._indices_by_length(label, work.prompts)[_lengths(pairs.build(work.index))]
        rng = np.random.default_rng([self.context.seed, work.index])
        drawn = rng.permutation([index for index in others if index != work.index])
        return (pairs.build(int(index)) for index in drawn[: self.options.draws])

    def _indices_by_length(self, label: str, source: str) -> dict[tuple[int, int], list[int]]:
        """The prompts of a set by their number of tokens and that of their answer."""
        if (label, source) not in self._by_length:
            pairs, indices = self.sets.open(label, source), defaultdict[tuple[int, int], list[int]](list)
            for index in range(len(pairs)):
                indices[_lengths(pairs.build(index))].append(index)
            self._by_length[label, source] = indices
        return self._by_length[label, source]

    def _check_other_prompts(self, label: str, source: str) -> None:
        """Raise BadInput for a prompt that has no other one to take outputs from."""
        pairs = self.sets.open(label, source)
        for (prompt_length, _), indices in self._indices_by_length(label, source).items():
            if len(indices) == 1:
                raise BadInput(
                    f"resample needs another prompt of the same number of tokens, and '{pairs.pair_names[indices[0]]}' "
                    f"is the only one of {prompt_length} in the set '{pairs.name}'. Use more prompts, or --kinds zero"
                )

    def _heads(self, model: Model, label: str) -> dict[int, list[int]]:
        """The heads to ablate by index of their attention layer. Refuses heads that were measured on other weights,
        unless the options allow them."""
        if self._named_heads is None:
            numbers, counts = model.geometry.layer_numbers, model.geometry.layer_heads
            return heads_by_layer(model, dict(zip(numbers, map(range, counts), strict=True)))
        self._named_heads.check(model, label)
        return heads_by_layer(model, self._named_heads.identifiers)

    def _open_prompt(self, tokenizer: Any) -> PairSet:
        """The prompt of the options as a set."""
        options = self.options
        return single_pair_set(
            tokenizer,
            str(options.prompt),
            str(options.answer),
            options.wrong or "",
            template=options.template,
            needs_one_token=options.metric in METRICS_OF_ONE_TOKEN,
            needs_wrong=options.metric in METRICS_WITH_WRONG,
        )


def _places(heads: Mapping[int, Sequence[int]]) -> list[LayerHead]:
    """Heads by attention layer as pairs of a layer and a head."""
    return [(layer, head) for layer, members in heads.items() for head in members]


def _head_columns(model: Model, layer: int, head: int) -> dict[str, int]:
    geometry = model.geometry
    return {"layer": geometry.layer_numbers[layer], "head": head, "kv_group": geometry.kv_group(layer, head)}


def _lengths(pair: TokenPair) -> tuple[int, int]:
    """The number of tokens of the prompt and of the answer."""
    return len(pair.clean), len(pair.answer)

"""Runner of the probe of circuits of heads: all prompts of one set and model per cell.

A cell has all prompts of a set, because greedy subsets are chosen by means over prompts.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from headscope.errors import BadInput
from headscope.forward.ablation import heads_by_layer
from headscope.head_names import HEADS_OF_WEIGHTS, parse_heads
from headscope.heads import format_head
from headscope.model_identity import refuse_other_weights
from headscope.patching.complement_ablation import (
    ComplementReplay,
    LayerOutputs,
    mean_by_position,
    mean_by_span,
    outputs_by_class,
    outputs_of_prompt,
    token_classes,
)
from headscope.patching.path_patching import LayerIndexHead
from headscope.positions.model import Model
from headscope.prompts.haystack import Haystack
from headscope.prompts.pair_sets import PairSet, check_set_names, load_pair_set
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from probes.circuit.schema import CIRCUIT, CIRCUIT_MEMBERS, WHOLE, CircuitOptions

RESIDUAL_STREAM_MEMORY_BYTES = 2**30
"""Memory for the residual streams of all prompts of a set; the rest is on disk."""

HeadSets = Sequence[Collection[LayerIndexHead]]


class CircuitRunner:
    """Cells: every set of every model."""

    def __init__(self, options: CircuitOptions, context: StudyContext):
        self.options, self.context = options, context
        self._pair_sets: dict[tuple[str, str], PairSet] = {}
        self._named_heads = {name: parse_heads(name) for name in options.heads}

    def cells(self) -> list[Cell]:
        cells = []
        for label in self.context.labels:
            sets = [self._pair_set(label, source) for source in self.options.pairs]
            check_set_names(sets)
            circuit = self._circuit(self.context.model(label), label)
            for source, pairs in zip(self.options.pairs, sets, strict=True):
                self._check_reference(pairs, self._reference_set(label, source))
                cost = self._cost(len(circuit)) * len(pairs) * pass_cost(len(pairs.build(0).clean))
                cells.append(Cell(f"{label}: {pairs.name}", label, cost, source))
        return cells

    def compute_rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        pairs, circuit = self._pair_set(cell.model, cell.work), self._circuit(model, cell.model)
        prompts = _Prompts(model, self._replays(model, cell, pairs), circuit)
        keys = {"model": cell.model, "prompts": pairs.name, "complement": self.options.complement}
        names = pd.DataFrame({"pair": pairs.pair_names}).assign(**keys, metric=self.options.metric)
        removed = {WHOLE: [], **self._random_subsets(circuit)}
        is_selecting = np.arange(len(pairs)) % 2 == 0
        greedy = self._greedy_subsets(prompts, is_selecting) if len(pairs) > 1 else {}
        empty = prompts.values([[]])[:, 0]
        blocks = []
        for name, subset in {**removed, **greedy}.items():
            values = prompts.without(subset)
            text = ",".join(_head_name(model, head) for head in subset)
            columns = {"metric_circuit": values[:, 0], "metric_model": values[:, 1], "metric_empty": empty}
            selects = is_selecting & (name in greedy)
            blocks.append(names.assign(subset=name, heads=text, size=len(circuit), **columns, is_selecting=selects))
        whole = blocks[0]["metric_circuit"].to_numpy()
        without = prompts.values([[head for head in circuit if head != member] for member in circuit])
        members = [
            names.assign(**_head_columns(model, head), metric_circuit=whole, metric_without=without[:, number])
            for number, head in enumerate(circuit)
        ]
        return {
            CIRCUIT.name: pd.concat(blocks, ignore_index=True),
            CIRCUIT_MEMBERS.name: pd.concat(members, ignore_index=True),
        }

    def _cost(self, size: int) -> float:
        """The cost of a prompt in forward passes, its reference outputs included."""
        greedy = sum(2 * (size - step) for step in range(min(self.options.greedy, size - 1)))
        draws = self.options.draws if self.options.complement == "resample" else 1
        return 2 + (2 + size + 2 * self.options.random_subsets + greedy) * draws

    def _replays(self, model: Model, cell: Cell, pairs: PairSet) -> list[ComplementReplay]:
        """The prompts with what replaces the outputs of the heads that are ablated."""
        assert cell.model is not None
        replacements = self._replacements(model, pairs, self._reference_set(cell.model, cell.work))
        replays = []
        for pair, outputs in zip(map(pairs.build, range(len(pairs))), replacements, strict=True):
            memory = RESIDUAL_STREAM_MEMORY_BYTES / len(pairs)
            replays.append(ComplementReplay(model, pair, self.options.metric, outputs, memory))
        return replays

    def _replacements(self, model: Model, pairs: PairSet, reference: PairSet) -> list[Sequence[LayerOutputs]]:
        """For each prompt the replaced outputs: one mean, one reference prompt per draw, or none for zeros."""
        prompts = [pairs.build(index) for index in range(len(pairs))]
        if self.options.complement == "zero":
            return [[{}] for _ in prompts]
        others = [reference.build(index) for index in range(len(reference))]
        if self.options.complement == "mean" and self.options.by == "span":
            means = mean_by_span(model, ((pair.corrupted.tolist(), token_classes(pair)) for pair in others))
            return [[outputs_by_class(means, token_classes(pair))] for pair in prompts]
        by_length: dict[int, list[list[int]]] = {}
        for pair in others:
            by_length.setdefault(len(pair.corrupted), []).append(pair.corrupted.tolist())
        if self.options.complement == "mean":
            lengths = {len(pair.clean) for pair in prompts}
            of_length = {length: mean_by_position(model, by_length[length]) for length in sorted(lengths)}
            return [[of_length[len(pair.clean)]] for pair in prompts]
        return [
            [outputs_of_prompt(model, ids) for ids in self._drawn(by_length[len(pair.clean)], index)]
            for index, pair in enumerate(prompts)
        ]

    def _drawn(self, prompts: Sequence[list[int]], index: int) -> list[list[int]]:
        """Reference prompts for the prompt of this index, drawn with the study's seed."""
        order = np.random.default_rng([self.context.seed, index]).permutation(len(prompts))
        return [prompts[number] for number in order[: self.options.draws]]

    def _random_subsets(self, circuit: Sequence[LayerIndexHead]) -> dict[str, list[LayerIndexHead]]:
        """Subsets with a random number of members, at least one and not all, the same for all prompts."""
        rng = np.random.default_rng([self.context.seed, len(circuit)])
        count = self.options.random_subsets if len(circuit) > 1 else 0
        subsets = {}
        for number in range(1, count + 1):
            size = int(rng.integers(1, len(circuit)))
            subsets[f"random {number}"] = [circuit[at] for at in sorted(rng.permutation(len(circuit))[:size])]
        return subsets

    def _greedy_subsets(self, prompts: "_Prompts", is_selecting: np.ndarray) -> dict[str, list[LayerIndexHead]]:
        """Subsets that grow by the head that most separates circuit and model in the mean over selecting prompts."""
        subsets: dict[str, list[LayerIndexHead]] = {}
        subset: list[LayerIndexHead] = []
        for step in range(1, min(self.options.greedy, len(prompts.circuit) - 1) + 1):
            candidates = [[*subset, head] for head in prompts.circuit if head not in subset]
            scores = [abs(float(np.diff(prompts.without(candidate, is_selecting)).mean())) for candidate in candidates]
            subset = candidates[int(np.argmax(scores))]
            subsets[f"greedy {step}"] = subset
        return subsets

    def _circuit(self, model: Model, label: str) -> list[LayerIndexHead]:
        """The members by layer index and head. Raises BadInput for a head twice and for all heads of the model."""
        names: list[str] = []
        for name, heads in self._named_heads.items():
            source = f"head set '{heads if name.startswith(HEADS_OF_WEIGHTS) else name}'"
            if refuse_other_weights(source, heads.model_digests, model.identity, label, self.options.weights):
                self.context.record_other_weights(label, source, heads.model_digests.label)
            names += heads.identifiers
        if repeated := [name for name in names if names.count(name) > 1]:
            raise BadInput(f"the circuit has {repeated[0]} twice. Name every head once")
        self.context.record_input("heads", [",".join(names).encode()])
        circuit = [(layer, head) for layer, members in heads_by_layer(model, names).items() for head in members]
        if len(circuit) == sum(model.geometry.layer_heads):
            raise BadInput(
                f"the circuit has all {len(circuit)} heads of '{label}', so that nothing is ablated. Name fewer"
            )
        return circuit

    def _check_reference(self, pairs: PairSet, reference: PairSet) -> None:
        """Raise BadInput for a prompt without reference prompts of its length, or without tokens of its spans."""
        if self.options.complement == "zero":
            return
        others = [reference.build(index) for index in range(len(reference))]
        for pair in map(pairs.build, range(len(pairs))):
            length = len(pair.clean)
            if self.options.by == "span":
                known = {name for other in others for name in token_classes(other).tolist()}
                if missing := sorted({*token_classes(pair).tolist()} - known):
                    raise BadInput(
                        f"the reference set '{reference.name}' has no tokens of the span '{missing[0]}' of "
                        f"'{pair.name}'. Name the span there, or use by 'position'"
                    )
            elif all(len(other.corrupted) != length for other in others):
                lengths = ", ".join(map(str, sorted({len(other.corrupted) for other in others})))
                raise BadInput(
                    f"the reference set '{reference.name}' has no prompt of {length} tokens, the length of "
                    f"'{pair.name}': its prompts have {lengths}. Use another reference set, or by 'span'"
                )

    def _reference_set(self, label: str, source: str) -> PairSet:
        return self._pair_set(label, self.options.reference or source)

    def _haystacks(self, label: str) -> list[Haystack]:
        """The documents of the study as texts for needles."""
        tokenizer = self.context.tokenizer(label)
        documents = self.context.documents(label, self.options.length)
        return [Haystack(document.name, document.ids, tokenizer) for document in documents]

    def _pair_set(self, label: str, source: str) -> PairSet:
        """A set of prompts in the tokens of a model."""
        if (label, source) not in self._pair_sets:
            pairs = load_pair_set(
                source,
                self.context.tokenizer(label),
                partial(self._haystacks, label),
                count=self.options.count,
                length=self.options.length,
                seed=self.context.seed,
                alignment="equal",
                metric=self.options.metric,
            )
            self.context.record_input(f"prompts '{source}'", [pairs.digest.encode()])
            self._pair_sets[label, source] = pairs
        return self._pair_sets[label, source]


class _Prompts:
    """All prompts of a set, and a circuit."""

    def __init__(self, model: Model, replays: Sequence[ComplementReplay], circuit: Sequence[LayerIndexHead]):
        self.replays, self.circuit = replays, circuit
        self._all_heads = [
            (layer, head) for layer, heads in enumerate(model.geometry.layer_heads) for head in range(heads)
        ]

    def values(self, kept: HeadSets, chosen: np.ndarray | None = None) -> np.ndarray:
        """The metric [prompts, sets] with only the heads of each set intact, of all or the chosen prompts."""
        chosen = np.ones(len(self.replays), bool) if chosen is None else chosen
        return np.array(
            [replay.values(kept) for replay, is_chosen in zip(self.replays, chosen, strict=True) if is_chosen]
        ).reshape(-1, len(kept))

    def without(self, subset: Collection[LayerIndexHead], chosen: np.ndarray | None = None) -> np.ndarray:
        """The metric [prompts, 2] of the circuit and of the model, both without these heads."""
        kept = [[head for head in heads if head not in subset] for heads in (self.circuit, self._all_heads)]
        return self.values(kept, chosen)


def _head_name(model: Model, head: LayerIndexHead) -> str:
    return format_head(model.geometry.layer_numbers[head[0]], head[1])


def _head_columns(model: Model, head: LayerIndexHead) -> dict[str, Any]:
    layer, number = head
    geometry = model.geometry
    return {"layer": geometry.layer_numbers[layer], "head": number, "kv_group": geometry.kv_group(layer, number)}

"""Runner of the probe of circuits of heads: all prompts of one set and model per cell.

A cell has all prompts of a set, because greedy subsets are chosen by means over prompts.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.ablation_names import MEAN_OF_PROMPTS
from headscope.base.heads import format_head
from headscope.errors import BadInput
from headscope.interventions.circuit import CircuitRuns, Intact, Member
from headscope.interventions.heads import heads_by_layer
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.pair_sets import PairSet
from headscope.prompts.pairs import stored_metric_name
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.named_heads import NamedHeads
from headscope.study.prompts import PromptSets
from probes.circuit.declaration import CIRCUIT, CIRCUIT_MEMBERS, WHOLE, CircuitOptions, split_positions
from probes.circuit.reference import Reference

log = logging.getLogger("headscope")
RESIDUAL_STREAM_MEMORY_BYTES = 2**30
"""Memory for the residual streams of all prompts of a set, and for replaced outputs; the rest is on disk."""


@dataclass(frozen=True)
class _CircuitWork:
    prompts: str
    length: int


class CircuitRunner:
    """Cells: every set of every model."""

    def __init__(self, options: CircuitOptions, context: StudyContext):
        self.options, self.context = options, context
        self.sets = PromptSets(
            context,
            options.pairs,
            count=options.count,
            length=options.length,
            metric=options.metric,
            alignment="free" if options.complement != "zero" or callable(options.metric) else "unused",
        )
        self._places = [split_positions(name) for name in options.heads]
        self._named_heads = NamedHeads(context, [name for name, _ in self._places], options.weights)

    def cells(self) -> list[Cell]:
        cells = []
        sets_of_models = {label: self.sets.of_model(label) for label in self.context.labels}
        references = {
            (label, source): self._reference(label, source) for label in sets_of_models for source in self.sets.sources
        }
        for (label, _), reference in references.items():  # reports mistakes in prompts before any model is opened
            reference.check(label, references.values())
        for label, sets in sets_of_models.items():
            circuit = self._circuit(self.context.model(label), label)
            for source, pairs in zip(self.sets.sources, sets, strict=True):
                _refuse_shared_tokens(self.context.model(label), circuit, pairs)
                if len(pairs) == 1 and self._greedy_steps(len(circuit)):
                    log.warning(
                        "%s: the greedy test of completeness is left out: '%s' has one prompt. Use 2 or more, and 6 "
                        "for an interval",
                        *(label, pairs.name),
                    )
                cost = self._passes(len(circuit), len(pairs)) * pass_cost(pairs.length)
                cells.append(Cell(f"{label}: {pairs.name}", label, cost, _CircuitWork(source, pairs.length)))
        return cells

    def compute_rows(self, cell: Cell[_CircuitWork], model: Model) -> Mapping[str, Rows]:
        pairs, circuit = self.sets.open(cell.model, cell.work.prompts), self._circuit(model, cell.model)
        reference = self._reference(cell.model, cell.work.prompts)
        draws, length = self._draws, pairs.length
        replays = self._replays(model, pairs, reference)
        self.context.advance(self._recording_passes * len(pairs) * pass_cost(length))
        prompts = _Prompts(replays, circuit, lambda runs: self.context.advance(runs * draws * pass_cost(length)))
        metric = stored_metric_name(self.options.metric)
        is_counted = self._count_prompts([replay.unchanged for replay in replays], metric)
        keys = {"model": cell.model, "prompts": pairs.name, "complement": self.options.complement, "metric": metric}
        names = pd.DataFrame({"pair": pairs.pair_names, "is_counted": is_counted}).assign(**keys)
        common: dict[str, Any] = {"size": len(circuit), "reference_prompts": reference.counts}
        removed = {WHOLE: [], **self._random_subsets(circuit)}
        is_selecting = is_counted & (np.cumsum(is_counted) % 2 == 1)
        greedy = self._greedy_subsets(prompts, is_selecting) if is_counted.sum() > 1 else {}
        if self._greedy_steps(len(circuit)) and is_counted.sum() <= 1 < len(pairs):
            log.warning(
                "%s: the greedy test of completeness is left out: %d of %d prompts of '%s' count. Use other prompts, "
                "or --keep-failing",
                *(cell.model, is_counted.sum(), len(pairs), pairs.name),
            )
        empty = prompts.values([Intact([])])[:, 0]
        blocks = []
        for name, subset in {**removed, **greedy}.items():
            values = prompts.without(subset)
            text = ",".join(_member_name(model, member) for member in subset)
            columns = {"metric_circuit": values[:, 0], "metric_model": values[:, 1], "metric_empty": empty}
            selects = is_selecting & (name in greedy)
            blocks.append(names.assign(subset=name, heads=text, **common, **columns, is_selecting=selects))
        whole = blocks[0]["metric_circuit"].to_numpy()
        without = prompts.values([Intact([other for other in circuit if other != member]) for member in circuit])
        members = [
            names.assign(**_member_columns(model, member), metric_circuit=whole, metric_without=without[:, number])
            for number, member in enumerate(circuit)
        ]
        return {
            CIRCUIT.name: pd.concat(blocks, ignore_index=True),
            CIRCUIT_MEMBERS.name: pd.concat(members, ignore_index=True),
        }

    def _count_prompts(self, unchanged: Sequence[float], metric: str) -> np.ndarray:
        """Which prompts count, by the metric of the unchanged model."""
        return np.array([self.options.keep_failing or shows_answer(metric, value) for value in unchanged])

    def _passes(self, size: int, prompts: int) -> float:
        """The forward passes of a set of prompts, with those that record reference outputs and residual streams."""
        subsets = min(self.options.random_subsets, (1 << size) - 2)
        selecting = -(-prompts // 2)
        steps = range(1, self._greedy_steps(size) + 1) if prompts > 1 else []
        greedy = sum(2 * (size - step + 1) * selecting + 2 * prompts for step in steps)
        return self._recording_passes * prompts + ((3 + size + 2 * subsets) * prompts + greedy) * self._draws

    @property
    def _recording_passes(self) -> int:
        """Passes per prompt that record residual streams and reference outputs, also those that a mean leaves out."""
        return 3 if self.options.complement == MEAN_OF_PROMPTS else 2

    @property
    def _draws(self) -> int:
        """Most reference prompts whose outputs replace those of one prompt, one after another."""
        return self.options.draws if self.options.complement == "resample" else 1

    def _greedy_steps(self, size: int) -> int:
        return min(self.options.greedy, size - 1)

    def _replays(self, model: Model, pairs: PairSet, reference: Reference) -> list[CircuitRuns]:
        """The prompts with what replaces the outputs of the heads that are ablated."""
        memory = RESIDUAL_STREAM_MEMORY_BYTES / len(pairs)
        return [
            CircuitRuns(model, pairs.build(index), self.options.metric, outputs, memory)
            for index, outputs in enumerate(reference.replacements(model, memory))
        ]

    def _random_subsets(self, circuit: Sequence[Member]) -> dict[str, list[Member]]:
        """Distinct subsets with a random number of members, at least one and not all, the same for all prompts.

        All 2^n - 2 of a circuit of n heads if there are fewer than asked for.
        """
        rng = np.random.default_rng([self.context.seed, len(circuit)])
        count = min(self.options.random_subsets, 2 ** len(circuit) - 2)
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            size = int(rng.integers(1, len(circuit)))
            drawn[tuple(sorted(rng.permutation(len(circuit))[:size].tolist()))] = None
        return {f"random {number}": [circuit[at] for at in members] for number, members in enumerate(drawn, 1)}

    def _greedy_subsets(self, prompts: "_Prompts", is_selecting: np.ndarray) -> dict[str, list[Member]]:
        """Subsets that grow by the head that most separates circuit and model in the mean over selecting prompts."""
        subsets: dict[str, list[Member]] = {}
        subset: list[Member] = []
        for step in range(1, self._greedy_steps(len(prompts.circuit)) + 1):
            candidates = [[*subset, head] for head in prompts.circuit if head not in subset]
            scores = [abs(float(np.diff(prompts.without(candidate, is_selecting)).mean())) for candidate in candidates]
            subset = candidates[int(np.argmax(scores))]
            subsets[f"greedy {step}"] = subset
        return subsets

    def _circuit(self, model: Model, label: str) -> list[Member]:
        """The members by layer index and head. Raises BadInput for a head twice and for all heads of the model."""
        self._named_heads.check(model, label)
        names = [
            f"{head}@{positions}" if positions else head
            for name, positions in self._places
            for head in self._named_heads.of_name(name)
        ]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise BadInput(f"the circuit has {repeated[0]} twice. Name every head once")
        circuit = sorted(_member(model, name) for name in names)
        if len(circuit) == sum(model.geometry.layer_heads) and all(one.positions == ALL_TOKENS for one in circuit):
            raise BadInput(
                f"the circuit has all {len(circuit)} heads of '{label}', so that nothing is ablated. Name fewer"
            )
        return circuit

    def _reference(self, label: str, source: str) -> Reference:
        reference = self.sets.open(label, self.options.reference or source)
        return Reference(self.options, self.context.seed, self.sets.open(label, source), reference)


class _Prompts:
    """All prompts of a set, and a circuit; `advance` receives the number of finished runs."""

    def __init__(
        self,
        replays: Sequence[CircuitRuns],
        circuit: Sequence[Member],
        advance: Callable[[int], None],
    ):
        self.replays, self.circuit, self._advance = replays, circuit, advance

    def values(self, sets: Sequence[Intact], chosen: np.ndarray | None = None) -> np.ndarray:
        """The metric [prompts, sets] with only these outputs intact, of all or the chosen prompts."""
        chosen = np.ones(len(self.replays), bool) if chosen is None else chosen
        rows = []
        for replay, is_chosen in zip(self.replays, chosen, strict=True):
            if is_chosen:
                rows.append(replay.values(sets))
                self._advance(len(sets))
        return np.array(rows).reshape(-1, len(sets))

    def without(self, subset: Collection[Member], chosen: np.ndarray | None = None) -> np.ndarray:
        """The metric [prompts, 2] of the circuit and of the model, both without these members."""
        rest = [member for member in self.circuit if member not in subset]
        return self.values([Intact(rest), Intact(subset, are_removed=True)], chosen)


def _member(model: Model, name: str) -> Member:
    """The member of a name such as L18H6 or L18H6@last."""
    head, positions = split_positions(name)
    ((layer, (number,)),) = heads_by_layer(model, [head]).items()
    return Member(layer, number, positions or ALL_TOKENS)


def _refuse_shared_tokens(model: Model, circuit: Sequence[Member], pairs: PairSet) -> None:
    """Raise BadInput for a prompt that lacks a member's positions, and for one in which members share an output."""
    if all(member.positions == ALL_TOKENS for member in circuit):
        return
    for pair in map(pairs.build, range(len(pairs))):
        owners: dict[tuple[int, int, int], Member] = {}
        for member in circuit:
            for token in member.tokens(pair):
                owner = owners.setdefault((member.layer, member.head, token), member)
                if owner != member:
                    raise BadInput(
                        f"the members {_member_name(model, owner)} and {_member_name(model, member)} of the circuit "
                        f"both have token {token} of '{pair.name}'. Name every position of a head once"
                    )


def _member_name(model: Model, member: Member) -> str:
    head = format_head(model.geometry.layer_numbers[member.layer], member.head)
    return head if member.positions == ALL_TOKENS else f"{head}@{member.positions}"


def _member_columns(model: Model, member: Member) -> dict[str, Any]:
    geometry = model.geometry
    return {
        "layer": geometry.layer_numbers[member.layer],
        "head": member.head,
        "kv_group": geometry.kv_group(member.layer, member.head),
        "positions": member.positions,
    }

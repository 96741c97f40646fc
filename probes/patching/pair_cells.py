"""Cells and sets of prompt pairs, which pairs count, and the stored rows of one pair: of patching and paths."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from headscope.errors import BadInput
from headscope.interventions.edits import Run
from headscope.interventions.heads import Unit
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import Activation, Direction, PairRuns
from headscope.interventions.parts import PartName, layers_with
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.haystack import decode_tokens
from headscope.prompts.pair_sets import GENERATED_SETS, PairSet
from headscope.prompts.pairs import METRICS_WITH_WRONG, PAIR_OPTIONS, TokenPair
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompts import PromptSets
from probes.patching.declaration import ALL_POSITIONS, PairOptions, effect_columns

RESIDUAL_STREAM_MEMORY_BYTES = 2**28
"""Memory for the residual streams of a pair; the rest is on disk."""
SELECTION_PAIRS = 100
"""Most pairs whose estimates select the units that verify patches exactly [ours]."""
CHECKED_PAIRS = 16
"""Pairs of a file whose answers are checked for an exchange before the first one is patched."""


@dataclass(frozen=True)
class PairWork:
    """One step on the pair with number `index` of a set of prompts."""

    step: Literal["estimate", "exact"]
    prompts: str
    index: int
    length: int = field(compare=False)
    prerequisites: tuple[str, ...] = field(default=(), compare=False)
    """Cells whose stored estimates select what this one patches."""


PairCell = Cell[PairWork]


@dataclass(frozen=True)
class SetCost:
    """What a set of pairs costs in one model, in forward passes over a prompt of one pair."""

    label: str
    source: str
    pairs: PairSet
    model: Model
    all_exact: float
    """All exact effects."""
    estimate: float
    verified: float
    """The exact effects of the units that estimates select."""

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the first prompt."""
        return len(self.pairs.build(0).clean)

    @property
    def operations(self) -> float:
        """Floating-point operations of all exact effects: two for each parameter and token."""
        parameters = sum(parameter.numel() for parameter in self.model.module.parameters())
        return float(2 * parameters * self.prompt_tokens * self.all_exact * len(self.pairs))


def cells_of_sets(costs: Sequence[SetCost], options: PairOptions) -> Iterator[Cell]:
    """The cells of all sets and models, by the one method that the options choose for all."""
    method = options.choose_method(sum(cost.operations for cost in costs))
    for cost in costs:
        steps = {"estimate": cost.estimate, "exact": cost.all_exact if method == "exact" else cost.verified}
        chosen = [*steps] if method == "verify" else [method]
        pass_ = pass_cost(cost.prompt_tokens)
        yield from _pair_cells(cost, {step: steps[step] * pass_ for step in chosen})


def _pair_cells(of_set: SetCost, costs: Mapping[Any, float]) -> Iterator[Cell]:
    """A cell per pair and step in `costs`, step after step; the first cells of a step select what the next patches."""
    prerequisites: tuple[str, ...] = ()
    for step, cost in costs.items():
        cells = [
            Cell(
                f"{of_set.label}: {of_set.pairs.name}, pair {name}, {step}",
                of_set.label,
                cost,
                PairWork(step, of_set.source, index, of_set.pairs.length, prerequisites),
            )
            for index, name in enumerate(of_set.pairs.pair_names)
        ]
        prerequisites = tuple(cell.id for cell in cells[:SELECTION_PAIRS])
        yield from cells


def open_pair_sets(
    context: StudyContext,
    options: PairOptions,
    check: Callable[[str, TokenPair], Any],
    changeable: Collection[str] = PAIR_OPTIONS,
) -> PromptSets:
    """The sets of pairs of the options; `check`, and `changeable` as `options`, as in `PromptSets`."""
    return PromptSets(
        context,
        options.pairs,
        count=options.count,
        length=options.length,
        metric=options.metric,
        alignment=options.align,
        check=check,
        options=changeable,
    )


def refuse_swapped_answers(model: Model, pairs: PairSet, source: str, options: PairOptions) -> None:
    """Raise BadInput if the model gives the opposite answer to both prompts in most of the first pairs of a file."""
    if source in GENERATED_SETS or options.metric not in METRICS_WITH_WRONG or options.keep_failing:
        return
    count = min(len(pairs), CHECKED_PAIRS)
    swapped = []
    for pair in map(pairs.build, range(count)):
        replay = PairRuns(model, PairTokens.on_device(pair, model.device), options.metric, RESIDUAL_STREAM_MEMORY_BYTES)
        if replay.clean_value < 0 < replay.corrupted_value:
            swapped.append(pair.location)
    if 2 * len(swapped) > count:
        raise BadInput(
            f"{swapped[0]}: the model prefers the wrong answer for the clean prompt and the answer for the corrupted "
            f"prompt, as in {len(swapped)} of {count} pairs. Exchange 'answer' and 'wrong' in these lines, or use "
            "--keep-failing to measure them as they are"
        )


def counts_pair(replay: PairRuns, pair: TokenPair, options: PairOptions) -> bool:
    """Whether means include a pair, if its metric differs enough between the prompts."""
    return options.keep_failing or shows_answer(
        replay.metric_name, replay.clean_value, replay.corrupted_value, pair.is_contrast
    )


@dataclass(frozen=True)
class PatchedSpan:
    """Positions that are patched together, counted from the first aligned one, which is token `first_aligned`.

    None is all positions. A named span has a name.
    """

    positions: range | None
    first_aligned: int
    name: str = ""

    @property
    def columns(self) -> dict[str, Any]:
        """The span in the columns of both tables of heads."""
        if self.positions is None:
            return {"position": ALL_POSITIONS, "span": "", "first": 0, "last": 0}
        first, last = (self.first_aligned + self.positions[end] for end in (0, -1))
        return {"position": first, "span": self.name, "first": first, "last": last}

    @property
    def layer_columns(self) -> dict[str, Any]:
        """The span in the columns of the table of layers."""
        columns = self.columns
        last = ALL_POSITIONS if self.positions is None else columns["last"]
        return {"position": columns["position"], "span": self.name, "last": last}


def layer_rows(
    pair_runs: PairRuns, step: str, parts: Sequence[PartName], direction: Direction, spans: Sequence[PatchedSpan]
) -> Iterator[pd.DataFrame]:
    """Rows of one layer and part after the other, at every span. `step` is exact or estimate.

    The whole residual stream has no rows: it is the other run.
    """
    replay = pair_runs.clean
    for part in parts:
        is_left_out = part == "resid_pre" and _is_whole_prompt_aligned(pair_runs)
        kept = [span for span in spans if not (is_left_out and span.positions is None)]
        if not kept:
            continue
        columns, places = pd.DataFrame([span.layer_columns for span in kept]), _number_places(kept)
        keys = {"activation": part, "direction": direction, "metric": pair_runs.metric_name, "method": step}
        layers = layers_with(part, len(replay.layers), replay.parts)
        runs = [pair_runs.patch_part(part, direction, layer, place) for layer in layers for place in places]
        by_layer = np.reshape(patched_values(pair_runs, step, direction, runs), (len(layers), len(places)))
        unpatched = (pair_runs.clean_value, pair_runs.corrupted_value)
        for layer, of_places in zip(layers, by_layer, strict=True):
            values = of_places[[places[span.positions] for span in kept]]
            effects = effect_columns(values, *unpatched, direction, pair_runs.metric_name)
            yield columns.assign(layer=layer, **keys, **effects)


def patched_values(pair_runs: PairRuns, step: str, direction: Direction, runs: Sequence[Run]) -> np.ndarray:
    """The metric after the patches of every run, exact or estimated."""
    if step == "exact":
        return np.array(pair_runs.evaluate(direction, runs))
    return pair_runs.unpatched_value(direction) + np.array(pair_runs.estimate(direction, runs))


def _number_places(spans: Sequence[PatchedSpan]) -> dict[range | None, int]:
    """The positions of spans, numbered from 0: spans of equal positions are patched once."""
    return {place: number for number, place in enumerate(dict.fromkeys(span.positions for span in spans))}


def _is_whole_prompt_aligned(pair_runs: PairRuns) -> bool:
    """Whether all positions of both prompts correspond."""
    lengths = {run.ids.shape[1] - len(pair_runs.pair.answer) for run in (pair_runs.clean, pair_runs.corrupted)}
    return lengths == {pair_runs.pair.aligned}


def estimate_rows(
    pair_runs: PairRuns,
    model: Model,
    units: Mapping[Activation, Sequence[Unit]],
    direction: Direction,
    spans: Sequence[PatchedSpan],
) -> Iterator[pd.DataFrame]:
    """Rows of the estimates of one unit after the other, by activation, at every span: one estimate of all of them."""
    places = _number_places(spans)
    patched = [(activation, unit) for activation, members in units.items() for unit in members]
    runs = [pair_runs.patch(activation, direction, [unit], place) for activation, unit in patched for place in places]
    values = np.reshape(patched_values(pair_runs, "estimate", direction, runs), (len(patched), len(places)))
    span_columns, at = pd.DataFrame([span.columns for span in spans]), [places[span.positions] for span in spans]
    for (activation, unit), of_places in zip(patched, values, strict=True):
        columns = unit_columns(model, unit) | result_columns(pair_runs, activation, direction, of_places[at])
        yield span_columns.assign(**columns, method="estimate")


def entry_rows(
    pair_runs: PairRuns, units: Sequence[Unit], model: Model, step: str, direction: Direction, first: int
) -> Iterator[pd.DataFrame]:
    """Rows of every entry of the patterns of heads. `step` is exact or estimate; `first` is the first aligned token."""
    entries = [(query, key) for query in range(pair_runs.pair.aligned) for key in range(query + 1)]
    places = pd.DataFrame(first + np.array(entries), columns=["destination", "source"])
    estimates = pair_runs.estimate_entries(direction) if step == "estimate" else []
    for unit in units:
        if step == "estimate":
            changes = estimates[unit.layer][unit.head].numpy()
            patched = pair_runs.unpatched_value(direction) + changes[tuple(np.transpose(entries))]
        else:
            runs = [pair_runs.patch_entry(direction, unit, *entry) for entry in entries]
            patched = np.array(pair_runs.evaluate(direction, runs))
        columns = unit_columns(model, unit) | result_columns(pair_runs, "pattern", direction, patched)
        del columns["activation"]
        yield places.assign(**columns, method=step)


def unit_columns(model: Model, unit: Unit) -> dict[str, Any]:
    """The columns that name a unit; `layer` is its number in the model."""
    return {"layer": model.geometry.layer_numbers[unit.layer], "head": unit.head, "kv_group": unit.kv_group}


def result_columns(pair_runs: PairRuns, activation: str, direction: str, patched: Any) -> dict[str, Any]:
    """The columns of a patch and its effect, with `patched`, the metric after it."""
    keys = {"activation": activation, "direction": direction, "metric": pair_runs.metric_name}
    values = (pair_runs.clean_value, pair_runs.corrupted_value)
    return keys | effect_columns(patched, *values, direction, pair_runs.metric_name)


def token_rows(tokenizer: Any, pair: TokenPair) -> pd.DataFrame:
    """The aligned tokens of both prompts."""
    clean, corrupted = (
        [decode_tokens(tokenizer, ids[at : at + 1]) for at in range(len(ids) - pair.aligned, len(ids))]
        for ids in (pair.clean, pair.corrupted)
    )
    first = len(pair.clean) - pair.aligned
    return pd.DataFrame({"position": first + np.arange(pair.aligned), "clean": clean, "corrupted": corrupted})

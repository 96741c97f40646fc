"""Cells and sets of prompt pairs, and which pairs count: of patching and of path patching."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headscope.errors import BadInput
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.pair_sets import GENERATED_SETS, PairSet
from headscope.prompts.pairs import METRICS_WITH_WRONG, TokenPair
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompt_sets import PromptSets
from probes.patching.schema import PairOptions

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
                PairWork(step, of_set.source, index, prerequisites),
            )
            for index, name in enumerate(of_set.pairs.pair_names)
        ]
        prerequisites = tuple(cell.id for cell in cells[:SELECTION_PAIRS])
        yield from cells


def open_pair_sets(context: StudyContext, options: PairOptions, check: Callable[[str, TokenPair], Any]) -> PromptSets:
    """The sets of pairs of the options; `check` as in `PromptSets`."""
    return PromptSets(
        context,
        options.pairs,
        count=options.count,
        length=options.length,
        metric=options.metric,
        alignment=options.align,
        check=check,
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

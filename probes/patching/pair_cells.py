"""Cells and sets of prompt pairs, and which pairs count: of patching and of path patching."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headscope.errors import BadInput
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.haystack import Haystack
from headscope.prompts.pair_sets import GENERATED_SETS, PairSet, load_pair_set
from headscope.prompts.pairs import METRICS_WITH_WRONG, TokenPair, stored_metric_name
from headscope.study.cells import Cell
from headscope.study.context import StudyContext
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


def pair_cells(label: str, source: str, pairs: PairSet, costs: Mapping[Any, float]) -> Iterator[Cell]:
    """A cell per pair and step in `costs`, step after step; the first cells of a step select what the next patches."""
    prerequisites: tuple[str, ...] = ()
    for step, cost in costs.items():
        cells = [
            Cell(
                f"{label}: {pairs.name}, pair {name}, {step}",
                label,
                cost,
                PairWork(step, source, index, prerequisites),
            )
            for index, name in enumerate(pairs.pair_names)
        ]
        prerequisites = tuple(cell.id for cell in cells[:SELECTION_PAIRS])
        yield from cells


def open_pair_set(context: StudyContext, options: PairOptions, label: str, source: str) -> PairSet:
    """A set of pairs in the tokens of a model, recorded as an input of the study."""

    def haystacks() -> list[Haystack]:
        """The documents of the study as texts for needles."""
        documents = context.documents(label, options.length)
        return [Haystack(document.name, document.ids, context.tokenizer(label)) for document in documents]

    pairs = load_pair_set(
        source,
        context.tokenizer(label),
        haystacks,
        count=options.count,
        length=options.length,
        seed=context.seed,
        alignment=options.align,
        metric=stored_metric_name(options.metric),
    )
    context.record_input(f"prompt pairs '{source}'", [pairs.digest.encode()])
    return pairs


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

"""Runner of path patching: estimates and exact patches of one prompt pair of one model per cell."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from headscope.base.heads import format_head
from headscope.errors import BadInput
from headscope.interventions.heads import ALL_HEADS as EVERY_HEAD
from headscope.interventions.heads import layer_heads
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import Direction, PairRuns
from headscope.interventions.path_patching import LayerIndexHead, Path, PathModel, PathPatching, PathSpan, inspect_paths
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.results.effects.ranking import select_units
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell
from headscope.study.context import StudyContext
from headscope.study.named_heads import NamedHeads
from probes.patching.declaration import effect_columns, is_normalised
from probes.patching.pair_cells import (
    RESIDUAL_STREAM_MEMORY_BYTES,
    PairCell,
    PairWork,
    SetCost,
    cells_of_sets,
    counts_pair,
    open_pair_sets,
    refuse_swapped_answers,
)
from probes.patching.paths.declaration import (
    ALL_HEADS,
    LOGITS,
    PATH_ENDS,
    PATH_ESTIMATES,
    PATH_KEYS,
    PATHS,
    RECEIVER_INPUTS,
    TOGETHER,
    PathsOptions,
)

PATH_COLUMNS = [column.name for column in PATH_KEYS]
EACH = "each"
"""Every position separately."""
Places = tuple[str, str]
"""Names of the positions of the sender and of the receiver."""
ESTIMATE_COST, PATCH_COST = 12.0, 0.4
"""Costs of estimates and of one exact patch, in forward passes over a prompt."""


class PathsRunner:
    """Cells: every pair of every set and model; for verify, the estimates of all pairs come before the exact patches.

    The paths to verify are selected by the estimates of the first `SELECTION_PAIRS` pairs of the set, the same
    paths for every pair.
    """

    def __init__(self, options: PathsOptions, context: StudyContext):
        self.options, self.context = options, context
        self.sets = open_pair_sets(context, options, lambda label, pair: self._placed_paths([], pair))
        self._named_heads = {
            option: NamedHeads(context, names, options.weights)
            for option, names in (("senders", options.senders), ("receivers", options.receivers))
            if names != ALL_HEADS
        }
        self._path_models: dict[str, PathModel] = {}
        self._selections: dict[tuple[str, str], dict[str, list[Path]]] = {}
        self._checked_sets: set[tuple[str, str]] = set()

    def cells(self) -> list[Cell]:
        for label in self.context.labels:  # reports mistakes in prompts before any model is opened
            self.sets.of_model(label)
        costs = []
        for label in self.context.labels:
            model = self.context.model(label)
            for heads in self._named_heads.values():
                heads.check(model, label)
            costs += [self._cost(label, source, model) for source in self.sets.sources]
        return [*cells_of_sets(costs, self.options)]

    def compute_rows(self, cell: PairCell, model: Model) -> Mapping[str, Rows]:
        work = cell.work
        pairs = self.sets.open(cell.model, work.prompts)
        if (cell.model, work.prompts) not in self._checked_sets:
            refuse_swapped_answers(model, pairs, work.prompts, self.options)
            self._checked_sets.add((cell.model, work.prompts))
        pair = pairs.build(work.index)
        tokens = PairTokens.on_device(pair, model.device)
        replay = PairRuns(model, tokens, self.options.metric, RESIDUAL_STREAM_MEMORY_BYTES)
        is_counted = counts_pair(replay, pair, self.options)
        if work.step == "estimate" and not is_counted:
            return {}
        keys = {"model": cell.model, "prompts": pairs.name, "metric": replay.metric_name, "norms": self.options.norms}
        if cell.model not in self._path_models:
            self._path_models[cell.model] = inspect_paths(model, tokens.clean)
        blocks = []
        with replay.capturing():
            for direction in self.options.directions:
                patching = PathPatching(
                    replay,
                    self._path_models[cell.model],
                    direction,
                    self.options.norms,
                    RESIDUAL_STREAM_MEMORY_BYTES,
                    self.options.mlps,
                )
                if work.step == "estimate":
                    block = self._estimate_rows(patching, replay, model, direction)
                else:
                    paths = self._selection(cell.model, model, work)[direction]
                    block = self._exact_rows(patching, replay, model, direction, self._placed_paths(paths, pair))
                blocks.append(block.assign(direction=direction, **keys))
        table = pd.concat(blocks, ignore_index=True)
        if work.step == "exact":
            table["is_counted"] &= is_counted
            mlps_recomputed = self.options.mlps == "recomputed"
            return {PATHS.name: table.assign(pair=pair.name, group=pair.group, mlps_recomputed=mlps_recomputed)}
        return {PATH_ESTIMATES.name: table} if len(table) else {}

    def _cost(self, label: str, source: str, model: Model) -> SetCost:
        pairs, options = self.sets.open(label, source), self.options
        length, paths, directions = len(pairs.build(0).clean), len(self._paths(model)), len(options.directions)
        for names in (options.sender_positions, options.receiver_positions):
            paths *= len({*names} - {EACH}) + (length if EACH in names else 0)
        verified = (options.verify_top + options.verify_random) * len(options.through)
        return SetCost(
            *(label, source, pairs, model),
            all_exact=directions * (3 + PATCH_COST * paths),
            estimate=directions * ESTIMATE_COST,
            verified=directions * (3 + PATCH_COST * verified),
        )

    def _estimate_rows(
        self, patching: PathPatching, replay: PairRuns, model: Model, direction: Direction
    ) -> pd.DataFrame:
        """Estimates of all chosen paths as rows; none if the metric of the two prompts differs too little."""
        paths, changes = self._paths(model), _estimates_of(self._paths(model), *patching.estimate())
        clean, corrupted = replay.clean_value, replay.corrupted_value
        difference = clean - corrupted if direction == "denoising" else corrupted - clean
        rows = _path_columns(model, paths).assign(change=changes, difference=difference, pairs=1)
        return rows if is_normalised(clean, corrupted, replay.metric_name) else rows.iloc[:0]

    def _exact_rows(
        self,
        patching: PathPatching,
        replay: PairRuns,
        model: Model,
        direction: Direction,
        placed: Mapping[Places, Sequence[Path]],
    ) -> pd.DataFrame:
        """Rows of exact patches, by the names of the positions of sender and receiver."""
        values = dict(patching.patch([*dict.fromkeys(path for paths in placed.values() for path in paths)]))
        blocks = []
        for (sender_positions, receiver_positions), paths in placed.items():
            patched = np.array([values[path] for path in paths])
            columns = effect_columns(patched, replay.clean_value, replay.corrupted_value, direction, replay.metric_name)
            block = _path_columns(model, paths, self.options.together).assign(**columns)
            blocks.append(block.assign(sender_positions=sender_positions, receiver_positions=receiver_positions))
        return pd.concat(blocks, ignore_index=True)

    def _placed_paths(self, paths: Sequence[Path], pair: TokenPair) -> dict[Places, list[Path]]:
        """The paths at all positions that the options name. Those to the logits have none of a receiver."""
        senders, receivers = (
            _spans(pair, names) for names in (self.options.sender_positions, self.options.receiver_positions)
        )
        placed: dict[Places, list[Path]] = {}
        for (sender, sender_span), (receiver, receiver_span) in product(senders.items(), receivers.items()):
            for path in paths:
                if path.receivers:
                    own = replace(path, sender_span=sender_span, receiver_span=receiver_span)
                    placed.setdefault((sender, receiver), []).append(own)
                elif receiver == next(iter(receivers)):
                    placed.setdefault((sender, ALL_TOKENS), []).append(replace(path, sender_span=sender_span))
        return placed

    def _paths(self, model: Model) -> list[Path]:
        """All paths between the chosen senders and receivers. Raises BadInput for a head without any."""
        senders = self._heads(model, "senders")
        receivers = [] if self.options.through == ["logits"] else self._heads(model, "receivers")
        to_logits = "logits" in self.options.through
        _check_order(model, senders, receivers, self.options, to_logits)
        inputs = [name for name in RECEIVER_INPUTS if name in self.options.through]
        paths = []
        for sender in senders:
            later = [receiver for receiver in receivers if receiver[0] > sender[0]]
            sets = [tuple(later)] if self.options.together and later else [(receiver,) for receiver in later]
            paths += [Path(sender, members, name) for name in inputs for members in sets]
        return paths + ([Path(sender, (), "logits") for sender in senders] if to_logits else [])

    def _heads(self, model: Model, option: str) -> list[LayerIndexHead]:
        """The heads that an option names, or all."""
        named = self._named_heads.get(option)
        return [*layer_heads(model, EVERY_HEAD if named is None else named.identifiers)]

    def _selection(self, label: str, model: Model, work: PairWork) -> dict[str, list[Path]]:
        """The paths to patch exactly, by direction."""
        if not work.prerequisites:
            return dict.fromkeys(self.options.directions, self._paths(model))
        if (label, work.prompts) not in self._selections:
            totals = self._summed_squares(model, work)
            self._selections[label, work.prompts] = {
                direction: [
                    _read_path(model, row)
                    for number, name in enumerate(PATH_ENDS)
                    for row in select_paths(
                        totals[(totals["direction"] == direction) & (totals["through"] == name)],
                        self.options,
                        [self.context.seed, number, int(direction == "noising")],
                    )
                ]
                for direction in self.options.directions
            }
        return self._selections[label, work.prompts]

    def _summed_squares(self, model: Model, work: PairWork) -> pd.DataFrame:
        """The sum over pairs of the squared estimates, one cell at a time; 0 if no pair has estimates."""
        sums: pd.Series | None = None
        for cell in work.prerequisites:
            job_id = f"paths/{cell}"
            if PATH_ESTIMATES.name in self.context.stored_tables(job_id):
                rows = self.context.read_stored(job_id, PATH_ESTIMATES.name)
                rows = rows.astype({"direction": str, "through": str, "change": "float64"})
                squares = rows.set_index(["direction", *PATH_COLUMNS])["change"].pow(2)
                sums = squares if sums is None else sums + squares
        if sums is None:
            paths = _path_columns(model, self._paths(model)).assign(change=0.0)
            return pd.concat([paths.assign(direction=name) for name in self.options.directions], ignore_index=True)
        return sums.reset_index()


def select_paths(squares: pd.DataFrame, options: PathsOptions, seed: Sequence[int]) -> list[dict[Any, Any]]:
    """The paths that verify patches exactly; `change` is the sum of the squared estimates of all pairs."""
    return squares.iloc[select_units(squares["change"], options.verify_top, options.verify_random, seed)].to_dict(
        "records"
    )


def _check_order(
    model: Model, senders: list[LayerIndexHead], receivers: list[LayerIndexHead], options: PathsOptions, to_logits: bool
) -> None:
    """Raise BadInput for a named head without any path."""
    numbers = model.geometry.layer_numbers
    if options.receivers != ALL_HEADS:
        for layer, head in receivers:
            if layer <= min(sender for sender, _ in senders):
                raise BadInput(
                    f"receiver {format_head(numbers[layer], head)} is not in a later layer than any sender. Name "
                    "senders in earlier layers, or another receiver"
                )
    if options.senders != ALL_HEADS and not to_logits:
        for layer, head in senders:
            if layer >= max(receiver for receiver, _ in receivers):
                raise BadInput(
                    f"sender {format_head(numbers[layer], head)} is not in an earlier layer than any receiver. Name "
                    "receivers in later layers, or another sender"
                )


def _estimates_of(paths: Sequence[Path], to_heads: Tensor, to_logits: Tensor) -> np.ndarray:
    """The estimated change of each path, from those of `PathPatching.estimate`."""
    changes = [
        to_logits[path.sender]
        if not path.receivers
        else to_heads[(*path.sender, *path.receivers[0], RECEIVER_INPUTS.index(path.end))]
        for path in paths
    ]
    return np.array([float(change) for change in changes])


def _spans(pair: TokenPair, names: Sequence[str]) -> dict[str, PathSpan]:
    """The spans of a pair that these names stand for. Raises BadInput for one that the pair lacks."""
    spans: dict[str, PathSpan] = {}
    for name in names:
        if name == ALL_TOKENS:
            spans[name] = ()
        elif name == EACH:
            first = len(pair.clean) - pair.aligned
            spans |= {str(first + at): (at, at + 1) for at in range(pair.aligned)}
        else:
            span = pair.aligned_span(name)
            spans[name] = (span.start, span.stop)
    return spans


def _path_columns(model: Model, paths: Sequence[Path], is_together: bool = False) -> pd.DataFrame:
    """The key columns of paths."""
    numbers = model.geometry.layer_numbers

    def receiver(path: Path) -> tuple[int, int]:
        if not path.receivers:
            return LOGITS, LOGITS
        ((layer, head), *_) = path.receivers
        return (TOGETHER, TOGETHER) if is_together else (numbers[layer], head)

    ends = np.array([(numbers[path.sender[0]], path.sender[1], *receiver(path)) for path in paths])
    return pd.DataFrame(
        {
            "sender_layer": ends[:, 0],
            "sender_head": ends[:, 1],
            "receiver_layer": ends[:, 2],
            "receiver_head": ends[:, 3],
            "through": [path.end for path in paths],
        }
    )


def _read_path(model: Model, row: Mapping[Any, Any]) -> Path:
    """The path in a row of estimates."""
    index = model.geometry.layer_numbers.index
    to_logits = row["through"] == "logits"
    receivers = () if to_logits else ((index(row["receiver_layer"]), int(row["receiver_head"])),)
    return Path((index(row["sender_layer"]), int(row["sender_head"])), receivers, row["through"])

"""Rows of the stored tables of one pair: spans of positions, estimates of units, patched layers, tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from headscope.forward.interventions import Unit
from headscope.patching.activation_patching import Activation, Direction, PatchingReplay
from headscope.patching.layer_patching import LayerActivation, LayerPatching
from headscope.patching.pattern_entries import PatternEntries
from headscope.positions.model import Model
from headscope.prompts.haystack import decode_tokens
from headscope.prompts.pairs import TokenPair
from probes.patching.effects import effect_columns
from probes.patching.schema import ALL_POSITIONS


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
    patching: LayerPatching,
    step: str,
    activations: Sequence[LayerActivation],
    direction: Direction,
    spans: Sequence[PatchedSpan],
) -> Iterator[pd.DataFrame]:
    """Rows of one layer and activation after the other, at every span. `step` is exact or estimate.

    The whole residual stream has no rows: it is the other run.
    """
    replay = patching.replay
    numbers = _number_places(spans)
    estimates = patching.estimate(activations, direction, [*numbers]) if step == "estimate" else {}
    for activation in activations:
        is_left_out = activation == "resid_pre" and _is_whole_prompt_aligned(replay)
        kept = [span for span in spans if not (is_left_out and span.positions is None)]
        if not kept:
            continue
        columns, places = pd.DataFrame([span.layer_columns for span in kept]), _number_places(kept)
        keys = {"activation": activation, "direction": direction, "metric": replay.metric_name, "method": step}
        for layer in patching.layers(activation):
            if step == "estimate":
                changes = estimates[activation][layer, [numbers[place] for place in places]]
                values = replay.unpatched_value(direction) + changes.numpy()
            else:
                values = np.array([value for *_, value in patching.patch(activation, direction, [layer], [*places])])
            values = values[[places[span.positions] for span in kept]]
            unpatched = (replay.clean_value, replay.corrupted_value)
            yield columns.assign(
                layer=layer, **keys, **effect_columns(values, *unpatched, direction, replay.metric_name)
            )


def _number_places(spans: Sequence[PatchedSpan]) -> dict[range | None, int]:
    """The positions of spans, numbered from 0: spans of equal positions are patched once."""
    return {place: number for number, place in enumerate(dict.fromkeys(span.positions for span in spans))}


def _is_whole_prompt_aligned(replay: PatchingReplay) -> bool:
    """Whether all positions of both prompts correspond."""
    lengths = {run.ids.shape[1] - len(replay.pair.answer) for run in (replay.clean, replay.corrupted)}
    return lengths == {replay.pair.aligned}


def estimate_rows(
    replay: PatchingReplay,
    model: Model,
    units: Sequence[Unit],
    activation: Activation,
    direction: Direction,
    changes: Tensor,
    spans: Sequence[PatchedSpan],
) -> pd.DataFrame:
    """Rows of the estimates of one activation; `changes` are those of `PatchingReplay.estimate`."""
    unpatched = replay.unpatched_value(direction)
    span_columns = pd.DataFrame([span.columns for span in spans])
    blocks = []
    for unit in units:
        number = unit.kv_group if activation in ("k", "v") else unit.head
        patched = unpatched + changes[unit.layer, number].numpy()
        columns = unit_columns(model, unit) | result_columns(replay, activation, direction, patched)
        blocks.append(span_columns.assign(**columns, method="estimate"))
    return pd.concat(blocks, ignore_index=True)


def entry_rows(
    entries: PatternEntries, units: Sequence[Unit], model: Model, step: str, direction: Direction, first: int
) -> Iterator[pd.DataFrame]:
    """Rows of every entry of the patterns of heads. `step` is exact or estimate; `first` is the first aligned token."""
    replay = entries.replay
    places = pd.DataFrame(first + np.array(entries.entries), columns=["destination", "source"])
    if step == "exact":
        values = ((unit, np.array(patched)) for unit, patched in entries.patch(direction, units))
    else:
        changes, unpatched = entries.estimate(direction), replay.unpatched_value(direction)
        values = ((unit, unpatched + changes[unit.layer][unit.head].numpy()) for unit in units)
    for unit, patched in values:
        columns = unit_columns(model, unit) | result_columns(replay, "pattern", direction, patched)
        del columns["activation"]
        yield places.assign(**columns, method=step)


def unit_columns(model: Model, unit: Unit) -> dict[str, Any]:
    """The columns that name a unit; `layer` is its number in the model."""
    return {"layer": model.geometry.layer_numbers[unit.layer], "head": unit.head, "kv_group": unit.kv_group}


def result_columns(replay: PatchingReplay, activation: str, direction: str, patched: Any) -> dict[str, Any]:
    """The columns of a patch and its effect, with `patched`, the metric after it."""
    keys = {"activation": activation, "direction": direction, "metric": replay.metric_name}
    return keys | effect_columns(patched, replay.clean_value, replay.corrupted_value, direction, replay.metric_name)


def token_rows(tokenizer: Any, pair: TokenPair) -> pd.DataFrame:
    """The aligned tokens of both prompts."""
    clean, corrupted = (
        [decode_tokens(tokenizer, ids[at : at + 1]) for at in range(len(ids) - pair.aligned, len(ids))]
        for ids in (pair.clean, pair.corrupted)
    )
    first = len(pair.clean) - pair.aligned
    return pd.DataFrame({"position": first + np.arange(pair.aligned), "clean": clean, "corrupted": corrupted})

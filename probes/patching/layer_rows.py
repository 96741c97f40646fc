"""Rows of the table `patching_layers`: exact patches and estimates of the layers of one pair."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from headscope.patching.activation_patching import Direction, PatchingReplay
from headscope.patching.layer_patching import LayerActivation, LayerPatching
from probes.patching.patched_span import PatchedSpan
from probes.patching.schema import effect_columns


def layer_rows(
    patching: LayerPatching,
    step: str,
    activations: Sequence[LayerActivation],
    direction: Direction,
    spans: Sequence[PatchedSpan],
) -> Iterator[dict[str, Any]]:
    """Rows of every layer that has an activation, at every span. `step` is exact or estimate.

    The whole residual stream has no rows: it is the other run.
    """
    replay = patching.replay
    places = [*dict.fromkeys(span.positions for span in spans)]  # spans of equal positions are patched once
    estimates = patching.estimate(activations, direction, places) if step == "estimate" else {}
    for activation in activations:
        layers = patching.layers(activation)
        chosen = [place for place in places if not _is_whole_stream(activation, place, replay)]
        if step == "estimate":
            changes = estimates[activation] + replay.unpatched_value(direction)
            values = {
                (layer, place): float(changes[layer, places.index(place)]) for layer in layers for place in chosen
            }
        else:
            patches = patching.patch(activation, direction, layers, chosen)
            values = {(layer, place): value for layer, place, value in patches}
        keys = {"activation": activation, "direction": direction, "metric": replay.metric_name, "method": step}
        for layer, span in product(layers, spans):
            if span.positions in chosen:
                value = values[layer, span.positions]
                unpatched = (replay.clean_value, replay.corrupted_value)
                effect = effect_columns(value, *unpatched, direction, replay.metric_name)
                yield {"layer": layer, **keys, **span.layer_columns, **effect}


def _is_whole_stream(activation: str, positions: range | None, replay: PatchingReplay) -> bool:
    """Whether a patch takes the residual stream of a whole prompt from the other run."""
    lengths = {run.ids.shape[1] - len(replay.pair.answer) for run in (replay.clean, replay.corrupted)}
    return activation == "resid_pre" and positions is None and lengths == {replay.pair.aligned}

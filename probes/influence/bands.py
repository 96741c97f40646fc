"""Bands of rotary pairs that can be knocked out: how they are written, and which pairs of a model they hold.

`pairs-zero:A-B` removes what the pairs A to B (both included, from 0) add to the logit; `pairs-unrotated:A-B` removes
their
rotation and keeps their content. In place of A-B a band may go by its wavelength in the checkpoint's own rotation,
against the native context: `short` (below an eighth of it), `middle`, `long` (above it); `eighths` stands for eight
equal parts of the pairs [ours], `wavelengths` for these three. Knows neither models nor stored runs.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.errors import BadInput

PairMask = npt.NDArray[np.bool_]
"""Which pairs of each layer, [layers, pairs]."""

WAVELENGTH_BANDS = ("short", "middle", "long")
KIND_DESCRIPTIONS = {"pairs-zero": "their part of the logit removed", "pairs-unrotated": "their rotation removed"}
EQUAL_PARTS = 8
"""Equal parts of the pairs in `eighths`."""
BAND_PATTERN = re.compile(rf"(pairs-zero|pairs-unrotated):(\d+-\d+|{'|'.join(WAVELENGTH_BANDS)}|eighths|wavelengths)")


def check_band_component(component: str) -> str:
    """A knock-out of pairs as it was written. Raises ValueError for anything else."""
    if not BAND_PATTERN.fullmatch(component):
        raise ValueError(
            "pairs-zero:BAND or pairs-unrotated:BAND with A-B, short, middle, long, eighths or wavelengths"
        )
    return component


def is_band(component: str) -> bool:
    """Whether a component is a knock-out of pairs."""
    return component.partition(":")[0] in KIND_DESCRIPTIONS


def band_mask(components: pd.Series) -> pd.Series:
    """Whether each component is one, every name asked once."""
    return components.map({name: is_band(str(name)) for name in components.unique()}).astype(bool)


def expand_bands(component: str, theta: npt.NDArray[np.float32], native_context: int) -> Iterator[tuple[str, PairMask]]:
    """The bands that a component stands for, each by its own name, with its pairs.

    `theta` [layers, pairs] are the checkpoint's own frequencies, rad/token, 0 in layers that do not rotate; `native` is
    its context in tokens. Raises BadInput for pairs that there are not; of several bands, those without pairs are left
    out.
    """
    kind, _, written = component.partition(":")
    turning: PairMask = np.asarray((theta > 0).any(1))
    count = theta.shape[1]
    if written == "eighths":
        parts = [part for part in np.array_split(np.arange(count), EQUAL_PARTS) if len(part)]
        for part in parts:
            yield from expand_bands(f"{kind}:{part[0]}-{part[-1]}", theta, native_context)
        return
    if "-" in written:
        first, last = map(int, written.split("-"))
        if not first <= last < count:
            raise BadInput(f"{component}: there are pairs 0 to {count - 1}; give A-B with A <= B among these")
        at = np.arange(count)
        yield f"{kind}:{first}-{last}", turning[:, None] & (first <= at) & (at <= last)
        return
    with np.errstate(divide="ignore"):
        turns = native_context * theta / (2 * np.pi)  # within the native context
    held = {"short": turns > 8, "middle": (turns <= 8) & (turns >= 1), "long": turns < 1}
    for name in WAVELENGTH_BANDS if written == "wavelengths" else (written,):
        pairs = turning[:, None] & held[name]
        if pairs.any():
            yield f"{kind}:{name}", pairs
        elif written == name:
            raise BadInput(f"{component}: no pair has such a wavelength in a native context of {native_context} tokens")


def band_label(component: str) -> str:
    """The band of a component: "0-3", "short"."""
    return component.partition(":")[2]


def band_sort_key(component: str) -> tuple[int, int, int]:
    """A key that sorts components: by kind, bands by their pairs, then those by wavelength."""
    kind, _, band = component.partition(":")
    named = band in WAVELENGTH_BANDS
    return (
        list(KIND_DESCRIPTIONS).index(kind),
        int(named),
        WAVELENGTH_BANDS.index(band) if named else int(band.partition("-")[0]),
    )


def describe_band(component: str) -> str:
    """What was done, in words: "pairs 0-3, their rotation removed"."""
    kind, _, band = component.partition(":")
    pairs = f"pairs of {band} wavelength" if band in WAVELENGTH_BANDS else f"pairs {band}"
    return f"{pairs}, {KIND_DESCRIPTIONS[kind]}"

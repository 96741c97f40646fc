"""Bands of rotary pairs that can be ablated: their syntax, and the pairs of a model that they contain.

`pairs-zero:A-B` removes the contribution of pairs A to B (inclusive, from 0) to the logits; `pairs-unrotated:A-B`
removes their rotation only. Instead of A-B, a band may be named by the wavelengths of the checkpoint's own rotation
relative to the native context: `short` (below an eighth of it), `middle`, `long` (above it). `eighths` stands for
eight equal parts of the pairs [ours], `wavelengths` for the three named bands.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.base.ablation_names import NOT_OF_DOCUMENTS, ablation_name
from headscope.base.user_input import quote
from headscope.errors import BadInput

PairMask = npt.NDArray[np.bool_]
"""Selected pairs of each layer, [layers, pairs]."""

OWN_COMPONENTS = ("joint", "freq", "scale", "kv-int8", "kv-int4")
"""Components that are neither ablations nor bands."""
WAVELENGTH_BANDS = ("short", "middle", "long")
KIND_DESCRIPTIONS = {"pairs-zero": "contribution to the logits removed", "pairs-unrotated": "rotation removed"}
EQUAL_PARTS = 8
"""Equal parts of the pairs in `eighths`."""
BAND_PATTERN = re.compile(rf"(pairs-zero|pairs-unrotated):(\d+-\d+|{'|'.join(WAVELENGTH_BANDS)}|eighths|wavelengths)")


def check_component(component: str) -> str:
    """The component, as it is stored: mean is mean:text. Raises ValueError for what is none."""
    if component in OWN_COMPONENTS:
        return component
    if not is_band(component):
        bands = (f"{kind}:BAND" for kind in KIND_DESCRIPTIONS)
        return ablation_name(component, NOT_OF_DOCUMENTS, (*OWN_COMPONENTS, *bands))
    if not BAND_PATTERN.fullmatch(component):
        kind, _, band = component.partition(":")
        if not band:
            raise ValueError(
                f"component {quote(component)} has no band. Write {kind}:BAND: A-B (e.g. 0-3), short, middle, long, "
                "eighths or wavelengths"
            )
        raise ValueError(f"invalid band {quote(band)}. Use A-B (e.g. 0-3), short, middle, long, eighths or wavelengths")
    return component


def is_band(component: str) -> bool:
    """Whether a component is a pair ablation."""
    return component.partition(":")[0] in KIND_DESCRIPTIONS


def is_ablation(component: str) -> bool:
    """Whether a component is an ablation that other commands have, too."""
    return component not in OWN_COMPONENTS and not is_band(component)


def band_mask(components: pd.Series) -> pd.Series:
    """Whether each component is a pair ablation."""
    return components.map({name: is_band(str(name)) for name in components.unique()}).astype(bool)


def expand_bands(component: str, theta: npt.NDArray[np.float32], native_context: int) -> Iterator[tuple[str, PairMask]]:
    """The names and pairs of the bands that a component stands for.

    `theta` [layers, pairs] are the checkpoint's own frequencies in rad/token, 0 in layers that do not rotate and NaN
    for pairs that a layer does not have; `native_context` is in tokens. Bands without pairs are omitted if the
    component stands for several. Raises BadInput for pairs that do not exist.
    """
    kind, _, band_spec = component.partition(":")
    rotates: PairMask = np.asarray((theta > 0).any(1))
    count = theta.shape[1]
    if band_spec == "eighths":
        parts = [part for part in np.array_split(np.arange(count), EQUAL_PARTS) if len(part)]
        for part in parts:
            yield from expand_bands(f"{kind}:{part[0]}-{part[-1]}", theta, native_context)
        return
    if "-" in band_spec:
        first, last = map(int, band_spec.split("-"))
        if not first <= last < count:
            raise BadInput(f"{component}: the model has pairs 0 to {count - 1}. Give A-B with A <= B in this range")
        pair = np.arange(count)
        yield f"{kind}:{first}-{last}", rotates[:, None] & ~np.isnan(theta) & (first <= pair) & (pair <= last)
        return
    with np.errstate(divide="ignore"):
        turns = native_context * theta / (2 * np.pi)
    bands = {"short": turns > 8, "middle": (turns <= 8) & (turns >= 1), "long": turns < 1}
    for name in WAVELENGTH_BANDS if band_spec == "wavelengths" else (band_spec,):
        pairs = rotates[:, None] & bands[name]
        if pairs.any():
            yield f"{kind}:{name}", pairs
        elif band_spec == name:
            raise BadInput(
                f"{component}: no pair has such a wavelength for a native context of {native_context} tokens. "
                "Use another band"
            )


def band_label(component: str) -> str:
    """The band of a component: "0-3", "short"."""
    return component.partition(":")[2]


def pairs_label(component: str) -> str:
    """The pairs of a component: "pairs 0-3", "pairs of short wavelength"."""
    band = band_label(component)
    return f"pairs of {band} wavelength" if band in WAVELENGTH_BANDS else f"pairs {band}"


def band_sort_key(component: str) -> tuple[int, int, int]:
    """Sort key of components: by kind, then bands of numbered pairs, then bands by wavelength."""
    kind, _, band = component.partition(":")
    named = band in WAVELENGTH_BANDS
    return (
        list(KIND_DESCRIPTIONS).index(kind),
        int(named),
        WAVELENGTH_BANDS.index(band) if named else int(band.partition("-")[0]),
    )


def describe_band(component: str) -> str:
    """Text that names a pair ablation, e.g. "pairs 0-3, rotation removed"."""
    return f"{pairs_label(component)}, {KIND_DESCRIPTIONS[component.partition(':')[0]]}"

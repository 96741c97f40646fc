"""Log axes that read well: ticks at 1, 2, 5, 10 or at powers of ten, and the same on colour bars."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

LOG_AXIS_RATIO = 100
"""Last step over the first above 0, from which the axis is logarithmic."""


def log_ticks(values: npt.ArrayLike, sparse: bool = False) -> dict[str, Any]:
    """Tick values (in data units) and their text for a log axis over `values`: 1, 2, 5, 10 ... or powers of ten."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not len(numbers):
        return {}
    low, high = math.log10(numbers.min()), math.log10(numbers.max())
    if high - low < 0.6:  # too narrow for round numbers: evenly spaced ones, of three digits
        even = sorted({float(f"{10**power:.3g}") for power in np.linspace(low, high, 5)})
        return {"tickvals": even, "ticktext": [format_tick(tick) for tick in even]}
    steps = (1, 2, 5) if high - low < (1.5 if sparse else 2.5) else (1,)
    ticks = [step * 10.0**power for power in range(math.floor(low) - 1, math.ceil(high) + 1) for step in steps]
    near = [tick for tick in ticks if low - 0.31 <= math.log10(tick) <= high + 0.31]
    return {"tickvals": near, "ticktext": [format_tick(tick) for tick in near]}


def format_tick(value: float) -> str:
    """A round number as tick text: 0.05, 1, 2,000, 10<sup>-4</sup>."""
    if 1e-3 <= value < 1e6:
        return f"{value:,.12g}"
    mantissa, power = f"{value:.0e}".split("e")
    head = "" if mantissa == "1" else f"{mantissa}×"
    return f"{head}10<sup>{int(power)}</sup>".replace("-", "−")


def log_axis(values: npt.ArrayLike, sparse: bool = False) -> dict[str, Any]:
    """Axis settings for a log axis over `values`; `sparse` for small panels."""
    return {"type": "log", **log_ticks(values, sparse)}


def length_axis(lengths: npt.ArrayLike) -> dict[str, Any]:
    """Axis settings for a log axis over measured lengths: each of a few is a tick."""
    measured = np.unique(np.asarray(lengths, dtype=np.float64))
    if len(measured) > 5:
        return log_axis(measured)
    return {"type": "log", "tickvals": measured.tolist(), "ticktext": [format_tick(length) for length in measured]}


def log_colorbar(values: npt.ArrayLike) -> dict[str, Any]:
    """Colour bar settings for colours that are the log10 of `values`."""
    ticks = log_ticks(values)
    return {**ticks, "tickvals": [math.log10(tick) for tick in ticks["tickvals"]]} if ticks else {}


class StepAxis:
    """Where steps stand on the axis."""

    def __init__(self, steps: pd.Series):
        positive = steps[steps > 0]
        self.is_logarithmic = len(positive) > 0 and positive.max() >= LOG_AXIS_RATIO * positive.min()
        self.zero_position = positive.min() / 2 if self.is_logarithmic else 0
        self.settings: dict[str, Any] = {}
        ends = self.positions(pd.Series([steps.min(), steps.max()]))
        if self.is_logarithmic:
            ticks = log_axis(positive, sparse=True)
            if (steps == 0).any():
                ticks["tickvals"] = [
                    self.zero_position,
                    *(tick for tick in ticks["tickvals"] if tick >= positive.min()),
                ]
                ticks["ticktext"] = ["0", *map(format_tick, ticks["tickvals"][1:])]
            self.settings = ticks
            ends = np.log10(ends)
        room = 0.03 * (ends[1] - ends[0] or 1)
        self.range = [float(ends[0] - room), float(ends[1] + room)]

    def positions(self, steps: pd.Series) -> npt.NDArray[np.float64]:
        """Where on the axis these steps stand."""
        numbers = steps.to_numpy(dtype=np.float64)
        return np.where(numbers > 0, numbers, self.zero_position)

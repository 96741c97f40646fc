"""Axes: log axes and colour bars with ticks at 1, 2, 5, 10 or at powers of ten; the axis of tokens of a prompt."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.plots import style

LOG_AXIS_RATIO = 100
"""Ratio of the last step to the first step above 0 from which the step axis is logarithmic."""


def log_ticks(values: npt.ArrayLike, sparse: bool = False) -> dict[str, Any]:
    """Tick values (in data units) and tick texts of a log axis over `values`; {} without a positive finite value.

    Ticks are 1, 2, 5, 10 ..., or powers of ten over a wide range, or evenly spaced over a narrow one.
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not len(numbers):
        return {}
    low, high = math.log10(numbers.min()), math.log10(numbers.max())
    if high - low < 0.6:  # too narrow for round numbers
        evenly_spaced = sorted({float(f"{10**power:.3g}") for power in np.linspace(low, high, 5)})
        return {"tickvals": evenly_spaced, "ticktext": [format_tick(tick) for tick in evenly_spaced]}
    mantissas = (1, 2, 5) if high - low < (1.5 if sparse else 2.5) else (1,)
    ticks = [
        mantissa * 10.0**power for power in range(math.floor(low) - 1, math.ceil(high) + 1) for mantissa in mantissas
    ]
    ticks_in_range = [tick for tick in ticks if low - 0.31 <= math.log10(tick) <= high + 0.31]
    return {"tickvals": ticks_in_range, "ticktext": [format_tick(tick) for tick in ticks_in_range]}


def format_tick(value: float) -> str:
    """Format a round number as tick text: 0.05, 1, 2,000, 10<sup>-4</sup>."""
    if 1e-3 <= value < 1e6:
        return f"{value:,.12g}"
    digit, power = f"{value:.0e}".split("e")
    factor = "" if digit == "1" else f"{digit}×"
    return f"{factor}10<sup>{int(power)}</sup>".replace("-", "−")


def log_axis(values: npt.ArrayLike, sparse: bool = False) -> dict[str, Any]:
    """Plotly settings of a log axis over `values`; `sparse` gives fewer ticks, for small panels."""
    return {"type": "log", **log_ticks(values, sparse)}


def length_axis(lengths: npt.ArrayLike) -> dict[str, Any]:
    """Plotly settings of a log axis over context lengths; up to five lengths each get a tick."""
    measured = np.unique(np.asarray(lengths, dtype=np.float64))
    if len(measured) > 5:
        return log_axis(measured)
    return {"type": "log", "tickvals": measured.tolist(), "ticktext": [format_tick(length) for length in measured]}


def log_colorbar(values: npt.ArrayLike) -> dict[str, Any]:
    """Plotly settings of a colour bar whose colours are the log10 of `values`."""
    ticks = log_ticks(values)
    return {**ticks, "tickvals": [math.log10(tick) for tick in ticks["tickvals"]]} if ticks else {}


class CountAxis:
    """An axis of counts (training steps, distances): logarithmic over two decades or more, with 0 left of the first
    positive one.

    `settings` are plotly axis settings; `range` are the ends of the axis in plotly units (log10 on a log axis).
    """

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
        elif steps.nunique() == 1:
            self.settings = {"tickvals": [steps.iloc[0]], "ticktext": [format_tick(steps.iloc[0])]}
        margin = 0.03 * (ends[1] - ends[0] or 1)
        self.range = [float(ends[0] - margin), float(ends[1] + margin)]

    def positions(self, steps: pd.Series) -> npt.NDArray[np.float64]:
        """The x coordinates of these steps."""
        numbers = steps.to_numpy(dtype=np.float64)
        return np.where(numbers > 0, numbers, self.zero_position)


MAX_TOKEN_LABELS = style.UPRIGHT_LABELS
"""Tokens of a prompt up to which the axis of a plot names each of them."""
MAX_PANEL_TOKEN_LABELS = 24
"""The same for each of several panels, and for a vertical axis."""
MAX_HOVER_TOKENS = 512
"""Tokens of a prompt up to which the hover text of a map has their texts."""


def token_axis(
    positions: Iterable[int], labels: Sequence[str], limit: int = MAX_TOKEN_LABELS, title: str = "position"
) -> dict[str, Any]:
    """Plotly settings of a horizontal axis by position: labels of all tokens, or numbers under the title if there are
    more than `limit`."""
    if len(labels) > limit:
        return {"title": {"text": title}}
    texts = [*map(escape_token_label, labels)]
    return {
        "tickvals": [int(position) for position in positions],
        "ticktext": texts,
        **style.turned_labels(texts, limit),
    }


def token_hover(labels: Sequence[str], row_count: int) -> tuple[dict[str, Any], str]:
    """Plotly settings of a heatmap of so many rows by position, and the place of the token in its hover template."""
    if len(labels) > MAX_HOVER_TOKENS:
        return {}, "position %{x}"
    return {"text": [[*map(escape_token_label, labels)]] * row_count}, "%{text}"


def escape_token_label(label: str) -> str:
    """A label of `token_labels` as plotly text on one line."""
    return style.escape_label(label, 200)

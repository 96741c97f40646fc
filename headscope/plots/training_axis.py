"""The axis of training steps: logarithmic where they span two decades or more, with step 0 left of the first."""

from typing import Any

import numpy as np
import pandas as pd

from headscope.plots import axes

LOG_AXIS_RATIO = 100
"""Last step over the first above 0, from which the axis is logarithmic."""


class StepAxis:
    """Where steps stand on the axis."""

    def __init__(self, steps: pd.Series):
        positive = steps[steps > 0]
        self.is_logarithmic = len(positive) > 0 and positive.max() >= LOG_AXIS_RATIO * positive.min()
        self.zero_position = positive.min() / 2 if self.is_logarithmic else 0
        self.settings: dict[str, Any] = {}
        ends = self.positions(pd.Series([steps.min(), steps.max()]))
        if self.is_logarithmic:
            ticks = axes.log_axis(positive, sparse=True)
            if (steps == 0).any():
                ticks["tickvals"] = [
                    self.zero_position,
                    *(tick for tick in ticks["tickvals"] if tick >= positive.min()),
                ]
                ticks["ticktext"] = ["0", *map(axes.format_tick, ticks["tickvals"][1:])]
            self.settings = ticks
            ends = np.log10(ends)
        room = 0.03 * (ends[1] - ends[0] or 1)
        self.range = [float(ends[0] - room), float(ends[1] + room)]

    def positions(self, steps: pd.Series) -> "np.ndarray[Any, Any]":
        """Where on the axis these steps stand."""
        numbers = steps.to_numpy(dtype=np.float64)
        return np.where(numbers > 0, numbers, self.zero_position)

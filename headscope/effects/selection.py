"""Which units are measured exactly when all were estimated first."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def select_units(
    mean_squares: npt.ArrayLike, top_count: int, random_count: int, seed: Sequence[int]
) -> npt.NDArray[np.intp]:
    """Positions of the `top_count` units of largest mean square estimate, then of `random_count` seeded others.

    All units if there are fewer. `mean_squares` [units] are over samples: a mean would miss a head whose estimates are
    off in both directions. On the IOI pairs of TransformerLens's Exploratory Analysis Demo, the queries of largest
    effect have rank 11 by |mean| and rank 4 by root mean square.
    """
    order = np.argsort(-np.asarray(mean_squares, dtype=np.float64), kind="stable")
    top, others = order[:top_count], order[top_count:]
    drawn = np.random.default_rng(seed).permutation(len(others))[:random_count]
    return np.concatenate([top, others[np.sort(drawn)]])

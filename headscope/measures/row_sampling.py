"""Which query rows a measure looks at, and how many keys they see: known on the host, so that no device is asked.

All rows, or N chosen with a seed; the choice never depends on the model.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord

Places = npt.NDArray[np.int64]

FIRST = 16
"""Log-spaced rows start where a row sees this many keys: below, every octave holds only a handful of rows."""


def log_spaced(length: int, count: int, seed: int) -> Tensor:
    """About `count` distinct rows of 0..length-1, one from each of `count` equal steps of ln(visible keys).

    For questions about growth with length. Sorted, int64.
    """
    low = min(FIRST, length)
    visible = torch.exp(_shares(count, seed) * math.log(length / low)) * low
    rows: Tensor = torch.unique(visible.round().long().clamp(1, length) - 1)
    return rows


def pair_shares(count: int, seed: int) -> npt.NDArray[np.float64]:
    """Where among the causal pairs (i, j) the rows of `pair_spaced` lie, as shares of all pairs, ascending."""
    return _shares(count, seed).double().numpy()


def pair_spaced(visible: Places, shares: npt.NDArray[np.float64]) -> Places:
    """Rows, one from each of as many strata as there are `shares` (`pair_shares`), all of equally many causal pairs.

    `visible` [rows] is the number of keys that each row sees; within its stratum a row is drawn with probability
    proportional to it, so the plain average of row means is unbiased for the mean over all pairs. Sorted, may repeat.
    """
    ends = visible.cumsum().astype(np.float64)
    rows: Places = np.searchsorted(ends, shares * ends[-1], side="right").clip(max=len(ends) - 1)
    return rows


def _shares(count: int, seed: int) -> Tensor:
    """One number from each of `count` equal parts of 0..1."""
    return (torch.arange(count) + torch.rand(count, generator=torch.Generator().manual_seed(seed))) / count


def queries(heard: AttentionRecord) -> slice:
    """Which rows of the document the queries are: all of them, or those of the chunk that was read."""
    last = heard.first_key + heard.k.shape[1]
    return slice(last - heard.q.shape[1], last)


def among(chosen: Places, heard: AttentionRecord) -> Places:
    """Those of a document's rows, which are sorted, that are queries here, as indices of the queries."""
    here = queries(heard)
    found: Places = chosen[slice(*np.searchsorted(chosen, (here.start, here.stop)))] - here.start
    return found


def visible_keys(heard: AttentionRecord, rows: Places) -> Places:
    """How many keys these rows of a document see in this layer, whether or not they are queries here."""
    seen: Places = rows + 1
    if heard.chunk is not None:
        seen = np.minimum(seen, rows % heard.chunk + 1)
    return seen if heard.window is None else np.minimum(seen, heard.window)


def on_host(places: Tensor | Places) -> Places:
    """As they are there, where arithmetic with them waits for no device."""
    return places.cpu().numpy() if isinstance(places, Tensor) else places


def on(device: torch.device, places: Places) -> Tensor:
    """As a tensor there."""
    return torch.from_numpy(places).to(device)

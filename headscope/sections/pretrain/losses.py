"""Held-out loss of trainings from scratch: document by document, and every variant beside RoPE with its seeds."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from headscope.report.content import Listing
from headscope.runs.means import interval
from headscope.runs.run import Run
from headscope.sections.pretrain.cast import Training, last, native

FIRST = "rope"
"""What the other variants are compared with."""


Losses = dict[Training, pd.Series]
"""Mean loss (nats/token) of each document under each training."""


def by_document(run: Run, finals: Mapping[Training, str], length: int) -> Losses:
    """The losses of the last models in contexts of that length."""
    nll = run.nll[run.nll["context_length"] == length].astype({"model": "str", "doc": "str", "nll": "float64"})
    sums = nll.assign(nll=nll["nll"] * nll["tokens"]).groupby(["model", "doc"])[["nll", "tokens"]].sum()
    means = (sums["nll"] / sums["tokens"]).unstack("model")
    return {each: means[label] for each, label in finals.items() if label in means}


def variants(run: Run) -> Iterator[Listing]:
    """A row a variant: its loss at each length, and what that is less RoPE's from the same seeds; none without two."""
    finals = last(run)
    names = [*dict.fromkeys(each.variant for each in finals)]
    if "nll" not in run.tables or len(names) < 2:
        return
    lengths = [int(length) for length in sorted(run.nll["context_length"].unique())]
    losses = {length: by_document(run, finals, length) for length in lengths}
    trained = native(run, next(iter(finals.values())))
    headings = ["variant", "seeds", *(f"loss at {length:,}" for length in lengths)]
    if FIRST in names:
        headings += [f"less {FIRST}'s at {length:,}" for length in lengths]
    if several := len(names) < len(finals):
        headings += [f"seeds apart at {trained:,}"]
    rows = []
    for name in names:
        seeds = [each for each in finals if each.variant == name]
        row = [name, ", ".join(str(each.seed) for each in seeds)]
        row += [_told(_over([losses[length][each] for each in seeds if each in losses[length]])) for length in lengths]
        if FIRST in names:
            gaps = [_against_first(losses[length], seeds) for length in lengths]
            row += [_told(gap, "+") if name != FIRST else "" for gap in gaps]
        rows.append([*row, _apart(losses.get(trained, {}), seeds)] if several else row)
    caption = "Held-out loss (nats/token) of every variant at its last step, 95 % intervals over documents in brackets"
    yield Listing(caption, headings, rows)


def _over(each: Sequence[pd.Series]) -> pd.Series:
    """The mean over seeds of each document that all of them have."""
    return pd.concat(each, axis=1).dropna().mean(axis=1) if each else pd.Series(dtype="float64")


def _against_first(losses: Losses, seeds: Sequence[Training]) -> pd.Series:
    """The difference from RoPE, document by document and seed by seed."""
    pairs = [(each, Training(FIRST, each.seed)) for each in seeds]
    return _over([losses[own] - losses[first] for own, first in pairs if own in losses and first in losses])


def _apart(losses: Losses, seeds: Sequence[Training]) -> str:
    means = [losses[each].mean() for each in seeds if each in losses]
    return f"{max(means) - min(means):.3f}" if len(means) > 1 else ""


def _told(values: pd.Series, sign: str = "") -> str:
    if values.empty:
        return ""
    low, high = interval(values.to_numpy(dtype=np.float64)[None])[:, 0]
    told = f"{values.mean():{sign}.3f}"
    return f"{told} ({low:{sign}.3f} to {high:{sign}.3f})" if np.isfinite(low) else told

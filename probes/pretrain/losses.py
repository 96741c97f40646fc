"""Held-out loss of trainings from scratch: document by document, and every variant beside the first, over its seeds."""

from collections.abc import Mapping, Sequence

import pandas as pd

from headscope.runs.aggregation import losses, with_interval
from headscope.runs.run import Run
from probes.pretrain.checkpoint_index import Training, native

Losses = dict[Training, pd.Series]
"""Mean loss (nats/token) of each document under each training."""


def by_document(run: Run, finals: Mapping[Training, str], length: int) -> Losses:
    """The losses of the last models in contexts of that length."""
    rows = run.nll[run.nll["context_length"] == length].astype({"model": "str", "doc": "str", "nll": "float64"})
    means = {str(label): block.droplevel("model") for label, block in losses(rows, ["model", "doc"]).groupby("model")}
    return {each: means[label] for each, label in finals.items() if label in means}


def variants(run: Run, finals: Mapping[Training, str]) -> pd.DataFrame:
    """A row a variant: `nll_<L>` (nats/token) of its last models over documents, `nll_<L>_diff` less that of the first
    variant with the same seed, both with intervals, and how far its seeds lie apart at the trained length."""
    names = [*dict.fromkeys(each.variant for each in finals)]
    seeds = {name: [each for each in finals if each.variant == name] for name in names}
    told = {name: ", ".join(str(each.seed) for each in mine) for name, mine in seeds.items()}
    columns: list[pd.DataFrame | pd.Series] = [pd.Series(told, name="seeds")]
    gaps: list[pd.DataFrame | pd.Series] = []
    trained = native(run, next(iter(finals.values())))
    for length in sorted(run.nll["context_length"].unique()):
        known = by_document(run, finals, int(length))
        columns.append(_over_seeds(f"nll_{length}", {name: _of(known, mine) for name, mine in seeds.items()}))
        against = {name: _against(known, mine, names[0]) for name, mine in seeds.items() if name != names[0]}
        gaps.append(_over_seeds(f"nll_{length}_diff", against))
        if length == trained and len(finals) > len(names):
            gaps.append(pd.Series({name: _apart(_of(known, mine)) for name, mine in seeds.items()}, name="seeds_apart"))
    return pd.concat([*columns, *gaps], axis=1).rename_axis("variant").reset_index()


def _of(known: Losses, seeds: Sequence[Training]) -> list[pd.Series]:
    return [known[each] for each in seeds if each in known]


def _against(known: Losses, seeds: Sequence[Training], first: str) -> list[pd.Series]:
    """The difference from the first variant, document by document and seed by seed."""
    pairs = [(each, Training(first, each.seed)) for each in seeds]
    return [known[own] - known[other] for own, other in pairs if own in known and other in known]


def _over_seeds(name: str, values: Mapping[str, list[pd.Series]]) -> pd.DataFrame:
    """By variant, the mean over documents of the mean over seeds, with its interval."""
    means = {each: pd.concat(some, axis=1).dropna().mean(axis=1) for each, some in values.items() if some}
    if not means:
        return pd.DataFrame(columns=[name])
    return with_interval(pd.concat(means, names=["model"]), name)


def _apart(seeds: list[pd.Series]) -> float:
    """How far the mean losses of seeds lie apart on the same documents (nats/token)."""
    means = pd.concat(seeds, axis=1).dropna().mean()
    return float(means.max() - means.min()) if len(means) > 1 else float("nan")

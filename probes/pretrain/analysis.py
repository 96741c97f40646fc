"""Held-out loss of trainings from scratch: document by document, and every variant beside the first, over its seeds."""

from collections.abc import Mapping, Sequence

import pandas as pd

from headscope.runs.aggregation import mean_losses, mean_with_interval
from headscope.runs.run import Run
from probes.pretrain.checkpoint_index import TrainingKey, native_context

LossesByTraining = dict[TrainingKey, pd.Series]
"""Mean loss (nats/token) of each document under each training."""


def losses_by_document(run: Run, final_labels: Mapping[TrainingKey, str], length: int) -> LossesByTraining:
    """The losses of the last models in contexts of that length."""
    rows = run.nll[run.nll["context_length"] == length].astype({"model": "str", "doc": "str", "nll": "float64"})
    means = {str(label): block.droplevel("model") for label, block in mean_losses(rows, ["model", "doc"]).groupby("model")}
    return {each: means[label] for each, label in final_labels.items() if label in means}


def variant_table(run: Run, final_labels: Mapping[TrainingKey, str]) -> pd.DataFrame:
    """A row a variant: `nll_<L>` (nats/token) of its last models over documents, `nll_<L>_diff` less that of the first
    variant with the same seed, both with intervals, and how far its seeds lie apart at the trained length."""
    names = [*dict.fromkeys(each.variant for each in final_labels)]
    seeds = {name: [each for each in final_labels if each.variant == name] for name in names}
    told = {name: ", ".join(str(each.seed) for each in mine) for name, mine in seeds.items()}
    columns: list[pd.DataFrame | pd.Series] = [pd.Series(told, name="seeds")]
    gaps: list[pd.DataFrame | pd.Series] = []
    trained = native_context(run, next(iter(final_labels.values())))
    for length in sorted(run.nll["context_length"].unique()):
        known = losses_by_document(run, final_labels, int(length))
        columns.append(_mean_over_seeds(f"nll_{length}", {name: _document_losses(known, mine) for name, mine in seeds.items()}))
        against = {name: _paired_differences(known, mine, names[0]) for name, mine in seeds.items() if name != names[0]}
        gaps.append(_mean_over_seeds(f"nll_{length}_diff", against))
        if length == trained and len(final_labels) > len(names):
            gaps.append(pd.Series({name: _seed_spread(_document_losses(known, mine)) for name, mine in seeds.items()}, name="seeds_apart"))
    return pd.concat([*columns, *gaps], axis=1).rename_axis("variant").reset_index()


def _document_losses(by_training: LossesByTraining, trainings: Sequence[TrainingKey]) -> list[pd.Series]:
    return [by_training[each] for each in trainings if each in by_training]


def _paired_differences(by_training: LossesByTraining, trainings: Sequence[TrainingKey], reference: str) -> list[pd.Series]:
    """The difference from the first variant, document by document and seed by seed."""
    pairs = [(each, TrainingKey(reference, each.seed)) for each in trainings]
    return [by_training[own] - by_training[other] for own, other in pairs if own in by_training and other in by_training]


def _mean_over_seeds(name: str, values: Mapping[str, list[pd.Series]]) -> pd.DataFrame:
    """By variant, the mean over documents of the mean over seeds, with its interval."""
    means = {each: pd.concat(some, axis=1).dropna().mean(axis=1) for each, some in values.items() if some}
    if not means:
        return pd.DataFrame(columns=[name])
    return mean_with_interval(pd.concat(means, names=["model"]), name)


def _seed_spread(seeds: list[pd.Series]) -> float:
    """How far the mean losses of seeds lie apart on the same documents (nats/token)."""
    means = pd.concat(seeds, axis=1).dropna().mean()
    return float(means.max() - means.min()) if len(means) > 1 else float("nan")

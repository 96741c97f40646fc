"""Final checkpoints of pretraining in a run, and their validation losses by document, variant and seed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd

from headscope.runs.aggregation import mean_losses, mean_with_interval
from headscope.runs.run import Run
from probes.pretrain.schema import TrainingKey

LossesByTraining = dict[TrainingKey, pd.Series]
"""Mean loss (nats/token) of each document under each training."""


def checkpoint_labels(run: Run) -> dict[TrainingKey, dict[int, str]]:
    """The run's checkpoints of each training, as trained: step -> label, in the order of the run.

    A checkpoint under another position scheme than its own is another model. Of several trainings of one variant and
    seed, which combined runs may have, it is the longest, or the first of these.
    """
    return {training: max(folders.values(), key=max) for training, folders in _checkpoints_by_folder(run).items()}


def repeated_trainings(run: Run) -> Iterator[tuple[TrainingKey, str, str]]:
    """Every training that `checkpoint_labels` leaves out: its variant and seed, and the label of the last checkpoint of
    the one that it has instead and of this one."""
    chosen = checkpoint_labels(run)
    for training, folders in _checkpoints_by_folder(run).items():
        for steps in folders.values():
            if steps != chosen[training]:
                yield training, chosen[training][max(chosen[training])], steps[max(steps)]


def _checkpoints_by_folder(run: Run) -> dict[TrainingKey, dict[str, dict[int, str]]]:
    """Step and label of every checkpoint under its own position scheme, by training and folder."""
    labels: dict[TrainingKey, dict[str, dict[int, str]]] = {}
    for model in run.manifest["models"]:
        has_own_scheme = not str(model.get("spec", "")).endswith(f"@{model.get('scheme')}")
        if model.get("pretraining") is not None and model["step"] is not None and has_own_scheme:
            training = TrainingKey(model["pretraining"]["variant"], model["pretraining"]["seed"])
            folder = str(PurePath(str(model.get("checkpoint", ""))).parent)
            labels.setdefault(training, {}).setdefault(folder, {})[model["step"]] = model["label"]
    return labels


def final_checkpoint_labels(run: Run) -> dict[TrainingKey, str]:
    """The label of each training's last checkpoint; only trainings that reached the highest step of the run."""
    labels = checkpoint_labels(run)
    end = max((max(steps) for steps in labels.values()), default=0)
    return {training: steps[end] for training, steps in labels.items() if end in steps}


def native_context(run: Run, label: str) -> int:
    """The context length in tokens that a model was trained on."""
    entry: Mapping[str, Any] = next(model for model in run.manifest["models"] if model["label"] == label)
    return int(entry["geometry"].get("native_context", 0))


def losses_by_document(run: Run, final_labels: Mapping[TrainingKey, str], length: int) -> LossesByTraining:
    """The losses of the final models at one context length."""
    rows = run.nll[run.nll["context_length"] == length].astype({"model": "str", "doc": "str", "nll": "float64"})
    by_label = mean_losses(rows, ["model", "doc"]).groupby("model")
    means = {str(label): losses.droplevel("model") for label, losses in by_label}
    return {training: means[label] for training, label in final_labels.items() if label in means}


def variant_table(run: Run, final_labels: Mapping[TrainingKey, str]) -> pd.DataFrame:
    """One row per variant, with its seeds and, for each context length L, means over documents and their intervals.

    `nll_<L>` is the loss of the final models (nats/token), `nll_<L>_diff` its difference from the first variant with
    the same seed, and `seeds_apart` the range of the seeds' losses at the trained length.
    """
    names = [*dict.fromkeys(training.variant for training in final_labels)]
    by_variant = {name: [training for training in final_labels if training.variant == name] for name in names}
    seeds = {name: ", ".join(str(training.seed) for training in trainings) for name, trainings in by_variant.items()}
    loss_columns: list[pd.DataFrame | pd.Series] = [pd.Series(seeds, name="seeds")]
    difference_columns: list[pd.DataFrame | pd.Series] = []
    trained_length = native_context(run, next(iter(final_labels.values())))
    for length in sorted(run.nll["context_length"].unique()):
        losses = losses_by_document(run, final_labels, int(length))
        values = {name: _document_losses(losses, trainings) for name, trainings in by_variant.items()}
        loss_columns.append(_mean_over_seeds(f"nll_{length}", values))
        differences = {
            name: _paired_differences(losses, trainings, names[0])
            for name, trainings in by_variant.items()
            if name != names[0]
        }
        difference_columns.append(_mean_over_seeds(f"nll_{length}_diff", differences))
        if length == trained_length and len(final_labels) > len(names):
            spreads = {name: _seed_spread(losses_by_seed) for name, losses_by_seed in values.items()}
            difference_columns.append(pd.Series(spreads, name="seeds_apart"))
    return pd.concat([*loss_columns, *difference_columns], axis=1).rename_axis("variant").reset_index()


def _document_losses(losses: LossesByTraining, trainings: Sequence[TrainingKey]) -> list[pd.Series]:
    return [losses[training] for training in trainings if training in losses]


def _paired_differences(losses: LossesByTraining, trainings: Sequence[TrainingKey], reference: str) -> list[pd.Series]:
    """Differences from the reference variant with the same seed, document by document."""
    pairs = [(training, TrainingKey(reference, training.seed)) for training in trainings]
    return [losses[training] - losses[other] for training, other in pairs if training in losses and other in losses]


def _mean_over_seeds(name: str, values: Mapping[str, list[pd.Series]]) -> pd.DataFrame:
    """By variant, the mean over documents of the mean over seeds, with its interval."""
    means = {
        variant: pd.concat(by_seed, axis=1).dropna().mean(axis=1) for variant, by_seed in values.items() if by_seed
    }
    if not means:
        return pd.DataFrame(columns=[name])
    return mean_with_interval(pd.concat(means, names=["model"]), name)


def _seed_spread(losses_by_seed: list[pd.Series]) -> float:
    """Range of the seeds' mean losses over the same documents (nats/token); NaN for a single seed."""
    means = pd.concat(losses_by_seed, axis=1).dropna().mean()
    return float(means.max() - means.min()) if len(means) > 1 else float("nan")

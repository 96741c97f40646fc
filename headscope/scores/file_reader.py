"""Read head scores from the files of other tools."""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import HeadSet
from headscope.base.model_identity import WeightDigests
from headscope.base.user_input import check_path, expand_path, quote, read_text_file, read_yaml
from headscope.errors import BadInput, ResourceMissing
from headscope.scores.head_scores import HeadScores

DUO_FILE = "full_attention_heads.tsv"
MAX_INDEX = 2**15
"""Numbers of layers and heads are stored in 16 bits."""

ORIGIN_FILE = "headscope.json"
"""The file that says where exported scores come from: in their folder, or beside them with their name before it."""


def read(path: Path | str) -> HeadScores:
    """Read a score per head, or per KV group (`per_group`), from a file that `headscope export` can write.

    Recognised by content: a folder of DuoAttention or its .tsv, JSON of Retrieval_Head and HeadKV (the mean of each
    list), YAML of QRHead (1 for the heads it names, the only rows), RTP-LLM (1 for heads that keep the whole context),
    CSV with columns layer, head and score, and head sets of headscope (their weights). Raises ResourceMissing without
    the file, BadInput for content that is none of these. The model is known from the file that headscope exports beside
    the scores, from a head set, from a CSV column `model`, or from QRHead's model_name_or_path.
    """
    file = expand_path(check_path(path, "path"), "scores")
    scores = _read_scores(file)
    origin = _read_origin(file)
    digests = scores.model_digests or WeightDigests.from_record(origin.get("weights"), origin.get("weights_sha256"))
    return replace(scores, model=str(origin.get("model") or scores.model), model_digests=digests)


def _read_origin(file: Path) -> Mapping[str, Any]:
    """What headscope's export wrote about the origin of a file; empty without it."""
    origin_file = file / ORIGIN_FILE if file.is_dir() else file.with_name(f"{file.name}.{ORIGIN_FILE}")
    if not os.path.isfile(origin_file):  # False, too, for a name that is too long
        return {}
    origin = read_json(origin_file, f"scores '{origin_file}'")
    return origin if isinstance(origin, Mapping) else {}


def _read_scores(file: Path) -> HeadScores:
    if file.is_dir():
        if not (file / DUO_FILE).is_file():
            raise ResourceMissing(f"no {DUO_FILE} in '{file}'. Give the folder of a DuoAttention pattern")
        return _read_tsv(file / DUO_FILE, file)
    if not file.exists():
        raise ResourceMissing(f"no scores at '{file}'. Check the path")
    if file.suffix == ".tsv":
        return _read_tsv(file, file)
    if file.suffix in (".npy", ".npz"):
        raise BadInput(
            f"scores '{file}' are an array of numpy, which does not name layers and heads. Save them as CSV with the "
            "columns layer, head and score"
        )
    if file.suffix == ".csv":
        return _read_csv(file)
    content = read_json(file, f"scores '{file}'") if file.suffix == ".json" else read_yaml(file, f"scores '{file}'")
    if not isinstance(content, Mapping):
        raise _not_scores(file, content)
    try:
        return _read_mapping(file, content)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise BadInput(f"scores '{file}': {' '.join(str(error).split())[:200]}. Check the file") from error


def read_json(file: Path, description: str) -> Any:
    """The content of a JSON file, which may be large. Raises BadInput for another text and for a key that repeats."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len({*keys}) < len(keys):
            repeated = next(key for key, count in Counter(keys).items() if count > 1)
            raise ValueError(f"the key {quote(repeated)} repeats")
        return dict(pairs)

    try:
        return json.loads(read_text_file(file, description), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{description} cannot be read ({' '.join(str(error).split())[:200]}). Check the file"
        ) from error


def _read_mapping(file: Path, content: Mapping[Any, Any]) -> HeadScores:
    if "headwise_config" in content:
        if not isinstance(content["headwise_config"], Mapping):
            raise _not_scores(file, content)
        layers = {int(key): flags for key, flags in content["headwise_config"].items() if str(key).isdecimal()}
        rows = [(layer, head, float(flag)) for layer, flags in layers.items() for head, flag in enumerate(flags)]
        return _scores(rows, "headwise_config", file)
    if "attn_head_set" in content:
        names = str(content["attn_head_set"]).split(",")
        scores = _scores([(*map(int, name.split("-")), 1.0) for name in names], "attn_head_set", file)
        return replace(scores, model=str(content.get("model_name_or_path") or ""))
    if "heads" in content:
        heads = HeadSet.read(file)
        weights = heads.weights or (1.0,) * len(heads)
        rows = [(*head, weight) for head, weight in zip(heads, weights, strict=True)]
        return replace(_scores(rows, heads.source, file), model_digests=heads.model_digests)
    rows = []
    for key, values in content.items():
        layer, dash, head = str(key).partition("-")
        if not (dash and layer.isdecimal() and head.isdecimal()):
            raise _not_scores(file, content)
        numbers = [*map(float, values if isinstance(values, list) else [values])]
        if not numbers:
            raise ValueError(f"the list of {quote(key)} is empty")
        rows.append((int(layer), int(head), sum(numbers) / len(numbers)))
    return _scores(rows, file.stem, file)


def _read_tsv(file: Path, source: Path) -> HeadScores:
    """Scores [layers, KV groups] as DuoAttention writes them, without names of rows and columns."""
    lines = read_text_file(file, f"scores '{file}'").splitlines()
    try:
        values = np.array([[float(value) for value in line.split("\t")] for line in lines if line.strip()], ndmin=2)
    except ValueError as error:
        raise BadInput(f"'{file}': {' '.join(str(error).split())[:200]}. It must hold tab-separated numbers") from error
    rows = [(layer, group, value) for (layer, group), value in np.ndenumerate(values)]
    return _scores(rows, file.stem, source, per_group=True)


def _read_csv(file: Path) -> HeadScores:
    text = read_text_file(file, f"scores '{file}'")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        lines = [*reader]
        name = _score_column(reader.fieldnames or (), file)
        rows = [(int(line["layer"]), int(line["head"]), float(line[name])) for line in lines]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadInput(
            f"scores '{file}' cannot be read ({' '.join(str(error).split())[:200]}). The file needs the columns layer, "
            "head and score, separated by commas, with numbers; score may have another name"
        ) from error
    models = {line.get("model") or "" for line in lines}
    if len(models) > 1:
        raise BadInput(
            f"scores '{file}' belong to several models: {', '.join(sorted(models))}. Keep the rows of one model"
        )
    scores_name = file.stem if name == "score" else name
    return replace(_scores(rows, scores_name, file), model="".join(models))


def _score_column(columns: Iterable[str], file: Path) -> str:
    """The column of the scores: "score", or the only one that does not say which head of which model a row is about."""
    names = [name for name in columns if name not in ("model", "layer", "head", "kv_group")]
    if "score" in names:
        return "score"
    if len(names) > 1:
        raise BadInput(f"scores '{file}' has several scores: {', '.join(names)}. Keep the column of one of them")
    return names[0] if names else "score"


def _scores(rows: list[Any], name: str, source: Path, per_group: bool = False) -> HeadScores:
    if not rows:
        raise BadInput(f"'{source}' holds no scores. Use a file that headscope export can write")
    if far := next((row for row in rows if not (0 <= row[0] < MAX_INDEX and 0 <= row[1] < MAX_INDEX)), None):
        place = f"layer {quote(far[0])} and head {quote(far[1])}"
        raise BadInput(f"scores '{source}' name {place}, which no model has. Check the file")
    table = pd.DataFrame(rows, columns=["layer", "head", "score"]).sort_values(["layer", "head"], ignore_index=True)
    table.insert(2, "kv_group", table["head"] if per_group else -1)
    return HeadScores(table, name, source=str(source), per_group=per_group)


def _not_scores(file: Path, content: object) -> BadInput:
    return BadInput(f"'{file}' holds no scores of heads: {quote(content)}. Use a file that headscope export can write")

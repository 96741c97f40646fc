"""Files that name heads: head sets of headscope, published lists, and scores in the file formats of other tools."""

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headscope.base.heads import Head, check_head, check_in_shape, format_head, format_unit, parse_head, to_head
from headscope.base.input_files import read_json, read_text_file, read_yaml
from headscope.base.model_identity import NO_DIGESTS, WeightDigests
from headscope.base.user_input import check_path, expand_path, parse_index, quote
from headscope.errors import BadInput, ResourceMissing

DUO_FILE = "full_attention_heads.tsv"
ORIGIN_FILE = "headscope.json"
"""The file that says where exported scores come from: in their folder, or beside them with their name before it."""
HEAD_SET_KEYS = ("heads", "weights", "source", "model", "shape", "model_digests", "model_digest")
FORMS = "Use a head set, a list of heads such as [L18H6, 18-7], or scores that headscope export can write"

Row = tuple[int, int, float | None]
"""Layer, head, score."""


@dataclass(frozen=True)
class HeadFile:
    """The heads of a file: layer, head and score; none or all of the scores are None.

    A list (`is_list`) names some heads, in order of rank; other files have a score for each head of a model, or for
    each KV group (`per_group`). `name` is that of the scores, or what a head set says of its selection; `model` and
    `digests` are those of the model that the heads belong to, as far as the file says. `shape` is its number of layers,
    and of heads or KV groups, if the file is a matrix or has a score for all of them.
    """

    rows: Sequence[Row]
    name: str
    is_list: bool = False
    per_group: bool = False
    model: str = ""
    digests: WeightDigests = NO_DIGESTS
    shape: tuple[int, int] | None = None

    @property
    def is_mask(self) -> bool:
        """Whether the scores say of all heads which are selected: 1 for those, 0 for the others."""
        return not self.is_list and {score for *_, score in self.rows} <= {0, 1}

    def ranked(self) -> list[Row]:
        """The rows of a list in its order, the selected ones of a mask, or all by decreasing score."""
        if self.is_list:
            return [*self.rows]
        return [row for row in sorted(self.rows, key=_by_score) if row[2] or not self.is_mask]


def _by_score(row: Row) -> float:
    return -(row[2] or 0.0)


def no_ranking(source: object) -> BadInput:
    """The error for KV groups where heads are needed."""
    return BadInput(
        f"'{source}' has scores of KV groups, whose heads depend on the model. Import the file, and use the top heads "
        "of the run"
    )


def read_heads(path: Path | str, column: str | None = None) -> HeadFile:
    """Read the heads of a file, with their scores if it has any. The form is recognised by the content:

    - lists in YAML, JSON or text: head sets of headscope, `attn_head_set` of QRHead, identifiers (L18H6, L18.H6, 18.6,
      18-6), pairs [18, 6], heads with a score (["18-6", 0.9], [18, 6, 0.9]), PASTA's heads by layer ({"18": [6, 7]}), a
      CSV with the columns layer and head;
    - scores of all heads: JSON of Retrieval_Head and HeadKV (the mean of each list), a CSV with the columns layer, head
      and a score (`column` names one of several), a matrix [layers, heads] in JSON or .npy, and RTP-LLM (1 for heads
      that keep the whole context);
    - scores of KV groups: a folder of DuoAttention or its .tsv.

    Whole numbers in rows of 2 or 3 are heads, [layer, head] or [layer, head, score], also in .npy; a matrix of 2 or 3
    heads per layer has decimals. Rows of only 0 and 1 may be either, and are refused. A mask may have True and False.

    The model is known from the file that headscope exports beside the scores, from a head set, from a CSV column
    `model`, or from QRHead's model_name_or_path. Raises ResourceMissing without the file, BadInput for other content.
    """
    file = expand_path(check_path(path, "path"), "heads")
    if not file.exists():
        raise ResourceMissing(f"no heads at '{file}'. Check the path")
    if column is not None and file.suffix != ".csv":
        raise BadInput(f"column {quote(column)}: '{file}' is not a CSV. Remove it")
    try:
        content = _read_file(file, column)
        _check_rows(content)
        origin = _read_origin(file)
        digests = content.digests or WeightDigests.parse(origin.get("weights"), origin.get("weights_sha256"))
    except BadInput:
        raise
    except (ValueError, OverflowError, EOFError, csv.Error) as error:
        raise BadInput(f"heads of '{file}': {' '.join(str(error).split())[:200]}. {FORMS}") from error
    shape = content.shape or (None if content.is_list else _shape_of_all(content.rows))
    return replace(content, model=str(origin.get("model") or content.model), digests=digests, shape=shape)


def _read_file(file: Path, column: str | None) -> HeadFile:
    if file.is_dir():
        if not (file / DUO_FILE).is_file():
            raise ResourceMissing(
                f"no {DUO_FILE} in '{file}'. Give a file or a folder of DuoAttention; of a run, first write a score to "
                "a file with headscope export"
            )
        file = file / DUO_FILE
    source = f"heads '{file}'"
    if file.suffix == ".tsv":
        lines = read_text_file(file, source).splitlines()
        try:
            return _read_matrix([line.split("\t") for line in lines if line.strip()], file.stem, per_group=True)
        except ValueError as error:
            raise ValueError(
                f"{error}. A .tsv is a matrix of scores of KV groups. Save a table with a header as .csv, with commas"
            ) from error
    if file.suffix == ".csv":
        return _read_csv(file, read_text_file(file, source), column)
    if file.suffix == ".npz":
        raise ValueError("an .npz holds several arrays. Save one of them as .npy")
    if file.suffix == ".npy":
        return _read_list(_list(_read_array(file)), file.stem)
    content = read_json(file, source) if file.suffix == ".json" else read_yaml(file, source)
    if isinstance(content, str):
        content = re.split(r"[,\s]+", content.strip(", \n"))
    if isinstance(content, list):
        return _read_list(content, file.stem)
    if isinstance(content, Mapping):
        return _read_mapping(content, file.stem)
    raise ValueError("the file is empty" if content is None else f"{quote(content)} is no list of heads")


def _read_array(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False).tolist()
    except (ValueError, EOFError) as error:
        raise ValueError("it is not an array of numbers that numpy saved") from error


def _read_mapping(content: Mapping[Any, Any], name: str) -> HeadFile:
    if isinstance(config := content.get("headwise_config"), Mapping):
        layers = {parse_index(key): flags for key, flags in config.items() if str(key)[:1].isdecimal()}
        rows = [(layer, *scored) for layer, flags in layers.items() for scored in enumerate(_scores(flags))]
        return HeadFile(rows, "headwise_config")
    if "headwise_config" in content:
        raise ValueError(f"{quote(content)} has no layers")
    if "attn_head_set" in content:
        names = [name.strip() for name in str(content["attn_head_set"]).split(",")]
        heads = _read_list(names, "attn_head_set")
        return replace(heads, model=_text(content, "model_name_or_path"))
    if "heads" in content:
        return _read_head_set(content)
    if content and all(str(key).isdecimal() for key in content):
        pairs = [(parse_index(layer), parse_index(head)) for layer, heads in content.items() for head in _list(heads)]
        return HeadFile([(*pair, None) for pair in pairs], name, is_list=True)
    return HeadFile([(*parse_head(key), _mean(key, scores)) for key, scores in content.items()], name)


def _read_head_set(content: Mapping[str, Any]) -> HeadFile:
    """A head set that `HeadSet.write` wrote. Raises ValueError for another key: its values would count for nothing."""
    if unknown := [key for key in content if key not in HEAD_SET_KEYS]:
        raise ValueError(f"unknown key {quote(unknown[0])}. Use: {', '.join(HEAD_SET_KEYS)}")
    heads = [_parse_entry(entry)[0] for entry in _list(content["heads"])]
    weights = [None] * len(heads) if content.get("weights") is None else [*map(_number, _list(content["weights"]))]
    if len(weights) != len(heads):
        raise ValueError(f"{len(weights)} weights for {len(heads)} heads. Give one weight per head")
    digests = WeightDigests.parse(content.get("model_digests"), content.get("model_digest"))
    shape = None if content.get("shape") is None else parse_shape(content["shape"])
    rows = [(*head, weight) for head, weight in zip(heads, weights, strict=True)]
    source, model = (_text(content, key) for key in ("source", "model"))
    return HeadFile(rows, source, is_list=True, model=model, digests=digests, shape=shape)


def _text(content: Mapping[str, Any], key: str) -> str:
    """The text of a key, "" without it. Raises ValueError for a value that is no text."""
    if not isinstance(value := content.get(key) or "", str):
        raise ValueError(f"{key} {quote(value)} is not a text. Put it in quotes")
    return value


def _read_list(content: list[Any], name: str) -> HeadFile:
    if content and all(isinstance(row, list) and _is_numbers(row) for row in content):
        heads = [row for row in content if _is_head(row)]
        if not heads:
            return _read_matrix(content, name)
        if len(heads) < len(content) or {number for row in content for number in row} <= {0, 1}:
            raise ValueError(
                f"{quote(heads[0])} may be a head [layer, head] or a row of a matrix. Write heads as names, "
                f"{format_head(*heads[0][:2])}, or a matrix with decimals, {[*map(float, heads[0])]}"
            )
    entries = [_parse_entry(entry) for entry in content]
    if len({score is None for _, score in entries}) > 1:
        raise ValueError("some heads have a score and others none")
    rows = [(*head, score) for head, score in entries]
    return HeadFile(sorted(rows, key=_by_score), name, is_list=True)


def _is_numbers(row: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in row)


def _is_head(row: list[Any]) -> bool:
    """Whether the list is [layer, head] or [layer, head, score], and not a row of a matrix."""
    return len(row) in (2, 3) and [type(number) for number in row[:2]] == [int, int]


def _parse_entry(entry: Any) -> tuple[Head, float | None]:
    """A head of a list, alone or with its score. Raises ValueError for anything else."""
    if not isinstance(entry, list) or not entry:
        return parse_head(entry), None
    head, rest = (to_head(entry[:2]), entry[2:]) if _is_head(entry) else (to_head(entry[0]), entry[1:])
    if len(rest) > 1:
        raise ValueError(f"{quote(entry)} is not a head with one score")
    return head, _number(rest[0]) if rest else None


def _mean(key: Any, scores: Any) -> float:
    numbers = [*map(_number, scores if isinstance(scores, list) else [scores])]
    if not numbers:
        raise ValueError(f"the list of {quote(key)} is empty")
    return sum(numbers) / len(numbers)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{quote(value)} is not a list")
    return value


def _scores(row: Any) -> list[float]:
    """The scores of a row of a matrix, or of a mask: True counts as 1."""
    is_mask = all(isinstance(value, bool) for value in _list(row))
    return [float(value) if is_mask else _number(value) for value in row]


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{quote(value)} is not a number") from error


def parse_shape(values: Any) -> tuple[int, int]:
    """A number of layers and one of heads, in a list. Raises ValueError for anything else."""
    numbers = [*map(parse_index, values)] if isinstance(values, list | tuple) else []
    if len(numbers) != 2 or 0 in numbers:
        raise ValueError(f"shape {quote(values)} is not a number of layers and one of heads. Write it as in [30, 9]")
    return numbers[0], numbers[1]


def _shape_of_all(rows: Sequence[Row]) -> tuple[int, int] | None:
    """The shape of these distinct heads if they are all those of some model: more than one, without a gap."""
    layers, heads = 1 + max(layer for layer, *_ in rows), 1 + max(head for _, head, _ in rows)
    return (layers, heads) if len(rows) == layers * heads > 1 else None


def _read_matrix(values: Any, name: str, per_group: bool = False) -> HeadFile:
    """The scores of a matrix [layers, heads], or [layers, KV groups]."""
    rows = [*map(_scores, _list(values))]
    if len({*map(len, rows)}) > 1:
        raise ValueError("the rows of the matrix have different lengths")
    scores = [(layer, head, score) for layer, row in enumerate(rows) for head, score in enumerate(row)]
    return HeadFile(scores, name, per_group=per_group, shape=(len(rows), len(rows[0])) if rows else None)


def _read_csv(file: Path, text: str, column: str | None) -> HeadFile:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = reader.fieldnames or ()
    if repeated := [name for name in columns if list(columns).count(name) > 1]:
        raise BadInput(f"heads '{file}' have two columns {quote(repeated[0])}. Keep one")
    if lacking := [name for name in ("layer", "head") if name not in columns]:
        raise BadInput(
            f"heads '{file}' have no column '{lacking[0]}': {quote(','.join(columns))}. Write the columns layer and "
            "head, and scores if there are any, separated by commas"
        )
    name, lines = _score_column(columns, file, column), [*reader]
    if long := next((line for line in lines if None in line), None):
        raise BadInput(
            f"heads '{file}': row {lines.index(long) + 1} has more values than the header has columns. Separate values "
            "by commas and decimals by points"
        )
    try:
        heads = [(parse_index(str(line["layer"]).strip()), parse_index(str(line["head"]).strip())) for line in lines]
        rows = [(*head, None if name is None else _number(line[name])) for head, line in zip(heads, lines, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"heads '{file}' cannot be read ({' '.join(str(error).split())[:200]}). The file needs the columns layer "
            "and head and may have scores, separated by commas, with numbers"
        ) from error
    models = {line.get("model") or "" for line in lines}
    if len(models) > 1:
        raise BadInput(
            f"heads '{file}' belong to several models: {', '.join(sorted(models))}. Keep the rows of one model"
        )
    scores_name = file.stem if name in (None, "score") else str(name)
    return HeadFile(rows, scores_name, is_list=name is None, model="".join(models))


def _score_column(columns: Iterable[str], file: Path, column: str | None) -> str | None:
    """The named column, "score", or the only one that does not say which head of which model a row is about; None
    without scores."""
    names = [name for name in columns if name not in ("model", "layer", "head", "kv_group")]
    if column is not None and column not in names:
        raise BadInput(f"no column {quote(column)} of scores in '{file}'. Use one of: {', '.join(names)}")
    if column is not None or "score" in names:
        return column or "score"
    if len(names) > 1:
        raise BadInput(f"heads '{file}' have several scores: {', '.join(names)}. Name one as column, or keep only one")
    return names[0] if names else None


def _check_rows(content: HeadFile) -> None:
    """Raise ValueError for no heads, for numbers that no model has, for repeated heads and for scores without value."""
    if not content.rows:
        raise ValueError("no heads")
    check_in_shape((row[:2] for row in content.rows), content.shape)
    heads: set[Head] = set()
    for layer, head, score in content.rows:
        unit = format_unit(layer, head, content.per_group)
        check_head(layer, head)
        if (layer, head) in heads:
            raise ValueError(f"{unit} appears twice. Name it once")
        if score is not None and not math.isfinite(score):
            raise ValueError(f"the score of {unit} is not finite: {score}")
        heads.add((layer, head))


def _read_origin(file: Path) -> Mapping[str, Any]:
    """What headscope's export wrote about the origin of a file; empty without it."""
    origin_file = file / ORIGIN_FILE if file.is_dir() else file.with_name(f"{file.name}.{ORIGIN_FILE}")
    if not os.path.isfile(origin_file):  # False, too, for a name that is too long
        return {}
    origin = read_json(origin_file, f"heads '{origin_file}'")
    return origin if isinstance(origin, Mapping) else {}

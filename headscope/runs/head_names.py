"""Names of heads in the options of a probe: a head, a file, the top heads of a run, or a HeadSet of Python."""

import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote as encode
from urllib.parse import unquote

from headscope.base.head_files import parse_shape
from headscope.base.head_set import HeadSet
from headscope.base.heads import format_head, parse_head, to_head
from headscope.base.model_identity import WeightDigests
from headscope.base.user_input import quote
from headscope.errors import BadInput
from headscope.runs.run import Run

OTHER_CHOICES = "Other choices: all, file:FILE, run:FOLDER:STATISTIC:COUNT[:MODEL]"
HEADS_OF_WEIGHTS = "weights:"
"""Start of weights:ORIGIN:HEAD,..., a head set with the digests of the weights that it was measured on.

ORIGIN are KIND=SHA256, shape=LAYERSxHEADS and model=NAME as far as they are known, joined by "/", or the SHA-256 of the
weights rounded to bfloat16, as older runs have it.
"""
SOURCES = ("file:", "run:", HEADS_OF_WEIGHTS)
"""Starts of names that stand for several heads."""


def format_heads_of_weights(heads: HeadSet) -> str:
    """A head set with what is known of its model as one name, without its weights and source."""
    shape = "x".join(map(str, heads.shape or ()))
    fields = {**heads.model_digests.to_dict(), "shape": shape, "model": encode(heads.model, safe="")}
    return f"{HEADS_OF_WEIGHTS}{'/'.join(f'{name}={value}' for name, value in fields.items() if value)}:{heads}"


def parse_heads_of_weights(name: str) -> HeadSet:
    """The head set of such a name. Raises ValueError for a part that is not a head."""
    origin, _, heads = name.removeprefix(HEADS_OF_WEIGHTS).partition(":")
    fields = dict(part.partition("=")[::2] for part in origin.split("/")) if "=" in origin else {"bfloat16": origin}
    shape, model = fields.pop("shape", ""), unquote(fields.pop("model", ""))
    return replace(
        HeadSet.parse(heads),
        model_digests=WeightDigests.parse(fields),
        model=model,
        shape=parse_shape(shape.split("x")) if shape else None,
    )


def head_names(value: Any) -> Any:
    """A text such as "L18H6,L3H1", a HeadSet, or pairs (layer, head), as a list of names; any other value unchanged.

    Raises ValueError for an item that is neither a text nor a pair.
    """
    if isinstance(value, str):
        return [value] if value.startswith(SOURCES) else [name.strip() for name in value.split(",")]
    if isinstance(value, HeadSet) and (value.model_digests or value.shape or value.model):
        return [format_heads_of_weights(value)]
    if not isinstance(value, HeadSet | list | tuple):
        return value
    return [item if isinstance(item, str) else format_head(*to_head(item)) for item in value]


def parse_heads(name: str) -> HeadSet:
    """The heads of a name: a head such as L18H6, `file:FILE` (a head set that `HeadSet.write` wrote, or a list of
    heads), `run:FOLDER:STATISTIC:COUNT[:MODEL]` (the heads of the largest value of a column of `run.heads`), or
    `weights:DIGESTS:HEAD,...` (a HeadSet of Python).

    Raises BadInput for anything else and for no heads, ResourceMissing without the file, BadRun if the folder is not a
    finished run.
    """
    if not (heads := _heads_of_name(name)):
        raise BadInput(f"{quote(name)} names no head. Name at least one, e.g. L18H6")
    return heads


def _heads_of_name(name: str) -> HeadSet:
    source, _, rest = name.partition(":")
    if source == "file":
        return HeadSet.read(rest)
    if source == "run":
        match = re.fullmatch(r"(.+?):(\w+):([0-9]{1,6})(?::(.+))?", rest)
        if match is None:
            raise BadInput(f"{quote(name)} names no heads of a run. Write run:FOLDER:STATISTIC:COUNT[:MODEL]")
        folder, statistic, count, model = match.groups()
        return Run.open(folder).top_heads(statistic, int(count), model)
    try:
        return parse_heads_of_weights(name) if name.startswith(HEADS_OF_WEIGHTS) else HeadSet.parse([name])
    except ValueError as error:
        raise BadInput(f"{error}. {OTHER_CHOICES}") from error


def names_of_heads(names: list[str]) -> list[str]:
    """The names of an option with heads as L18H6, each once. Raises ValueError for one that is not a head."""
    try:
        plain = [name if ":" in name or names == ["all"] else format_head(*parse_head(name.strip())) for name in names]
    except ValueError as error:
        raise ValueError(f"{error}. {OTHER_CHOICES}") from error
    return [*dict.fromkeys(plain)]

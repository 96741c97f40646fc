"""The stub `headscope/__init__.pyi`: types of every probe's function, written from the options of the probes."""

import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from headscope import plugins
from headscope.api import keyword_fields, shared_keywords
from headscope.declaration import Declaration
from headscope.study.config import OptionParts
from headscope.study.python_options import ACCEPTS_FUNCTION, ACCEPTS_POSITIONS

FILE = Path(__file__).with_name("__init__.pyi")
MARK = "# The functions of the probes, written by `make docs` from their options.\n"

SHARED_TYPES = {
    "text": "str | Path | Sequence[str]",
    "docs": "int",
    "seed": "int",
    "out": "str | Path",
    "name": "str",
    "device": "str",
    "dtype": "str",
    "bos": 'Literal["auto", "yes", "no"]',
    "engine": "str | Mapping[str, Any]",
    "resume": "bool",
    "quiet": "bool",
}


def add_probe_functions(stub: str) -> str:
    """Replace the functions below MARK with those of the installed probes."""
    functions = "\n".join(
        line for probe, options in plugins.call_parts(OptionParts.options) for line in _function(probe, options)
    )
    return f"{stub.partition(MARK)[0]}{MARK}\n{functions}\n"


def _function(probe: Declaration, options: type[BaseModel]) -> Iterator[str]:
    yield f"def {probe.function_name}("
    if {"models", "model"} & {*probe.takes}:
        yield "    model: ModelSource | Mapping[str, ModelSource],"
    yield "    *,"
    for name, default in shared_keywords(probe).items():
        yield f"    {name}: {SHARED_TYPES[name]} = {_literal(default)},"
    for name, field in keyword_fields(options).items():
        default = field.get_default(call_default_factory=True)
        kind = " | MetricFunction" if ACCEPTS_FUNCTION in field.metadata else ""
        kind += " | Positions" if ACCEPTS_POSITIONS in field.metadata else ""
        yield f"    {name}: {_type(field.annotation)}{kind} = {_literal(default)},"
    yield ") -> Run:"
    summary = textwrap.fill(probe.summary, 112, subsequent_indent="    ")
    yield f'    """{summary}"""\n'


def _literal(default: Any) -> str:
    """The default as a stub can state it: plain values, not lists."""
    if isinstance(default, str):
        return f'"{default}"'
    return repr(default) if default is None or isinstance(default, bool | int | float) else "..."


def _type(annotation: Any) -> str:
    """The type of an option as Python source; a list may be any sequence."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(_literal(value) for value in arguments)}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin in (list, tuple):
        return f"Sequence[{_type(arguments[0])}]"
    if origin is dict:
        return f"Mapping[{_type(arguments[0])}, {_type(arguments[1])}]"
    if annotation is type(None):
        return "None"
    if annotation is Any:
        return "Any"
    return "Mapping[str, Any]" if issubclass(annotation, BaseModel) else str(annotation.__name__)

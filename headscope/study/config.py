"""Study options from a YAML file, command-line flags or Python: models, texts, and the options of each probe.

Imports no torch, so an invalid study is reported before anything is loaded. Every installed probe is a key of a study,
with its own options below it.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from headscope.base import input_files, plugins, user_input
from headscope.base.model_spec import ModelSpec
from headscope.base.user_input import MAX_DOCUMENTS, MAX_LENGTH, MAX_SEED, MAX_WORKERS
from headscope.errors import BadInput, BadOption, OptionError, OptionName, ResourceMissing
from headscope.prompts.shakespeare import DEFAULT_SOURCE, expand_source
from headscope.prompts.special_tokens import BosChoice
from headscope.study.option_rules import Excludes, Needs, Rule, annotation_classes, first_fault, rules_of

log = logging.getLogger("headscope")

MAX_PROMPT_TOKENS = 1024
"""Most tokens of a prompt that takes the place of documents: each of them is a query row."""


def _has_boolean(value: Any) -> bool:
    """Whether a value is a boolean, or a list or mapping that has one at any depth."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_has_boolean, items))


class Options(BaseModel):
    """Base of a block of options in a study file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    option_rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules about options of this class and its subclasses: `Needs` and `Excludes`."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_raw_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic cannot read or report, and true and false in place of a number: Python counts them as 1
        and 0."""
        if user_input.is_too_long(value):
            raise ValueError(f"has more than {user_input.MAX_ITEMS:,} values: {user_input.quote(value)}. Use fewer")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                check_prompt(item)
        classes = annotation_classes(cls.model_fields[info.field_name or ""].annotation)
        if {int, float} & {*classes} and bool not in classes and _has_boolean(value):
            raise PydanticKnownError("int_type" if int in classes else "float_type")
        return value

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Refuse strings that are empty, or that cannot be stored and shown on one line."""
        items = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else [value]
        for text in (item for item in items if isinstance(item, str)):
            if not text:
                raise PydanticKnownError("string_too_short", {"min_length": 1})
            user_input.check_text(text)
        return value

    @field_validator("*")
    @classmethod
    def _drop_duplicates(cls, value: Any) -> Any:
        """Drop repeated values of a list, so that no two cells are the same."""
        is_plain_list = isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)
        return list(dict.fromkeys(value)) if is_plain_list else value

    @model_validator(mode="after")
    def _check_option_rules(self) -> Self:
        for rule in rules_of(type(self)):
            if fault := rule.fault(self):
                raise fault
        return self


def sorted_lengths(minimum: int, quantity: str) -> AfterValidator:
    """A validator of sizes in tokens: at least one, each at least `minimum`, sorted. Messages name the `quantity`."""

    def validate(sizes: list[int]) -> list[int]:
        if not sizes:
            raise ValueError(f"no {quantity}. Give at least one")
        if min(sizes) < minimum:
            raise ValueError(f"{quantity} {min(sizes)} is too short. Use at least {minimum} tokens")
        if max(sizes) > MAX_LENGTH:
            raise ValueError(f"{quantity} {user_input.quote(max(sizes))} is too long. Use at most {MAX_LENGTH} tokens")
        return sorted(set(sizes))

    return AfterValidator(validate)


Lengths = Annotated[list[int], sorted_lengths(2, "context length")]


class OptionParts:
    """Contract of the part of a probe with its options."""

    def options(self) -> type[Options]:
        """Its options: the source of flags, help, YAML keys and Python keywords."""
        raise NotImplementedError("the probe has no options")


class MultilineOptions(Options):
    """Options whose texts may have several lines."""

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        super()._check_text(check_prompt(value) if isinstance(value, str) else value)
        return value


class PromptOptions(MultilineOptions):
    """Options of a probe that reads documents, or a prompt instead."""

    option_rules: ClassVar[tuple[Rule, ...]] = (
        Needs("template", "prompt prompt_file"),
        Excludes("prompt", "prompt_file"),
        Excludes("lengths rows", "prompt prompt_file", "every token of a prompt is analysed"),
    )

    prompt: str | None = Field(None, description="text to analyse instead of documents; every token is a query row")
    prompt_file: str | None = Field(None, description="file to read the prompt from")
    template: bool = Field(False, description="put the prompt into the chat template of the tokenizer, as a message")

    @classmethod
    def replacement_of_texts(cls, values: Mapping[str, Any]) -> str:
        """What takes the place of documents under these values of the options; "" if the probe reads documents."""
        return "a prompt" if values.get("prompt") or values.get("prompt_file") else ""


def refuse_texts_beside_prompt(options: type, values: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raise BadOption if `values` of a probe's options replace documents and `texts` name settings of these as well."""
    if issubclass(options, PromptOptions) and texts and (replacement := options.replacement_of_texts(values)):
        fault = OptionError(
            "{option} has no effect with {replacement} in place of documents. Remove one of them",
            option=OptionName(texts[0]),
            replacement=replacement,
        )
        raise BadOption("", (), fault)


def check_prompt(text: str) -> str:
    """The text on one line. Raises ValueError for control characters other than tabs and line breaks."""
    return user_input.check_text(re.sub(r"[\t\n\r]", " ", text))


TextSource = Annotated[str, AfterValidator(expand_source)]
"""A text source as runs record it."""


class TextOptions(Options):
    """The documents that are measured."""

    source: TextSource = Field(
        default=DEFAULT_SOURCE,
        description="pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET; pkg:shakespeare:whole begins with the "
        "title page",
        validate_default=True,
    )
    docs: int = Field(default=4, ge=1, le=MAX_DOCUMENTS, description="number of documents per context length")

    @model_validator(mode="before")
    @classmethod
    def _expand_source(cls, value: Any) -> Any:
        """Accept the source alone, as the flag does."""
        return {"source": value} if isinstance(value, str) else value


class EngineOptions(Options):
    """Where cells run. It changes no number, so it does not belong to the identity of a run."""

    option_rules = (Needs("address workers gpus_per_worker", "name=ray"),)

    name: Literal["plain", "ray"] = Field(default="plain", description="plain (this process) or ray")
    address: str | None = Field(
        default=None,
        min_length=1,
        description="address of a Ray cluster, e.g. auto; default: a new one on this machine",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="processes with a checkpoint each; default: one per GPU, or two",
    )
    gpus_per_worker: float | None = Field(
        default=None,
        ge=0,
        le=MAX_WORKERS,
        description="GPUs per worker, 0.5 for two workers on one GPU; default: 1 if there are GPUs",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        """Accept the name alone, as the flag does."""
        return {"name": value} if isinstance(value, str) else value


class Study(Options):
    """A study: the probes whose options are set are stored in one run. `study_type` adds a field per probe."""

    name: str = Field(
        default="study", pattern=user_input.RUN_NAME_PATTERN, description="name appended to the run directory"
    )
    models: dict[Annotated[str, Field(min_length=1)], str] = Field(
        default_factory=lambda: {"base": "smollm2-135m"}, description="model specs by label"
    )
    texts: TextOptions = Field(default_factory=TextOptions)
    seed: int = Field(0, ge=0, le=MAX_SEED, description="random seed")
    bos: BosChoice = Field(
        "auto",
        description="begin prompts and texts with a BOS token: auto (as the tokenizer does by itself), yes or no",
    )
    device: str = Field("auto", description="auto (one GPU, or all GPUs if one is too small, else cpu), cpu, cuda, ...")
    dtype: str = Field("auto", description="auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16")
    engine: EngineOptions = Field(
        default_factory=EngineOptions, description="where work items run: plain (this process) or ray", exclude=True
    )

    @model_validator(mode="after")
    def _check_models(self) -> "Study":
        for name in self.probe_options:
            takes = plugins.requestable_probes()[name].takes
            if "models" in takes and not self.models:
                raise ValueError("no model. Give at least one, e.g. --model base=smollm2-135m")
            specs = [ModelSpec.parse(spec) for spec in self.models.values()] if "model" in takes else []
            if "model" in takes and [spec.scheme.text for spec in specs] != ["base"]:
                requested = ", ".join(self.models.values()) or "no model"
                raise ValueError(
                    f"{name} takes one checkpoint without a scheme, not {requested}. Use --model CHECKPOINT"
                )
        return self

    @model_validator(mode="after")
    def _check_bos(self) -> "Study":
        templates = [name for name, options in self.probe_options.items() if _uses_chat_template(options)]
        if self.bos != "auto" and templates:
            raise ValueError(
                f"'bos' has no effect on the chat template of {templates[0]}, which has its own special tokens. Remove "
                "'bos' or 'template'"
            )
        return self

    @property
    def probe_options(self) -> dict[str, Options]:
        """The options of each requested probe, by name, in the order of the probes."""
        options = {name: getattr(self, name, None) for name in plugins.requestable_probes()}
        return {name: block for name, block in options.items() if block is not None}


def _uses_chat_template(options: Options) -> bool:
    return getattr(options, "template", False) in (True, "chat")


@cache
def study_type() -> type[Study]:
    """`Study` with a field for every probe whose options can be imported."""
    fields: dict[str, Any] = {
        probe.name: (options | None, Field(None, description=probe.summary))
        for probe, options in plugins.call_parts(OptionParts.options)
    }
    return create_model("Study", __base__=Study, **fields)


def read_study(file: Path | str | None, overrides: Mapping[str, Any]) -> Study:
    """Read a study from a YAML file and apply overrides (a None override is absent; dicts merge key by key).

    `models` in the overrides replace those of the file. Raises ResourceMissing without the file, BadInput with the
    file, the key and, for an unknown key, the most similar known one.
    """
    source_name = f"study file '{file}'" if file is not None else "study"
    content: Any = {}
    if file is not None:
        try:
            content = input_files.read_yaml(user_input.expand_path(file, "study file"), source_name)
        except FileNotFoundError as error:
            raise ResourceMissing(f"no {source_name}. Check the path") from error
        if not isinstance(content, dict):
            raise BadInput(f"{source_name} has no keys. Add a probe, e.g. measure: {{lengths: [2048]}}")
    if overrides.get("models"):
        content = {key: value for key, value in content.items() if key != "models"}
    if isinstance(source := content.get("texts"), str):
        content = {**content, "texts": {"source": source}}
    if isinstance(name := content.get("engine"), str):
        content = {**content, "engine": {"name": name}}
    # A probe's key without a value requests the probe with its defaults.
    content |= {name: {} for name in plugins.requestable_probes() if name in content and content[name] is None}
    try:
        merged = _merge_options(content, overrides)
    except ValueError as error:
        raise BadInput(f"{source_name}: {error}") from error
    study = build_study(merged, source_name)
    if "texts" in content:
        _warn_of_unused_texts(study, source_name)
    return study


def _warn_of_unused_texts(study: Study, source_name: str) -> None:
    """Warn if each probe that could read the documents of a study file has a prompt instead."""
    readers = {name: o for name, o in study.probe_options.items() if "text" in plugins.requestable_probes()[name].takes}
    if readers and all(isinstance(o, PromptOptions) and o.replacement_of_texts(vars(o)) for o in readers.values()):
        log.warning(
            "%s: 'texts' has no effect: every probe that could read it has a prompt (%s). Remove 'texts', or prompts",
            source_name,
            ", ".join(readers),
        )


def build_study(content: Mapping[str, Any], source_name: str = "study") -> Study:
    """Build a study from plain data. Raises BadInput with one line about the first mistake."""
    try:
        return study_type().model_validate(content)
    except ValidationError as error:
        raise BadOption(source_name, *first_fault(error, study_type())) from error


LABEL_PATTERN = r"(?=[^=]*\w)[\w.+-](?:[\w .+-]*[\w.+-])?"
"""Pattern of a model's label."""


def check_label(label: object, spec: object) -> None:
    """Raise BadInput for a label that the command line would refuse; a spec may be its own label."""
    if not isinstance(label, str) or not (label == spec or re.fullmatch(LABEL_PATTERN, label)):
        raise bad_label(label)


def bad_label(label: object) -> BadInput:
    """The error for a label of a model."""
    return BadInput(f"bad model name {user_input.quote(label)}. Use a text of letters, digits, spaces and . _ + -")


def parse_models(entries: list[str]) -> dict[str, str]:
    """Parse NAME=SPEC entries into specs by label; an entry without NAME= has its spec as label.

    Raises BadInput for a name that repeats or has other characters than words, spaces and . + -.
    """
    models: dict[str, str] = {}
    for entry in entries:
        if re.fullmatch(r"[\w .+-]+=", entry):
            raise BadInput(f"model label '{entry[:-1]}' has no model. Write --model {entry}CHECKPOINT")
        match = re.match(rf"^({LABEL_PATTERN})=(.+)$", entry)
        if match is None and (name := re.match(r"[^=@/:]+(?==)", entry)):
            raise bad_label(name[0])
        label, spec = (match[1], match[2]) if match else (entry, entry)
        if label in models:
            raise BadInput(f"model label '{label}' is used twice. Give each model its own label: --model NAME=SPEC")
        models[label] = spec
    return models


def _merge_options(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            block = {} if merged.get(key) is None else merged[key]
            if not isinstance(block, Mapping):
                raise ValueError(f"{key} must be a mapping (key: value): {user_input.quote(block)}")
            merged[key] = _merge_options(block, value)
        elif value is not None:
            merged[key] = value
    return merged

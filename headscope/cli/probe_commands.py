"""The command of each probe: its flags come from the fields of its options."""

import inspect
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic.fields import FieldInfo

from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.cli import flags
from headscope.errors import BadInput, BadOption, OptionError, quote_option
from headscope.study.config import OptionParts

if TYPE_CHECKING:
    from headscope.compat.typer import Command
    from headscope.study.config import Study

STUDY_FILE = Annotated[
    Path | None, typer.Argument(metavar="STUDY.yaml", help="Study file; all its probes go into one run.")
]
ENGINE = {
    "engine": flags.Engine,
    "address": flags.Address,
    "workers": flags.Workers,
    "gpus_per_worker": flags.Gpus,
}


def build_command(probe: Declaration) -> "Command":
    """The command of a probe. Raises BrokenProbe if its options cannot be read."""
    from headscope.api import keyword_fields

    options = keyword_fields(plugins.call_part(probe, OptionParts.options))
    parameters = {
        **_input_flags(probe, "training_texts" in options),
        **{name: _option_flag(name, field) for name, field in options.items()},
        **_shared_flags(probe),
    }

    def call(**values: Any) -> None:
        _run(probe, options, values)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in parameters.items()
        ]
    )
    call.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    example = f"\n\n{probe.example}" if probe.example else ""
    app.command(probe.command_name, cls=flags.GroupedCommand, help=f"{probe.summary}{example}")(call)
    return typer.main.get_command(app)


def _input_flags(probe: Declaration, is_training: bool) -> dict[str, tuple[Any, Any]]:
    """Flags for models and texts; for a probe that trains, the texts are for validation."""
    flags_of_input: dict[str, dict[str, tuple[Any, Any]]] = {
        "models": {"model": (flags.Models, None), "checkpoints": (flags.Checkpoints, None)},
        "model": {"model": (flags.Model, None)},
        "text": {"text": (flags.ValidationText if is_training else flags.Text, None)},
        "docs": {"docs": (flags.ValidationDocs if is_training else flags.Docs, None), "limit": (flags.Limit, None)},
    }
    file = {"study_file": (STUDY_FILE, None)} if probe.command == "run" else {}
    return {**file, **{name: flag for input_kind in probe.takes for name, flag in flags_of_input[input_kind].items()}}


def _shared_flags(probe: Declaration) -> dict[str, tuple[Any, Any]]:
    device_flags = {"device": (flags.Device, None), "dtype": (flags.Dtype, None)} if probe.takes else {}
    bos_flag = {"bos": (flags.Bos, None)} if {"models", "model"} & {*probe.takes} else {}
    return {
        "name": (flags.Name, None),
        "out": (flags.Out, Path("runs")),
        "config": (flags.Config, None),
        **device_flags,
        **bos_flag,
        "seed": (flags.Seed, None),
        **{name: (flag, None) for name, flag in ENGINE.items()},
        "resume": (flags.Resume, False),
        "show_all": (flags.All, False),
        "as_json": (flags.Json, False),
        "quiet": (flags.Quiet, False),
    }


def _option_flag(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """The flag of an option. It takes text, which pydantic parses and checks."""
    is_list = list in _plain_types(field.annotation)
    spellings = [_flag(name)]
    if is_list and name.endswith("s"):
        spellings.append(re.sub(r"(?<=ss)es$|s$", "", spellings[0]))
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, Mapping) else {}
    spellings += typing.cast(list[str], extra.get("flags", []))
    description = f"{_capitalized(field.description or '')}."
    list_hint = " Repeat the flag, or separate values by commas." if is_list else ""
    help_text = f"{description}{list_hint}{_default_text(field)}"
    if bool in _plain_types(field.annotation):
        return Annotated[bool | None, typer.Option(f"{spellings[0]}/--no-{spellings[0][2:]}", help=help_text)], None
    flag_type = list[str] | None if is_list else str | None
    return Annotated[flag_type, typer.Option(*spellings, help=help_text, metavar=_metavar(field))], None


def _capitalized(description: str) -> str:
    """The description as a sentence, unless it starts with a value to type, as in "exact: evaluate every head"."""
    first_word = re.split(r"[\s,]", description, maxsplit=1)[0]
    return description if first_word.endswith(":") else description[:1].upper() + description[1:]


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return " [required]"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return ""
    if isinstance(default, bool):
        return " [default: on]" if default else " [default: off]"
    items = default if isinstance(default, list) else [default]
    return f" [default: {','.join(map(str, items)) or 'none'}]"


def _metavar(field: FieldInfo) -> str:
    names = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
    choices_by_name = _literal_values(field.annotation)
    type_names = [names[kind] for kind in _plain_types(field.annotation) if kind in names]
    return "|".join([*dict.fromkeys(type_names), *choices_by_name]) or "TEXT"


def _plain_types(annotation: Any) -> set[Any]:
    """The plain types in an annotation, with `list` if it contains one."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return set()
    if origin is Annotated:
        return _plain_types(inner[0])
    if origin is list:
        return {list}.union(*(_plain_types(part) for part in inner))
    if origin is tuple:  # for Python and study files; a flag takes one text
        return set()
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_plain_types(part) for part in inner))
    return {annotation}


def choices(field: FieldInfo) -> str:
    """The text "; choices: a, b" for an option that takes only named values; "" for any other."""
    values = _literal_values(field.annotation)
    return f"; choices: {', '.join(values)}" if len(values) > 1 and str not in _plain_types(field.annotation) else ""


def _literal_values(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [value for part in typing.get_args(annotation) for value in _literal_values(part)]


def _option_value(field: FieldInfo, value: Any) -> Any:
    """A flag's values as the option takes them. If it also takes a count, one value without comma or point is a
    count."""
    if not isinstance(value, list):
        return value
    types = _plain_types(field.annotation)
    items = [item.strip() for text in value for item in text.split(",") if item.strip()]
    takes_count = int in types and not _takes_only_lists(field.annotation)
    return value[0] if takes_count and len(value) == 1 and not {",", "."} & set(value[0]) else items


def _takes_only_lists(annotation: Any) -> bool:
    alternatives = [part for part in typing.get_args(annotation) if part is not type(None)]
    return typing.get_origin(annotation) is list or all(typing.get_origin(part) is list for part in alternatives)


def _run(probe: Declaration, options: Mapping[str, FieldInfo], values: dict[str, Any]) -> None:
    from headscope.cli import execute, print_result

    try:
        study = _read_study(probe, options, values)
    except BadOption as error:
        raise BadInput(_describe_with_flags(error, probe, options, values)) from error
    run = execute(study, values["out"], values["resume"], values["quiet"] or values["as_json"])
    print_result(run, values["as_json"], values["show_all"])


FLAGS_BY_KEY = {"texts.source": "text", "texts.docs": "docs", "engine.name": "engine"}
"""Flags of the keys of a study file whose names differ."""


def _describe_with_flags(
    error: BadOption, probe: Declaration, options: Mapping[str, FieldInfo], values: Mapping[str, Any]
) -> str:
    """The message of a mistake, with flags in place of the keys of a study.

    Beside a study file only flags that were typed are named so: the others may be keys of the file.
    """
    file = values.get("study_file") or values["config"]
    names = {name for name, value in values.items() if not file or value not in (None, [])}
    flag_by_key = {**FLAGS_BY_KEY, **{f"{probe.name}.{name}": name for name in options}}

    def name_option(name: str) -> str:
        name = FLAGS_BY_KEY.get(f"{error.key}.{name}", name)
        return _flag(name) if name in names else quote_option(name)

    name = flag_by_key.get(error.key, error.key.removeprefix("engine."))
    if isinstance(error.fault, OptionError) and error.key in (probe.name, "engine") and not file:
        return error.describe(name_option, "")
    if name in names:
        return error.describe(name_option, _flag(name))
    source = f"{error.source}: " if file and error.source else ""
    return source + error.describe(name_option, ".".join(map(str, error.path)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_study(probe: Declaration, options: Mapping[str, FieldInfo], values: dict[str, Any]) -> "Study":
    """The study that the flags, and a study file, describe. Raises BadInput with one line about the first mistake."""
    from headscope.study.checkpoint_glob import checkpoint_models
    from headscope.study.config import parse_models, read_study, refuse_texts_beside_prompt

    file, config = values.get("study_file"), values["config"]
    if file and config:
        raise BadInput("two study files: STUDY.yaml and --config. Give only one")
    probe_values = {
        name: _option_value(field, values[name]) for name, field in options.items() if values[name] not in (None, [])
    }
    if not (file or config):  # other probes of a study file may read documents
        texts = [flag for flag in ("text", "docs", "limit") if values.get(flag) is not None]
        refuse_texts_beside_prompt(plugins.call_part(probe, OptionParts.options), probe_values, texts)
    models: dict[str, str] = {}
    if "model" in probe.takes:
        models = {"base": values["model"]} if values["model"] is not None else {}
    elif "models" in probe.takes:
        models = parse_models(values["model"] or [])
        matches = checkpoint_models(values["checkpoints"] or [])
        if repeated := [label for label in matches if label in models]:
            raise BadInput(
                f"model label '{repeated[0]}' is used by both --model and --checkpoints. Rename one: --model NAME=..."
            )
        models |= matches
    overrides: dict[str, Any] = {
        "name": values["name"] or (None if file or config or probe.command == "run" else probe.name),
        "models": models or None,
        "texts": {"source": values.get("text"), "docs": values.get("docs")},
        **{key: values.get(key) for key in ("seed", "device", "dtype", "bos")},
        "engine": {"name" if key == "engine" else key: values[key] for key in ENGINE},
    }
    if probe_values or probe.command != "run" or not (file or config):
        overrides[probe.name] = probe_values
    study = read_study(file or config, overrides)
    if values.get("limit") is not None:
        study.texts.docs = min(study.texts.docs, values["limit"])
    return study

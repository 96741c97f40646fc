"""A command for every section of a study, its flags made from the fields of its options."""

import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from typer._click.core import Command

from headscope import plugins
from headscope.cli import flags
from headscope.errors import BadInput
from headscope.plugins import Probe

STUDY_FILE = Annotated[
    Path | None, typer.Argument(metavar="STUDY.yaml", help="Study file; its sections all land in one run.")
]
ENGINE = {
    "engine": flags.Engine,
    "address": flags.Address,
    "workers": flags.Workers,
    "gpus_per_worker": flags.Gpus,
}


def command(probe: Probe) -> Command:
    """The command of a section. Raises BrokenProbe where its options cannot be read."""
    from headscope.api import keyword_fields

    options = keyword_fields(plugins.load_part(probe, "options"))
    parameters = {
        **_models(probe, "train" in options),
        **{name: _flag(name, field) for name, field in options.items()},
        **_shared(probe),
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
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    example = f"\n\n[bold]{probe.example}[/bold]" if probe.example else ""
    app.command(probe.command_name, help=f"{probe.summary}{example}")(call)
    return typer.main.get_command(app)


def _models(probe: Probe, learns: bool) -> dict[str, tuple[Any, Any]]:
    """What names the models and texts; a section that learns has the texts held out."""
    known: dict[str, dict[str, tuple[Any, Any]]] = {
        "models": {"model": (flags.Models, None), "checkpoints": (flags.Checkpoints, None)},
        "model": {"model": (flags.Model, None)},
        "text": {"text": (flags.HeldOut if learns else flags.Text, None)},
        "docs": {"docs": (flags.HeldOutDocs if learns else flags.Docs, None), "limit": (flags.Limit, None)},
    }
    file = {"study_file": (STUDY_FILE, None)} if probe.command == "run" else {}
    return {**file, **{name: flag for what in probe.takes for name, flag in known[what].items()}}


def _shared(probe: Probe) -> dict[str, tuple[Any, Any]]:
    where = {"device": (flags.Device, None), "dtype": (flags.Dtype, None)} if probe.takes else {}
    return {
        "name": (flags.Name, None),
        "out": (flags.Out, Path("runs")),
        "config": (flags.Config, None),
        **where,
        "seed": (flags.Seed, None),
        **{name: (flag, None) for name, flag in ENGINE.items()},
        "resume": (flags.Resume, False),
        "as_json": (flags.Json, False),
        "quiet": (flags.Quiet, False),
    }


def _flag(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """The flag of an option, for values as text: pydantic reads them and tells what is wrong with them."""
    listed = list in _kinds(field.annotation)
    spelled = [f"--{name.replace('_', '-')}"]
    if listed and name.endswith("s"):
        spelled.append(spelled[0].removesuffix("s"))
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, Mapping) else {}
    spelled += typing.cast(list[str], extra.get("flags", []))
    words = f"{(field.description or '')[:1].upper()}{(field.description or '')[1:]}{choices(field)}."
    several = " Repeat the flag or separate by commas." if listed else ""
    help_text = f"{words}{several}{_default(field)}".replace("[", "\\[")
    if bool in _kinds(field.annotation):
        return Annotated[bool | None, typer.Option(f"{spelled[0]}/--no-{spelled[0][2:]}", help=help_text)], None
    kind = list[str] | None if listed else str | None
    return Annotated[kind, typer.Option(*spelled, help=help_text, metavar=_metavar(field))], None


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None or field.is_required():
        return ""
    items = default if isinstance(default, list) else [default]
    told = [f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else str(item) for item in items]
    return f" [default: {' '.join(told)}]"


def _metavar(field: FieldInfo) -> str:
    names = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
    named = _named(field.annotation)
    told = [names[kind] for kind in _kinds(field.annotation) if kind in names]
    return "|".join([*dict.fromkeys(told), *named]) or "TEXT"


def _kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation, `list` among them where it holds one."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return set()
    if origin is Annotated:
        return _kinds(inner[0])
    if origin is list:
        return {list}.union(*(_kinds(each) for each in inner))
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(each) for each in inner))
    return {annotation}


def choices(field: FieldInfo) -> str:
    """The values that an option may be given by name, in words; "" where there are not several."""
    named = _named(field.annotation)
    return f"; choices: {', '.join(named)}" if len(named) > 1 else ""


def _named(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [choice for each in typing.get_args(annotation) for choice in _named(each)]


def _given(field: FieldInfo, value: Any) -> Any:
    """A flag's values as the option takes them. Where a count does too, one value without comma or point is a count."""
    if not isinstance(value, list):
        return value
    kinds = _kinds(field.annotation)
    items = [item.strip() for text in value for item in text.split(",") if item.strip()]
    counts = int in kinds and not _only_lists(field.annotation)
    return value[0] if counts and len(value) == 1 and not {",", "."} & set(value[0]) else items


def _only_lists(annotation: Any) -> bool:
    alternatives = [each for each in typing.get_args(annotation) if each is not type(None)]
    return typing.get_origin(annotation) is list or all(typing.get_origin(each) is list for each in alternatives)


def _run(probe: Probe, options: Mapping[str, FieldInfo], values: dict[str, Any]) -> None:
    from headscope.cli.execution import execute, finish
    from headscope.study.checkpoint_glob import expand_checkpoints
    from headscope.study.config import parse_models, read_study

    file, config = values.get("study_file"), values["config"]
    for what in ("text", "name", "checkpoints"):
        if values.get(what) == "":
            raise BadInput(f"--{what} is empty: leave it out or say which")
    if values.get("model") == "" or "" in list(values.get("model") or []):
        raise BadInput("--model is empty: leave it out or say which")
    if file and config:
        raise BadInput("give the study file once: as STUDY.yaml or as --config")
    own = {name: _given(field, values[name]) for name, field in options.items() if values[name] not in (None, [])}
    models: dict[str, str] = {}
    if "model" in probe.takes:
        models = {"base": values["model"]} if values["model"] is not None else {}
    elif "models" in probe.takes:
        models = parse_models(values["model"] or [])
        if values["checkpoints"] is not None:
            found = expand_checkpoints(values["checkpoints"])
            if twice := [label for label in found if label in models]:
                raise BadInput(f"model label '{twice[0]}' is given twice: by --model and by --checkpoints")
            models |= found
    overrides: dict[str, Any] = {
        "name": values["name"] or (None if file or config or probe.command else probe.name),
        "models": models or None,
        "texts": {"source": values.get("text"), "docs": values.get("docs")},
        **{key: values.get(key) for key in ("seed", "device", "dtype")},
        "engine": {"name" if key == "engine" else key: values[key] for key in ENGINE},
    }
    if own or probe.command != "run" or not (file or config):
        overrides[probe.name] = own
    study = read_study(file or config, overrides)
    if values.get("limit") is not None:
        study.texts.docs = min(study.texts.docs, values["limit"])
    finish(execute(study, values["out"], values["resume"], values["quiet"] or values["as_json"]), values["as_json"])

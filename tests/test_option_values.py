"""Every option of every command, and every number of a study: a bad value is refused in one line before any work."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel
from support.refusals import refuses

from headscope.base import user_input
from headscope.cli.app import app
from headscope.cli.command_groups import ProbeCommand
from headscope.cli.probe_commands import build_command
from headscope.compat.typer import DISPLAY_TYPE
from headscope.errors import BadOption
from headscope.study.config import build_study, study_type
from headscope.study.option_rules import annotation_classes

BIG = 10**30
BAD_NUMBERS = ("", "x", "-1", "nan", "inf", str(BIG))
BAD_PATHS = ("", "file/below", "nul\0")
RAW = ("Input should", "Value error", "Invalid value", "Errno", "Traceback")
"""Words of other libraries."""
REQUIRED = {
    "circuit": ("--heads=L0H0",),
    "import": ("--file=scores.csv",),
    "ablate": ("--pairs=ioi", "--heads=L0H0"),
}
"""Options without which a command refuses every other one."""
STARTS = (
    *("headscope.study.runner.run_study", "headscope.study.planning.plan_study", "headscope.positions.model.load"),
    *("dashboards.app.serve", "headscope.cli.bundle._open_site"),
)
GROUP: Any = typer.main.get_command(app)
with_flags = cache(lambda name: build_command(GROUP.get_command(None, name).probe))  # built once: it takes 20 ms


def command(name: str) -> Any:
    found = GROUP.get_command(None, name)
    return with_flags(name) if isinstance(found, ProbeCommand) else found


@pytest.fixture
def refuses_argument(headscope: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command on arguments of which the first must be refused, as `named`, before anything is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.main.get_command", lambda _: GROUP)
    monkeypatch.setattr(ProbeCommand, "with_flags", lambda self: with_flags(self.name))
    for start in STARTS:
        monkeypatch.setattr(start, lambda *_, **__: pytest.fail("the command started"))
    (tmp_path / "file").write_text("")

    def run(name: str, *arguments: str, named: tuple[str, ...]) -> None:
        code, _, err = headscope(name, *arguments)
        assert code in (2, 3), arguments
        assert err.startswith("headscope: "), (arguments, err)
        assert err.count("\n") == 1, (arguments, err)
        assert not [word for word in RAW if word in err], (arguments, err)
        assert any(text in err for text in named), (arguments, err)
        assert os.listdir(tmp_path) == ["file"], arguments

    return run


def bad_values(param: Any, value_type: str) -> tuple[str, ...]:
    kind = f"{value_type} {param.metavar if value_type in ('str', 'list[str]') else ''}".lower()
    if "path" in kind:
        return BAD_PATHS
    return (*BAD_NUMBERS, "1.5") if "int" in kind else BAD_NUMBERS if "float" in kind or "number" in kind else ("",)


@pytest.mark.parametrize("name", GROUP.list_commands(None))
def test_a_bad_value_of_an_option_is_refused_before_any_work(name: str, refuses_argument: Any) -> None:
    context = typer.Context(command(name))
    params = [param for param in command(name).get_params(context) if not getattr(param, "is_flag", False)]
    positional = [param.name for param in params if param.param_type_name == "argument" and param.required]
    options = [f"{p.opts[0]}=x" for p in params if p.param_type_name == "option" and p.required]
    for param in params:
        flag = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
        required = [text for text in (*REQUIRED.get(name, ()), *options) if not text.startswith(f"{flag}=")]
        for value in bad_values(param, DISPLAY_TYPE.of(param)(context).strip("<>")):
            given = [f"{flag}={value}"] if flag.startswith("--") else [] if param.required else [value]
            given += [value if argument == param.name else "file" for argument in positional]
            refuses_argument(
                name, *given, *required, named=(flag, user_input.quote(value), value) if value else (flag,)
            )


def numeric_fields(options: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path of every option of a study that takes numbers, and its annotation."""
    for name, field in options.model_fields.items():
        classes = annotation_classes(field.annotation)
        for inner in classes:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from numeric_fields(inner, (*path, name))
        if {int, float} & {*classes}:
            yield (*path, name), field.annotation


NUMBERS = dict(numeric_fields(study_type()))


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_a_bad_number_of_a_study_is_refused(path: tuple[str, ...]) -> None:
    annotation = NUMBERS[path]
    is_list = list in map(get_origin, [annotation, *get_args(annotation)])
    for value in (True, "x", float("nan"), BIG, *([[True], ["x"], [float("nan")], [BIG]] if is_list else [])):
        content: Any = {path[-1]: value}
        if path[:-1] == ("adapt", "phases"):
            content = [{"length": 8, "steps": 1, **content}]
        for key in reversed(path[:-1]):
            content = {key: content}
        if path[0] == "circuit":
            content["circuit"] |= {"heads": ["L0H0"]}
        with refuses(BadOption) as raised:
            build_study({"scaling": {}} | content)
        assert path[-1].removesuffix("s") in str(raised.value), (value, raised.value)
        assert not [word for word in RAW if word in str(raised.value)], (value, raised.value)

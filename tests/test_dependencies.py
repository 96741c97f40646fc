"""The ranges of versions in pyproject.toml: their lower ends run in `make test-oldest`, and the pinned versions fit."""

import tomllib
from collections.abc import Callable

from packaging.requirements import Requirement
from support.oldest_versions import PYPROJECT, oldest_versions

from headscope.base import plugins
from headscope.cli import app as cli


def test_every_dependency_has_a_lower_bound() -> None:
    requirements = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    assert [Requirement(text).name for text in requirements] == list(oldest_versions())


def test_the_pinned_versions_are_allowed() -> None:
    lines = (PYPROJECT.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line and line[0] != "#")
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    bounded = [
        requirement for text in (*project["dependencies"], *extras) if (requirement := Requirement(text)).specifier
    ]
    assert len(bounded) > len(oldest_versions())
    for requirement in bounded:
        assert requirement.specifier.contains(pins[requirement.name.replace("_", "-")]), requirement


def test_every_command_shows_its_help(headscope: Callable[..., tuple[int, str, str]]) -> None:
    built_in = [
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    ]
    commands = [*built_in, *(probe.command_name for probe in plugins.requestable_probes().values())]
    assert len(commands) > 25
    for command in commands:
        code, text, err = headscope(command, "--help")
        assert (code, err) == (0, ""), command
        assert f" {command} [OPTIONS]" in text, command

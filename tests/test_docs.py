"""The documentation is true: every command, table, column and file is in it, and the reference is fresh."""

import re
import subprocess
from pathlib import Path

import pytest
import typer

from headscope import cli, reference
from headscope.runs.schema import all_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = reference.FILE.read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(cli.app).commands


def test_the_generated_reference_is_fresh():
    assert reference.text() == REFERENCE, "run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_and_is_named_in_the_readme(name):
    command = COMMANDS[name]
    assert command.help
    assert all(parameter.help for parameter in command.params if parameter.name != "help"), name
    assert f"headscope {name}" in README or f"make {name}" in README


@pytest.mark.parametrize("table", all_tables().values(), ids=lambda table: table.name)
def test_every_table_and_column_is_in_the_reference(table):
    assert f"### {table.name}\n" in REFERENCE
    for column in table.columns:
        assert re.search(rf"\| (\*\*)?{column.name}(\*\*)? \|", REFERENCE), column.name
        assert column.meaning


def test_the_tree_in_the_readme_names_every_file_once():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages = ("headscope/", "probes/", "dashboards/")
    expected = {name for name in tracked.splitlines() if name.startswith(packages) and not name.endswith("__init__.py")}
    tree = README.split("## The house")[1].split("## Develop")[0]
    told = re.findall(r"^    ([\w./]+\.py)  ", tree, re.MULTILINE)
    assert sorted(told) == sorted(expected)


def test_the_readme_has_the_two_set_up_commands_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"    make {target} " in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)

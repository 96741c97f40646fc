"""The documentation is true: its code runs, every command, table, column and file is in it, the reference is fresh."""

import glob
import inspect
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
import yaml

import headscope as hs
from headscope import reference
from headscope.base import plugins
from headscope.cli.app import app
from headscope.cli.command_groups import Commands
from headscope.results.table import COLUMNS
from headscope.runs.columns import all_tables
from headscope.study.config import OptionParts, build_study, read_study
from probes.adapt import paper_page

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "\n".join(
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("usage", "adarope-training", "patching", "budget", "weights", "results")
)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
REFERENCE = reference.FILE.read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """Code blocks of README and guides in that language."""
    code = re.findall(rf"^```{kind}\n(.*?)^```", f"{README}\n{GUIDES}", re.MULTILINE | re.DOTALL)
    assert code
    return code


def commands() -> list[str]:
    import typer

    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    return group.list_commands(None)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_entry_pages_are_short(page):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= 150


def test_generated_reference_is_up_to_date():
    assert reference.reference_page() == REFERENCE, "run `make docs`"


@pytest.mark.parametrize("name", commands())
def test_every_command_is_in_the_readme_and_documented_in_the_reference(name):
    assert f"headscope {name}" in README + GUIDES or f"make {name}" in README
    chapter = REFERENCE.split(f"### headscope {name}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", chapter, re.MULTILINE)
    assert rows
    assert [flag for flag, meaning in rows if not meaning.strip() and "--help" not in flag] == []


def test_every_function_and_its_keywords_are_in_the_reference():
    options_of = dict(plugins.call_parts(OptionParts.options))
    assert [probe.name for probe in options_of] == [*plugins.requestable_probes()]
    for probe, options in options_of.items():
        chapter = REFERENCE.split(f"### hs.{probe.function_name}(")[1].split("\n### ")[0]
        keywords = inspect.signature(getattr(hs, probe.function_name)).parameters
        inputs = [name for name in ("model", "text", "docs") if name in keywords]
        assert chapter.startswith(f"{', '.join([*inputs, '...'])})")
        for name, field in options.model_fields.items():
            assert field.description, f"{probe.name}.{name}"
            assert f"| `{name}` |" in chapter or name == "models"
            assert (f"| `{name}` | (required) |" in chapter) == field.is_required()


@pytest.mark.parametrize("table", all_tables().values(), ids=lambda table: table.name)
def test_every_table_and_column_is_in_the_reference(table):
    chapter = REFERENCE.split(f"### {table.name}\n")[1].split("\n### ")[0]
    for column in table.columns:
        assert column.meaning
        cell = f"**{column.name}**" if column.key else column.name
        assert chapter.count(f"\n| {cell} |") == 1, cell


def test_every_column_of_findings_is_documented():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"`{name}`" not in page] == []


def test_every_folder_is_in_contributing():
    existing_folders = {path.parent.name for path in (ROOT / "headscope").glob("*/__init__.py")}
    listed = set(re.findall(r"^    headscope/(\w+)/ ", CONTRIBUTING, re.MULTILINE))
    assert listed == existing_folders


def test_the_readme_has_the_two_set_up_commands_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"    make {target} " in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.slow
def test_paper_page_ends_with_the_notes_and_current_verdicts_of_shipped_runs_and_names_its_study():
    page = paper_page.PAGE_PATH.read_text(encoding="utf-8")
    assert page.endswith(paper_page.notes())
    assert all(spec in page for spec in read_study(ROOT / "headscope/study_files/paper.yaml", {}).models.values())


# What can be run is run --------------------------------------------------------------------------------------------

SMALLER = {
    "--lengths 512,1024 --depths 3 --needles 2 --ablate-top 4 --draws 2": "--lengths 128 --depths 1 --needles 2 "
    "--ablate-top 4 --draws 1",
    "--out loss.pdf": "--out loss.html",  # needs no browser
    "--length 64,128": "--length 24,48",
    "--length 64": "--length 24",
    "--length 128": "--length 48",
    "--phase 128:2": "--phase 48:2",
    "--positions each --method exact": "--positions each --verify-top 1 --verify-random 1",
    "--count 4 --method exact --mlps": "--count 2 --method exact --mlps",
    "--pairs ioi --count 16 --draws 1": "--pairs induction --length 24 --count 3 --draws 1",
    "--count 12 --seed 1 --random-subsets 5 --greedy 2": "--count 3 --by span --seed 1 --random-subsets 1 --greedy 1",
    "--count 12 --seed 1 --random-subsets 2": "--count 3 --by span --seed 1 --random-subsets 1",
    "--verify-top 3 --verify-random 3": "--verify-top 1 --verify-random 1",
    "--verify-top 3 --verify-random 2": "--verify-top 1 --verify-random 1",
    "lengths=[128]": "lengths=[48]",
    'lengths": [128]': 'lengths": [48]',
    "length=64": "length=24",
    "lengths=[64]": "lengths=[24]",
    "ess2_128": "ess2_48",
    "ess2_64": "ess2_24",
    '1847. " * 8': '1847. " * 5',
}
"""Settings of the pages, and what the tests run instead, replaced in order."""


def smaller(code: str) -> str:
    for setting, replacement in SMALLER.items():
        code = code.replace(setting, replacement)
    return code


@pytest.mark.model
@pytest.mark.usefixtures("opened_once", "studies_run_once")
def test_readme_python_examples_run(tmp_path, monkeypatch, capsys):
    code = smaller("\n".join(blocks("python")))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.count("torch.Size") == 30  # the listener prints a line per layer
    assert (tmp_path / "report.html").is_file()


@pytest.mark.model
@pytest.mark.usefixtures("opened_once", "studies_run_once")
def test_readme_shell_examples_run_in_order(headscope, tmp_path, monkeypatch):
    """In this process, which has imported torch; the installed command itself is started by other tests."""
    (tmp_path / "headscope").symlink_to(ROOT / "headscope")  # commands name shipped runs from the root of a clone
    for name, content in re.findall(r'^```json title="(.+?)"\n(.*?)^```', README, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = smaller("".join(blocks("console")))
    lines = [line.removeprefix("$ headscope ") for line in code.splitlines()]
    assert len(lines) >= 8
    for line in lines:
        words = [sorted(glob.glob(word)) or [word] for word in shlex.split(line)]
        exit_code, _, err = headscope(*chain.from_iterable(words))
        assert exit_code == 0, f"{line}: {err}"
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "loss.html").is_file()


@pytest.mark.parametrize("block", blocks("yaml"))
def test_readme_study_files_are_valid(block):
    assert build_study(yaml.safe_load(block)).probe_options


def test_readme_needle_file_is_valid(tmp_path):
    from headscope.prompts.needles import read_needles

    (tmp_path / "needles.jsonl").write_text("".join(blocks("json")), encoding="utf-8")
    assert [needle.name for needle in read_needles(str(tmp_path / "needles.jsonl"), 9)] == ["bell"]

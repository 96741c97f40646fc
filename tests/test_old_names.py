"""Options with a new name: flags, keywords and study keys answer with it, and stored runs have it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import headscope
from headscope import plugins
from headscope.cli.flags import example_run
from headscope.errors import BadInput
from headscope.report.html_page import provenance
from headscope.runs import old_names
from headscope.runs.manifest import write_manifest
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.synthetic import synthetic_run
from headscope.runs.writer import join_runs
from headscope.study.config import build_study

EXAMPLE = example_run()

RENAMED = [(probe, old, new) for probe, names in old_names.OPTIONS.items() for old, new in names.items()]
SHAPE = {"layers": 2, "heads": 2, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2, "probes": ["measure"]}


@pytest.mark.parametrize(("probe_name", "old", "new"), RENAMED)
def test_old_option_answers_with_its_new_name(probe_name: str, old: str, new: str, refused: Callable[..., str]) -> None:
    probe = plugins.probes()[probe_name]
    fields = probe.options().model_fields
    assert new in fields
    assert old not in fields
    message = f"option '{old}' of '{probe_name}' is now '{new}'"
    with pytest.raises(BadInput, match=re.escape(message)):
        build_study({"models": {"base": "smollm2-135m"}, probe_name: {old: 1}})
    with pytest.raises(BadInput, match=re.escape(message)):
        getattr(headscope, probe.function_name)(**{old: 1})
    flags = [f"--{name.replace('_', '-')}" for name in (old, new)]
    message = f"option {flags[0]} is now {flags[1]}. See headscope {probe.command_name} --help"
    assert message in refused(2, probe.command_name, flags[0])


def test_old_flag_that_turns_an_option_off_answers_with_its_new_name(refused: Callable[..., str]) -> None:
    assert "option --no-watch is now --no-measure-checkpoints" in refused(2, "adapt", "--no-watch")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_stored_runs_have_the_new_names(version: int, tmp_path: Path) -> None:
    runs = [synthetic_run(tmp_path, models=(label,), **SHAPE) for label in ("base", "yarn")]
    old_config = {probe: dict.fromkeys(names, 7) for probe, names in old_names.OPTIONS.items()}
    new_config = {probe: dict.fromkeys(names.values(), 7) for probe, names in old_names.OPTIONS.items()}
    for run in runs:
        manifest = json.loads((run.path / "run.json").read_text()) | {"config": old_config, "format_version": version}
        write_manifest(run.path, manifest)
    first, second = (Run.open(run.path) for run in runs)
    assert first.manifest["config"] == second.manifest["config"] == new_config
    assert json.loads(provenance(first)["Configuration"]) == new_config
    joined = Run.open(join_runs([first, second], tmp_path, "both").path)
    assert [part["config"] for part in joined.manifest["config"]["joined"].values()] == [new_config] * 2


def test_runs_joined_by_an_earlier_version_have_the_new_names() -> None:
    config = {"name": "both", "joined": {"a": {"seed": 0, "config": {"budget": {"bound": 0.1}}}, "b": {"seed": 1}}}
    renamed = {"a": {"seed": 0, "config": {"budget": {"max_loss_increase": 0.1}}}, "b": {"seed": 1}}
    assert old_names.translate_config(config) == {"name": "both", "joined": renamed}


def test_bins_of_runs_that_did_not_count_their_rows_weigh_what_they_averaged() -> None:
    run = Run.open(EXAMPLE)
    assert "population" not in pq.read_schema(EXAMPLE / "attention.parquet").names
    rows = run.attention
    for name in ("population", "sink_rows", "sink_population"):
        assert rows[name].equals(rows["rows"].rename(name))
    assert validate(run) == []

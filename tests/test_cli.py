"""The command line: every mistake is one line and an exit code, and leaves nothing behind."""

import errno
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from support import families
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run
from transformers import BertConfig, BertForMaskedLM

import headscope as hs
from headscope.base import plugins
from headscope.cli.app import app
from headscope.cli.command_groups import ProbeCommand, command_groups
from headscope.models import loading
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.study.config import OptionParts

LICENSE = Path(__file__).parents[1] / "LICENSE"
"""A text of a few thousand tokens."""
LISTED_COMMANDS = [name for names in command_groups().values() for name in names]


def test_idle_threads_sleep_unless_the_user_sets_the_wait_policy():
    """In Python and on the command line: `import headscope` sets it before it imports torch."""
    command = [sys.executable, "-c", "import sys, headscope.cli.app; print(*sys.modules)"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "headscope.cli.app" in imported
    assert "torch" not in imported, "it would have read its environment before headscope sets it"
    for variables, set_to in (
        ({}, "5000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ):
        code = "import os, headscope; print(os.environ.get('GOMP_SPINCOUNT'))"
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | variables
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout == f"{set_to}\n"


def truncated_gguf(folder: Path) -> Path:
    shipped = loading.ALIASES["smollm2-135m"]
    # Located, not imported: the package's own code wants the llm tool, which is not installed.
    shipped_file = Path(importlib.util.find_spec(shipped.package).origin).parent / shipped.file
    cut = folder / "cut.gguf"
    with shipped_file.open("rb") as source:
        cut.write_bytes(source.read(1_000_000))
    return cut


def test_an_unknown_alias_is_refused_with_the_nearest_one(refused):
    line = refused(2, "run", "--model", "smollm-135m", "--length", 64)
    assert_names(line, "'smollm-135m'", "'smollm2-135m'")


@pytest.mark.parametrize("name", ["a<b", "x, y", "a'b"])
def test_a_model_name_with_other_characters_is_refused_as_a_name(refused, name):
    line = refused(2, "run", "--model", f"{name}=smollm2-135m", "--length", 64)
    assert_names(line, f"model name {name!r}")


@pytest.mark.parametrize("name", ["two\n", "\n", "two\nlines"])
def test_a_line_break_in_the_name_of_a_joined_run_is_refused(refused, tmp_path, name):
    runs = [synthetic_run(tmp_path, ("base",), seed=seed).path for seed in (0, 1)]
    assert_names(refused(2, "join", *runs, "--name", name), "invalid run name")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_empty_study_is_refused(headscope, tmp_path, command):
    (tmp_path / "empty.yaml").write_text("{}")
    code, _, line = headscope(command, tmp_path / "empty.yaml")
    assert code == 2
    assert_names(line, "no probe")


def test_a_missing_path_is_reported_as_missing(refused):
    assert_names(refused(3, "run", "--model", "./nowhere/model", "--length", 64), "'./nowhere/model'")


@pytest.mark.slow
def test_a_truncated_gguf_is_refused_and_leaves_no_cache(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    cut = truncated_gguf(tmp_path)
    assert_names(refused(2, "run", "--model", f"cut={cut}", "--length", 64), "GGUF", cut)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_a_hub_id_without_network_is_reported_as_missing(tmp_path):
    command = [sys.executable, "-m", "headscope.cli.app", "run", "--model", "x=nobody/nothing", "--length", "64"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run([*command, "--out", tmp_path / "runs"], capture_output=True, text=True, env=environment)
    assert completed.returncode == 3
    lines = completed.stderr.splitlines()
    assert len(lines) == 1, completed.stderr
    assert lines[0].startswith("headscope: ")
    assert_names(lines[0], "'nobody/nothing'", "hub")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ("yarm:factor=8", ("'yarm'", "'yarn'")),
        ("yarn:factor=0", ("factor=0", 1)),
        ("yarn", ("'yarn'", "yarn:factor=8")),
        ("yarn:factors=8", ("'factors'", "'factor'")),
    ],
)
def test_a_bad_scheme_is_refused_before_any_work(refused, scheme, named):
    assert_names(refused(2, "run", "--model", f"x=smollm2-135m@{scheme}", "--length", 64), *named)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "arguments", "named"),
    [
        (2, ["--factor", 0.5], ("--factor", 0.5, 1)),
        (2, ["--phase", "2048"], ("'2048'", "LENGTH:STEPS")),
        (
            2,
            ["--phase", "100000:1", "--training-texts", f"file:{LICENSE}"],
            (100000, LICENSE.name, "--training-texts"),
        ),
        (2, ["--variant", "freq"], ("--variant", "'freq'", "'full'")),
        (2, ["--model", "smollm2-135m@yarn:factor=8"], ("adapt", "smollm2-135m@yarn:factor=8", "--model CHECKPOINT")),
        (3, ["--strategy", "adarope-joint", "--adapter", "./none.safetensors"], ("'./none.safetensors'",)),
        (3, ["--training-texts", "file:./none/*.txt"], ("'file:none/*.txt'",)),
    ],
)
def test_a_mistake_in_a_training_is_refused_before_any_work(refused, code, arguments, named):
    assert_names(refused(code, "adapt", *arguments), *named)


def test_a_negative_length_is_refused(refused):
    assert_names(refused(2, "run", "--length", -5), "--lengths", -5)


def test_non_numeric_rows_are_refused(refused):
    assert_names(refused(2, "run", "--rows", "some"), "--rows", "'some'")


def test_single_depth_is_a_list_of_one(refused):
    assert_names(refused(2, "needle", "--depths", "1.5"), "depth", 1.5, 0, 1)


def test_a_depth_outside_the_haystack_is_refused(refused):
    assert_names(refused(2, "needle", "--depths", "0,1.5"), "depth", 1.5, 0, 1)


def test_nonexistent_needle_file_is_reported_as_missing(refused, tmp_path):
    assert_names(refused(3, "needle", "--file", tmp_path / "none.jsonl"), f"'{tmp_path}/none.jsonl'")


def test_non_numeric_length_is_refused(refused):
    assert_names(refused(2, "needle", "--lengths", "many"), "--lengths", "'many'")


@pytest.mark.model
@pytest.mark.parametrize("lengths", ["40,80", "40"])
def test_a_context_too_short_for_the_needle_is_refused(refused, lengths):
    assert_names(refused(2, "needle", "--lengths", lengths), "haystack", 40)


def test_lengths_of_every_probe_are_a_list_of_tokens():
    for name, options in plugins.call_parts(OptionParts.options):
        if lengths := options.model_fields.get("lengths"):
            assert str(lengths.annotation).startswith("list["), name
            assert "tokens" in lengths.description, name


def test_an_unknown_table_is_refused(refused):
    assert_names(refused(2, "run", "--measure", "attentions"), "--tables", "'attentions'", "'attention'")


@pytest.mark.model
def test_a_length_beyond_every_document_names_the_longest(refused):
    line = refused(2, "run", "--text", f"file:{LICENSE}", "--docs", 1, "--length", 10_000_000)
    assert_names(line.replace(f"file:{LICENSE}", ""), f"{LICENSE.parent.name}/{LICENSE.name}", "10,000,000")


def test_an_unknown_study_key_suggests_the_nearest(refused, tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("measure: {lenghts: [64]}\n")
    line = refused(2, "run", file)
    assert_names(line, "study.yaml", "'measure.lenghts'", "'lengths'")


def test_mistakes_of_head_influence_are_refused_before_any_work(refused):
    model = ("--model", "learned=smollm2-135m@adarope:adapter=nowhere.safetensors")
    assert_names(refused(3, "influence", *model), "'nowhere.safetensors'")
    assert_names(refused(2, "influence", "--component", "freq,frequency"), "--components", "'frequency'")
    assert_names(refused(2, "influence", "--reset-to", "start"), "--reset-to", "'start'")
    assert_names(refused(2, "influence", "--unit", "layer"), "--unit", "'layer'")
    assert_names(refused(2, "influence", "--verify-top", 0), "--verify-top", 0)


@pytest.mark.model
def test_a_reset_needs_an_adapter_and_influence_documents_of_the_length(refused):
    line = refused(2, "influence", "--model", "yarn=smollm2-135m@yarn:factor=8", "--component", "joint")
    assert_names(line, "'yarn'", "AdaRoPE", "'joint'")
    flags = ("--component", "zero", "--text", f"file:{LICENSE}", "--docs", 1, "--length", 10_000_000)
    line = refused(2, "influence", *flags)
    assert_names(line.replace(f"file:{LICENSE}", ""), f"{LICENSE.parent.name}/{LICENSE.name}", "10,000,000")


@pytest.mark.model
def test_a_text_that_is_not_utf8_is_refused_with_the_byte(refused, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"plain and then \xff\xfe")
    line = refused(2, "run", "--text", f"file:{tmp_path}/bad.txt", "--docs", 1, "--length", 64)
    assert_names(line.replace(str(tmp_path), ""), "bad.txt", "UTF-8", 15)


@pytest.mark.model
def test_an_adapter_of_another_geometry_is_refused(refused, tmp_path):
    other = hs.load(families.MEASURABLE["llama-gqa"]())
    adapter = AdaRoPE.from_schedule(other, resolve_schedule(other, "base"))
    adapter.save(tmp_path / "other.safetensors")
    spec = f"x=smollm2-135m@adarope:adapter={tmp_path}/other.safetensors"
    line = refused(2, "run", "--model", spec, "--length", 64, "--docs", 1)
    assert_names(line, "other.safetensors", "'smollm2-135m'", "xi", tuple(adapter.xi.shape))


def test_an_encoder_checkpoint_is_refused_by_name(refused, tmp_path):
    tiny = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=32)
    BertForMaskedLM(tiny).save_pretrained(tmp_path / "bert")
    line = refused(2, "run", "--model", f"x={tmp_path}/bert", "--length", 64, "--docs", 1)
    assert_names(line, "bert", "causal")


@pytest.mark.model
def test_a_full_disk_is_one_line_and_leaves_nothing(refused, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_names(refused(2, "run", "--length", 64, "--docs", 1), os.strerror(errno.ENOSPC))


@pytest.mark.model
def test_an_output_path_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    line = refused(2, "run", "--length", 64, "--docs", 1, out=tmp_path / "file")
    assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_of_a_newer_format_is_refused_by_version(refused, tmp_path):
    run = synthetic_run(tmp_path / "made", probes=("measure",))
    manifest = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**manifest, "format_version": 99}))
    line = refused(2, "report", run.path, out=tmp_path / "report.html")
    assert_names(line.replace(str(tmp_path), ""), run.name, 99, 4)


def test_a_corrupt_table_is_refused_by_file(refused, tmp_path):
    run = synthetic_run(tmp_path / "made", probes=("measure",))
    (run.path / "attention.parquet").write_bytes(b"PAR1 and no more")
    line = refused(2, "report", run.path, out=tmp_path / "report.html")
    assert_names(line, run.path / "attention.parquet")


def test_messages_name_flags_on_the_command_line_and_keys_in_a_study_file(refused, tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("measure: {rows: 1}")
    line = refused(2, "run", file).replace(str(tmp_path), "")
    assert_names(line, "study.yaml", "measure.rows", 1, 2)
    assert "--" not in line
    line = refused(2, "run", file, "--rows", 1)
    assert_names(line, "--rows", 1, 2)
    assert "study.yaml" not in line
    assert "measure" not in line


def test_ls_names_damaged_runs_and_lists_the_rest(headscope, tmp_path):
    good = synthetic_run(tmp_path, probes=("measure",))
    shutil.copytree(good.path, tmp_path / "20260101T000000Z-broken-00000000")
    (tmp_path / "20260101T000000Z-broken-00000000" / "run.json").write_text("{")
    shutil.copytree(good.path, tmp_path / "20260102T000000Z-cut-00000000")
    (tmp_path / "20260102T000000Z-cut-00000000" / "attention.parquet").write_bytes(b"PAR1")
    (tmp_path / ".begun-00000000.partial" / "cells" / "one").mkdir(parents=True)
    code, out, _ = headscope("ls", tmp_path)
    assert code == 0
    assert good.name in out
    reported = {
        "20260101T000000Z-broken-00000000": ("run.json",),
        "20260102T000000Z-cut-00000000": ("attention.parquet",),
        ".begun-00000000.partial": (1, "--resume"),
    }
    for name, named in reported.items():
        (line,) = (line for line in out.splitlines() if line.startswith(name))
        assert_names(line.removeprefix(name).replace(str(tmp_path), ""), *named)
    rows = json.loads(headscope("ls", tmp_path, "--json")[1])
    assert {Path(row["path"]).name for row in rows if "error" in row} == {*reported}
    assert len(rows) == len(reported) + 1


def test_ls_of_a_run_names_its_folder_and_a_run_without_run_json_is_listed(headscope, tmp_path):
    run = synthetic_run(tmp_path, probes=("measure",))
    for _ in range(2):  # with run.json, and without
        code, out, err = headscope("ls", run.path)
        assert (code, out) == (2, "")
        assert_names(err, f"'{run.path}'", f"headscope ls {tmp_path}")
        (run.path / "run.json").unlink(missing_ok=True)
    assert_names(headscope("ls", tmp_path)[1].replace(str(run.path), ""), run.name, "damaged", "run.json")


@pytest.mark.slow
def test_validate_finds_a_table_that_was_altered(headscope, tmp_path):
    run = synthetic_run(tmp_path, probes=("measure",))
    assert headscope("validate", run.path)[0] == 0
    run.nll.assign(nll=1.0).to_parquet(run.path / "nll.parquet")
    code, out, err = headscope("validate", run.path)
    assert code == 2
    assert_names(out, run.name, "nll", "sha256")
    assert_names(err, "1 run")


@pytest.mark.parametrize("command", ["needle", "run", "bench", "bundle", "ls"])
def test_help_ends_with_the_common_options_and_shows_no_type_for_flags(headscope, command):
    code, text, _ = headscope(command, "--help")
    assert code == 0
    assert "bool" not in text
    assert "[default: ]" not in text
    *_, last_group = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    assert last_group.startswith("Common options:")
    assert "--help" in last_group


@pytest.mark.parametrize("name", LISTED_COMMANDS)
def test_second_spellings_of_lists_are_singular_words(name):
    command = typer.main.get_command(app).get_command(None, name)
    command = command.with_flags() if isinstance(command, ProbeCommand) else command
    spellings = [opt for parameter in command.params for opt in parameter.opts]
    assert not [spelling for spelling in spellings if spelling.endswith("sse")]


@pytest.mark.parametrize("name", LISTED_COMMANDS)
def test_help_at_80_columns_cuts_no_value(name, headscope, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = headscope(name, "--help")
    assert code == 0
    command = typer.main.get_command(app).get_command(None, name)
    command = command.with_flags() if isinstance(command, ProbeCommand) else command
    words = {*text.split()}
    for parameter in command.params:
        assert {*(parameter.help or "").split()} <= words, parameter.name
        assert {*parameter.opts} <= {*text.replace(",", " ").split()} or parameter.param_type_name == "argument"
    meanings = [line for line in text.splitlines() if not line.startswith(("  -", "  headscope "))]
    assert all(len(line) <= 80 or " " not in line.strip() for line in meanings), "only a single value may be longer"


def test_the_commands_are_grouped_by_question_in_help_and_readme(headscope):
    _, text, _ = headscope("--help")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for heading, names in command_groups().items():
        section = text.split(f"{heading}:\n")[1].split("\n\n")[0]
        assert re.findall(r"^  ([a-z]+) ", section, re.MULTILINE) == [*names]
        (row,) = (line for line in readme.splitlines() if line.startswith(f"| {heading} |"))
        assert re.findall(r"`(?:headscope )?([a-z]+)`", row.split(" | ")[1]) == [*names]
    group = typer.main.get_command(app)
    assert sorted(LISTED_COMMANDS) == sorted(group.list_commands(None))


def test_help_loads_without_torch():
    script = """
import sys
sys.argv = ["headscope", "--help"]
from headscope.cli.app import app
try:
    app()
except SystemExit:
    pass
assert not {"torch", "transformers", "pandas"} & set(sys.modules), "heavy import"
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    for command in ("demo", "run", "report", "ls", "validate", "bench"):
        assert command in completed.stdout


@pytest.mark.model
def test_run_prints_its_result_as_json(headscope, tmp_path):
    arguments = ("run", "--length", 64, "--docs", 1, "--measure", "attention,nll", "--json", "--out", tmp_path)
    code, out, err = headscope(*arguments)
    assert code == 0, err
    result = json.loads(out)
    assert Path(result["path"]).is_dir()
    assert set(result["tables"]) == {"attention", "nll", "positions", "scales"}
    assert result["summary"][0]["model"] == "base"


def test_the_dashboard_needs_a_folder_and_a_free_port(headscope, tmp_path):
    code, out, err = headscope("dash", tmp_path / "none")
    assert (code, out) == (2, "")
    assert_names(err, f"'{tmp_path}/none'", "headscope demo")
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        code, out, err = headscope("dash", tmp_path, "--port", port)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert_names(err, "--port", port)


@pytest.mark.slow
def test_the_dashboard_ends_quietly_on_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "headscope.cli.app", "dash", tmp_path, "--port", "0"]

    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would its children

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heed_ctrl_c, **pipes) as process:
        try:
            assert str(tmp_path) in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")


def test_version_prints_the_version(headscope):
    assert headscope("--version") == (0, f"headscope {version('headscope')}\n", "")

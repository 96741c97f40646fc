"""The command `bench`: measuring beside the plain forward pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import assert_names
from support.tiny_studies import save_checkpoint
from typer.testing import CliRunner

from headscope.bench import measuring
from headscope.cli import app as cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(Path(tmp_path_factory.mktemp("bench")) / "tiny"))


@pytest.mark.slow
def test_bench_compares_measuring_with_the_plain_pass(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setattr(measuring, "document_tokens", lambda model, length: torch.arange(length) % 120)
    arguments = ["bench", "--model", folder, "--length", "64", "--repeats", "1", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    output = json.loads(result.output.splitlines()[-1])
    assert output["machine"] == measuring.describe_machine()
    calls = [measuring.PLAIN, measuring.SAMPLED_STATISTICS, measuring.EXACT_STATISTICS, measuring.ALL_MEASURES]
    assert [row["what"] for row in output["rows"]] == calls
    assert output["rows"][0]["ratio"] == 1
    assert all(row["length"] == 64 and row["ratio"] > 0 and row["peak_ratio"] > 0 for row in output["rows"])
    words = " ".join(CliRunner().invoke(cli.app, arguments).output.split())
    assert all(word in words for word in (output["machine"], "plain", "sampled", "exact", "ratio", "peak MiB"))


@pytest.mark.slow
def test_bench_needs_no_plotly(folder: str) -> None:
    """In a process of its own, where plotly cannot be imported."""
    code = f"""
import sys
sys.modules["plotly"] = None
import torch
from headscope.bench import measuring
measuring.document_tokens = lambda model, length: torch.arange(length) % 120
from typer.testing import CliRunner
from headscope.cli.app import app
result = CliRunner().invoke(app, "bench --model {folder} --length 64 --repeats 1 --device cpu".split())
assert result.exit_code == 0, result.output + repr(result.exception)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert output.returncode == 0, output.stderr[-2000:]


def test_selfcheck_prints_its_table_without_plotly() -> None:
    code = "import sys; sys.modules['plotly'] = None; import headscope.cli.selfcheck, headscope.rendering.console"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_bench_refuses_unknown_devices(headscope: Any) -> None:
    code, _, err = headscope("bench", "--device", "tpu")
    assert code == 2
    assert_names(err, "device", "'tpu'")

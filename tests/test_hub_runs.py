"""Runs as dataset repositories: uploaded in one commit, downloaded to the same run, against a local hub server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import Hub
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run

SCRIPT = """
import json, sys
from pathlib import Path
import headscope as hs
from headscope.errors import HeadscopeError

folder, other = map(Path, sys.argv[1:3])
run = hs.Run.open(folder)
report = {"url": run.push_to_hub("lab/heads")}
fetched = hs.Run.from_hub("lab/heads")
report["name"], report["tables"] = fetched.name, fetched.tables
report["equal"] = fetched.heads.equals(run.heads)
fetched.check()
hs.Run.open(other).push_to_hub("lab/heads")
report["second"] = hs.Run.from_hub("lab/heads", other.name).models
calls = {
    "several": lambda: hs.Run.from_hub("lab/heads"),
    "unknown": lambda: hs.Run.from_hub("lab/heads", "none"),
    "missing": lambda: hs.Run.from_hub("lab/none"),
    "empty": lambda: hs.Run.from_hub("lab/empty"),
    "denied": lambda: run.push_to_hub("lab/none"),
    "invalid": lambda: run.push_to_hub("heads"),
}
for name, call in calls.items():
    try:
        call()
    except HeadscopeError as error:
        report[name] = f"{type(error).__name__}: {error}"
print(json.dumps(report))
"""


@pytest.mark.slow
def test_a_run_is_uploaded_and_comes_back_the_same(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "runs", probes=["measure"])
    other = synthetic_run(tmp_path / "runs", models=["base"], probes=["measure"])
    (tmp_path / "hub").mkdir()
    (tmp_path / "empty").mkdir()
    branches: dict[str, dict[str, Path]] = {
        "lab/heads": {"main": tmp_path / "hub"},
        "lab/empty": {"main": tmp_path / "empty"},
    }
    with Hub(branches).serving() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hf"),
        }
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(run.path), str(other.path)],
            env={**environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": "secret"},
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report["url"].endswith("datasets/lab/heads")
    assert report["name"] == run.name
    assert report["tables"] == run.tables
    assert report["equal"]
    assert report["second"] == ["base"]
    for file in run.path.glob("*.parquet"):
        assert (tmp_path / "hub" / run.name / file.name).read_bytes() == file.read_bytes()
    assert "Run.from_hub" in (tmp_path / "hub" / "README.md").read_text()
    for call, error, named in (
        ("several", "BadInput", ("'lab/heads'", "2 runs", run.name, other.name)),
        ("unknown", "BadInput", ("'lab/heads'", "'none'", run.name, other.name)),
        ("missing", "ResourceMissing", ("'lab/none'", "hf auth login")),
        ("empty", "ResourceMissing", ("'lab/empty'", "push_to_hub")),
        ("denied", "CannotWrite", ("'lab/none'", "hf auth login")),
        ("invalid", "BadInput", ("'heads'", "ORG/NAME")),
    ):
        assert report[call].startswith(f"{error}: ")
        assert_names(report[call], *named)
    assert all("\n" not in str(line) for line in report.values())

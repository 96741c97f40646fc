"""What bench tells of bfloat16: a row for every table, with an error that is one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_studies import save_checkpoint
from torch import Tensor
from typer.testing import CliRunner

from headscope.bench import rounding, variants
from headscope.cli import app as cli
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(Path(tmp_path_factory.mktemp("bench")) / "tiny"))


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of random tokens: the checkpoint knows no word of a play."""

    def drawn(source: str, tokenizer: Any, docs: int, length: int) -> list[TokenDocument]:
        chance = np.random.default_rng(0)
        return [TokenDocument(f"{doc}", chance.integers(3, 120, length).tolist()) for doc in range(docs)]

    monkeypatch.setattr(rounding, "load_token_documents", drawn)


def test_every_table_is_measured_in_bfloat16_with_its_ratio_and_its_error(folder: str) -> None:
    rows = rounding.rounding(folder, 64)
    assert [row["table"] for row in rows] == [f"{table} in bfloat16" for table in variants.TABLES]
    for row in rows:
        assert row["ratio"] > 0
        assert 1e-5 < row["error"] < 0.5
        assert row["error_over_sampling"] > 0


def test_the_error_is_that_of_means_over_documents_beside_their_standard_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of made-up numbers: two statistics of two rows, one of them off by a tenth, and what is no statistic."""
    read: list[float] = []

    def made_up(model: Model, ids: Tensor, tables: list[str], rows: int) -> dict[str, dict[str, Any]]:
        known = float(ids.sum())
        if known not in read:
            read.append(known)
        document = read.index(known)
        rounded = model.module.dtype.itemsize == 2
        value = np.array([1.0, 2.0]) + [0.0, 0.2, 0.4, 0.6][document]
        columns = {
            "layer": np.array([0, 1]),
            "theta": np.array([1.0, 2.0 + rounded]),
            "mean_abs_se": np.array([0.1, 0.1 + rounded]),
            "exact": value,
            "off": value * (1.1 if rounded else 1.0),
        }
        return dict.fromkeys(tables, columns)

    monkeypatch.setattr(rounding, "measure_tokens", made_up)
    rows = rounding.rounding(folder, 64)
    means, error = np.array([1.3, 2.3]), np.std([0.0, 0.2, 0.4, 0.6], ddof=1) / 2
    for row in rows:
        assert row["error"] == 0.05  # the median of 0, 0, 0.1 and 0.1
        assert row["error_over_sampling"] == pytest.approx(0.1 * np.sqrt((means**2).mean()) / error, rel=0.05)


@pytest.mark.parametrize(
    ("worst", "told"), [(0.08, "0.08 of the sampling error, less than"), (3.0, "3 of the sampling")]
)
def test_bench_tells_of_bfloat16_where_the_cpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, worst: float, told: str
) -> None:
    row = {"table": "nll in bfloat16", "ratio": 0.45, "error": 0.002, "error_over_sampling": worst}
    monkeypatch.setattr(variants, "compare", lambda *_: iter([[{"what": variants.PLAIN, "ratio": 1.0}]]))
    monkeypatch.setattr(rounding, "rounding", lambda *_: [row])
    for has in (True, False):
        monkeypatch.setattr(rounding, "has_bfloat16", lambda has=has: has)
        said = CliRunner().invoke(cli.app, ["bench"])
        assert said.exit_code == 0, said.output
        assert ("nll in bfloat16" in said.output) == has
        assert (told in " ".join(said.output.split())) == has
        rows = json.loads(CliRunner().invoke(cli.app, ["bench", "--json"]).output.splitlines()[-1])
        assert [each.get("error_over_sampling") for each in rows] == ([None, worst] if has else [None])

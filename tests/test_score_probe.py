"""Scores from other packages: one declaration and one function add everything that a score of heads has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.command_server import IMPORTS, serving
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts

import headscope
from headscope.base import plugins
from headscope.errors import HeadscopeError
from headscope.probe import AttentionScoreProbe
from headscope.prompts.texts import load_token_documents
from headscope.runs.aggregation import HEAD_KEYS
from headscope.runs.summary import head_table
from headscope.study.attention_scores import AttentionScoreRunner, ScoreFunction

PACKAGES = Path(__file__).with_name("external_plugin")


def test_the_example_score_is_two_short_files() -> None:
    files = sorted((PACKAGES / "value_norms").glob("*.py"))
    assert [file.name for file in files] == ["__init__.py", "run.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 40


@pytest.mark.slow
def test_a_score_of_another_package_has_a_command_table_column_interval_sentence_chart_and_term(tmp_path: Path) -> None:
    tiny, texts = save_checkpoint(tmp_path / "tiny"), save_texts(tmp_path / "texts")
    flags = ("--model", f"base={tiny}", "--text", texts, "--docs", 3, "--lengths", "24,40")
    with serving(IMPORTS) as server:

        def command(*arguments: object) -> str:
            code, out, err = server.run(tmp_path, *arguments, packages=PACKAGES)
            assert code == 0, err
            return str(out)

        help_text = command("value-norms", "--help")
        assert_names(help_text, "Measure the mean length of the values that each head reads.", "--lengths")
        printed = command("value-norms", *flags, "--out", tmp_path / "runs")
        (folder,) = (tmp_path / "runs").glob("2*")
        command("validate", folder)
        command("report", folder, "--out", tmp_path / "report.html")
    assert re.search(r"Largest value norm: L\dH\d, [\d.]+", printed)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert_names(page, "Value norm: base", "Mean length of the values of the head&#39;s KV group")
    assert re.search(r"In base, L\dH\d has the largest value norm: [\d.]+ \(95 % confidence interval", page)
    rows = heads_of(folder)
    assert rows["value_norm"].to_numpy() == pytest.approx(eager_value_norms(tiny, texts, 40, 3), rel=1e-5)
    assert ((rows["value_norm_low"] <= rows["value_norm"]) & (rows["value_norm"] <= rows["value_norm_high"])).all()


def heads_of(folder: Path) -> pd.DataFrame:
    """The per-head table of a run, in a process that finds the packages."""
    code = f"import headscope; print(headscope.Run.open({str(folder)!r}).heads.to_json(orient='records'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return pd.DataFrame(json.loads(printed.stdout))


def eager_value_norms(checkpoint: Path, texts: str, length: int, documents: int) -> np.ndarray:
    """By layer and head: the mean norm of the value projections of all tokens, averaged over documents."""
    model = headscope.load(str(checkpoint))
    geometry, by_document = model.geometry, []
    for document in load_token_documents(texts, model.tokenizer, documents, length):
        ids = torch.tensor([document.ids[:length]])
        states = model.module(ids, output_hidden_states=True).hidden_states
        norms: list[float] = []
        for layer, state in zip(model.module.model.layers, states, strict=False):
            values = layer.self_attn.v_proj(layer.input_layernorm(state)).unflatten(-1, (geometry.kv_groups, -1))
            of_group = values.norm(dim=-1).mean((0, 1))
            norms += of_group.repeat_interleave(geometry.heads // geometry.kv_groups).tolist()
        by_document.append(norms)
    return np.asarray(by_document).mean(0)


class Odd(AttentionScoreProbe):
    name = "odd"
    title = summary = label = meaning = "odd"
    column = "odd"

    def head_scores(self, record: Any) -> torch.Tensor:
        raise NotImplementedError


def failing(record: Any) -> torch.Tensor:
    return record.absent


@pytest.mark.parametrize(
    ("head_scores", "message"),
    [
        (lambda record: torch.zeros(3), r"returns shape \[3\]. Return one number for each query head, .* shape \[4\]"),
        (lambda record: 2.5, "returns float. Return one number for each query head"),
        (lambda record: torch.tensor([1, 0, torch.nan, 0]), "the score of head 2 is nan. Return a finite number"),
        (lambda record: torch.tensor([1, 1.5, 0, 0]), "the score of head 1 is 1.5. Return a finite number from 0 to 1"),
        (failing, "part 'head_scores' fails with AttributeError"),
    ],
)
def test_what_the_function_of_a_score_may_not_return_is_refused_in_one_line(head_scores: Any, message: str) -> None:
    """A score beyond its limits would have an interval without width."""
    record: Any = SimpleNamespace(q=torch.ones(4, 2, 8), layer=0)
    with pytest.raises(HeadscopeError, match=message) as refused:
        ScoreFunction(Odd(), head_scores, (0.0, 1.0), "").compute(record)
    assert "\n" not in str(refused.value)


def test_a_score_beyond_its_limits_by_rounding_is_the_limit() -> None:
    record: Any = SimpleNamespace(q=torch.ones(2, 2, 8), layer=0)
    function = ScoreFunction(Odd(), lambda record: torch.tensor([1.0000002, -1e-8]), (0.0, 1.0), "")
    assert function.compute(record) == [1.0, 0.0]


def test_the_function_of_a_score_is_an_input_that_a_resumed_run_compares() -> None:
    recorded: dict[str, Any] = {}
    context: Any = SimpleNamespace(record_input=lambda name, content: recorded.update({name: content}))
    options: Any = None
    for source in ("one", "two"):
        AttentionScoreRunner(options, context, ScoreFunction(Odd(), failing, (0.0, 1.0), source))
        assert recorded == {"the function of 'odd'": [source]}


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("label", "label = ..."), ("column", "column = ..."), ("head_scores", "parts = 'head_scores=run.head_scores'")],
)
def test_a_declaration_of_a_score_without_a_name_that_it_needs_is_refused_when_it_is_made(
    missing: str, remedy: str
) -> None:
    class Incomplete(AttentionScoreProbe):
        name = title = summary = label = meaning = column = "odd"
        parts = "head_scores=run.head_scores"

    delattr(Incomplete, missing)
    with pytest.raises(TypeError, match=f"class Incomplete lacks a name or part. Write {remedy}"):
        Incomplete()


def test_a_column_whose_name_an_earlier_probe_uses_is_reported_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = synthetic_run(tmp_path, probes=("measure",))
    columns = run.heads.drop(columns="value", errors="ignore").set_index(HEAD_KEYS)[["growth"]].astype("float64")
    monkeypatch.setattr(plugins, "_reported", {})
    tables = iter([(Odd(), columns), (Odd(), columns.assign(own=1.0))])
    monkeypatch.setattr(plugins, "call_parts", lambda part, *arguments: tables)
    table = head_table(run)
    assert [*table] == [*HEAD_KEYS, "growth", "own"]
    assert "probe 'odd': column 'growth' is left out: the name is already used. Rename it" in caplog.text

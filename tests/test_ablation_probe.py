"""The ablation probe: rows equal passes under `hs.ablated`, alone and together, and mistakes are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_studies import save_checkpoint, save_texts, tokenizer

import headscope as hs
from headscope.errors import InputChanged, Interrupted
from headscope.forward.ablation import REFERENCE_TOKENS
from headscope.report import assembly
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.synthetic import synthetic_run
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.ablation import report

PROMPT, ANSWER, WRONG = "w1 w5 w9 w5", " w7", " w8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts", words=REFERENCE_TOKENS)
    return folder


def run_study(folder: Path, out: Path, **section: Any) -> Run:
    content = {
        "models": {"base": f"{folder}/tiny@yarn:factor=4"},
        "texts": {"source": f"file:{folder}/texts/*.txt"},
        "device": "cpu",
        "ablation": section,
    }
    return runner.run_study(build_study(content), out, progress=NoProgress())


def answer_log_probability(model: Any, heads: Any, kind: Any, text: str) -> float:
    ids = torch.tensor([tokenizer()(PROMPT)["input_ids"]])
    with torch.no_grad(), hs.attached(model), hs.ablated(model, heads, kind, text=text):
        logits = model.module(ids, use_cache=False).logits[0, -1]
    return float(logits.log_softmax(-1)[tokenizer()(ANSWER)["input_ids"][0]])


def test_rows_equal_passes_with_the_heads_ablated_alone_and_together(folder: Path, tmp_path: Path) -> None:
    heads = ["L0H1", "L2H3", "L2H0"]
    run = run_study(folder, tmp_path, prompt=PROMPT, answer=ANSWER, heads=heads, kinds=["zero", "mean"])
    assert validate(run) == []
    model, text = hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu"), f"file:{folder}/texts/*.txt"
    rows = run.table("ablation")
    assert len(rows) == 2 * 3
    for row in rows.to_dict("records"):
        expected = answer_log_probability(model, [(row["layer"], row["head"])], row["kind"], text)
        assert row["metric_after"] == pytest.approx(expected, abs=1e-5)
        assert abs(row["metric_after"] - row["metric_before"]) > 1e-4
    for row in run.table("ablation_sets").to_dict("records"):
        assert row["size"] == 3
        expected = answer_log_probability(model, heads, row["kind"], text)
        assert row["metric_after"] == pytest.approx(expected, abs=1e-5)


def test_every_head_is_ablated_by_default_on_every_clean_prompt_of_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    pairs = [
        {"name": f"p{n}", "clean": f"w{n} w5 w9", "corrupted": "w1 w2 w3", "answer": ANSWER, "wrong": WRONG}
        for n in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, pairs)))
    run = run_study(folder, tmp_path / "runs", pairs=[str(file)], kinds=["resample"], metric="logit_diff")
    rows = run.table("ablation")
    assert len(rows) == 3 * 16
    assert set(rows["prompts"]) == {"prompts"}
    assert "ablation_sets" not in run.tables
    row = rows[(rows["layer"] == 1) & (rows["head"] == 2)]
    head = run.heads[(run.heads["layer"] == 1) & (run.heads["head"] == 2)].iloc[0]
    change = (row["metric_after"].astype(float) - row["metric_before"].astype(float)).mean()
    assert head["ablation_resample"] == pytest.approx(change, abs=1e-6)
    texts = [finding.text for finding in report.findings(run)]
    assert texts[0].startswith(
        "Resample ablation in base, prompts (3 prompts; 16 heads, one at a time): the change of the"
    )


class StopsAfterOneCell(NoProgress):
    """Interrupts the study when its second cell starts."""

    def __init__(self) -> None:
        self.cells = 0

    def set_activity(self, activity: str, worker: str = "") -> None:
        self.cells += 1
        if self.cells > 2:  # the first activity is the position parameters
            raise KeyboardInterrupt


def test_a_run_whose_reference_text_changed_is_not_resumed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for file in (folder / "texts").iterdir():
        (tmp_path / "texts" / file.name).write_bytes(file.read_bytes())
    content = {
        "models": {"base": f"{folder}/tiny", "yarn": f"{folder}/tiny@yarn:factor=4"},
        "texts": {"source": f"file:{tmp_path}/texts/*.txt"},
        "device": "cpu",
        "ablation": {"prompt": PROMPT, "answer": ANSWER, "kinds": ["mean"]},
    }
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        runner.run_study(build_study(content), tmp_path / "runs", progress=StopsAfterOneCell())
    for file in (tmp_path / "texts").iterdir():
        file.write_text(" ".join(reversed(file.read_text().split())))
    with pytest.raises(InputChanged, match="reference text of 'base'"):
        runner.run_study(build_study(content), tmp_path / "runs", progress=NoProgress(), resume=True)


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("give either 'prompt' with 'answer', or 'pairs'", ()),
        ("the prompt has no answer", ("--prompt", PROMPT)),
        ("prompt pair 'prompt': answer ' w7 w8' is 2 tokens", ("--prompt", PROMPT, "--answer", " w7 w8")),
        ("has no head L9H0", ("--prompt", PROMPT, "--answer", ANSWER, "--heads", "L9H0")),
        ("'first' is not a head", ("--prompt", PROMPT, "--answer", ANSWER, "--heads", "first")),
        ("it has no wrong answer", ("--prompt", PROMPT, "--answer", ANSWER, "--metric", "logit_diff")),
        ("ablation.kinds", ("--prompt", PROMPT, "--answer", ANSWER, "--kinds", "noise")),
        ("ablation.prompt must", ("--prompt", "", "--answer", ANSWER)),
        ("the set needle is for patching only", ("--pairs", "needle")),
        ("'count' cannot be combined with a prompt", ("--prompt", PROMPT, "--answer", ANSWER, "--count", "2")),
        ("'length' cannot be combined with a prompt", ("--prompt", PROMPT, "--answer", ANSWER, "--length", "9")),
        ("'answer' cannot be combined with 'pairs'", ("--pairs", "induction", "--answer", ANSWER)),
        ("'wrong' is for the metric logit_diff", ("--prompt", PROMPT, "--answer", ANSWER, "--wrong", WRONG)),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refused: Callable[..., str], folder: Path, message: str, flags: tuple[str, ...]
) -> None:
    assert message in refused(2, "ablate", "--model", f"{folder}/tiny", "--device", "cpu", "--quiet", *flags)


def test_two_files_of_one_name_are_refused(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pair = {"name": name, "clean": PROMPT, "corrupted": PROMPT, "answer": ANSWER}
        (tmp_path / name / "own.jsonl").write_text(json.dumps(pair))
    files = ("--pairs", f"{tmp_path}/a/own.jsonl", "--pairs", f"{tmp_path}/b/own.jsonl")
    line = refused(2, "ablate", "--model", f"{folder}/tiny", "--device", "cpu", "--quiet", *files)
    assert "two sets of prompt pairs are named 'own'" in line


def test_report_and_head_page_have_the_changes_of_every_head(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, pairs=4, lengths=(256,))
    (group,) = report.charts(assembly.render_context(run))
    assert len([*group.charts]) == 3
    assert len([*report.head_findings(run, "base", 1, 2)]) == 3
    assert len([*report.findings(run)]) == 2 * 3

"""Forward passes that several probes share: each runs once, with the tables of separate runs and bounded memory."""

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_studies import TEXT_PROBES, content, contents, save_checkpoint, save_texts

from headscope.runs.columns import all_tables
from headscope.runs.run import Run
from headscope.study import context as study_context
from headscope.study.cells import Cell, PassCell, TextPass, group_by_pass
from headscope.study.config import Study, build_study
from headscope.study.context import StudyContext
from headscope.study.executor import JobExecutor
from headscope.study.progress import NoProgress
from headscope.study.runner import run_study

MODELS, DOCUMENTS = ("base", "yarn"), 2
PASSES = sorted(product(MODELS, [24, 40], range(DOCUMENTS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `tiny` and four `texts` of 60 words."""
    folder = tmp_path_factory.mktemp("shared")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    return folder


def study_of(folder: Path, *names: str, **changes: Any) -> Study:
    return build_study({**content(folder, measure=None), **{name: TEXT_PROBES[name] for name in names}, **changes})


@pytest.fixture(scope="module")
def shared(folder: Path) -> Run:
    """A run of all three probes."""
    return run_study(study_of(folder, *TEXT_PROBES), folder / "shared")


@pytest.fixture
def pass_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How often a model embedded each sequence of more than 16 tokens; shorter ones check how the model works."""
    counts: Counter[tuple[int, ...]] = Counter()

    def count(module: Any, args: Any) -> None:
        if args[0].shape[1] > 16:
            counts[tuple(args[0][0].tolist())] += 1

    def counting(open_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            checkpoint = open_checkpoint(*arguments)
            checkpoint.module.get_input_embeddings().register_forward_pre_hook(count)
            return checkpoint

        return wrapper

    monkeypatch.setattr(study_context, "open_checkpoint", counting(study_context.open_checkpoint))
    return counts


def test_three_probes_of_one_study_run_each_pass_once(
    folder: Path, tmp_path: Path, pass_counts: Counter[tuple[int, ...]]
) -> None:
    run = run_study(study_of(folder, *TEXT_PROBES), tmp_path)
    assert sorted(map(len, pass_counts)) == sorted(length for _, length, _ in PASSES[: len(PASSES) // len(MODELS)])
    assert set(pass_counts.values()) == {len(MODELS)}
    assert run.manifest["timings"]["cells"] == len(PASSES) + len(MODELS)
    assert [(row["probe"], row["model"], row["cells"]) for row in run.manifest["timings"]["by_probe"]] == [
        ("measure+patterns+attribution", model, 4) for model in MODELS
    ]


@pytest.mark.slow
def test_the_tables_of_shared_passes_are_those_of_separate_runs(folder: Path, shared: Run, tmp_path: Path) -> None:
    separate: dict[str, bytes] = {}
    for name in TEXT_PROBES:
        separate |= contents(run_study(study_of(folder, name), tmp_path / name))
    assert contents(shared) == separate


def test_rows_are_ordered_by_model_length_and_document(shared: Run) -> None:
    keys = ["model", "context_length", "doc"]
    order = [*product(MODELS, [24, 40], dict.fromkeys(shared.nll["doc"]))]
    for name in shared.tables:
        if {*keys} <= {*all_tables()[name].keys}:
            rows = [tuple(row) for row in shared.table(name)[keys].drop_duplicates().to_numpy()]
            assert rows == [row for row in order if row in rows], name
            assert name == "far_keys" or len(rows) == len(order)


def test_probes_share_the_lengths_that_they_have_in_common(folder: Path) -> None:
    study = study_of(folder, "measure", patterns={**TEXT_PROBES["patterns"], "lengths": [40, 50]})
    jobs = [job for job in JobExecutor(StudyContext(study)).plan() if isinstance(job.cell, PassCell)]
    assert [(job.model, job.cell.text_pass.length, job.probe) for job in jobs] == [
        (model, length, probe)
        for model in MODELS
        for length, probe in ((24, "measure"), (40, "measure+patterns"), (50, "patterns"))
        for _ in range(DOCUMENTS)
    ]


def test_only_equal_tokens_of_one_model_share_a_pass() -> None:
    cells = [
        ("one", PassCell("a", "base", text_pass=TextPass.over([1, 2, 3], 1))),
        ("two", PassCell("b", "base", text_pass=TextPass.over([1, 2, 3], 0))),
        ("two", PassCell("c", "yarn", text_pass=TextPass.over([1, 2, 3], 0))),
        ("two", PassCell("d", "base", text_pass=TextPass.over([1, 2, 4], 0))),
        ("two", PassCell("e", "base", text_pass=TextPass.over([1, 2], 0))),
        ("three", Cell("f", "base")),
    ]
    jobs = group_by_pass(cells, ["base", "yarn"])
    assert [[cell.id for _, cell in job.parts] for job in jobs] == [["e"], ["d"], ["a", "b"], ["c"], ["f"]]
    assert [job.probe for job in jobs] == ["two", "two", "one+two", "two", "three"]


class MemoryProbe(NoProgress):
    """Records Python's memory and that of all tensors at the start of every cell, in bytes."""

    def __init__(self) -> None:
        self.bytes: list[tuple[int, int]] = []

    def set_activity(self, activity: str, worker: str = "") -> None:
        gc.collect()
        # Not subclasses: a compiled test of the same process leaves tensors without storage, whose size is a symbol.
        tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
        self.bytes.append((tracemalloc.get_traced_memory()[0], sum(tensor.nbytes for tensor in tensors)))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_documents(folder: Path, tmp_path: Path) -> None:
    documents = 6
    (tmp_path / "texts").mkdir()
    for number in range(documents):
        rng = random.Random(number)
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(f"w{rng.randrange(125)}" for _ in range(200)))
    probes = {name: {**TEXT_PROBES[name], "lengths": [200], "rows": 64} for name in ("measure", "patterns")}
    study = study_of(
        folder,
        models={"base": str(folder / "tiny")},
        texts={"source": f"file:{tmp_path}/texts/*.txt", "docs": documents},
        **probes,
    )
    memory = MemoryProbe()
    tracemalloc.start()
    try:
        run = run_study(study, tmp_path / "runs", progress=memory)
    finally:
        tracemalloc.stop()
    assert len(memory.bytes) == documents + 1
    (early, early_tensors), (late, late_tensors) = memory.bytes[2], memory.bytes[-2]
    bytes_per_document = sum(run.table(name).memory_usage().sum() for name in run.tables) / documents
    assert late_tensors - early_tensors < bytes_per_document / 10
    assert late - early < bytes_per_document / 2

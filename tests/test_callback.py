"""TrainingMonitor and HeadscopeCallback: they leave the training unchanged, extend one run and log medians."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refuses
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from headscope.errors import BadInput, BadOption, CannotWrite, Interrupted
from headscope.positions.model import Model, load
from headscope.runs.run import Run, list_runs
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter
from headscope.study.config import build_study
from headscope.study.monitor import TIME_SHARE_KEY, TrainingMonitor
from headscope.study.runner import run_study
from headscope.training.callback import HeadscopeCallback
from probes.pretrain.declaration import PretrainOptions
from probes.pretrain.trainer import random_model, train_tokenizer

WORDS = "the quick brown fox jumps over the lazy dog and then sleeps under an old tree. " * 40
PROBES = {"measure": {"lengths": [32], "rows": 4, "tables": ["attention", "nll"]}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([WORDS], 320)


@pytest.fixture
def text(tmp_path: Path) -> str:
    for n in range(2):
        (tmp_path / f"{n}.txt").write_text(" ".join(WORDS.split()[:: 2 * n + 1]))
    return f"file:{tmp_path}/*.txt"


def model(tokenizer: Any) -> Any:
    tiny = PretrainOptions(layers=2, width=16, heads=2, kv_groups=1, feed_forward=32, length=64)
    return random_model(tiny, len(tokenizer), 0)


def train(
    tokenizer: Any,
    folder: Path,
    steps: int = 4,
    resume: bool = False,
    tracker: Any = None,
    logging_steps: int = 500,
    **options: Any,
) -> Trainer:
    """A Trainer after `steps` steps; `options` are those of a HeadscopeCallback that logs to it."""
    ids = tokenizer(WORDS)["input_ids"]
    rows = [{"input_ids": ids[n : n + 32], "labels": ids[n : n + 32]} for n in range(8)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        report_to=[],
        save_steps=2,
        logging_steps=logging_steps,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model(tokenizer), arguments, default_data_collator, rows, processing_class=tokenizer)
    if tracker is not None:
        trainer.add_callback(tracker)
    if options:
        trainer.add_callback(HeadscopeCallback(log=trainer.log, **options))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


@pytest.mark.slow
def test_a_monitored_training_ends_with_equal_weights_and_logs_medians(
    tokenizer: Any, text: str, tmp_path: Path
) -> None:
    tracker_logs: list[dict[str, float]] = []

    class Tracker(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            tracker_logs.append(dict(logs))

    plain = train(tokenizer, tmp_path / "a")
    options = {"every": 2, "probes": PROBES, "text": text, "out": tmp_path / "runs"}
    monitored = train(tokenizer, tmp_path / "b", tracker=Tracker(), **options)
    for weight, monitored_weight in zip(plain.model.parameters(), monitored.model.parameters(), strict=True):
        assert torch.equal(weight, monitored_weight)
    entries = [entry for entry in monitored.state.log_history if TIME_SHARE_KEY in entry]
    assert [entry["step"] for entry in entries] == [0, 2, 4]
    assert all(0 < entry[TIME_SHARE_KEY] < 1 for entry in entries)
    assert [entry for entry in tracker_logs if TIME_SHARE_KEY in entry] == [
        {name: value for name, value in entry.items() if name != "step"} for entry in entries
    ]
    ((_, run),) = list_runs(tmp_path / "runs")
    assert isinstance(run, Run)
    assert validate(run) == []
    assert [(m["label"], m["step"]) for m in run.manifest["models"]] == [("step-0", 0), ("step-2", 2), ("step-4", 4)]
    medians = run.heads.groupby("model", observed=True)["ess2_32"].median()
    for entry in entries:
        assert entry["headscope/ess2_32"] == pytest.approx(medians[f"step-{entry['step']}"])
    # A study of the trained model gives the same numbers.
    study = build_study({"texts": {"source": text, "docs": 2}, "models": {"m": "m"}, **PROBES})
    after = run_study(study, tmp_path / "after", in_memory_models={"m": load(monitored.model, tokenizer=tokenizer)})
    last = run.heads[run.heads["model"] == "step-4"]["ess2_32"].to_numpy()
    assert (after.heads["ess2_32"].to_numpy() == last).all()


@pytest.mark.slow
def test_callback_leaves_the_trainers_log_entries_unchanged(tokenizer: Any, text: str, tmp_path: Path) -> None:
    plain = train(tokenizer, tmp_path / "a", steps=3, logging_steps=1)
    options = {"every": 1, "probes": PROBES, "text": text, "out": tmp_path / "runs"}
    monitored = train(tokenizer, tmp_path / "b", steps=3, logging_steps=1, **options)

    def own_entries(trainer: Trainer) -> list[dict[str, float]]:
        entries = [entry for entry in trainer.state.log_history if TIME_SHARE_KEY not in entry]
        return [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in entries]

    assert sum("loss" in entry for entry in own_entries(plain)) == 3
    assert own_entries(monitored) == own_entries(plain)
    assert sum(TIME_SHARE_KEY in entry for entry in monitored.state.log_history) == 4


@pytest.mark.slow
def test_a_resumed_training_continues_its_run(tokenizer: Any, text: str, tmp_path: Path) -> None:
    options = {"every": 2, "probes": PROBES, "text": text, "out": tmp_path / "runs"}
    train(tokenizer, tmp_path / "a", steps=2, **options)
    train(tokenizer, tmp_path / "a", steps=4, resume=True, **options)
    ((_, run),) = list_runs(tmp_path / "runs")
    assert isinstance(run, Run)
    assert run.models == ["step-0", "step-2", "step-4"]
    train(tokenizer, tmp_path / "c", steps=2, **options)
    assert len(list_runs(tmp_path / "runs")) == 2


def test_the_largest_logit_of_all_heads_is_logged(tokenizer: Any, text: str, tmp_path: Path) -> None:
    probes = {"measure": {"lengths": [32], "rows": "exact", "tables": ["attention"]}}
    monitor = TrainingMonitor(probes, text=text, out=tmp_path, tokenizer=tokenizer)
    logged = monitor(model(tokenizer), 0)
    assert logged["headscope/max_logit"] == pytest.approx(Run.open(monitor.path).max_logit["max_logit"].max())


def test_measure_works_in_a_custom_training_loop_under_a_scheme(tokenizer: Any, text: str, tmp_path: Path) -> None:
    opened = load(model(tokenizer), tokenizer=tokenizer)
    monitor = TrainingMonitor(PROBES, text=text, out=tmp_path)
    before = torch.get_rng_state()
    medians = [monitor(Model(opened.checkpoint), 0), monitor(opened.with_scheme("nope"), 1)]
    assert torch.equal(before, torch.get_rng_state())
    assert medians[0]["headscope/nll_32"] != medians[1]["headscope/nll_32"]
    assert [m["scheme"] for m in Run.open(monitor.path).manifest["models"]] == ["base", "nope"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["the run of a step is unfinished", "the replaced run is not yet removed"])
def test_a_monitor_killed_at_any_moment_resumes(
    tokenizer: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The training resumes at an earlier step than the one at which it was killed."""

    def monitor(resume: bool) -> TrainingMonitor:
        return TrainingMonitor(PROBES, text=text, out=tmp_path / "runs", tokenizer=tokenizer, resume=resume)

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    trained = model(tokenizer)
    first = monitor(resume=False)
    first(trained, 0)
    first(trained, 2)
    with monkeypatch.context() as patch:
        if moment == "the run of a step is unfinished":
            patch.setattr(RunWriter, "commit", kill)
        else:
            rmtree = shutil.rmtree
            patch.setattr(shutil, "rmtree", lambda p, **_: kill() if named(p, "replaced") else rmtree(p, **_))
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            first(trained, 4)
    resumed = monitor(resume=True)
    for step in (2, 4):
        resumed(trained, step)
    ((_, run),) = list_runs(tmp_path / "runs")
    assert isinstance(run, Run)
    assert validate(run) == []
    assert run.models == ["step-0", "step-2", "step-4"]


def named(path: Path, name: str) -> bool:
    """Whether a path has this name and exists."""
    return path.name == name and path.exists()


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"probe_options": {"mesure": {}}}, BadOption, ("'mesure'", "'measure'")),
        ({"probe_options": 5}, BadInput, ("probes", 5)),
        ({"probe_options": {"adapt": {}}}, BadInput, ("'adapt'", "measure")),
        ({"probe_options": {"measure": {}, "pretrain": {}}}, BadInput, ("'pretrain'", "measure")),
        ({"probe_options": {"window": {}}}, BadInput, ("'window'", "measure")),
        ({"docs": 0}, BadOption, ("texts.docs", 0, 1)),
        ({"name": "a b"}, BadOption, ("name", "'a b'")),
        ({"out": None}, BadInput, ("out", None)),
        ({"out": 5}, BadInput, ("out", 5)),
    ],
)
def test_invalid_settings_are_refused(
    settings: Any, error: type[BadInput], named: tuple[object, ...], tmp_path: Path
) -> None:
    with refuses(error, *named):
        TrainingMonitor(**{"out": tmp_path, **settings})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("every", [0, -1, "1", 1.5, True, None])
def test_an_invalid_number_of_steps_is_refused(every: Any) -> None:
    with refuses(BadInput, f"every={every!r}", 1):
        HeadscopeCallback(every=every)


def test_a_file_in_place_of_the_folder_of_runs_is_refused_before_the_first_step(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    with refuses(CannotWrite, file, "--out"):
        train(tokenizer, tmp_path / "a", every=1, out=file)
    assert file.read_text() == "kept"


def test_a_callback_that_would_train_is_refused_before_the_first_step(tokenizer: Any, tmp_path: Path) -> None:
    with refuses(BadInput, "'adapt'", "measure"):
        train(tokenizer, tmp_path / "a", every=1, probes={"adapt": {}}, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()

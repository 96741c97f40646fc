"""Evaluate probe: the harness's own scores under any scheme, without network requests."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import manager
from scipy import stats
from support.adapters import noisy
from support.harness_tasks import QUESTIONS, write_colours, write_task
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint

from headscope.errors import BadInput, InputChanged, Interrupted, ResourceMissing
from headscope.models import loading
from headscope.positions.model import Model, load
from headscope.rendering.blocks import RenderContext
from headscope.runs.aggregation import wilson_interval
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.summary import model_table
from headscope.study import runner as study
from headscope.study.config import build_study
from headscope.tasks import harness
from probes.evaluate import view
from probes.evaluate.results import (
    means_over_tasks,
    overview,
    preferred_metric_rows,
    results,
    summarise_heads,
    with_intervals,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny`, a checkpoint, and two tasks: `colours.yaml`, questions, and `prose.yaml`, texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    save_checkpoint(folder / "tiny")
    write_colours(folder)
    text = " ".join(f"{question} {choices[answer]}." for question, choices, answer in QUESTIONS)
    write_task(
        folder,
        "prose",
        [{"text": text * 30}, {"text": text}],  # one is longer than any context
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    return folder


def study_content(folder: Path, **options: Any) -> dict[str, Any]:
    section = {"tasks": [f"{folder}/colours.yaml", f"{folder}/prose.yaml"], "lengths": [128], **options}
    models = {"base": f"{folder}/tiny", "yarn": f"{folder}/tiny@yarn:factor=8"}
    return {"name": "evaluate", "models": models, "device": "cpu", "evaluate": section}


# Scores ------------------------------------------------------------------------------------------------------------


LENGTH, LIMIT = 1024, 2


def tasks_of_each_kind(folder: Path) -> list[str]:
    """One task of each kind: generated (RULER), multiple choice from a file, rolling likelihoods from a file."""
    return ["ruler_vt", f"{folder}/colours.yaml", f"{folder}/prose.yaml"]


@pytest.fixture(scope="module")
def smollm2_run(smollm2: Model, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Any]]:
    """A run of SmolLM2, and every network address that it tried to reach."""
    addresses: list[Any] = []
    settings = {"tasks": tasks_of_each_kind(folder), "lengths": [LENGTH], "documents": LIMIT}
    content = {"models": {"base": "smollm2-135m"}, "device": "cpu", "evaluate": settings}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket.socket, "connect", lambda _, address: addresses.append(address))
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: addresses.append(host))
        run = study.run_study(build_study(content), tmp_path_factory.mktemp("real"), in_memory_models={"base": smollm2})
    return run, addresses


@pytest.mark.model
def test_the_harness_makes_no_network_requests(smollm2_run: tuple[Run, list[Any]]) -> None:
    """By default nltk downloads on import, and the harness loads a tokenizer by name."""
    assert smollm2_run[1] == []
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.model
def test_scores_equal_those_of_the_harness_command_line(
    smollm2_run: tuple[Run, list[Any]],
    smollm2: Model,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint_folder = loading.locate("smollm2-135m")[0]
    command = [
        *("lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "1"),
        *(
            "--model_args",
            f"pretrained={checkpoint_folder},dtype=float32,max_length={LENGTH}",
            "--tasks",
            *tasks_of_each_kind(folder),
        ),
        *("--metadata", json.dumps({"max_seq_lengths": [LENGTH]}), "--limit", str(LIMIT)),
        *("--log_samples", "--output_path", str(tmp_path / "theirs")),
    ]
    # Index only RULER's tasks: the whole index takes half a minute to read.
    monkeypatch.setattr(manager, "__file__", str(harness.RULER_FOLDER / "manager.py"))
    monkeypatch.setattr(sys, "argv", command)
    cli_evaluate()
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    harness_scores = json.loads(file.read_text())["results"]
    rows = {(row.task, row.metric): row for row in smollm2_run[0].tasks.itertuples()}
    assert set(rows) == {
        *(("colours", metric) for metric in ("acc", "acc_norm", "brier_score")),
        ("prose", "bits_per_byte"),
        ("ruler_vt", "match"),
    }
    for (name, metric), row in rows.items():
        metric_key = str(LENGTH) if metric == "match" else metric
        assert row.score == np.float32(harness_scores[name][f"{metric_key},none"])
        if isinstance(error := harness_scores[name][f"{metric_key}_stderr,none"], float):
            assert row.stderr == np.float32(error)
        assert row.documents == LIMIT
    assert rows["colours", "acc"].higher_is_better
    assert not rows["colours", "brier_score"].higher_is_better
    (samples,) = (tmp_path / "theirs").rglob("samples_ruler_vt_*.jsonl")
    prompts = [json.loads(line)["doc"]["input"] for line in samples.read_text().splitlines()]
    (built_task,) = harness.build_task(*harness.find_tasks(["ruler_vt"]), LENGTH, smollm2.tokenizer).values()
    assert prompts == [document["input"] for document in list(built_task.eval_docs)[:LIMIT]]
    assert smollm2.tokenizer.pad_token == loading.load_tokenizer("smollm2-135m").pad_token


@pytest.fixture(scope="module")
def finished_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study.run_study(build_study(study_content(folder)), tmp_path_factory.mktemp("runs"))


def test_every_model_is_scored_under_its_scheme_on_the_same_documents(finished_run: Run) -> None:
    assert validate(finished_run) == []
    bits = finished_run.tasks[finished_run.tasks["metric"] == "bits_per_byte"].set_index("model")
    assert bits.loc["base", "score"] != bits.loc["yarn", "score"]
    assert set(finished_run.tasks["documents"]) == {2, len(QUESTIONS)}
    assert set(finished_run.tasks["context_length"]) == {128}


def test_an_interrupted_study_resumes_at_the_next_cell(
    finished_run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_tasks, calls = harness.score_tasks, []

    def interrupted_scores(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score_tasks(*arguments)

    monkeypatch.setattr(harness, "score_tasks", interrupted_scores)
    with refuses(Interrupted, tmp_path, "--resume"):
        study.run_study(build_study(study_content(folder)), tmp_path)
    resumed = study.run_study(build_study(study_content(folder)), tmp_path, resume=True)
    assert len(calls) == 3 + 2
    assert resumed.manifest["tables"] == finished_run.manifest["tables"]


@pytest.mark.parametrize("changed", ["documents", "prompt"])
def test_a_run_with_a_changed_task_file_is_not_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    content = study_content(folder, tasks=[f"{tmp_path}/own.yaml"])
    (tmp_path / "own.jsonl").write_text((folder / "colours.jsonl").read_text())
    config = yaml.safe_load((folder / "colours.yaml").read_text()) | {"task": "own"}
    config["dataset_kwargs"] = {"data_files": f"{tmp_path}/own.jsonl"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    score_tasks, calls = harness.score_tasks, []

    def interrupted_scores(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score_tasks(*arguments)

    monkeypatch.setattr(harness, "score_tasks", interrupted_scores)
    with pytest.raises(Interrupted):
        study.run_study(build_study(content), tmp_path / "runs")
    if changed == "documents":
        with (tmp_path / "own.jsonl").open("a") as file:
            file.write(json.dumps({"question": "Tar is", "choices": ["white", "black", "red"], "answer": 1}) + "\n")
    else:
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(config | {"doc_to_text": "Say: {{question}}"}))
    with refuses(InputChanged, "task own"):
        study.run_study(build_study(content), tmp_path / "runs", resume=True)


def test_truncated_prompts_give_a_warning(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{index}: on and on. " * 50, "choices": ["yes", "no"], "answer": 0} for index in range(2)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load((folder / "colours.yaml").read_text()) | {"task": "long"}
    config["dataset_kwargs"] = {"data_files": f"{folder}/long.jsonl"}
    (folder / "long.yaml").write_text(yaml.safe_dump(config))
    study.run_study(build_study(study_content(folder, tasks=[f"{folder}/long.yaml"])), tmp_path)
    warnings = [message for message in caplog.messages if "--length" in message]
    assert len(warnings) == 2  # one per model
    for warning in warnings:
        assert_names(warning, "task long")


def test_models_with_length_sequence_are_refused(folder: Path, tmp_path: Path) -> None:
    noisy(load(f"{folder}/tiny")).save(tmp_path / "adapter.safetensors")
    content = study_content(folder)
    content["models"] = {"whole": f"{folder}/tiny@adarope:adapter={tmp_path}/adapter.safetensors,length=sequence"}
    with refuses(BadInput, "'whole'", "length=sequence", "length=visible"):
        study.run_study(build_study(content), tmp_path / "runs")


def test_a_group_expands_to_its_generated_tasks() -> None:
    tasks = {task.name: task.is_generated_to_length for task in harness.find_tasks(["ruler", "niah_single_1"])}
    assert len(tasks) == 13
    assert all(tasks.values())


@pytest.mark.model
def test_several_generated_tasks_can_be_built(smollm2: Model) -> None:
    """The harness imports the modules of its tasks again for each task."""
    for task in harness.find_tasks(["niah_single_1", "ruler_vt"]):
        assert len(harness.build_task(task, 1024, smollm2.tokenizer)) == 1


def test_a_missing_standard_error_is_bootstrapped() -> None:
    values = list(np.random.default_rng(0).random(200))
    assert harness._bootstrap_standard_error(np.mean, values) == pytest.approx(np.std(values) / np.sqrt(200), rel=0.1)


# Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "named", "arguments"),
    [
        (2, ["length 64"], ("--length", 64)),
        (2, ["length 512", "task ruler_vt", "1,024"], ("--tasks", "ruler_vt", "--length", 512)),
        (2, ["--lengths", "long"], ("--length", "long")),
        (2, ["--documents", "2"], ("--limit", 1)),
        (2, ["--tasks", "empty"], ("--tasks", "")),
        (2, ["'niah_singel_1'", "'niah_single_1'"], ("--tasks", "niah_singel_1")),
        (3, ["'{folder}/none.yaml'"], ("--tasks", "{folder}/none.yaml")),
        (2, ["'{folder}/empty.yaml'", "Unknown config shape"], ("--tasks", "{folder}/empty.yaml")),
        (3, ["task own", "data", "nobody/nothing"], ("--tasks", "{folder}/hub.yaml")),
        (3, ["task own", "data", "{folder}/gone.jsonl"], ("--tasks", "{folder}/gone.yaml")),
        (2, ["task own", "guess"], ("--tasks", "{folder}/broken.yaml")),
        (2, ["task own", "documents", "1"], ("--tasks", "{folder}/one.yaml")),
    ],
)
def test_bad_input_is_refused_in_one_line(
    code: int,
    named: list[str],
    arguments: Any,
    refused: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "TASKS_FOLDER", harness.RULER_FOLDER)  # the whole index takes half a minute to read
    (folder / "empty.yaml").write_text("metric_list: []\n")
    (folder / "one.jsonl").write_text(
        json.dumps({"question": "Tar is", "choices": ["red", "black"], "answer": 1}) + "\n"
    )
    config = yaml.safe_load((folder / "colours.yaml").read_text()) | {"task": "own"}
    changes = {
        "hub": {"dataset_path": "nobody/nothing", "dataset_kwargs": None},
        "gone": {"dataset_kwargs": {"data_files": f"{folder}/gone.jsonl"}},
        "broken": {"output_type": "guess"},
        "one": {"dataset_kwargs": {"data_files": f"{folder}/one.jsonl"}},
    }
    for name, change in changes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config | change))
    flags = [str(argument).replace("{folder}", str(folder)) for argument in arguments]
    if "--tasks" not in flags:
        flags += ["--tasks", f"{folder}/colours.yaml"]
    line = refused(code, "evaluate", "--model", f"x={folder}/tiny", "--device", "cpu", "--quiet", *flags)
    assert_names(line, *(name.replace("{folder}", str(folder)) for name in named))


SANDBOX_ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() | length }}{{question}}"
UNTRUSTED = {
    "function": ({"doc_to_text": "!function mark.mark"}, ["'!function mark.mark'", "--trust-task-code"]),
    "included": ({"include": "function.yaml"}, ["'!function mark.mark'", "--trust-task-code"]),
    "class": ({"class": "!function mark.Task"}, ["'!function mark.Task'", "--trust-task-code"]),
    "metric": ({"metric_list": [{"metric": "./mark.py"}]}, ["metric", "'./mark.py'", "--trust-task-code"]),
    "evaluate": (
        {"metric_list": [{"metric": "acc", "hf_evaluate": True}]},
        ["metric", "'acc'", "--trust-task-code"],
    ),
    "escape": ({"doc_to_text": SANDBOX_ESCAPE}, ["task own", "SecurityError"]),
}


def write_untrusted(folder: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((folder / "colours.yaml").read_text()) | {"task": "own"}
    for name, (change, _) in UNTRUSTED.items():
        text = yaml.safe_dump(config | change).replace("'!function mark.mark'", "!function mark.mark")
        (tmp_path / f"{name}.yaml").write_text(text.replace("'!function mark.Task'", "!function mark.Task"))
    (tmp_path / "mark.py").write_text(
        "from pathlib import Path\n\nPath(__file__).with_name('ran').touch()\n\n\n"
        "def mark(doc):\n    return doc['question']\n"
    )


@pytest.mark.parametrize("name", UNTRUSTED)
def test_a_task_file_that_runs_code_is_refused(name: str, refused: Any, folder: Path, tmp_path: Path) -> None:
    write_untrusted(folder, tmp_path)
    flags = ("--model", f"x={folder}/tiny", "--device", "cpu", "--length", 128, "--quiet")
    assert_names(refused(2, "evaluate", *flags, "--tasks", f"{tmp_path}/{name}.yaml"), *UNTRUSTED[name][1])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["function", "escape"])
def test_a_trusted_task_file_runs_its_code(name: str, headscope: Any, folder: Path, tmp_path: Path) -> None:
    write_untrusted(folder, tmp_path)
    flags = ("--model", f"x={folder}/tiny", "--device", "cpu", "--length", 128, "--quiet", "--trust-task-code")
    code, _, err = headscope("evaluate", *flags, "--tasks", f"{tmp_path}/{name}.yaml", "--out", tmp_path / "runs")
    assert code == 0, err
    assert (tmp_path / "ran").exists() == (name == "function")


@pytest.mark.parametrize(
    ("content", "named"),
    [  # {file} for the file; texts of the harness are its own
        ("", ["{file}", "Expected YAML dict"]),
        ("- a", ["{file}", "Expected YAML dict"]),
        ("just text", ["{file}", "Expected YAML dict"]),
        ("dataset_path: json", ["{file}", "Unknown config shape"]),
        ("task:", ["{file}", "'task'"]),
        ("task: 5", ["{file}", "5", "task: NAME"]),
        ("task: [colours]", ["{file}", "['colours']", "task: NAME"]),
        ("task: {a: 1}", ["{file}", "{'a': 1}", "task: NAME"]),
        ("task: a\nmetric_list: 5", ["{file}", "metric_list", "5"]),
        ("task: a\nmetric_list: [acc]", ["{file}", "metric_list", "['acc']"]),
        ("task: a\nmetric_list: acc", ["{file}", "metric_list", "'acc'"]),
        ("task: a\nmetric_list: [{metric: [acc]}]", ["{file}", "metric ['acc']", "--trust-task-code"]),
        ("task: a\ninclude: 5", ["{file}"]),
        ("task: a\ninclude: none.yaml", ["{file}", "none.yaml"]),
        ("task: a\ninclude: odd.yaml", ["{file}", "Include cycle"]),
        ("task: a\ndataset_path: 5", ["task a"]),
        ("task: a\ndataset_path: json\ndataset_kwargs: 5", ["task a"]),
        ("task: a\ntag: 5", ["task a"]),
        ("task: a\nnever: 5", ["task a", "never"]),
        ("task: {", ["{file}", "task: {"]),
        ("task: !!python/name:os.system x", ["{file}", "os.system"]),
        ("group: a\ntask: 5", ["{file}", "'task'", "5"]),
        ("group: 5\ntask: [a]", ["{file}", "5", "task: NAME"]),
        ("group: a\ntask: [{x: 1}]", ["task a"]),
        ("group: a\ntask: [5]", ["task a"]),
        ("group: a\ntask: [nowhere]", ["task a"]),
        ("class: a\ntask: b", ["task b"]),
        ("class: a", ["{file}", "'task'"]),
    ],
)
def test_malformed_task_file_gives_one_line(
    content: str, named: list[str], refused: Any, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(content)
    flags = ("--model", f"x={folder}/tiny", "--device", "cpu", "--length", 128, "--quiet")
    line = refused(2, "evaluate", *flags, "--tasks", file)
    assert_names(line, *(name.replace("{file}", f"'{file}'") for name in named))


def test_a_missing_package_is_named() -> None:
    error = harness._task_error("niah_single_2", ModuleNotFoundError("No module named 'bs4'", name="bs4"))
    assert type(error) is ResourceMissing
    assert_names(str(error), "task niah_single_2", "package bs4")
    assert isinstance(harness._task_error("x", ConnectionError("offline")), ResourceMissing)


def test_json_is_the_only_output(headscope: Any, folder: Path, tmp_path: Path) -> None:
    flags = ("--model", f"x={folder}/tiny", "--tasks", f"{folder}/colours.yaml", "--device", "cpu", "--length", 128)
    code, out, _ = headscope("evaluate", *flags, "--json", "--out", tmp_path)
    assert code == 0
    assert {row["task"] for row in json.loads(out)["tasks"]} == {"colours"}


# Report and plots -----------------------------------------------------------------------------------------------------


def score_rows(*rows: tuple[str, str, int, str, float, float]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["model", "task", "context_length", "metric", "score", "stderr"])
    return frame.assign(filter="none", documents=100, higher_is_better=True)


TASKS = score_rows(
    *(("base", "arc_easy", 4096, metric, score, 0.04) for metric, score in (("acc", 0.5), ("acc_norm", 0.6))),
    ("base", "boolq", 4096, "acc", 0.7, 0.03),
    *(("base", "ruler_vt", length, "match", score, 0.02) for length, score in ((2048, 0.9), (4096, 0.8))),
    ("yarn", "arc_easy", 4096, "acc_norm", 0.5, 0.04),
    ("yarn", "boolq", 4096, "acc", 0.6, 0.03),
)


def test_the_preferred_metric_is_the_papers_and_means_are_over_tasks_of_one_kind() -> None:
    rows = preferred_metric_rows(TASKS)
    assert list(rows["metric"]) == ["acc_norm", "acc", "match", "match", "acc_norm", "acc"]
    means = means_over_tasks(rows).set_index(["model", "kind", "context_length"])
    assert list(means.index) == [("base", "accuracy", 4096), ("yarn", "accuracy", 4096)]
    assert means.loc[("base", "accuracy", 4096), "score"] == pytest.approx(0.65)
    assert means.loc[("base", "accuracy", 4096), "stderr"] == pytest.approx(0.025)


def test_means_are_over_the_tasks_that_every_model_has() -> None:
    more = pd.concat([TASKS, score_rows(("yarn", "hellaswag", 4096, "acc", 0.9, 0.1))])
    assert means_over_tasks(preferred_metric_rows(more)).equals(means_over_tasks(preferred_metric_rows(TASKS)))


def test_the_colour_scale_respects_metrics_where_lower_is_better() -> None:
    rows = score_rows(("base", "wiki", 4096, "bits", 1.0, 0.1), ("yarn", "wiki", 4096, "bits", 2.0, 0.1))
    (heat,) = view.plot_score_table(rows.assign(higher_is_better=False)).data
    assert heat.z.tolist() == [[1.0], [0.0]]


def test_the_score_table_has_every_model_and_task_with_its_standard_error() -> None:
    (heat,) = view.plot_score_table(TASKS).data
    assert list(heat.y) == ["base", "yarn"]
    assert [column.split("<br>")[0] for column in heat.x] == ["arc_easy", "boolq", "ruler_vt", "ruler_vt", "mean of 2"]
    assert heat.text[0][0] == "0.600<br>±0.040"
    assert heat.text[1][2] == ""
    assert view.plot_scores_by_length(TASKS).layout.xaxis.ticktext == ("2,048", "4,096")
    lines = view.plot_scores_by_length(TASKS).data
    assert [list(line.x) for line in lines] == [[2048, 4096], []]
    assert view.plot_score_table(TASKS.iloc[:0]).layout.annotations[0].text.startswith("no data")


@pytest.mark.slow
def test_results_overview_and_charts_have_the_scores(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path)
    all_results = [*results(run)]
    assert len({result.key for result in all_results}) == len(all_results)
    tasks = preferred_metric_rows(run.tasks)
    scores = [result for result in all_results if result.question == "tasks.score"]
    assert [result.value for result in scores] == tasks["score"].tolist()
    assert {result.model for result in scores} == {*run.models}
    assert all(result.low < result.value < result.high and result.n == 100 for result in scores)
    means = [result for result in all_results if result.question == "tasks.mean_score"]
    assert (means[0].where["kind"], means[0].details["tasks"]) == ("match", 2)
    length = means[0].where["context_length"]
    row = model_table(run).set_index("model").loc[means[0].model]
    columns = [f"task_match_{length}{ending}" for ending in ("", "_low", "_high")]
    assert row[columns].tolist() == [means[0].value, means[0].low, means[0].high]
    json_data = overview(run)
    assert json_data is not None
    assert {*json_data.data["task"]} == {"niah_single_1", "ruler_vt", "arc_easy"}
    context = RenderContext(run, run.models, run.heads, run.models[0], {})
    scores, comparison = view.charts(context)
    assert len([*scores.charts]) == 2
    assert len([*comparison.charts]) == 1


def test_scores_that_are_shares_of_documents_have_the_interval_of_wilson() -> None:
    shares = pd.Series([0.75, 1.0, 0.5, 12.0])
    documents = pd.Series([20, 20, 20, 20])
    stderr = pd.Series([(0.75 * 0.25 / 19) ** 0.5, 0.0, 0.05, 0.4])
    rows = with_intervals(pd.DataFrame({"score": shares, "stderr": stderr, "documents": documents}))
    low, high = wilson_interval(shares[:2], documents[:2])
    t = stats.t.ppf(0.975, 19)
    assert rows["low"].tolist() == pytest.approx([*low, 0.5 - 0.05 * t, 12 - 0.4 * t])
    assert rows["high"].tolist() == pytest.approx([*high, 0.5 + 0.05 * t, 12 + 0.4 * t])
    assert with_intervals(pd.DataFrame({"score": [0.5], "stderr": [0.1], "documents": [2]}))["low"].isna().all()


def test_scores_are_plotted_against_the_head_summary_of_the_same_model() -> None:
    units = pd.DataFrame({"layer": 0, "head": range(20)})
    heads = pd.concat(
        [
            units.assign(model="base", growth=0.2, ess2_512=10.0),
            units.assign(model="yarn", growth=0.4, ess2_512=np.where(units["head"] < 5, 12.0, 30.0)),
        ]
    )
    numbers = summarise_heads(heads)
    growth = "Growth exponent, median over heads"
    assert numbers[growth].to_dict() == {"base": 0.2, "yarn": 0.4}
    assert list(numbers) == [growth]  # the fraction exists for one model only
    heads = pd.concat([heads, units.assign(model="other", growth=np.nan, ess2_512=10.0)])
    (unchanged,) = set(summarise_heads(heads)) - {growth}
    assert summarise_heads(heads)[unchanged].dropna().to_dict() == {"yarn": 0.25, "other": 1.0}
    smaller = pd.DataFrame({"layer": 0, "head": range(8)}).assign(model="smaller", growth=0.2, ess2_512=10.0)
    assert summarise_heads(pd.concat([heads, smaller]))[unchanged].dropna().to_dict() == {"yarn": 0.25, "other": 1.0}
    points = [trace for trace in view.plot_scores_against_heads(TASKS, numbers).data if trace.customdata is not None]
    assert {trace.name: list(trace.x) for trace in points} == {"base": [0.2] * 3, "yarn": [0.4] * 2}
    assert dict(zip(points[0].customdata, points[0].y, strict=True))["ruler_vt"] == 0.8  # at its longest length

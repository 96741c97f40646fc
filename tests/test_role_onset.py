"""Heads by training step: the training run of a checkpoint, statistics by layer, and the emergence of roles."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.manifests import model_entry
from support.shipped_runs import open_shipped

from dashboards.pages import checkpoints
from headscope.plots import role_emergence
from headscope.results.result import Result
from headscope.runs.column_metadata import heads_with_role, measured_roles
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from headscope.runs.trainings import role_onsets, training_checkpoints
from probes.measure.results import onset_results

STEPS = (0, 1, 16, 256, 2048)
TRAININGS = ("rope-s0", "alibi-s0")


def models() -> list[dict[str, Any]]:
    return [
        model_entry(f"{training}:{step}", f"runs/{training}/step-{step:06d}", step=step)
        for training in TRAININGS
        for step in STEPS
    ]


def heads() -> pd.DataFrame:
    """Head h of layer l acquires its role at step index 1 + l + h in rope, one later in alibi; head 0 at the start."""
    rows = [
        (f"{training}:{step}", layer, head, 0, 0.9 if head == 0 or index >= 1 + layer + head + delay else 0.1)
        for delay, training in enumerate(TRAININGS)
        for index, step in enumerate(STEPS)
        for layer in range(2)
        for head in range(3)
    ]
    frame = pd.DataFrame(rows, columns=["model", "layer", "head", "kv_group", "previous_token"])
    return frame.assign(model=pd.Categorical(frame["model"], [model["label"] for model in models()]))


COURSE = training_checkpoints(models())


@pytest.mark.parametrize(
    ("checkpoint", "scheme", "label", "training"),
    [
        ("out/rope-s0/step-000016", "base", "x", "rope-s0"),
        (
            "out/adarope-s0/step-000016",
            "adarope:adapter=out/adarope-s0/step-000016/adarope.safetensors",
            "x",
            "adarope-s0",
        ),
        ("smollm2-135m", "adarope:adapter=run/adapters/step-0010.safetensors", "x", "adapters"),
        ("gpt/run/checkpoint-500", "base", "x", "run"),
        ("org/pythia:step1000", "base", "x", "pythia"),
        ("base+loras/fine/checkpoint-5", "base", "x", "fine"),
        ("in-memory llama", "base", "step-500 \u00b7 second", "second"),
        ("in-memory llama", "base", "step-500", "training"),
    ],
)
def test_a_training_run_is_named_after_the_folder_of_its_checkpoints(
    checkpoint: str, scheme: str, label: str, training: str
) -> None:
    table = training_checkpoints([model_entry(label, checkpoint, scheme, 7)])
    assert table.to_dict("records") == [{"label": label, "training": training, "step": 7}]


def trainings(*specs: tuple[str, str, int]) -> list[str]:
    """The training of each checkpoint (path, scheme, step)."""
    entries = [model_entry(str(number), *spec) for number, spec in enumerate(specs)]
    names: list[str] = training_checkpoints(entries)["training"].tolist()
    return names


def test_checkpoints_under_several_schemes_are_one_training_under_each() -> None:
    assert trainings(
        ("out/run/step-1", "base", 1),
        ("out/run/step-1", "yarn:factor=4", 1),
        ("out/run/step-2", "base", 2),
        ("out/run/step-2", "yarn:factor=4", 2),
        ("out/other/step-1", "base", 1),
    ) == ["run", "run yarn:factor=4"] * 2 + ["other"]
    fixed = [f"adarope:adapter={name}.safetensors" for name in ("x", "y")]
    assert (
        trainings(*((f"run/step-{step}", scheme, step) for step in (1, 2) for scheme in fixed))
        == [f"run {scheme}" for scheme in fixed] * 2
    )


def test_checkpoints_with_positions_that_no_scheme_names_are_a_training() -> None:
    models = [{**model_entry(str(step), f"gpt2/step-{step}", "base", step), "scheme": "learned"} for step in (1, 2)]
    assert training_checkpoints(models)["training"].tolist() == ["gpt2", "gpt2"]


def test_adarope_that_is_trained_with_its_checkpoints_is_one_training() -> None:
    folders = [f"out/adarope-s0/step-{step}" for step in (1, 2)]
    specs = [(folder, f"adarope:adapter={folder}/adarope.safetensors", 1) for folder in folders]
    assert trainings(*specs) == ["adarope-s0", "adarope-s0"]
    assert trainings(*specs, ("out/adarope-s0/step-1", "nope", 1)) == ["adarope-s0 adarope"] * 2 + ["adarope-s0 nope"]


def test_two_trainings_whose_folders_have_one_name_are_told_apart_by_their_path() -> None:
    assert trainings(*((f"{run}/checkpoints/step-{step}", "base", step) for run in "ab" for step in (1, 2))) == [
        "a/checkpoints", "a/checkpoints", "b/checkpoints", "b/checkpoints",
    ]  # fmt: skip


def test_models_without_a_step_belong_to_no_training_run() -> None:
    assert training_checkpoints([model_entry("a", "x/step-1")]).empty


def test_adapters_named_without_a_step_belong_to_no_training_run() -> None:
    adapters = "smollm2-135m", "smollm2-135m-x2", "a/no-freq.safetensors"
    schemes = [f"adarope:adapter={adapter}" for adapter in adapters]
    models = [model_entry(scheme, "smollm2-135m", scheme, step) for step, scheme in enumerate(schemes, 28)]
    assert training_checkpoints(models).empty


def test_default_models_are_the_last_checkpoint_of_each_training_run_and_models_without_steps() -> None:
    untrained = model_entry("other", "other")

    def default_labels(models: list[dict[str, Any]]) -> list[str]:
        run: Any = SimpleNamespace(
            manifest={"models": models}, models=[model["label"] for model in models], shows_all_models=False
        )
        run.derived = lambda compute: compute(run)
        return default_models(run)

    assert default_labels([untrained, *models()]) == ["other", "rope-s0:2048", "alibi-s0:2048"]
    rope_models = [model for model in models() if "rope" in model["label"]]
    assert default_labels(rope_models) == [model["label"] for model in rope_models]


def test_one_training_run_has_a_line_per_head_in_the_panel_of_its_layer() -> None:
    one_training = COURSE[COURSE["training"] == "rope-s0"]
    figure = role_emergence.plot_training_by_layer(heads(), "previous_token", one_training)
    assert len(figure.data) == 6
    first = figure.data[0]
    assert list(first.customdata) == list(STEPS)
    assert list(first.x) == [0.5, *STEPS[1:]]  # logarithmic, with room for step 0
    assert figure.layout.xaxis.type == "log"
    assert list(figure.data[1].y) == [0.1, 0.1, 0.9, 0.9, 0.9]


def test_several_training_runs_have_a_median_line_each_and_lines_of_the_selected_heads() -> None:
    figure = role_emergence.plot_training_by_layer(heads(), "previous_token", COURSE, [(1, 2)])
    assert len(figure.data) == 4 + 2
    lines = {trace.name: list(trace.y) for trace in figure.data if trace.yaxis == "y"}
    assert lines == {"rope-s0": [0.1, 0.1, 0.9, 0.9, 0.9], "alibi-s0": [0.1, 0.1, 0.1, 0.9, 0.9]}


def test_a_role_is_acquired_at_the_first_step_from_which_the_head_keeps_it() -> None:
    flickering = heads()
    one_row = (flickering["model"] == "rope-s0:1") & (flickering["layer"] == 1) & (flickering["head"] == 2)
    flickering.loc[one_row, "previous_token"] = 0.9
    onsets = role_onsets(flickering, COURSE, ["previous-token", "induction"])
    steps = onsets.set_index(["training", "layer", "head"])["step"]
    assert steps["rope-s0"].to_dict() == {(0, 0): 0, (0, 1): 16, (0, 2): 256, (1, 0): 0, (1, 1): 256, (1, 2): 2048}
    assert (1, 2) not in steps["alibi-s0"]
    figure = role_emergence.plot_role_onsets(onsets, TRAININGS, STEPS)
    assert [len(trace.x) for trace in figure.data] == [6, 5]


@pytest.mark.slow
def test_results_have_the_step_of_the_first_and_of_the_middle_head_of_every_role_in_every_training() -> None:
    run = open_shipped("from-scratch")
    course = training_checkpoints(run.manifest["models"]).set_index("label")
    roles = run.heads[["model", "layer", "head"]].assign(
        **{role: heads_with_role(run.heads, role) for role in measured_roles(run.heads)}
    )
    expected = {}
    for role in measured_roles(run.heads):
        for training in course["training"].unique():
            steps = course[course["training"] == training].sort_values("step")["step"]
            onsets = []
            for _, head in roles[roles["model"].isin(steps.index)].groupby(["layer", "head"]):
                outcomes = head.set_index("model").reindex(steps.index)[role].tolist()
                kept = next((index for index in range(len(steps)) if all(outcomes[index:])), None)
                onsets += [] if kept is None else [steps.iloc[kept]]
            if onsets:
                expected[training, role] = (len(onsets), min(onsets), sorted(onsets)[(len(onsets) - 1) // 2])
    results = {(result.where["training"], result.where["role"]): result for result in all_onsets(run)}
    assert {key: (result.n, result.details["first"], result.value) for key, result in results.items()} == expected
    assert len(expected) > 20
    assert course.loc[results["nope-s0", "constant"].model].to_dict() == {"training": "nope-s0", "step": 2048}


def all_onsets(run: Run) -> list[Result]:
    return [*onset_results(run, run.heads, run.models)]


def test_single_checkpoints_of_trainings_have_no_onsets() -> None:
    assert all_onsets(open_shipped("from-scratch-seeds")) == []
    assert all_onsets(open_shipped("example")) == []


def test_a_step_at_which_a_role_was_not_measured_is_none_without_it() -> None:
    frame = heads()
    frame.loc[frame["model"] == "rope-s0:256", "previous_token"] = np.nan
    onsets = role_onsets(frame, COURSE, ["previous-token"])
    steps = onsets.set_index(["training", "layer", "head"])["step"]["rope-s0"]
    assert steps.to_dict() == {(0, 0): 0, (0, 1): 16, (0, 2): 2048, (1, 0): 0, (1, 1): 2048, (1, 2): 2048}
    assert onsets[onsets["is_first"]].set_index("training")["head"]["rope-s0"].tolist() == [0, 0]


def test_onsets_are_about_checkpoints_whose_heads_were_measured_at_one_length() -> None:
    frame = heads()
    run: Any = SimpleNamespace(manifest={"models": models()}, models=[model["label"] for model in models()])

    def results(frame: pd.DataFrame, labels: list[str] | None = None) -> list[Result]:
        return [*onset_results(run, frame, labels or run.models)]

    assert {result.model for result in results(frame)} == {"rope-s0:2048", "alibi-s0:2048"}
    without_last = frame[frame["model"] != "rope-s0:2048"]
    for labels in (None, ["rope-s0:2048", "alibi-s0:2048"]):
        assert {result.model for result in results(without_last, labels)} == {"rope-s0:256", "alibi-s0:2048"}
    assert {result.model for result in results(frame, ["alibi-s0:2048"])} == {"alibi-s0:2048"}
    one_step = frame[frame["model"].isin(["rope-s0:2048"])]
    assert results(one_step) == []
    mixed = frame.assign(ess2_256=1.0, ess2_512=np.where(frame["model"] == "rope-s0:2048", 2.0, np.nan))
    assert results(mixed) == []


def test_role_onset_table_has_a_column_per_training_run() -> None:
    table = checkpoints._role_onset_table(role_onsets(heads(), COURSE, ["previous-token", "induction"]), TRAININGS)
    assert table.column_names == ("role", "rope-s0", "alibi-s0")
    assert table.rows == [
        ("previous-token", "6 heads; first at step 0, half by step 16", "5 heads; first at step 0, half by step 256")
    ]


def test_heads_with_a_role_are_counted_by_step() -> None:
    figure = role_emergence.plot_role_counts(heads(), COURSE, ["previous-token", "induction"])
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        "rope-s0": [2, 2, 3, 5, 6],
        "alibi-s0": [2, 2, 2, 3, 5],
    }


def test_a_slider_shows_the_heads_with_each_role_by_layer_at_one_step() -> None:
    figure = role_emergence.plot_roles_by_layer(heads(), COURSE, ["previous-token", "induction"])
    (slider,) = figure.layout.sliders
    for position, mark in enumerate(slider.steps):
        drawn = [trace for trace, visible in zip(figure.data, mark.args[0]["visible"], strict=True) if visible]
        assert tuple(trace.name for trace in drawn) == TRAININGS
        assert [int(trace.z.sum()) for trace in drawn] == [
            [2, 2, 3, 5, 6][position],
            [2, 2, 2, 3, 5][position],
        ]
    assert slider.active == 4
    last = role_emergence.plot_roles_by_layer(heads(), COURSE[COURSE["step"] == 2048], ["previous-token"])
    assert not last.layout.sliders
    assert last.layout.height < figure.layout.height
    assert tuple(trace.name for trace in figure.data if trace.visible) == TRAININGS


def test_steps_within_two_decades_are_on_a_linear_axis() -> None:
    one_training = COURSE[(COURSE["training"] == "rope-s0") & (COURSE["step"] < 100)]
    figure = role_emergence.plot_training_by_layer(heads(), "previous_token", one_training)
    assert list(figure.data[0].x) == [0, 1, 16]


def test_without_data_the_figures_are_empty() -> None:
    empty = COURSE.head(0)
    for figure in (
        role_emergence.plot_training_by_layer(heads(), "previous_token", empty),
        role_emergence.plot_training_by_layer(heads().drop(columns="previous_token"), "previous_token", COURSE),
        role_emergence.plot_role_counts(heads().assign(previous_token=np.nan), COURSE, ["previous-token"]),
        role_emergence.plot_roles_by_layer(heads().assign(previous_token=np.nan), COURSE, ["previous-token"]),
        role_emergence.plot_role_onsets(role_onsets(heads(), empty, ["previous-token"]), TRAININGS, STEPS),
    ):
        assert not figure.data

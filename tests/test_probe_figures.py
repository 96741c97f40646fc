"""Figures and findings of the window and scaling probes, and the report of a run without models."""

import math
from pathlib import Path

import pytest

from headscope import rendering
from headscope.rendering import assembly
from headscope.results.collection import all_results
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner as study
from headscope.study.config import build_study
from probes.scaling import view as scaling
from probes.window import view as window
from probes.window.results import SCHEME_NAMES, accuracy_by_width, mass_bounds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = {
        "name": "probes",
        "models": {},
        "window": {"center": 32, "widths": [1, 2, 4], "seeds": 3, "steps": 400},
        "scaling": {"lengths": [100, 1000], "seeds": 4},
    }
    return study.run_study(build_study(plan), tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_the_window_and_scaling_probes_write_one_valid_run(run: Run) -> None:
    assert set(run.tables) == {"window", "window_pairs", "scaling"}
    assert validate(run) == []


@pytest.mark.slow
def test_accuracy_lines_are_means_over_seeds(run: Run) -> None:
    figure = window.plot_accuracy_by_width(run.window)
    means = accuracy_by_width(run.window).set_index(["scheme", "width"])["accuracy"]
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines+markers"}
    assert list(lines) == list(SCHEME_NAMES.values())
    for scheme, name in SCHEME_NAMES.items():
        assert list(lines[name].x) == [1, 2, 4]
        assert list(lines[name].y) == pytest.approx(list(means[scheme]))


@pytest.mark.slow
def test_dominant_frequencies_are_medians_over_seeds(run: Run) -> None:
    lines = {trace.name: trace for trace in window.plot_dominant_frequency(run.window).data}
    assert set(lines) == set(SCHEME_NAMES.values()) - {"NoPE"}
    rows = run.window.query("scheme == 'learned' and width == 4")["dominant_theta"]
    assert lines["learned frequencies"].y[2] == pytest.approx(float(rows.median()))


def test_mass_points_are_the_models_that_solve_the_task_with_the_bounds(run: Run) -> None:
    solved = run.window[(run.window["accuracy"] >= 0.99) & (run.window["scheme"] != "nope")]
    assert len(solved), "the probe must solve narrow windows at this size"
    figure = window.plot_frequency_mass(run.window)
    points = [value for trace in figure.data if trace.mode == "markers" for value in trace.y]
    assert sorted(points) == pytest.approx(sorted(solved["frequency_mass"].astype(float)))
    bounds = mass_bounds(run.window)
    assert bounds is not None
    line_names = " ".join(trace.name for trace in figure.data if trace.mode == "lines")
    assert f"C₁ = {bounds.c1:.3g}" in line_names
    assert f"C₂ = {bounds.c2:.3g}" in line_names


def test_pair_profile_shows_the_stored_logit_of_each_pair_and_distance(run: Run) -> None:
    heatmap = window.plot_pair_profile(run.window_pairs, "learned", 2, 32).data[0]
    rows = run.window_pairs.query("scheme == 'learned' and width == 2 and pair == 1 and distance == 40")
    assert heatmap.z[1][list(heatmap.x).index(40)] == pytest.approx(float(rows["logit"].iloc[0]))


def test_convergence_lines_and_findings_are_geometric_mean_ratios(run: Run) -> None:
    figure = scaling.plot_convergence(run.scaling, "nope")
    rows = run.scaling.query("scheme == 'nope' and context_length == 1000").astype({"exponent": float})
    line = next(trace for trace in figure.data if trace.name.startswith("L^0.9"))
    expected = math.exp(sum(map(math.log, rows[rows["exponent"].round(3) == 0.9]["ratio"])) / 4)
    assert line.y[list(line.x).index(1000)] == pytest.approx(expected)
    assert figure.layout.yaxis.title.text == "geometric mean of ESS / target"
    target = {"scheme": "nope", "beta": 2.0, "exponent": 0.9, "context_length": 1000}
    (ratio,) = [result for result in all_results(run) if result.where == target]
    assert (ratio.value, ratio.n) == (pytest.approx(expected), 4)
    assert ratio.low < ratio.value < ratio.high


def test_window_results_are_those_of_the_trained_models(run: Run) -> None:
    widths = accuracy_by_width(run.window)
    results = {(result.question, result.where.get("scheme")): result for result in all_results(run)}
    for scheme, rows in widths.groupby("scheme", observed=True):
        name, worst = SCHEME_NAMES[str(scheme)], rows.loc[rows["accuracy"].idxmin()]
        assert results["window.solved", name].value == rows["solved"].sum()
        assert results["window.accuracy", name].value == pytest.approx(rows["accuracy"].mean())
        lowest = results["window.lowest_accuracy", name]
        assert lowest.value == pytest.approx(worst["accuracy"])
        assert lowest.low <= worst["low"], "it is the lowest of three widths"
        assert lowest.high >= min(worst["high"], 1)
    assert results["window.mass_by_width", None].n == 3
    keys = [result.key for result in all_results(run)]
    assert len(keys) == len({*keys})


@pytest.mark.parametrize(
    "draw", [window.plot_accuracy_by_width, window.plot_frequency_mass, window.plot_dominant_frequency]
)
def test_an_empty_window_table_gives_a_figure_with_the_reason(run: Run, draw) -> None:
    figure = draw(run.window.head(0))
    assert (len(figure.data), len(figure.layout.annotations)) == (0, 1)


def test_a_run_without_models_has_a_report_of_its_probes(run: Run, tmp_path: Path) -> None:
    assert set(assembly.results_by_topic(run)) == {"Needle retrieval from a window", "Scaling theorems"}
    assert set(assembly.collect_chapters(assembly.render_context(run))) == {
        "Needle retrieval from a window",
        "Scaling theorems",
    }
    page = rendering.write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Needle retrieval from a window" in page
    assert "Heads worth a closer look" not in page
    assert "NaN" not in page.split("<main>")[1].split("</main>")[0]

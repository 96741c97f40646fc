"""What the app states is true of the view: scales, units, names of files, damaged runs, and refused requests."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flask.testing import FlaskClient
from support.synthetic_runs import synthetic_run

from dashboards import export
from dashboards.app import MAX_REQUEST_BYTES, create_app
from dashboards.controls import build_controls, build_run_control
from dashboards.layout import page_header, resolve_url
from dashboards.view_state import ViewState
from headscope.errors import BadRun
from headscope.plots import head_matrices as head_figures
from headscope.rendering.blocks import Chart
from headscope.runs.column_metadata import format_number, is_role_measured
from headscope.runs.run import Run

TINY = {"layers": 3, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), **TINY, probes=["measure"])


@pytest.fixture
def client(run: Run) -> FlaskClient:
    return create_app(run.path.parent).server.test_client()


def matrix(run: Run, **query: str) -> Chart:
    return next(block for block in resolve_url("/heads", query)[3].sections[""] if isinstance(block, Chart))


def test_filters_keep_the_colour_scale(client: FlaskClient, run: Run) -> None:
    with client.application.app_context():
        whole, part = (
            matrix(run, stat="growth", model="base", **filters).figure.data[0] for filters in ({}, {"layers": "1-1"})
        )
    assert np.isnan(part.z[0]).all()
    assert (part.zmin, part.zmax) == (whole.zmin, whole.zmax)


def test_values_beyond_the_scale_are_marked_in_the_cell_and_at_the_colour_bar() -> None:
    keys = {"layer": np.repeat(np.arange(15), 15), "head": np.tile(np.arange(15), 15), "kv_group": 0}
    values = np.r_[0.62, np.linspace(-0.05, 0.05, 224)]
    heads = pd.DataFrame({"model": "base", **keys, "next_token_attribution": values})
    figure = head_figures.plot_matrix(heads, "next_token_attribution", "base")
    assert figure.data[0].zmax < 0.1
    assert "max +0.62" in figure.data[0].colorbar.ticktext[-1]
    marks = [(annotation.text, annotation.x, annotation.y) for annotation in figure.layout.annotations]
    assert any("▲" in text and (x, y) == (0, 0) for text, x, y in marks)


def test_a_role_that_was_not_measured_is_no_filter(client: FlaskClient, run: Run) -> None:
    with client.application.app_context():
        page, _, view, _ = resolve_url("/heads", {})
        controls = {
            item.id["control"]: item
            for item in build_controls(page, run, view)
            if isinstance(getattr(item, "id", None), dict)
        }
    offered = {option["value"] for option in controls["role"].data}
    assert "local" in offered
    assert "retrieval" not in offered
    assert all(is_role_measured(run.heads, name) for name in offered)


def test_a_damaged_run_is_marked_in_the_selector(tmp_path: Path) -> None:
    whole, broken = (synthetic_run(tmp_path, **TINY, seed=seed, probes=["measure"]) for seed in (0, 1))
    (broken.path / "attention.parquet").write_bytes(b"PAR1")
    with create_app(tmp_path).server.app_context():
        with pytest.raises(BadRun):  # tables are checked when their run is opened
            resolve_url("/heads", {"run": broken.path.name})
        selector = build_run_control(resolve_url("/heads", {"run": whole.path.name})[1])
    labels = {option["value"]: option["label"] for option in selector.data}
    assert labels[broken.path.name].endswith("(damaged)")
    assert not labels[whole.path.name].endswith("(damaged)")


def test_the_selector_of_runs_is_sent_again_only_when_a_run_was_added(tmp_path: Path) -> None:
    synthetic_run(tmp_path, **TINY, probes=["measure"])
    client = create_app(tmp_path).server.test_client()

    def response(path: str, state: dict[str, Any] | None) -> dict[str, Any]:
        names = ("content.children", "run-control.children", "controls.children", "page-state.data")
        body = {
            "output": f"..{'...'.join(names)}..",
            "outputs": [dict(zip(("id", "property"), name.split("."), strict=True)) for name in names],
            "inputs": [
                {"id": "url", "property": "pathname", "value": path},
                {"id": "url", "property": "search", "value": ""},
            ],
            "state": [{"id": "page-state", "property": "data", "value": state}],
            "changedPropIds": ["url.pathname"],
        }
        answer: dict[str, Any] = client.post("/_dash-update-component", json=body).get_json()["response"]
        return answer

    first = response("/heads", None)
    assert len(first["run-control"]["children"]["props"]["data"]) == 1
    second = response("/compare", first["page-state"]["data"])
    assert "run-control" not in second
    assert "controls" in second
    synthetic_run(tmp_path, **TINY, seed=1, probes=["measure"])
    third = response("/heads", second["page-state"]["data"])
    assert len(third["run-control"]["children"]["props"]["data"]) == 2


def test_the_browser_learns_of_a_run_that_finishes_later(tmp_path: Path) -> None:
    client = create_app(tmp_path).server.test_client()
    assert client.get("/newest-run").json == {}
    later = synthetic_run(tmp_path, **TINY, probes=["measure"])
    assert client.get("/newest-run").json["name"] == later.path.name


@pytest.mark.parametrize("path", ["/", "/heads", "/head/0.0", "/compare", "/runs"])
@pytest.mark.parametrize(
    "parameter", ["model", "models", "stat", "baseline", "layers", "min", "max", "role", "heads", "sort", "statistic"]
)
def test_a_parameter_that_cannot_be_used_is_named_on_the_page(run: Run, path: str, parameter: str) -> None:
    with create_app(run.path.parent).server.app_context():
        page, opened, view, content = resolve_url(path, {parameter: "no-such"})
        header = str(page_header(page, opened, content, view))
    takes_others = path.startswith("/head/") and parameter == "statistic"  # its explorers read other parameters
    assert takes_others or "no-such" in header or f": {parameter}." in header


def test_filters_reach_every_chart_of_the_page_of_heads(run: Run) -> None:
    with create_app(run.path.parent).server.app_context():
        *_, content = resolve_url("/heads", {"layers": "1-1"})
        (chart,) = content.sections["Heads with similar statistics"]
    layers = {point[0] for trace in chart.figure.data for point in trace.customdata}
    assert layers == {1}


def test_long_requests_are_refused_and_deep_brackets_are_ignored(client: FlaskClient, run: Run) -> None:
    answer = client.post(
        "/_dash-update-component", data=b"x" * (MAX_REQUEST_BYTES + 1), content_type="application/json"
    )
    assert answer.status_code == 413
    assert answer.text == "the request is longer than 1,000,000 bytes"
    assert ViewState.from_query({"column_filters": "[" * 100_000}, run).column_filters == {}


def test_a_file_name_has_runs_and_filters(run: Run) -> None:
    view = ViewState.from_query({"layers": "1-2", "model": "base"}, run)
    assert export.file_name_suffix(run, view) == "synthetic-in-layers-1-to-2"


def test_a_value_has_one_text_whatever_its_type() -> None:
    for value in np.arange(10_005, 10_000_000, 50_010) / 1e7:  # many end in 5 at the fourth decimal
        assert format_number(np.float64(value)) == format_number(float(value))
    assert format_number(np.float64(0.8625)) == "0.863"

"""Figures carry the numbers of the tables, say their units, and never fail on what is missing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headscope.figures import axes, compare, heads, layers, lengths, loss, rotary, style
from headscope.runs.bins import middle
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn", "adarope"))


def shown(figure) -> str:
    """All text that a figure shows or hovers."""
    return figure.to_json()


def test_matrix_shows_every_head_in_log_colour_with_its_value_and_unit_on_hover(run: Run) -> None:
    figure = heads.matrix(run.heads, "ess2_1024", "yarn")
    trace = figure.data[0]
    row = run.heads.query("model == 'yarn' and layer == 2 and head == 5").iloc[0]
    assert trace.z.shape == (4, 6)
    assert trace.z[2][5] == pytest.approx(np.log10(row["ess2_1024"]))
    assert trace.customdata[2][5].tolist() == pytest.approx([2, 5, row["kv_group"], row["ess2_1024"]])
    assert "tokens" in trace.hovertemplate
    assert trace.colorbar.title.text == "tokens"


def test_change_is_a_ratio_for_lengths_and_a_difference_otherwise(run: Run) -> None:
    table = run.heads.set_index(["model", "layer", "head"])
    ratio = heads.change(run.heads, "ess2_1024", "yarn", "base").data[0]
    expected = table.loc[("yarn", 1, 3), "ess2_1024"] / table.loc[("base", 1, 3), "ess2_1024"]
    assert ratio.customdata[1][3][3] == pytest.approx(expected)
    assert ratio.z[1][3] == pytest.approx(np.log10(expected))
    assert ratio.zmin == -ratio.zmax
    difference = heads.change(run.heads, "growth", "yarn", "base").data[0]
    assert difference.z[0][1] == pytest.approx(
        table.loc[("yarn", 0, 1), "growth"] - table.loc[("base", 0, 1), "growth"]
    )


def test_boxes_hold_minimum_quartiles_maximum_and_mean_over_heads(run: Run) -> None:
    boxes = [trace for trace in heads.spread(run.heads, "cov").data if trace.type == "box"]
    values = run.heads.loc[run.heads["model"] == "base", "cov"]
    told = [boxes[0][key][0] for key in ("lowerfence", "q1", "median", "q3", "upperfence", "mean")]
    assert told == pytest.approx([*values.quantile([0, 0.25, 0.5, 0.75, 1]), values.mean()])
    assert [box.name for box in boxes] == ["base", "yarn", "adarope"]


def test_scatter_against_the_base_has_a_panel_per_method_and_equal_axes(run: Run) -> None:
    figure = compare.against(run.heads, "ess2_1024", "base")
    points = [trace for trace in figure.data if trace.mode == "markers"]
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    base = run.heads[run.heads["model"] == "base"]["ess2_1024"].to_numpy()
    yarn = run.heads[run.heads["model"] == "yarn"]["ess2_1024"].to_numpy()
    assert len(points) == len(lines) == 2
    np.testing.assert_allclose(points[0].x, base)
    np.testing.assert_allclose(points[0].y, yarn)
    assert all(list(line.x) == list(line.y) for line in lines)
    assert figure.layout.xaxis.range == figure.layout.yaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"


def test_growth_lines_average_ln_ess2_over_documents_by_rows(run: Run) -> None:
    figure = lengths.growth(run.attention, [(1, 2), (3, 0)])
    line = next(trace for trace in figure.data if trace.name == "yarn")
    rows = run.attention.query("model == 'yarn' and layer == 1 and head == 2 and context_length == 1024")
    visible = int(rows["visible"].max())
    mine = rows[rows["visible"] == visible]
    assert line.y[-1] == pytest.approx(np.exp(np.average(mine["log_ess2"].astype(float), weights=mine["rows"])))
    assert line.x[-1] == pytest.approx(float(middle(visible, 1024)))
    assert [trace.hovertemplate.split("<")[0] for trace in figure.data if trace.name is None] == [
        "slope 1: uniform attention",
        "slope 0",
    ] * 2


def test_spectrum_shows_log_theta_over_usage_with_error_bars(run: Run) -> None:
    figure = rotary.spectrum(run.pairs, 0, 1)
    above, below = figure.data[0], figure.data[1]
    rows = run.pairs.query("model == 'base' and layer == 0 and head == 1 and context_length == 1024 and pair == 3")
    assert above.y[3] == pytest.approx(np.log10(float(rows["theta"].iloc[0])))
    assert below.y[3] == pytest.approx(rows["mean_abs"].astype(float).mean())
    assert below.error_y.array[3] == pytest.approx(rows["mean_abs"].astype(float).sem(), rel=1e-5)
    assert "logits" in below.hovertemplate
    assert (above.yaxis, below.yaxis) == ("y", "y2")


def test_one_document_takes_the_stored_standard_error(run: Run) -> None:
    single = run.pairs[run.pairs["doc"] == "synthetic/0"]
    row = single.query("model == 'base' and layer == 0 and head == 1 and context_length == 1024 and pair == 3").iloc[0]
    assert rotary.spectrum(single, 0, 1).data[1].error_y.array[3] == pytest.approx(row["mean_abs_se"])


def test_pairs_that_do_not_rotate_leave_gaps(run: Run) -> None:
    still = run.pairs.assign(theta=np.float32(0))
    assert np.isnan(rotary.spectrum(still, 0, 1).data[0].y).all()
    positions = run.positions.assign(log_theta=-np.inf)
    assert "no pair of this model rotates" in shown(rotary.frequency_change(positions, "base"))


def test_profile_is_pair_by_distance_at_the_longest_length(run: Run) -> None:
    trace = rotary.profile(run.distance, 1, 2, "base").data[0]
    rows = run.distance.query("model == 'base' and layer == 1 and head == 2 and context_length == 1024")
    cell = rows[(rows["pair"] == 4) & (rows["distance"] == 16)].iloc[0]
    at = list(trace.customdata[4]).index(16)
    assert trace.z[4][at] == pytest.approx(cell["mean_signed"])
    assert trace.zmid == 0


def test_frequency_change_is_the_mean_over_key_groups(run: Run) -> None:
    trace = rotary.frequency_change(run.positions, "adarope").data[0]
    rows = run.positions.query("model == 'adarope' and layer == 2 and pair == 7")
    assert trace.z[2][7] == pytest.approx((rows["log_theta"] - rows["log_theta_base"]).mean(), abs=1e-6)


def test_by_layer_is_a_geometric_mean_where_the_statistic_is_logarithmic(run: Run) -> None:
    figure = layers.by_layer(run.heads, "ess2_1024")
    line = next(trace for trace in figure.data if trace.name == "base")
    mine = run.heads.query("model == 'base' and layer == 3")["ess2_1024"]
    assert line.y[3] == pytest.approx(np.exp(np.log(mine).mean()))
    assert figure.layout.yaxis.type == "log"


def test_infinite_values_are_left_out_of_a_layer(run: Run) -> None:
    figure = layers.by_layer(run.heads.assign(effective_base=np.inf), "effective_base")
    assert all(len(trace.x) == 0 for trace in figure.data)


def test_training_steps_follow_the_median_and_the_chosen_heads(run: Run) -> None:
    figure = layers.over_steps(run.heads, "growth", {"yarn": 50, "base": 10}, [(0, 1)])
    median = next(trace for trace in figure.data if trace.name == "median of all heads")
    chosen = figure.data[-1]
    assert list(median.x) == list(chosen.x) == [10, 50]
    assert median.y[1] == pytest.approx(run.heads[run.heads["model"] == "yarn"]["growth"].median())
    assert chosen.y[0] == pytest.approx(
        run.heads.query("model == 'base' and layer == 0 and head == 1")["growth"].item()
    )


def test_loss_is_a_mean_over_documents_and_its_difference_is_paired(run: Run) -> None:
    mean = next(trace for trace in loss.by_position(run.nll).data if trace.name == "yarn")
    rows = run.nll[(run.nll["model"] == "yarn") & (run.nll["context_length"] == 1024)]
    assert mean.y[0] == pytest.approx(rows[rows["position"] == mean.x[0]]["nll"].mean())
    difference = loss.difference(run.nll, "base")
    named = {trace.name: trace for trace in difference.data if trace.name}
    assert set(named) == {"yarn", "adarope"}
    np.testing.assert_allclose(named["adarope"].y, 0.1, atol=1e-5)


@pytest.mark.parametrize(
    "figure",
    [
        lambda frame: heads.matrix(frame, "growth", "base"),
        lambda frame: heads.change(frame, "growth", "yarn", "base"),
        lambda frame: heads.spread(frame, "cov"),
        lambda frame: compare.against(frame, "ess2_1024", "base"),
        lambda frame: lengths.growth(frame, [(0, 0)]),
        lambda frame: layers.by_layer(frame, "gamma"),
        lambda frame: layers.over_steps(frame, "growth", {"base": 1}),
        lambda frame: rotary.spectrum(frame, 0, 0),
        lambda frame: rotary.profile(frame, 0, 0, "base"),
        lambda frame: rotary.frequency_change(frame, "base"),
        lambda frame: loss.by_position(frame),
        lambda frame: loss.difference(frame, "base"),
    ],
)
def test_a_table_without_rows_or_columns_gives_a_figure_that_says_why(run: Run, figure) -> None:
    for table in (run.heads, run.attention, run.pairs, run.distance, run.positions, run.nll):
        assert figure(table.iloc[:0]).layout.annotations[0].text.startswith(("no rows to show", "not measured: "))
        assert figure(table[["model"]]).layout.annotations[0].text.startswith("not measured: ")
    assert figure(pd.DataFrame()).layout.annotations[0].text.startswith("not measured: model, ")


def test_a_model_keeps_its_colour_when_others_are_filtered_out(run: Run) -> None:
    everyone = style.looks(run.heads)
    alone = style.looks(run.heads[run.heads["model"] == "adarope"])
    assert alone == {"adarope": everyone["adarope"]}
    assert len({look.colour for look in everyone.values()}) == 3


def test_labels_cannot_smuggle_html_into_a_figure(run: Run) -> None:
    hostile = '<a href="https://example.org">x</a>'
    table = run.heads.assign(model=run.heads["model"].cat.rename_categories({"base": hostile}))
    for figure in (
        heads.matrix(table, "growth", hostile),
        heads.spread(table),
        compare.against(table, "growth", hostile),
    ):
        assert "&lt;a href" in figure.to_json()
        assert "<a href" not in figure.to_json().replace("\\u003c", "<")


def test_log_ticks_are_round() -> None:
    assert axes.log_ticks([3, 60])["ticktext"] == ["2", "5", "10", "20", "50", "100"]
    assert axes.log_ticks([1e-6, 1])["ticktext"][0] == "10<sup>−6</sup>"
    assert axes.log_ticks([0.9, 1 / 0.9])["ticktext"] == ["0.9", "0.949", "1", "1.05", "1.11"]
    assert axes.log_ticks([np.nan, 0, np.inf]) == {}


def test_figures_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, headscope.figures.heads, headscope.figures.loss, headscope.figures.rotary, headscope.report;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)

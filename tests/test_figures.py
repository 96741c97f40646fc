"""Figures show the numbers of the tables with their units, and state the reason if they have nothing to plot."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.colors import unlabel_rgb
from scipy.stats import t
from support.synthetic_runs import synthetic_run

from headscope.base.bins import bin_center
from headscope.plots import (
    axes,
    curves,
    head_matrices,
    head_scatter,
    layers,
    learned_frequencies,
    rank_shift,
    rotary,
    style,
)
from headscope.rendering import html_page
from headscope.runs.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn", "adarope"))


def figure_text(figure) -> str:
    """All text of a figure, hover text included."""
    return figure.to_json()


@pytest.mark.slow
def test_matrix_shows_every_head_with_log_colour_and_its_value_and_unit_on_hover(run: Run) -> None:
    figure = head_matrices.plot_matrix(run.heads, "ess2_1024", "yarn")
    trace = figure.data[0]
    row = run.heads.query("model == 'yarn' and layer == 2 and head == 5").iloc[0]
    assert trace.z.shape == (4, 6)
    assert trace.z[2][5] == pytest.approx(np.log10(row["ess2_1024"]))
    assert trace.customdata[2][5].tolist() == pytest.approx([2, 5, row["kv_group"], row["ess2_1024"]])
    assert "tokens" in trace.hovertemplate
    assert trace.colorbar.title.text == "tokens"


@pytest.mark.slow
def test_change_is_a_ratio_for_lengths_and_a_difference_otherwise(run: Run) -> None:
    table = run.heads.set_index(["model", "layer", "head"])
    ratio = head_matrices.plot_change(run.heads, "ess2_1024", "yarn", "base").data[0]
    expected = table.loc[("yarn", 1, 3), "ess2_1024"] / table.loc[("base", 1, 3), "ess2_1024"]
    assert ratio.customdata[1][3][3] == pytest.approx(expected)
    assert ratio.z[1][3] == pytest.approx(np.log10(expected))
    assert ratio.zmin == -ratio.zmax
    difference = head_matrices.plot_change(run.heads, "growth", "yarn", "base").data[0]
    assert difference.z[0][1] == pytest.approx(
        table.loc[("yarn", 0, 1), "growth"] - table.loc[("base", 0, 1), "growth"]
    )


@pytest.mark.slow
def test_boxes_hold_minimum_quartiles_maximum_and_mean_over_heads(run: Run) -> None:
    boxes = [trace for trace in head_matrices.plot_distribution(run.heads, "cov").data if trace.type == "box"]
    values = run.heads.loc[run.heads["model"] == "base", "cov"]
    box_values = [boxes[0][key][0] for key in ("lowerfence", "q1", "median", "q3", "upperfence", "mean")]
    assert box_values == pytest.approx([*values.quantile([0, 0.25, 0.5, 0.75, 1]), values.mean()])
    assert [box.name for box in boxes] == ["base", "yarn", "adarope"]


def test_colour_bar_of_few_layers_has_integer_ticks(run: Run) -> None:
    assert head_scatter.plot_against_baseline(run.heads, "ess2_1024", "base").layout.coloraxis.colorbar.dtick == 1
    deep = run.heads.assign(layer=run.heads["layer"] * 10)
    assert head_scatter.plot_against_baseline(deep, "ess2_1024", "base").layout.coloraxis.colorbar.dtick is None


def test_baseline_scatter_has_a_panel_per_model_and_equal_axes(run: Run) -> None:
    figure = head_scatter.plot_against_baseline(run.heads, "ess2_1024", "base")
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


def test_effective_length_averages_ln_ess2_over_documents_weighted_by_rows(run: Run) -> None:
    figure = curves.plot_effective_length(run.attention, [(1, 2), (3, 0)])
    line = next(trace for trace in figure.data if trace.name == "yarn")
    rows = run.attention.query("model == 'yarn' and layer == 1 and head == 2 and context_length == 1024")
    visible = int(rows["visible"].max())
    last_bin = rows[rows["visible"] == visible]
    assert line.y[-1] == pytest.approx(np.exp(np.average(last_bin["log_ess2"].astype(float), weights=last_bin["rows"])))
    assert line.x[-1] == pytest.approx(float(bin_center(visible, 1024)))
    assert [trace.hovertemplate.split("<")[0] for trace in figure.data if trace.name is None] == [
        "slope 1: uniform attention",
        "slope 0",
    ] * 2


def test_spectrum_shows_log_theta_over_usage_with_intervals(run: Run) -> None:
    figure = rotary.plot_spectrum(run.pairs, 0, 1)
    frequency, usage = figure.data[0], figure.data[1]
    rows = run.pairs.query("model == 'base' and layer == 0 and head == 1 and context_length == 1024 and pair == 3")
    values = rows["mean_abs"].astype(float)
    assert frequency.y[3] == pytest.approx(np.log10(float(rows["theta"].iloc[0])))
    assert usage.y[3] == pytest.approx(values.mean())
    assert len(values) == 3
    assert usage.error_y.array[3] == pytest.approx(values.sem() * t.ppf(0.975, 2), rel=1e-5)
    assert "logits" in usage.hovertemplate
    assert (frequency.yaxis, usage.yaxis) == ("y", "y2")


def test_two_documents_give_no_interval(run: Run) -> None:
    two = run.pairs[run.pairs["doc"] != "synthetic/0"]
    assert two["doc"].nunique() == 2
    assert np.isnan(rotary.plot_spectrum(two, 0, 1).data[1].error_y.array).all()


def test_pairs_without_rotation_are_gaps(run: Run) -> None:
    unrotated = run.pairs.assign(theta=np.float32(0))
    assert np.isnan(rotary.plot_spectrum(unrotated, 0, 1).data[0].y).all()
    positions = run.positions.assign(log_theta=-np.inf)
    empty = learned_frequencies.plot_frequency_change(positions, "base")
    assert (len(empty.data), len(empty.layout.annotations)) == (0, 1), "a reason in place of the data"


def test_pair_profile_is_pair_by_distance_at_the_longest_context(run: Run) -> None:
    trace = rotary.plot_pair_profile(run.distance, 1, 2, "base").data[0]
    rows = run.distance.query("model == 'base' and layer == 1 and head == 2 and context_length == 1024")
    cell = rows[(rows["pair"] == 4) & (rows["distance"] == 16)].iloc[0]
    column = list(trace.customdata[4]).index(16)
    assert trace.z[4][column] == pytest.approx(cell["mean_signed"])
    assert trace.zmid == 0


def test_frequency_change_is_the_mean_over_kv_groups(run: Run) -> None:
    trace = learned_frequencies.plot_frequency_change(run.positions, "adarope").data[0]
    rows = run.positions.query("model == 'adarope' and layer == 2 and pair == 7")
    assert trace.z[2][7] == pytest.approx((rows["log_theta"] - rows["log_theta_base"]).mean(), abs=1e-6)


def test_layers_are_ranked_by_rms_change_which_opposite_signs_do_not_cancel(run: Run) -> None:
    rows = run.positions[run.positions["model"] == "adarope"].reset_index(drop=True)
    sign = np.where(rows["kv_group"] % 2, 1.0, -1.0) * np.where(rows["layer"] == 2, 3.0, 1.0)
    positions = rows.assign(log_theta=rows["log_theta_base"] + 0.1 * sign)
    bars, dots = learned_frequencies.plot_layers_by_change(positions, "adarope").data
    assert next(layer for layer, *_ in bars.customdata) == 2
    assert list(bars.y) == pytest.approx([0.3, 0.1, 0.1, 0.1], rel=1e-5)
    assert len(dots.y) == len(rows.groupby(["layer", "kv_group"]))
    assert np.abs(learned_frequencies.plot_frequency_change(positions, "adarope").data[0].z).max() < 1e-6, (
        "a mean cancels"
    )


def test_matrices_of_all_models_share_one_scale_and_signed_ones_are_symmetric(run: Run) -> None:
    pair = [head_matrices.plot_matrix(run.heads, "growth", model).data[0] for model in ("base", "adarope")]
    assert len({(trace.zmin, trace.zmax) for trace in pair}) == 1
    changes = [head_matrices.plot_change(run.heads, "growth", model, "base").data[0] for model in ("yarn", "adarope")]
    assert len({(trace.zmin, trace.zmax) for trace in changes}) == 1
    signed = head_matrices.plot_matrix(run.heads, "influence_joint", "adarope").data[0]
    assert signed.zmin == -signed.zmax
    small = head_matrices.plot_small_matrices(run.heads, "growth")
    assert [trace.name for trace in small.data] == ["base", "yarn", "adarope"]
    assert small.layout.coloraxis.cmin == pair[0].zmin
    profiles = rotary.plot_pair_profiles(run.distance, 1, 2)
    assert profiles.layout.coloraxis.cmin == -profiles.layout.coloraxis.cmax
    assert all(trace.coloraxis == "coloraxis" for trace in (*small.data, *profiles.data))


def test_a_clipped_colour_bar_states_the_extremes_of_its_own_model(run: Run) -> None:
    heads = run.heads.fillna({"influence_joint": 0.0})
    outliers = heads["layer"].eq(0) & heads["head"].eq(0)
    for model, outlier in (("base", -70.0), ("adarope", 50.0)):
        heads.loc[outliers & (heads["model"] == model), "influence_joint"] = outlier
    all_heads = pd.concat([heads, *[heads[~outliers]] * 5])
    for model, stated, of_other in (("base", "min −70", "50"), ("adarope", "max +50", "70")):
        matrix = head_matrices.plot_matrix(heads, "influence_joint", model, all_heads).data[0]
        ticks = " ".join(matrix.colorbar.ticktext)
        assert stated in ticks
        assert of_other not in ticks


def test_frequencies_that_were_not_learned_have_the_name_of_their_model(run: Run) -> None:
    computed = run.positions.query("model == 'adarope'").assign(model="yarn")
    computed["log_theta_init"] = computed["log_theta"]
    assert [*trace_names(computed, "yarn")] == ["base", "yarn"]
    assert [*trace_names(run.positions, "adarope")] == ["base", "initialisation", "learned"]


def trace_names(positions: pd.DataFrame, model: str) -> dict[str, None]:
    figure = learned_frequencies.plot_learned_frequencies(positions, model, 1, 1)
    return dict.fromkeys(trace.name for trace in figure.data)


def test_logit_by_distance_is_the_sum_over_pairs(run: Run) -> None:
    line = next(trace for trace in rotary.plot_logit_by_distance(run.distance, 1, 2).data if trace.name == "yarn")
    rows = run.distance.query("model == 'yarn' and layer == 1 and head == 2 and context_length == 1024")
    index = list(line.customdata).index(16)
    assert line.y[index] == pytest.approx(rows[rows["distance"] == 16]["mean_signed"].astype(float).sum(), rel=1e-5)


def test_effective_length_of_one_head_has_a_band_over_documents(run: Run) -> None:
    figure = curves.plot_effective_length(run.attention.query("layer == 1 and head == 2"), [(1, 2)])
    low, high, line = figure.data[:3]
    assert all(a <= y <= b for a, y, b in zip(low.y, line.y, high.y, strict=True))
    few = run.attention[run.attention["doc"].isin(["synthetic/0", "synthetic/1"])]
    assert all(trace.fill is None for trace in curves.plot_effective_length(few, [(1, 2)]).data), (
        "two documents give no interval"
    )


def test_rank_shift_counts_ranks_and_marks_changes_beyond_noise(run: Run) -> None:
    changes = rank_shift.rank_changes(run.heads, "growth", "base", "adarope").set_index(["layer", "head"])
    wide = run.heads.set_index(["model", "layer", "head"])
    values = wide.loc["adarope", "growth"]
    for head, row in changes.iterrows():
        assert row["after_rank"] == (values > values[head]).sum() + 1
        assert row["after_best"] <= row["after_rank"] <= row["after_worst"]
        base, learned = wide.loc[("base", *head)], wide.loc[("adarope", *head)]
        is_beyond_noise = learned["growth_low"] > base["growth_high"] or learned["growth_high"] < base["growth_low"]
        assert (row["direction"] != 0) == is_beyond_noise
    top = [set(wide.loc[model, "growth"].nlargest(10).index) for model in ("base", "adarope")]
    assert rank_shift.top_overlap(changes) == len(top[0] & top[1])
    figure = rank_shift.plot_rank_shift(run.heads, "growth", "base", {(1, 2)})
    assert {(layer, head) for trace in figure.data for layer, head, _ in trace.customdata} == {(1, 2)}


def test_a_long_title_is_wrapped_and_the_top_margin_grows() -> None:
    short, long = (style.set_top_margin(style.new_figure("A title " * count)) for count in (2, 20))
    assert long.layout.title.text.count("<br>") == 2
    assert long.layout.title.text.replace("<br>", " ") + " " == "A title " * 20
    assert long.layout.margin.t - short.layout.margin.t == 2 * style.TITLE_LINE_HEIGHT
    assert "…" not in style.escape_label("x" * 90)


def test_by_layer_is_a_geometric_mean_for_a_logarithmic_statistic(run: Run) -> None:
    figure = layers.plot_by_layer(run.heads, "ess2_1024")
    line = next(trace for trace in figure.data if trace.name == "base")
    values = run.heads.query("model == 'base' and layer == 3")["ess2_1024"]
    assert line.y[3] == pytest.approx(np.exp(np.log(values).mean()))
    assert figure.layout.yaxis.type == "log"


def test_infinite_values_are_left_out_of_a_layer(run: Run) -> None:
    figure = layers.plot_by_layer(run.heads.assign(effective_base=np.inf), "effective_base")
    assert all(len(trace.x) == 0 for trace in figure.data)


def test_over_steps_shows_the_median_and_the_selected_heads(run: Run) -> None:
    figure = layers.plot_over_steps(run.heads, "growth", {"yarn": 50, "base": 10}, [(0, 1)])
    median = next(trace for trace in figure.data if trace.name == "median over all heads")
    selected = figure.data[-1]
    assert list(median.x) == list(selected.x) == [10, 50]
    assert median.y[1] == pytest.approx(run.heads[run.heads["model"] == "yarn"]["growth"].median())
    assert selected.y[0] == pytest.approx(
        run.heads.query("model == 'base' and layer == 0 and head == 1")["growth"].item()
    )


def test_step_zero_is_left_of_steps_that_span_decades(run: Run) -> None:
    figure = layers.plot_over_steps(run.heads, "growth", {"base": 0, "yarn": 1, "adarope": 500}, [(0, 1)])
    assert figure.layout.xaxis.type == "log"
    for trace in figure.data[2:]:  # after the band
        assert list(trace.x) == [0.5, 1, 500]
        assert list(trace.customdata) == [0, 1, 500]


def test_loss_is_a_mean_over_documents_and_the_difference_is_paired(run: Run) -> None:
    mean = next(trace for trace in curves.plot_loss_by_position(run.nll).data if trace.name == "yarn")
    rows = run.nll[(run.nll["model"] == "yarn") & (run.nll["context_length"] == 1024)]
    assert mean.y[0] == pytest.approx(rows[rows["position"] == mean.x[0]]["nll"].mean())
    difference = curves.plot_loss_difference(run.nll, "base")
    lines = {trace.name: trace for trace in difference.data if trace.name}
    assert set(lines) == {"yarn", "adarope"}
    np.testing.assert_allclose(lines["adarope"].y, 0.1, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "figure",
    [
        lambda frame: head_matrices.plot_matrix(frame, "growth", "base"),
        lambda frame: head_matrices.plot_change(frame, "growth", "yarn", "base"),
        lambda frame: head_matrices.plot_distribution(frame, "cov"),
        lambda frame: head_scatter.plot_against_baseline(frame, "ess2_1024", "base"),
        lambda frame: curves.plot_effective_length(frame, [(0, 0)]),
        lambda frame: rank_shift.plot_rank_shift(frame, "growth", "base"),
        lambda frame: head_matrices.plot_small_matrices(frame, "growth"),
        lambda frame: learned_frequencies.plot_layers_by_change(frame, "base"),
        lambda frame: rotary.plot_pair_profiles(frame, 0, 0),
        lambda frame: rotary.plot_logit_by_distance(frame, 0, 0),
        lambda frame: layers.plot_by_layer(frame, "gamma"),
        lambda frame: layers.plot_over_steps(frame, "growth", {"base": 1}),
        lambda frame: rotary.plot_spectrum(frame, 0, 0),
        lambda frame: rotary.plot_pair_profile(frame, 0, 0, "base"),
        lambda frame: learned_frequencies.plot_frequency_change(frame, "base"),
        lambda frame: curves.plot_loss_by_position(frame),
        lambda frame: curves.plot_loss_difference(frame, "base"),
    ],
)
def test_a_table_without_rows_or_columns_gives_a_figure_with_the_reason(run: Run, figure) -> None:
    for table in (run.heads, run.attention, run.pairs, run.distance, run.positions, run.nll):
        assert figure(table.iloc[:0]).layout.annotations[0].text.startswith(("no data to plot", "not measured: "))
        assert figure(table[["model"]]).layout.annotations[0].text.startswith("not measured: ")
    assert figure(pd.DataFrame()).layout.annotations[0].text.startswith("not measured: model, ")


def test_a_model_keeps_its_colour_when_others_are_filtered_out(run: Run) -> None:
    all_styles = style.model_styles(run.heads)
    filtered_styles = style.model_styles(run.heads[run.heads["model"] == "adarope"])
    assert filtered_styles == {"adarope": all_styles["adarope"]}
    assert len({model_style.colour for model_style in all_styles.values()}) == 3


def test_overlapping_bands_are_fainter(run: Run) -> None:
    style_of_two, style_of_eight = (
        style.model_styles(pd.DataFrame({"model": [f"model {index}" for index in range(count)]}))["model 0"]
        for count in (2, 8)
    )
    assert style_of_two.band_colour.endswith(",0.16)")
    assert style_of_eight.band_colour.endswith(",0.05)")
    assert style_of_two.band_colour[:-5] == style_of_eight.band_colour[:-5]
    assert style_of_two.fill_colour == style_of_eight.fill_colour == style_of_two.band_colour


def test_labels_cannot_inject_html_into_a_figure(run: Run) -> None:
    hostile = '<a href="https://example.org">x</a>'
    table = run.heads.assign(model=run.heads["model"].cat.rename_categories({"base": hostile}))
    for figure in (
        head_matrices.plot_matrix(table, "growth", hostile),
        head_matrices.plot_distribution(table),
        head_scatter.plot_against_baseline(table, "growth", hostile),
    ):
        assert "&lt;a href" in figure.to_json()
        assert "<a href" not in figure.to_json().replace("\\u003c", "<")


def test_log_ticks_are_round() -> None:
    assert axes.log_ticks([3, 60])["ticktext"] == ["2", "5", "10", "20", "50", "100"]
    assert axes.log_ticks([1e-6, 1])["ticktext"][0] == "10<sup>−6</sup>"
    assert axes.log_ticks([0.9, 1 / 0.9])["ticktext"] == ["0.9", "0.949", "1", "1.05", "1.11"]
    assert axes.log_ticks([np.nan, 0, np.inf]) == {}


def test_plots_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, headscope.plots.head_matrices, headscope.plots.curves, headscope.plots.rotary; "
        "import headscope.rendering; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_selected_heads_are_framed_in_every_matrix_and_the_axes_stay(run: Run) -> None:
    selected_heads = {(0, 5), (3, 0)}  # at the ends of both axes
    for figure, panels in (
        (head_matrices.plot_matrix(run.heads, "cov", "base"), 1),
        (head_matrices.plot_small_matrices(run.heads, "cov"), 3),
    ):
        head_scatter.highlight_heads(figure, selected_heads)
        frames = [trace for trace in figure.data if trace.type == "scatter"]
        assert len({frame.xaxis or "x" for frame in frames}) == panels
        for frame in frames:
            assert {*zip(frame.y, frame.x, strict=True)} == selected_heads
            axis = (frame.xaxis or "x").removeprefix("x")
            assert figure.layout[f"xaxis{axis}"].range == (-0.5, 5.5)
            assert figure.layout[f"yaxis{axis}"].range == (-0.5, 3.5)


def test_colours_of_an_ordered_series_are_visible_on_light_and_dark_pages() -> None:
    def luminance(colour: str) -> float:
        shares = [value / 255 for value in unlabel_rgb(colour)]
        linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    light, dark = 1.0, luminance("rgb(21,24,28)")
    for value in map(luminance, style.ordered_colours(9)):
        assert (light + 0.05) / (value + 0.05) >= 3
        assert (value + 0.05) / (dark + 0.05) >= 3


def test_ids_of_head_points_reach_the_browser_as_lists_and_are_not_checked_one_by_one() -> None:
    """plotly would check every number of a list: seconds for all heads of a large model."""
    ids = np.arange(3 * 4000).reshape(-1, 3)

    def checks(points: int) -> int:
        figure = go.Figure(go.Scatter(customdata=ids[:points]))
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            style.declare_head_points(figure)
        finally:
            sys.setprofile(None)
        assert json.loads(figure.to_json())["data"][0]["customdata"] == ids[:points].tolist()
        return counted

    checks(1)
    assert checks(4000) == checks(40)


@pytest.mark.parametrize(
    "plot",
    [
        lambda run: curves.plot_effective_length(run.attention, [(1, 2)]),
        lambda run: curves.plot_effective_length(run.attention, [(1, 2), (3, 0)]),
        lambda run: rotary.plot_spectrum(run.pairs, 1, 2),
        lambda run: rotary.plot_pair_profiles(run.distance, 1, 2),
        lambda run: rotary.plot_logit_by_distance(run.distance, 1, 2),
        lambda run: learned_frequencies.plot_learned_frequencies(run.positions, "adarope", 1, 0),
        lambda run: head_matrices.plot_matrix(run.heads, "growth", "yarn"),
        lambda run: head_matrices.plot_matrix(run.heads, "logit_scale", "yarn"),
    ],
)
def test_plotly_accepts_a_drafted_figure_and_stores_it_as_it_is(run: Run, plot: Callable[[Run], go.Figure]) -> None:
    figure = plot(run)
    assert len(figure.data)
    settings = {"data": [trace.to_plotly_json() for trace in figure.data], "layout": figure.layout.to_plotly_json()}
    assert go.Figure(settings).to_plotly_json() == figure.to_plotly_json()
    with pytest.raises(ValueError, match="nonsense"):
        figure.update_layout(nonsense=1)
    with pytest.raises(ValueError, match="Invalid value"):
        figure.update_traces(visible="sometimes")


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint64", "float32", "float64", "bool", "object"])
def test_arrays_are_packed_as_plotly_packs_them(dtype: str) -> None:
    numbers = np.array([[0, 1, 2], [3, 100, 1]]).astype(dtype)
    arrays = [numbers, numbers[:0], numbers.T, np.asarray(numbers[0] * 300 if dtype == "int64" else numbers[0])]
    arrays += [np.array([2**40, -1]), np.array([2**31 - 1]), np.array([1.5, np.nan])]
    for array in arrays:
        figure = go.Figure([{"type": "scatter", "customdata": array, "y": [1, 2]}])
        figure.layout.xaxis.range = [0, 1]
        assert html_page.figure_values(figure) == html_page.to_json_values(figure.to_plotly_json())

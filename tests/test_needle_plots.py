"""Tables, figures and sentences of the needle probe contain the numbers of the stored trials."""

import html
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run

from headscope.plots import head_matrices
from headscope.rendering import assembly, html_page
from headscope.results.result import Result
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.runs.summary import model_table
from probes.needle import PROBE, plots, view
from probes.needle import results as needle_results
from probes.needle.analysis import (
    model_agreement,
    retrieval_summary,
    scores_by_group,
    scores_by_seed,
    seed_agreement,
    success_rates,
)
from probes.needle.declaration import TABLES, NeedleOptions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"))


def mean_scores(run: Run, model: str, **filters: object) -> pd.Series:
    """Mean strict score by (layer, head) over the successful trials, by plain selection."""
    trials = run.needles[(run.needles["model"] == model) & (run.needles["mode"] == "strict") & run.needles["success"]]
    for name, value in filters.items():
        trials = trials[trials[name] == value]
    keys = ["needle", "context_length", "depth", "seed"]
    successful = set(trials[keys].itertuples(index=False, name=None))
    rows = run.retrieval[(run.retrieval["model"] == model) & (run.retrieval["mode"] == "strict")]
    is_successful = [key in successful for key in rows[keys].itertuples(index=False, name=None)]
    return rows[is_successful].astype({"score": "float64"}).groupby(["layer", "head"])["score"].mean()


def results(run: Run, question: str) -> list[Result]:
    """Results of the probe that answer a question."""
    return [result for result in PROBE.results(run) if result.question == f"retrieval.{question}"]


def chart_titles(run: Run) -> set[str]:
    """Titles of the charts of the probe."""
    groups = view.charts(assembly.render_context(run))
    return {chart.figure.layout.title.text for group in groups for chart in group.charts}


@pytest.mark.slow
def test_head_table_contains_the_mean_score_over_successful_trials(run: Run) -> None:
    for model in run.models:
        rows = run.heads[run.heads["model"] == model].set_index(["layer", "head"])
        expected = mean_scores(run, model)
        np.testing.assert_allclose(rows["retrieval"], expected, rtol=1e-6)
        assert (rows["retrieval_low"] <= rows["retrieval"]).all()
        assert (rows["retrieval"] <= rows["retrieval_high"]).all()
        assert rows["retrieval_high"].max() <= 1
        assert (rows["retrieval_control"] == 0).all()
        assert rows["retrieval_mass"].between(0, 1).all()


@pytest.mark.slow
def test_model_without_success_has_control_scores_but_no_retrieval_score(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    needles = run.needles.assign(success=run.needles["success"] & (run.needles["model"] != "yarn"))
    failed_run = Run(run.path, run.manifest)
    monkeypatch.setitem(failed_run._frames, "needles", needles)
    yarn = failed_run.heads[failed_run.heads["model"] == "yarn"]
    assert yarn["retrieval"].isna().all()
    assert yarn["retrieval_control"].notna().all()
    summary = retrieval_summary(failed_run).set_index("model")
    assert summary.loc["yarn", "successes"] == 0
    assert np.isnan(summary.loc["yarn", "above"])
    assert np.isnan(summary.loc["yarn", "top"])
    (warning,) = results(failed_run, "no_success")
    assert (warning.model, warning.n) == ("yarn", 32)
    assert {result.model for result in results(failed_run, "top_head")} == {"base"}
    titles = chart_titles(failed_run)
    assert "Retrieval score: base" in titles
    assert "Retrieval score: yarn" not in titles


@pytest.mark.slow
def test_success_rates_have_the_wilson_interval(run: Run) -> None:
    rates = success_rates(run.needles, ["model", "mode", "context_length", "depth"])
    row = rates.loc[("base", "strict", 256, 0)]
    n, p, z = row["trials"], row["share"], 1.959963984540054
    centre, half_width = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert n == 4
    assert row["low"] == pytest.approx((centre - half_width) / (1 + z * z / n))
    assert row["high"] == pytest.approx((centre + half_width) / (1 + z * z / n))


def test_retrieval_summary_counts_heads_above_the_threshold_and_at_zero(run: Run) -> None:
    summary = retrieval_summary(run).set_index("model")
    for model in run.models:
        scores = mean_scores(run, model)
        assert summary.loc[model, "above"] == pytest.approx((scores > 0.1).mean())
        assert summary.loc[model, "zero"] == pytest.approx((scores == 0).mean())
        assert (summary.loc[model, "layer"], summary.loc[model, "head"]) == scores.idxmax()
        assert summary.loc[model, "top"] == pytest.approx(scores.max())


def test_top_head_has_the_mean_over_trials_an_interval_for_the_choice_and_its_followers(run: Run) -> None:
    scores = mean_scores(run, "base").sort_values(ascending=False, kind="stable")
    (top,) = [result for result in results(run, "top_head") if result.model == "base"]
    assert (top.layer, top.head) == scores.index[0]
    assert top.value == pytest.approx(scores.iloc[0])
    assert top.value == pytest.approx(np.mean([*top.by_sample.values()]))
    row = run.heads[(run.heads["model"] == "base") & (run.heads["layer"] == top.layer)].set_index("head").loc[top.head]
    assert top.low < row["retrieval_low"], "the interval of the largest of 24 heads is wider than that of one head"
    assert [*top.details["next"]] == [f"L{layer}H{head}" for layer, head in scores.index[1:5]]


def test_keys_are_unique_and_every_result_has_a_sentence(run: Run) -> None:
    every_result = [*PROBE.results(run)]
    assert len({result.key for result in every_result}) == len(every_result)
    assert {result.model for result in every_result} == {"", *run.models}
    for result in every_result:
        text = sentence(result)
        assert not result.model or result.model in text
        assert "{" not in text


@pytest.mark.slow
def test_overview_has_one_row_per_model_and_warnings_name_models_without_success(run: Run) -> None:
    overview = needle_results.overview(run)
    assert overview is not None
    layer, head = mean_scores(run, "base").idxmax()
    assert tuple(overview.data.iloc[0][["layer", "head"]]) == (layer, head)
    assert [*overview.data["model"]] == run.models
    assert results(run, "no_success") == []
    failed_run = Run(run.path, run.manifest)
    failed_run._frames["needles"] = run.needles.assign(success=False)
    assert [(result.model, result.n) for result in results(failed_run, "no_success")] == [
        (label, 32) for label in run.models
    ]


def test_models_are_compared_by_success_with_its_interval_and_by_retrieval_heads(run: Run) -> None:
    table = model_table(run).set_index("model")
    for result in results(run, "success"):
        columns = [f"retrieval_success{ending}" for ending in ("", "_low", "_high")]
        assert table.loc[result.model, columns].tolist() == [result.value, result.low, result.high]
    for result in results(run, "heads"):
        assert (
            table.loc[result.model, "retrieval_heads"] == result.value == (mean_scores(run, result.model) > 0.1).sum()
        )


def test_head_results_have_score_rank_and_attribution_and_chart_shows_cells(run: Run) -> None:
    scores = mean_scores(run, "yarn").sort_values(ascending=False)
    layer, head = scores.index[0]
    score, ranks, attribution = needle_results.head_results(run, "yarn", layer, head)
    is_head = (run.heads["model"] == "yarn") & (run.heads["layer"] == layer) & (run.heads["head"] == head)
    (row,) = run.heads[is_head].to_dict("records")
    assert [(rank.model, rank.value) for rank in ranks.parts] == [("base", 1), ("yarn", 1)]
    assert (score.value, score.low, score.high) == (row["retrieval"], row["retrieval_low"], row["retrieval_high"])
    assert score.value == pytest.approx(scores.iloc[0])
    assert score.details["control"] == 0
    assert (score.question, score.model) == ("retrieval.head_score", "yarn")
    assert_names(sentence(score), f"{100 * score.value:.0f} %", "0.000")
    assert (attribution.value, attribution.details["rest"]) == (row["needle_write"], row["needle_rest"])
    (chart,) = view.head_charts(run, "yarn", layer, head)
    deepest = run.retrieval.merge(run.needles[run.needles["success"]]).query(
        f"model == 'yarn' and layer == {layer} and head == {head} and context_length == 1024 and depth == 1"
    )
    assert chart.figure.data[0].z[3][1] == pytest.approx(deepest["score"].mean())
    assert chart.figure.data[0].customdata[3][1] == len(deepest)


@pytest.mark.slow
def test_a_head_of_a_model_without_success_has_no_score_rather_than_a_zero(run: Run) -> None:
    lowest = mean_scores(run, "base").idxmin()
    for failed_models, ranked in ((["yarn"], 1), (run.models, 0)):
        failed_run = Run(run.path, run.manifest)
        is_failed = run.needles["model"].isin(failed_models)
        failed_run._frames["needles"] = run.needles.assign(success=run.needles["success"] & ~is_failed)
        no_score, *ranks = needle_results.head_results(failed_run, "yarn", *lowest)
        assert (no_score.question, no_score.model) == ("retrieval.no_score", "yarn")
        assert [(result.question, len(result.parts)) for result in ranks] == [("heads.ranks", 1)] * ranked
    assert next(needle_results.head_results(run, "base", *lowest)).value == 0
    questions = [result.question for result in needle_results.head_results(run, "yarn", *lowest)]
    assert "retrieval.no_score" not in questions


def test_seed_agreement_compares_the_mean_scores_of_two_seeds(run: Run) -> None:
    agreement = seed_agreement(scores_by_seed(run)).set_index("model")
    first, second = (mean_scores(run, "base", seed=seed) for seed in (0, 1))
    assert agreement.loc["base", "spearman"] == pytest.approx(spearmanr(first, second).statistic)
    top = [set(scores.sort_values(ascending=False, kind="stable").index[:10]) for scores in (first, second)]
    assert agreement.loc["base", "overlap"] == len(top[0] & top[1]) / 10


def test_model_agreement_compares_the_mean_scores_of_two_models(run: Run) -> None:
    (row,) = model_agreement(run.heads).to_dict("records")
    assert (row["first"], row["second"]) == ("base", "yarn")
    first, second = mean_scores(run, "base"), mean_scores(run, "yarn")
    assert row["spearman"] == pytest.approx(spearmanr(first, second).statistic)
    top = [set(scores.sort_values(ascending=False, kind="stable").index[:10]) for scores in (first, second)]
    assert row["overlap"] == len(top[0] & top[1]) / 10
    (result,) = results(run, "model_agreement")
    assert (result.value, result.details["overlap"], result.n) == (row["spearman"], row["overlap"], 24)
    assert result.where == {"first": "base", "second": "yarn"}


def test_model_agreement_of_a_single_model_or_without_scores_is_empty(run: Run) -> None:
    assert model_agreement(run.heads[run.heads["model"] == "base"]).empty
    assert model_agreement(run.heads.assign(retrieval=np.nan)).empty


def test_scores_by_group_are_mean_and_maximum_over_the_kv_group(run: Run) -> None:
    groups = scores_by_group(run.heads).set_index(["model", "layer", "kv_group"])
    scores = mean_scores(run, "base")
    assert groups.loc[("base", 2, 1), "mean"] == pytest.approx(scores[2][3:].mean())
    assert groups.loc[("base", 2, 1), "max"] == pytest.approx(scores[2][3:].max())


def test_success_map_shows_the_share_of_each_length_and_depth(run: Run) -> None:
    heatmap = plots.plot_success_map(run.needles, "yarn").data[0]
    trials = run.needles.query("model == 'yarn' and mode == 'strict' and context_length == 1024")
    deepest = trials[trials["depth"] == 1]["success"]
    assert heatmap.z[3][1] == pytest.approx(deepest.mean())
    assert (heatmap.x[1], heatmap.y[3]) == ("1,024", "100 %")
    assert heatmap.customdata[3][1][0] == str(len(deepest))


def test_ranked_scores_are_in_descending_order(run: Run) -> None:
    figure = plots.plot_ranked_scores(run.heads)
    line = next(trace for trace in figure.data if trace.name == "base" and trace.mode == "lines+markers")
    scores = mean_scores(run, "base").sort_values(ascending=False, kind="stable")
    np.testing.assert_allclose(list(line.y), scores)
    assert list(line.x) == list(range(1, 25))
    assert tuple(line.customdata[0])[:2] == scores.index[0]


def test_scatter_plots_and_matrix_show_one_value_per_head(run: Run) -> None:
    growth_points = plots.plot_against_growth(run.heads, "base").data[0]
    rows = run.heads[run.heads["model"] == "base"]
    np.testing.assert_allclose(growth_points.x, rows["growth"])
    np.testing.assert_allclose(growth_points.y, rows["retrieval"])
    seed_points = plots.plot_seed_agreement(scores_by_seed(run), "base").data[0]
    np.testing.assert_allclose(seed_points.x, mean_scores(run, "base", seed=0))
    np.testing.assert_allclose(seed_points.y, mean_scores(run, "base", seed=1))
    matrix = head_matrices.plot_matrix(run.heads, "retrieval", "base").data[0]
    assert matrix.z[1][2] == pytest.approx(mean_scores(run, "base")[1, 2])


def test_grid_accepts_strings_of_flags_and_lists_of_a_study_file() -> None:
    grid = NeedleOptions(lengths=["1000"], steps="4", depths="3")
    assert grid.grid_lengths == [250, 500, 750, 1000]
    assert grid.grid_depths == [0, 0.5, 1]
    grid = NeedleOptions(lengths=["2048", "512"], depths=["0", "0.25"])
    assert (grid.grid_lengths, grid.grid_depths) == ([512, 2048], [0, 0.25])
    for name, option in NeedleOptions.model_fields.items():
        assert option.description, name


def test_figures_without_data_state_the_reason(run: Run) -> None:
    for figure, reason in (
        (plots.plot_success_map(run.needles.iloc[:0], "base"), "no data"),
        (plots.plot_success_map(pd.DataFrame(), "base"), "model, mode"),
        (plots.plot_ranked_scores(run.heads.drop(columns="retrieval")), "retrieval"),
        (plots.plot_against_growth(run.heads.drop(columns="growth"), "base"), "growth"),
        (plots.plot_seed_agreement(scores_by_seed(run).drop(columns=[1]), "base"), "two seeds"),
        (plots.plot_seed_agreement(pd.DataFrame(), "base"), "model"),
    ):
        assert_names(figure.layout.annotations[0].text, reason)


@pytest.mark.slow
def test_report_contains_every_needle_chart_and_finding(run: Run, tmp_path: Path) -> None:
    titles = chart_titles(run)
    needle_tables = {table.name for table in TABLES}
    run = Run(run.path, run.manifest)
    run.tables = [name for name in run.tables if name in needle_tables]
    kinds = {"Needle retrieved", "Retrieval score of every head", "Retrieval against growth"}
    assert kinds | {"Retrieval in two haystacks"} < titles, "one chart with a panel per model"
    assert {"Retrieval score, heads ranked", "Retrieval score of each head, compared with base"} < titles
    assert {"Attribution through the needle of every head", "Needle retrieved under zero ablation of heads"} < titles
    page = html_page.write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Needle in a haystack" in page
    (agreement,) = (result for result in results(run, "haystack_agreement") if result.model == "base")
    assert {"haystack": 0, "other_haystack": 1}.items() <= {**agreement.where, **agreement.details}.items()
    assert sentence(agreement) in html.unescape(page)


def test_success_by_length_counts_trials_over_all_depths(run: Run) -> None:
    figure = plots.plot_success_by_length(run.needles)
    for model in run.models:
        line = next(trace for trace in figure.data if trace.name == model)
        trials = run.needles[(run.needles["model"] == model) & (run.needles["mode"] == "strict")]
        for length, share in zip(line.x, line.y, strict=True):
            assert share == pytest.approx(trials[trials["context_length"] == length]["success"].mean())

"""Tables, figures and sentences of the needle probe contain the numbers of the stored trials."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from headscope.plots import heads
from headscope.report import assembly, html_page
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.needle import findings, plots, report
from probes.needle.analysis import (
    model_agreement,
    retrieval_summary,
    scores_by_group,
    scores_by_seed,
    seed_agreement,
    success_by_cell,
)
from probes.needle.schema import TABLES, NeedleOptions


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


def sentences(run: Run) -> list[str]:
    return [finding.text for finding in findings.findings(run)]


def chart_titles(run: Run) -> set[str]:
    """Titles of the charts of the probe."""
    groups = report.charts(assembly.render_context(run))
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
    text = " ".join(sentences(failed_run))
    assert "yarn answers none of 32 trials, so its heads have no retrieval score." in text
    titles = chart_titles(failed_run)
    assert "Retrieval score: base" in titles
    assert "Retrieval score: yarn" not in titles


def test_success_by_cell_has_the_wilson_interval(run: Run) -> None:
    cell = success_by_cell(run.needles).query(
        "model == 'base' and mode == 'strict' and context_length == 256 and depth == 0"
    )
    (row,) = cell.to_dict("records")
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


def test_first_finding_lists_the_top_five_heads(run: Run) -> None:
    top = mean_scores(run, "base").sort_values(ascending=False, kind="stable")[:5]
    listed = ", ".join(f"layer {layer}, head {head} ({score:.2f})" for (layer, head), score in top.items())
    assert listed in sentences(run)[0]


def test_finding_about_one_model_names_the_model(run: Run) -> None:
    all_findings = [*findings.findings(run)]
    assert {finding.model for finding in all_findings} == {"", *run.models}
    for finding in all_findings:
        is_comparison = finding.text.startswith("The retrieval scores of base and")
        expected = "" if is_comparison else next(label for label in run.models if label in finding.text)
        assert finding.model == expected


def test_overview_has_one_row_per_model_and_warns_of_models_without_success(run: Run) -> None:
    overview = findings.overview(run)
    assert overview is not None
    assert overview.warnings == []
    scores = mean_scores(run, "base")
    layer, head = scores.idxmax()
    assert overview.rows[0]["top head"] == f"L{layer} H{head}: {scores.max():.2f}"
    assert [row["model"] for row in overview.rows] == run.models
    failed_run = Run(run.path, run.manifest)
    failed_run._frames["needles"] = run.needles.assign(success=False)
    overview = findings.overview(failed_run)
    assert overview is not None
    assert overview.rows[1]["top head"] == "no score"
    assert [warning.split(",")[0] for warning in overview.warnings] == [
        f"{label} answered none of 32 trials" for label in run.models
    ]


def test_head_findings_report_score_rank_and_attribution_and_chart_shows_cells(run: Run) -> None:
    scores = mean_scores(run, "yarn").sort_values(ascending=False)
    layer, head = scores.index[0]
    score_sentence, rank_sentence, attribution_sentence = findings.head_findings(run, "yarn", layer, head)
    is_head = (run.heads["model"] == "yarn") & (run.heads["layer"] == layer) & (run.heads["head"] == head)
    attribution = run.heads[is_head]["needle_write"].item()
    assert attribution_sentence.startswith(
        f"Its direct logit attribution to an answer token is {attribution:+.2f} logits"
    )
    assert score_sentence.startswith(f"It copies {100 * scores.iloc[0]:.0f} % of the hidden fact")
    assert f"1 of 24 in yarn ({scores.iloc[0]:.3f})" in rank_sentence
    lowest = mean_scores(run, "base").add(mean_scores(run, "yarn")).idxmin()
    assert next(findings.head_findings(run, "base", *lowest)) == "It copies no needle token in any successful trial."
    (chart,) = report.head_charts(run, "yarn", layer, head)
    deepest = run.retrieval.merge(run.needles[run.needles["success"]]).query(
        f"model == 'yarn' and layer == {layer} and head == {head} and context_length == 1024 and depth == 1"
    )
    assert chart.figure.data[0].z[3][1] == pytest.approx(deepest["score"].mean())
    assert chart.figure.data[0].customdata[3][1] == len(deepest)


def test_a_head_of_a_model_without_success_has_no_score_rather_than_a_zero(run: Run) -> None:
    lowest = mean_scores(run, "base").idxmin()
    for failed_models, others in ((["yarn"], ["It copies no needle token in any successful trial."]), (run.models, [])):
        failed_run = Run(run.path, run.manifest)
        is_failed = run.needles["model"].isin(failed_models)
        failed_run._frames["needles"] = run.needles.assign(success=run.needles["success"] & ~is_failed)
        no_score = "yarn answers no trial, so its heads have no retrieval score."
        assert [*findings.head_findings(failed_run, "yarn", *lowest)] == [no_score, *others]
    assert not any("answers no trial" in text for text in findings.head_findings(run, "yarn", *lowest))


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
    start = "The retrieval scores of base and yarn have a rank correlation of"
    assert any(sentence.startswith(start) for sentence in sentences(run))


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
    matrix = heads.plot_matrix(run.heads, "retrieval", "base").data[0]
    assert matrix.z[1][2] == pytest.approx(mean_scores(run, "base")[1, 2])


def test_grid_accepts_strings_of_flags_and_lists_of_a_study_file() -> None:
    grid = NeedleOptions(lengths="4", depths="3", max_length="1000")
    assert grid.grid_lengths == [250, 500, 750, 1000]
    assert grid.grid_depths == [0, 0.5, 1]
    grid = NeedleOptions(lengths=["2048", "512"], depths=["0", "0.25"])
    assert (grid.grid_lengths, grid.grid_depths) == ([512, 2048], [0, 0.25])
    for name, option in NeedleOptions.model_fields.items():
        assert option.description, name


def test_figures_without_data_state_the_reason(run: Run) -> None:
    for figure, reason in (
        (plots.plot_success_map(run.needles.iloc[:0], "base"), "no data to plot"),
        (plots.plot_success_map(pd.DataFrame(), "base"), "not measured: model, mode, "),
        (plots.plot_ranked_scores(run.heads.drop(columns="retrieval")), "not measured: retrieval"),
        (plots.plot_against_growth(run.heads.drop(columns="growth"), "base"), "not measured: growth"),
        (plots.plot_seed_agreement(scores_by_seed(run).drop(columns=[1]), "base"), "a comparison needs two seeds"),
        (plots.plot_seed_agreement(pd.DataFrame(), "base"), "not measured: model"),
    ):
        assert figure.layout.annotations[0].text.startswith(reason)


def test_report_contains_every_needle_chart_and_finding(run: Run, tmp_path: Path) -> None:
    titles = chart_titles(run)
    needle_tables = {table.name for table in TABLES}
    run = Run(run.path, run.manifest)
    run.tables = [name for name in run.tables if name in needle_tables]
    for label in run.models:
        kinds = ("Needle retrieved", "Retrieval score", "Retrieval against growth", "Retrieval in two haystacks")
        assert {f"{kind}: {label}" for kind in kinds} < titles
    assert {"Retrieval score, heads ranked", "Retrieval score of each head, compared with base"} < titles
    assert {"Attribution through the needle: base", "Needle retrieved under zero ablation of heads: yarn"} < titles
    page = html_page.write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Needle in a haystack" in page
    assert "The retrieval scores of base in haystacks 0 and 1 have a rank" in page


def test_success_by_length_counts_trials_over_all_depths(run: Run) -> None:
    figure = plots.plot_success_by_length(run.needles)
    for model in run.models:
        line = next(trace for trace in figure.data if trace.name == model)
        trials = run.needles[(run.needles["model"] == model) & (run.needles["mode"] == "strict")]
        for length, share in zip(line.x, line.y, strict=True):
            assert share == pytest.approx(trials[trials["context_length"] == length]["success"].mean())


def test_head_finding_reports_the_score_with_and_without_the_needle(run: Run) -> None:
    rows = run.heads[run.heads["model"] == run.models[-1]]
    row = rows.loc[rows["retrieval"].idxmax()]
    sentence = next(findings.head_findings(run, run.models[-1], int(row["layer"]), int(row["head"])))
    assert sentence.startswith(
        f"It copies {100 * row['retrieval']:.0f} % of the hidden fact (95 % confidence interval "
    )
    assert sentence.endswith(f"its score on control prompts is {row['retrieval_control']:.3f}.")

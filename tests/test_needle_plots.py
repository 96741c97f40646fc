"""What is told of needle trials, in tables, figures and sentences, carries the numbers of the stored trials."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from headscope.plots import heads
from headscope.report import assembly
from headscope.report import html_page as report
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.needle import findings
from probes.needle import plots as needle
from probes.needle import report as charts
from probes.needle.analysis import (
    model_agreement,
    retrieval_summary,
    scores_by_group,
    scores_by_seed,
    seed_agreement,
    success_by_cell,
)
from probes.needle.options import NeedleOptions
from probes.needle.tables import TABLES


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"))


def scores(run: Run, model: str, **only: object) -> pd.Series:
    """Mean strict score by (layer, head) over the successful trials, by plain selection."""
    trials = run.needles[(run.needles["model"] == model) & (run.needles["mode"] == "strict") & run.needles["success"]]
    for name, value in only.items():
        trials = trials[trials[name] == value]
    wanted = set(trials[["needle", "context_length", "depth", "seed"]].itertuples(index=False, name=None))
    rows = run.retrieval[(run.retrieval["model"] == model) & (run.retrieval["mode"] == "strict")]
    kept = [
        key in wanted for key in rows[["needle", "context_length", "depth", "seed"]].itertuples(index=False, name=None)
    ]
    return rows[kept].astype({"score": "float64"}).groupby(["layer", "head"])["score"].mean()


def sentences(run: Run) -> list[str]:
    return [finding.text for finding in findings.findings(run)]


def drawn(run: Run) -> set[str]:
    """Titles of the charts of the chapter."""
    groups = charts.charts(assembly.render_context(run))
    return {chart.figure.layout.title.text for group in groups for chart in group.charts}


def test_the_headline_is_the_mean_over_successful_trials_alone(run: Run) -> None:
    for model in run.models:
        mine = run.heads[run.heads["model"] == model].set_index(["layer", "head"])
        expected = scores(run, model)
        np.testing.assert_allclose(mine["retrieval"], expected, rtol=1e-6)
        assert (mine["retrieval_low"] <= mine["retrieval"]).all()
        assert (mine["retrieval"] <= mine["retrieval_high"]).all()
        assert mine["retrieval_high"].max() <= 1
        assert (mine["retrieval_control"] == 0).all()
        assert mine["retrieval_mass"].between(0, 1).all()


def test_a_model_without_success_has_no_headline_but_its_control(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = run.needles.assign(success=run.needles["success"] & (run.needles["model"] != "yarn"))
    other = Run(run.path, run.manifest)
    monkeypatch.setitem(other._frames, "needles", failed)
    yarn = other.heads[other.heads["model"] == "yarn"]
    assert yarn["retrieval"].isna().all()
    assert yarn["retrieval_control"].notna().all()
    seen = retrieval_summary(other).set_index("model")
    assert seen.loc["yarn", "successes"] == 0
    assert np.isnan(seen.loc["yarn", "above"])
    assert np.isnan(seen.loc["yarn", "top"])
    told = " ".join(sentences(other))
    assert "yarn answers none of 32 trials, so its heads have no retrieval score." in told
    titles = drawn(other)
    assert "Retrieval score: base" in titles
    assert "Retrieval score: yarn" not in titles


def test_success_has_the_wilson_interval(run: Run) -> None:
    cell = success_by_cell(run.needles).query(
        "model == 'base' and mode == 'strict' and context_length == 256 and depth == 0"
    )
    (row,) = cell.to_dict("records")
    n, p, z = row["trials"], row["share"], 1.959963984540054
    middle, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert n == 4
    assert row["low"] == pytest.approx((middle - half) / (1 + z * z / n))
    assert row["high"] == pytest.approx((middle + half) / (1 + z * z / n))


def test_the_overview_counts_heads_above_a_tenth_and_at_zero(run: Run) -> None:
    seen = retrieval_summary(run).set_index("model")
    for model in run.models:
        mine = scores(run, model)
        assert seen.loc[model, "above"] == pytest.approx((mine > 0.1).mean())
        assert seen.loc[model, "zero"] == pytest.approx((mine == 0).mean())
        assert (seen.loc[model, "layer"], seen.loc[model, "head"]) == mine.idxmax()
        assert seen.loc[model, "top"] == pytest.approx(mine.max())


def test_the_words_name_the_five_best_heads(run: Run) -> None:
    told = sentences(run)[0]
    best = scores(run, "base").sort_values(ascending=False, kind="stable")[:5]
    assert ", ".join(f"layer {layer} head {head} ({score:.2f})" for (layer, head), score in best.items()) in told


def test_a_sentence_about_one_model_says_which(run: Run) -> None:
    found = [*findings.findings(run)]
    assert {finding.model for finding in found} == {"", *run.models}
    for finding in found:
        several = finding.text.startswith("The retrieval scores of base and")
        assert finding.model == ("" if several else next(label for label in run.models if label in finding.text))


def test_the_terminal_shows_a_row_a_model_and_warns_of_one_that_found_nothing(run: Run) -> None:
    shown = findings.overview(run)
    assert shown is not None
    assert shown.warnings == []
    best = scores(run, "base")
    layer, head = best.idxmax()
    assert shown.rows[0]["top head"] == f"L{layer} H{head}: {best.max():.2f}"
    assert [row["model"] for row in shown.rows] == run.models
    failed = Run(run.path, run.manifest)
    failed._frames["needles"] = run.needles.assign(success=False)
    shown = findings.overview(failed)
    assert shown is not None
    assert shown.rows[1]["top head"] == "no score"
    assert [line.split(",")[0] for line in shown.warnings] == [
        f"{label} answered none of 32 trials" for label in run.models
    ]


def test_a_head_is_told_by_its_rank_and_drawn_by_length_and_depth(run: Run) -> None:
    order = scores(run, "yarn").sort_values(ascending=False)
    layer, head = order.index[0]
    copied, told, writes = findings.head_findings(run, "yarn", layer, head)
    mine = run.heads[(run.heads["model"] == "yarn") & (run.heads["layer"] == layer) & (run.heads["head"] == head)]
    assert writes.startswith(f"Its attribution to an answer token is {mine['needle_write'].item():+.2f} logits")
    assert copied.startswith(f"It copies {order.iloc[0]:.0%} of the hidden fact")
    assert f"1 of 24 in yarn ({order.iloc[0]:.3f})" in told
    never = scores(run, "base").add(scores(run, "yarn")).idxmin()
    assert next(findings.head_findings(run, "base", *never)) == "It copies no needle token in any successful trial."
    (chart,) = charts.head_charts(run, "yarn", layer, head)
    deepest = run.retrieval.merge(run.needles[run.needles["success"]]).query(
        f"model == 'yarn' and layer == {layer} and head == {head} and context_length == 1024 and depth == 1"
    )
    assert chart.figure.data[0].z[3][1] == pytest.approx(deepest["score"].mean())
    assert chart.figure.data[0].customdata[3][1] == len(deepest)


def test_seeds_agree_as_their_own_means_do(run: Run) -> None:
    found = seed_agreement(scores_by_seed(run)).set_index("model")
    first, second = (scores(run, "base", seed=seed) for seed in (0, 1))
    assert found.loc["base", "spearman"] == pytest.approx(spearmanr(first, second).statistic)
    best = [set(each.sort_values(ascending=False, kind="stable").index[:10]) for each in (first, second)]
    assert found.loc["base", "overlap"] == len(best[0] & best[1]) / 10


def test_models_agree_as_their_own_means_do(run: Run) -> None:
    (row,) = model_agreement(run.heads).to_dict("records")
    assert (row["first"], row["second"]) == ("base", "yarn")
    first, second = scores(run, "base"), scores(run, "yarn")
    assert row["spearman"] == pytest.approx(spearmanr(first, second).statistic)
    best = [set(each.sort_values(ascending=False, kind="stable").index[:10]) for each in (first, second)]
    assert row["overlap"] == len(best[0] & best[1]) / 10
    told = sentences(run)
    assert any(said.startswith("The retrieval scores of base and yarn have a rank correlation of") for said in told)


def test_a_model_alone_agrees_with_nobody(run: Run) -> None:
    assert model_agreement(run.heads[run.heads["model"] == "base"]).empty
    assert model_agreement(run.heads.assign(retrieval=np.nan)).empty


def test_groups_hold_the_mean_and_the_largest_of_their_heads(run: Run) -> None:
    groups = scores_by_group(run.heads).set_index(["model", "layer", "kv_group"])
    mine = scores(run, "base")
    assert groups.loc[("base", 2, 1), "mean"] == pytest.approx(mine[2][3:].mean())
    assert groups.loc[("base", 2, 1), "max"] == pytest.approx(mine[2][3:].max())


def test_the_map_holds_the_share_of_each_length_and_depth(run: Run) -> None:
    heat = needle.plot_success_map(run.needles, "yarn").data[0]
    trials = run.needles.query("model == 'yarn' and mode == 'strict' and context_length == 1024")
    deepest = trials[trials["depth"] == 1]["success"]
    assert heat.z[3][1] == pytest.approx(deepest.mean())
    assert (heat.x[1], heat.y[3]) == ("1,024", "100%")
    assert heat.customdata[3][1][0] == len(deepest)


def test_heads_are_ranked_with_their_intervals(run: Run) -> None:
    figure = needle.plot_ranked_scores(run.heads)
    line = next(trace for trace in figure.data if trace.name == "base" and trace.mode == "lines+markers")
    mine = scores(run, "base").sort_values(ascending=False, kind="stable")
    np.testing.assert_allclose(list(line.y), mine)
    assert list(line.x) == list(range(1, 25))
    assert tuple(line.customdata[0])[:2] == mine.index[0]


def test_dots_are_heads(run: Run) -> None:
    grown = needle.plot_against_growth(run.heads, "base").data[0]
    mine = run.heads[run.heads["model"] == "base"]
    np.testing.assert_allclose(grown.x, mine["growth"])
    np.testing.assert_allclose(grown.y, mine["retrieval"])
    seeds = needle.plot_seed_agreement(scores_by_seed(run), "base").data[0]
    np.testing.assert_allclose(seeds.x, scores(run, "base", seed=0))
    np.testing.assert_allclose(seeds.y, scores(run, "base", seed=1))
    matrix = heads.plot_matrix(run.heads, "retrieval", "base").data[0]
    assert matrix.z[1][2] == pytest.approx(scores(run, "base")[1, 2])


def test_the_grid_is_what_flags_or_a_study_file_say() -> None:
    grid = NeedleOptions(lengths="4", depths="3", max_length="1000")
    assert grid.grid_lengths == [250, 500, 750, 1000]
    assert grid.grid_depths == [0, 0.5, 1]
    listed = NeedleOptions(lengths=["2048", "512"], depths=["0", "0.25"])
    assert (listed.grid_lengths, listed.grid_depths) == ([512, 2048], [0, 0.25])
    for name, option in NeedleOptions.model_fields.items():
        assert option.description, name


def test_what_is_missing_is_said_in_the_figure(run: Run) -> None:
    for figure, told in (
        (needle.plot_success_map(run.needles.iloc[:0], "base"), "no data to plot"),
        (needle.plot_success_map(pd.DataFrame(), "base"), "not measured: model, mode, "),
        (needle.plot_ranked_scores(run.heads.drop(columns="retrieval")), "not measured: retrieval"),
        (needle.plot_against_growth(run.heads.drop(columns="growth"), "base"), "not measured: growth"),
        (needle.plot_seed_agreement(scores_by_seed(run).drop(columns=[1]), "base"), "a comparison needs two seeds"),
        (needle.plot_seed_agreement(pd.DataFrame(), "base"), "not measured: model"),
    ):
        assert figure.layout.annotations[0].text.startswith(told)


def test_the_report_shows_every_needle_figure_and_sentence(run: Run, tmp_path: Path) -> None:
    titles = drawn(run)
    mine = {table.name for table in TABLES}
    run = Run(run.path, run.manifest)
    run.tables = [name for name in run.tables if name in mine]
    for label in run.models:
        named = ("Needle retrieved", "Retrieval score", "Retrieval against growth", "Retrieval in two haystacks")
        assert {f"{name}: {label}" for name in named} < titles
    assert {"Retrieval score, heads ranked", "Retrieval score of each head, compared with base"} < titles
    assert {"Attribution through the needle: base", "Needle retrieved with heads ablated (zero): yarn"} < titles
    page = report.write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Needle in a haystack" in page
    assert "The retrieval scores of base in haystacks 0 and 1 have a rank" in page


def test_success_by_length_counts_trials_over_all_depths(run: Run) -> None:
    figure = needle.plot_success_by_length(run.needles)
    for model in run.models:
        line = next(trace for trace in figure.data if trace.name == model)
        for length, share in zip(line.x, line.y, strict=True):
            mine = run.needles[(run.needles["model"] == model) & (run.needles["mode"] == "strict")]
            assert share == pytest.approx(mine[mine["context_length"] == length]["success"].mean())


def test_a_head_is_told_what_it_copies_with_and_without_a_needle(run: Run) -> None:
    heads = run.heads[run.heads["model"] == run.models[-1]]
    row = heads.loc[heads["retrieval"].idxmax()]
    told = next(findings.head_findings(run, run.models[-1], int(row["layer"]), int(row["head"])))
    assert told.startswith(f"It copies {row['retrieval']:.0%} of the hidden fact (95 % confidence interval ")
    assert told.endswith(f"in control trials without the needle its score is {row['retrieval_control']:.3f}.")

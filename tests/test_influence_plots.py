"""Charts, findings, claims and per-head columns of head influence have the numbers of their tables."""

import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from headscope.plots.learned_frequencies import plot_learned_frequencies
from headscope.report import assembly
from headscope.report.blocks import PaperClaim
from headscope.runs.column_metadata import statistic, statistics
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.influence import band_plots, findings, plots, report
from probes.influence.analysis import best_unit_effects, estimate_agreement, set_effects
from probes.influence.labels import describe_methods, unit_noun, unit_nouns


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "learned"), pairs=4, lengths=(1024,))


@pytest.fixture(scope="module")
def frequency_units(run: Run) -> pd.DataFrame:
    units = best_unit_effects(run.influence)
    return units[(units["model"] == "learned") & (units["component"] == "freq")]


@pytest.mark.slow
def test_each_unit_has_its_most_accurate_method(run: Run) -> None:
    assert set(best_unit_effects(run.influence)["method"]) == {"exact"}
    rows = run.influence
    partly = best_unit_effects(rows[(rows["method"] == "estimate") | (rows["layer"] == 0)])
    assert ((partly["method"] == "exact") == (partly["layer"] == 0)).all()
    units = partly[(partly["model"] == "learned") & (partly["component"] == "freq")]
    assert len(units) == 8
    subtitle = plots.plot_matrix(units).layout.title.subtitle.text.replace("<br>", " ")
    assert subtitle.endswith("2 of 8 KV groups were evaluated exactly, the others estimated (first-order)")


def test_the_histogram_counts_every_unit_and_marks_the_kv_group_of_a_head(
    run: Run, frequency_units: pd.DataFrame
) -> None:
    head = run.heads.query("model == 'learned' and layer == 1 and head == 4").iloc[0]
    figure = plots.plot_histogram(frequency_units, {"best head": head})
    assert int(np.nansum(figure.data[0].y)) == len(frequency_units) == 8
    unit = frequency_units.query("layer == 1 and kv_group == 1").iloc[0]
    assert any(shape.x0 == pytest.approx(unit["delta"]) for shape in figure.layout.shapes)
    assert figure.layout.annotations[-1].text.startswith("best head: layer 1, KV group 1, Δ ")
    assert figure.layout.title.text == "Influence: learned"
    assert figure.layout.title.subtitle.text == "frequencies reset to the start of training: all changes are exact"


def test_the_matrix_has_the_mean_of_each_unit(frequency_units: pd.DataFrame) -> None:
    heatmap = plots.plot_matrix(frequency_units).data[0]
    for _, unit in frequency_units.iterrows():
        assert heatmap.z[unit["layer"]][unit["kv_group"]] == pytest.approx(unit["delta"])
    assert heatmap.zmax == -heatmap.zmin > 0


def test_the_forest_plot_has_one_dot_per_document_and_distinguishes_exact_from_estimated(run: Run) -> None:
    rows = run.influence
    partly = best_unit_effects(rows[(rows["method"] == "estimate") | (rows["layer"] == 0)])
    units = partly[(partly["model"] == "learned") & (partly["component"] == "freq")]
    document_rows = rows.query("model == 'learned' and component == 'freq' and method == 'exact'")
    dots, filled, hollow = plots.plot_forest(units, document_rows).data
    order = units.sort_values("delta", ascending=False).reset_index(drop=True)
    assert len(filled.x) == 2
    assert len(hollow.x) == 6
    assert {filled.marker.symbol, hollow.marker.symbol} == {"circle", "circle-open"}
    for trace in (filled, hollow):
        for x, y, head_id in zip(trace.x, trace.y, trace.customdata, strict=True):
            assert x == order.loc[y, "delta"]
            assert head_id[:2] == [order.loc[y, "layer"], -1]
    assert len(dots.x) == 8 * document_rows["doc"].nunique()
    rank = order.index[(order["layer"] == 0) & (order["kv_group"] == 0)][0]
    point = list(filled.y).index(rank)
    assert filled.x[point] + filled.error_x.array[point] == pytest.approx(order.loc[rank, "high"])
    assert "q = " in filled.text[point]


def test_learned_frequencies_are_plotted_with_those_at_the_start_of_training(run: Run) -> None:
    figure = plot_learned_frequencies(run.positions, "learned", 2, 1)
    rows = run.positions.query("model == 'learned' and layer == 2 and kv_group == 1").sort_values("pair")
    learned = [trace for trace in figure.data if trace.name == "learned"]
    np.testing.assert_allclose(learned[0].y, rows["log_theta"].astype(float) / np.log(10), rtol=1e-6)
    np.testing.assert_allclose(
        learned[1].y, rows["log_theta"].astype(float) - rows["log_theta_base"].astype(float), atol=1e-6
    )


def test_influence_is_plotted_against_the_mean_over_the_heads_of_a_kv_group(
    run: Run, frequency_units: pd.DataFrame
) -> None:
    heads = run.heads[run.heads["model"] == "learned"]
    trace = plots.plot_against_statistic(frequency_units, heads, "sink_mass", "sink mass").data[0]
    group_mean = heads[(heads["layer"] == 0) & (heads["kv_group"] == 0)]["sink_mass"].mean()
    assert trace.x[0] == pytest.approx(group_mean)
    assert list(trace.y) == pytest.approx(list(frequency_units["delta"]))


def test_the_cumulative_effect_has_lines_for_top_and_random_units(run: Run) -> None:
    sets = run.influence_sets[(run.influence_sets["model"] == "learned") & (run.influence_sets["component"] == "scale")]
    lines = {
        trace.name: trace
        for trace in plots.plot_cumulative_effect(set_effects(sets)).data
        if trace.mode == "lines+markers"
    }
    means = set_effects(sets).set_index(["choice", "size"])["mean"]
    assert list(lines["top by influence"].x) == [1, 2, 4, 24]
    assert lines["top by influence"].y[1] == pytest.approx(means["top", 2])
    assert lines["random, same layers"].y[0] == pytest.approx(means["random", 1])


@pytest.mark.parametrize("plot", [plots.plot_histogram, plots.plot_matrix, plots.plot_cumulative_effect])
def test_an_empty_table_gives_a_figure_with_a_reason(plot: Callable[[pd.DataFrame], go.Figure], run: Run) -> None:
    table = (
        set_effects(run.influence_sets) if plot is plots.plot_cumulative_effect else best_unit_effects(run.influence)
    )
    assert "no data to plot" in plot(table.head(0)).to_json()


def test_the_per_head_table_has_the_influence_of_each_heads_unit(run: Run, frequency_units: pd.DataFrame) -> None:
    heads = run.heads[run.heads["model"] == "learned"].set_index(["layer", "head"])
    unit = frequency_units.query("layer == 3 and kv_group == 1").iloc[0]
    for head in (3, 4, 5):
        for suffix, column in (("", "delta"), ("_low", "low"), ("_high", "high")):
            assert heads.loc[(3, head), f"influence_freq{suffix}"] == pytest.approx(unit[column])
    units = best_unit_effects(run.influence)
    scale = units[(units["model"] == "learned") & (units["component"] == "scale")].set_index(["layer", "head"])
    assert heads.loc[(2, 5), "influence_scale"] == pytest.approx(scale.loc[(2, 5), "delta"])


def test_findings_report_concentration_agreement_and_the_effect_of_all_units(run: Run) -> None:
    sentences = [finding.text for finding in findings.sweep_findings(run)]
    best = estimate_agreement(run.influence).iloc[0]
    assert any(f"{best['spearman']:.2f} (first-order" in sentence for sentence in sentences)
    assert any("Gini" in sentence and "KV group" in sentence for sentence in sentences)
    assert any("with all 8 KV groups changed" in sentence for sentence in sentences)


def test_a_fall_of_the_loss_for_all_units_is_not_a_rise(run: Run, band_run: Run, answer_run: Run) -> None:
    def falling(run: Run, table: str) -> Run:
        rows = run.table(table)
        return with_tables(run, **run._frames | {table: rows.assign(delta_nll=-rows["delta_nll"].abs() - 0.001)})

    runs = [falling(run, "influence"), falling(band_run, "influence"), falling(answer_run, "influence_answers")]
    for changed_run in runs:
        context = assembly.render_context(changed_run)
        charts = [chart for group in report.charts(context) for chart in group.charts]
        texts = [finding.text for finding in findings.sweep_findings(changed_run)]
        texts += [card.caption for card in report.overview_cards(context)]
        assert not any("rises most" in text for text in texts if "answer" in text or changed_run is not runs[2])
        assert any("falls least for " in text for text in texts)
        assert any(chart.summary.startswith("Smallest fall: ") for chart in charts)
    text = next(finding.text for finding in findings.sweep_findings(runs[0]))
    assert re.search(r"falls least for layer \d, KV group \d, by 0\.\d+ nats/token .* It falls most for ", text)


def test_the_methods_of_a_sweep_are_a_clause(frequency_units: pd.DataFrame) -> None:
    exact, estimated = frequency_units.assign(method="exact"), frequency_units.assign(method="second-order")
    assert describe_methods(exact) == "all changes are exact"
    assert describe_methods(estimated) == "all changes are second-order estimates"
    one_exact = pd.concat([exact.head(1), estimated.tail(7)])
    expected = "1 of 8 KV groups was evaluated exactly, the others estimated (second-order)"
    assert describe_methods(one_exact) == expected
    one_group = frequency_units.assign(head=[-1, *range(7)])
    assert (unit_noun(one_group), unit_nouns(one_group)) == ("head or KV group", "heads and KV groups")


def test_named_top_heads_are_marked_and_their_statistics_plotted(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"]
    best_head_names = {
        name: declared.best_head_name for name, declared in statistics().items() if declared.best_head_name
    }
    assert best_head_names["retrieval"] == "top retrieval head"
    group = next(
        group for group in report.charts(assembly.render_context(run)) if group.heading.startswith("Temperature")
    )
    _, histogram, *later_figures = [chart.figure for chart in group.charts]
    best = heads.loc[heads["retrieval"].idxmax()]
    start = f"top retrieval head: layer {best['layer']}, head {best['head']}, "
    assert any(annotation.text.startswith(start) for annotation in histogram.layout.annotations)
    titles = [figure.layout.title.text for figure in later_figures]
    assert "Influence against retrieval score: base" in titles


def test_the_page_has_the_sweeps_of_one_model_and_lists_models_with_sweeps(run: Run) -> None:
    page = report.page(assembly.render_context(run, selected_model="learned"))
    assert page.title == "Head influence: learned"
    assert [*page.sections] == [
        "Frequencies reset to the start of training, 1,024 tokens",
        "Temperature reset to the start of training, 1,024 tokens",
        "Frequencies and temperature reset to the start of training, 1,024 tokens",
        "In words",
    ]
    (summary,) = page.sections["In words"]
    assert len(summary.sentences) == 9
    assert all("learned" in sentence for sentence in summary.sentences)
    titles = [
        chart.figure.layout.title.text
        for name, charts in page.sections.items()
        if name != "In words"
        for chart in charts
    ]
    assert [title for title in titles if title.startswith("Influence: ")] == ["Influence: learned"] * 6
    page_without_sweeps = report.page(assembly.render_context(run, selected_model="other"))
    (advice,) = page_without_sweeps.sections[""]
    assert advice.sentences[0] == "This run has no influence sweep of other. It has sweeps of base, learned."
    assert "headscope influence --model" in advice.sentences[1]


def test_head_findings_report_the_influence_and_rank_of_the_heads_unit(run: Run, frequency_units: pd.DataFrame) -> None:
    unit = frequency_units.query("layer == 2 and kv_group == 1").iloc[0]
    rank = int((frequency_units["delta"] > unit["delta"]).sum()) + 1
    sentences = [*findings.head_findings(run, "learned", 2, 4)]
    assert len(sentences) == 3
    assert sentences[0].startswith(
        f"Influence in learned, frequencies reset to the start of training: {unit['delta']:+#.2g} nats/token"
    )
    assert sentences[0].endswith(f"for layer 2, KV group 1, rank {rank} of 8.")
    assert [*findings.head_findings(run, "learned", 99, 0)] == []


def test_every_component_of_a_sweep_is_a_statistic() -> None:
    for component in ("joint", "freq", "scale", "zero", "mean", "uniform"):
        assert statistic(f"influence_{component}").unit == "nats/token"
        assert statistic(f"influence_answer_{component}").label.startswith("influence on answers, ")
    assert statistic("influence_zero").format_number(-0.01234) == "-0.012"


def test_every_sweep_is_a_chart_group(run: Run) -> None:
    groups = [*report.charts(assembly.render_context(run))]
    assert {group.chapter for group in groups} == {"Head influence"}
    assert len(groups) == 6, "three components of two models"
    assert len([*groups[0].charts]) >= 5


KEYS = {"model": "learned", "context_length": 1024, "target": "none", "nll_before": 2.0}


def with_tables(run: Run, **tables: pd.DataFrame) -> Run:
    """A copy of the run with added or replaced tables."""
    table_entries = run.manifest["tables"] | {name: {"rows": len(table)} for name, table in tables.items()}
    changed_run = Run(run.path, {**run.manifest, "tables": table_entries})
    changed_run._frames.update(tables)
    return changed_run


@pytest.fixture(scope="module")
def answer_run(run: Run) -> Run:
    """A run with answers: head 4 of layer 1 has the largest influence, twice as large in the half of the trials that
    the model answers."""
    heads = run.heads[run.heads["model"] == "learned"][["layer", "head", "kv_group"]]
    trials = [(doc, fact, depth) for doc in ("a", "b") for fact in ("bell", "ledger") for depth in (0.0, 1.0)]
    rows = []
    for number, (doc, fact, depth) in enumerate(trials):
        is_answered, rng = number % 2, np.random.default_rng(number)
        delta = np.where((heads["layer"] == 1) & (heads["head"] == 4), 1 + is_answered, 0.1 * rng.random(len(heads)))
        trial = {"doc": doc, "fact": fact, "depth": depth, "hits": 0.9 * is_answered, "component": "zero"}
        rows.append(heads.assign(**KEYS, **trial, method="exact", delta_nll=delta))
    return with_tables(run, influence_answers=pd.concat(rows, ignore_index=True))


@pytest.fixture(scope="module")
def band_run(run: Run) -> Run:
    """A run with bands: without pairs 2-3 of head h of layer l, the loss rises by (l + 1) (h + 1) / 1000; without pairs
    0-1, by half of it."""
    heads = run.heads[run.heads["model"] == "learned"][["layer", "head", "kv_group"]]
    full_effect = (heads["layer"] + 1) * (heads["head"] + 1) / 1000
    keys = KEYS | {"doc": "a"}
    shares = {"pairs-zero:0-1": 0.5, "pairs-zero:2-3": 1.0, "pairs-zero:long": 0.2, "pairs-unrotated:0-1": 0.1}
    units = [
        heads.assign(**keys, component=component, method="exact", delta_nll=share * full_effect)
        for component, share in shares.items()
    ]
    set_columns = {"unit": "head", "choice": "top", "size": len(heads), "draw": 0}
    sets = [
        pd.DataFrame([{**keys, **set_columns, "component": component, "delta_nll": 3 * share}])
        for component, share in shares.items()
    ]
    return with_tables(
        run, influence=pd.concat(units, ignore_index=True), influence_sets=pd.concat(sets, ignore_index=True)
    )


def test_answers_are_one_sweep_with_trials_as_documents(answer_run: Run) -> None:
    groups = {group.heading: [*group.charts] for group in report.charts(assembly.render_context(answer_run))}
    assert len(groups) == 7 - 3, "groups of both models share a heading"
    forest, histogram, matrix, *_ = groups["Zero ablation (loss of the answer), up to 1,024 tokens"]
    assert forest.figure.layout.title.text == "Influence on answers, top heads: learned"
    assert forest.caption.startswith("8 trials.")
    assert {trace.name for trace in forest.figure.data} == {"one trial", "mean, exact"}
    assert matrix.figure.data[0].z[1][4] == pytest.approx(1.5)
    assert int(np.nansum(histogram.figure.data[0].y)) == 24


def test_the_finding_about_answers_reports_answered_trials_separately(answer_run: Run) -> None:
    (sentence,) = [
        finding.text for finding in findings.sweep_findings(answer_run) if "loss of the answer" in finding.text
    ]
    assert "the loss of the answer rises most for layer 1, head 4, by +1.5 nats/token" in sentence
    assert "The top retrieval head, layer " in sentence
    assert "Without ablation, learned answers 4 of 8 trials correctly" in sentence
    assert "over these trials the loss rises most for layer 1, head 4, by +2.0 nats/token (95 % confidence" in sentence
    head_sentences = [*findings.head_findings(answer_run, "learned", 1, 4)]
    assert any(
        text.startswith("Influence in learned, zero ablation (loss of the answer): +1.5") for text in head_sentences
    )


def run_with_top_head(run: Run, answers: pd.DataFrame, layer: int, head: int) -> Run:
    """A copy of the run with these answers, in which one head has the highest retrieval score."""
    changed_run = with_tables(run, influence_answers=answers)
    is_top = (run.heads["layer"] == layer) & (run.heads["head"] == head)
    changed_run.__dict__["heads"] = run.heads.assign(retrieval=is_top.astype(float))
    return changed_run


def retrieval_claim(run: Run) -> PaperClaim:
    """The claim that the top retrieval head has the largest influence on answers."""
    statement = "top retrieval head has the largest influence on answers"
    (claim,) = [claim for claim in findings.paper_claims(run) if statement in claim.statement]
    return claim


@pytest.mark.parametrize(("layer", "head", "verdict"), [(1, 4, "supported"), (0, 0, "not supported")])
def test_the_claim_about_answers_depends_on_the_rank_of_the_top_retrieval_head(
    answer_run: Run, layer: int, head: int, verdict: str
) -> None:
    claim = retrieval_claim(run_with_top_head(answer_run, answer_run.influence_answers, layer, head))
    assert claim.verdict == verdict
    assert claim.statement.startswith("Under zero ablation, one head at a time, the top retrieval head")
    effects = best_unit_effects(answer_run.influence_answers).set_index(["layer", "head"])["delta"]
    rank = int((effects > effects[layer, head]).sum()) + 1
    assert f"layer {layer}, head {head} (" in claim.evidence
    assert f"has rank {rank} of 24" in claim.evidence
    assert "Its influence minus the largest other influence is " in claim.evidence


def test_the_claim_about_answers_is_inconclusive_with_estimated_units(answer_run: Run) -> None:
    answers = answer_run.influence_answers
    is_estimated = (answers["layer"] == 0) & (answers["head"] == 0)
    partly_estimated = answers.assign(method=answers["method"].where(~is_estimated, "estimate"))
    claim = retrieval_claim(run_with_top_head(answer_run, partly_estimated, 1, 4))
    assert claim.verdict == "inconclusive"
    assert "1 of 24 heads was only estimated" in claim.evidence


def test_bands_are_one_chart_group_of_single_heads_and_all_heads_at_once(band_run: Run) -> None:
    (group,) = report.charts(assembly.render_context(band_run))
    assert group.heading == "Rotary pairs by band, 1,024 tokens"
    ablated, unrotated, all_heads = group.charts
    heatmap = ablated.figure.data[0]
    assert list(heatmap.y) == ["0-1<br>6 to 63 tokens", "2-3<br>628 to 6,283 tokens", "long"]
    assert np.shape(heatmap.z) == (3, 24)
    assert heatmap.z[1][1 * 6 + 4] == pytest.approx(2 * 5 / 1000)
    assert list(heatmap.customdata[1][1 * 6 + 4][:2]) == [1, 4]
    assert ablated.figure.layout.title.subtitle.text == "contribution to the logits removed: all changes are exact"
    assert np.shape(unrotated.figure.data[0].z) == (1, 24)
    assert "Largest rise: pairs 2-3 of layer 3, head 5, +0.024" in ablated.summary
    bars = {
        trace.name: {band.partition("<br>")[0]: loss for band, loss in zip(trace.x, trace.y, strict=True)}
        for trace in all_heads.figure.data
    }
    assert bars == {
        "contribution to the logits removed": pytest.approx({"0-1": 1.5, "2-3": 3.0, "long": 0.6}),
        "rotation removed": pytest.approx({"0-1": 0.3}),
    }
    assert list(all_heads.figure.layout.xaxis.categoryarray) == ["0-1<br>6<br>to 63", "2-3<br>628<br>to 6,283", "long"]


def test_bands_have_one_finding_per_kind_of_ablation(band_run: Run) -> None:
    ablated, unrotated = [finding.text for finding in findings.sweep_findings(band_run)]
    assert (
        "Rotary pairs of learned by band, contribution to the logits removed in one head at a time (1,024 tokens)"
        in ablated
    )
    assert "the loss rises most for pairs 2-3 of layer 3, head 5, by +0.024 nats/token (one document)" in ablated
    assert ablated.endswith(
        "all heads at once, nats/token: pairs 0-1: +1.5, pairs 2-3: +3.0, pairs of long wavelength: +0.60."
    )
    assert unrotated.endswith("ablated in all heads at once, nats/token: pairs 0-1: +0.30.")
    assert [*findings.head_findings(band_run, "learned", 1, 4)] == [
        "Influence in learned, largest of 3 bands, pairs 2-3, contribution to the logits removed: +0.010 nats/token "
        "(one document) for layer 1, head 4.",
        "Influence in learned, largest of 1 band, pairs 0-1, rotation removed: +0.0010 nats/token "
        "(one document) for layer 1, head 4.",
    ]
    assert [*report.page(assembly.render_context(band_run, selected_model="learned")).sections] == [
        "Rotary pairs by band, 1,024 tokens",
        "In words",
    ]


def test_band_plots_without_rows_give_a_reason(band_run: Run) -> None:
    assert (
        "no data to plot" in band_plots.plot_influence_by_band(best_unit_effects(band_run.influence).head(0)).to_json()
    )
    assert (
        "no data to plot"
        in band_plots.plot_joint_effects_by_band(set_effects(band_run.influence_sets).head(0)).to_json()
    )

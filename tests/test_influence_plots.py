"""Charts, results, claims and per-head columns of head influence have the numbers of their tables."""

import numpy as np
import pandas as pd
import pytest
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run

from headscope.plots.learned_frequencies import plot_learned_frequencies
from headscope.rendering import assembly
from headscope.results import words
from headscope.results.effects.comparison import agreements
from headscope.results.effects.sweep import Effects, effects_table
from headscope.results.effects.units import unit_nouns
from headscope.results.result import Result
from headscope.runs.column_metadata import statistic, statistics
from headscope.runs.run import Run
from probes.influence import plots, view
from probes.influence.analysis import all_sweeps, ranked_sets, set_sweeps, unit_sweeps
from probes.influence.results import (
    claims,
    describe_change,
    describe_methods,
    head_results,
    influence_results,
    results,
    unit_noun,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "learned"), pairs=4, lengths=(1024,))


def sweep_of(sweeps: list[Effects], model: str = "learned", intervention: str = "freq") -> Effects:
    """The sweep of a model and component."""
    (effects,) = (one for one in sweeps if (one.model, one.key["intervention"]) == (model, intervention))
    return effects


def partly_estimated(run: Run) -> Effects:
    """The frequency sweep of a run in which only layer 0 was evaluated."""
    rows = run.influence
    return sweep_of(unit_sweeps(rows[(rows["method"] == "estimate") | (rows["layer"] == 0)], run.models))


def answers(run: Run, name: str) -> list[Result]:
    """Results that answer this question about the loss of documents or answers."""
    return [result for result in influence_results(run) if result.question.endswith(f"influence.{name}")]


@pytest.fixture(scope="module")
def frequencies(run: Run) -> Effects:
    return sweep_of(all_sweeps(run))


@pytest.fixture(scope="module")
def frequency_units(frequencies: Effects) -> pd.DataFrame:
    return frequencies.units


@pytest.mark.slow
def test_each_unit_has_its_most_accurate_method(run: Run) -> None:
    assert set(effects_table(all_sweeps(run))["method"]) == {"exact"}
    partly = partly_estimated(run)
    assert (partly.is_exact == (partly.units["layer"] == 0)).all()
    assert len(partly.units) == 8
    subtitle = plots.plot_matrix(partly).layout.title.subtitle.text.replace("<br>", " ")
    assert_names(subtitle, "2 of 8 KV groups", "first-order")


@pytest.mark.slow
def test_the_histogram_counts_every_unit_and_marks_the_kv_group_of_a_head(run: Run, frequencies: Effects) -> None:
    frequency_units = frequencies.units
    head = run.heads.query("model == 'learned' and layer == 1 and head == 4").iloc[0]
    figure = plots.plot_histogram(frequencies, {"best head": head})
    assert int(np.nansum(figure.data[0].y)) == len(frequency_units) == 8
    unit = frequency_units.query("layer == 1 and kv_group == 1").iloc[0]
    assert any(shape.x0 == pytest.approx(unit["effect"]) for shape in figure.layout.shapes)
    assert figure.layout.annotations[-1].text.startswith("best head: L1 KV group 1, Δ ")
    assert figure.layout.title.text == "Influence: learned"
    subtitle = figure.layout.title.subtitle.text.replace("<br>", " ")
    assert describe_change("freq", "init") in subtitle
    assert describe_methods(frequency_units) in subtitle


@pytest.mark.slow
def test_the_matrix_has_the_mean_of_each_unit(frequencies: Effects) -> None:
    heatmap = plots.plot_matrix(frequencies).data[0]
    for _, unit in frequencies.units.iterrows():
        assert heatmap.z[unit["layer"]][unit["kv_group"]] == pytest.approx(unit["effect"])
    assert heatmap.zmax == -heatmap.zmin > 0


def test_the_forest_plot_has_one_dot_per_document_and_distinguishes_exact_from_estimated(run: Run) -> None:
    partly = partly_estimated(run)
    dots, filled, hollow = plots.plot_forest(partly).data
    order = partly.units.sort_values("effect", ascending=False).reset_index(drop=True)
    assert len(filled.x) == 2
    assert len(hollow.x) == 6
    assert {filled.marker.symbol, hollow.marker.symbol} == {"circle", "circle-open"}
    for trace in (filled, hollow):
        for x, y, head_id in zip(trace.x, trace.y, trace.customdata, strict=True):
            assert x == order.loc[y, "effect"]
            assert [*head_id[:2]] == [order.loc[y, "layer"], -1]
    assert len(dots.x) == 8 * run.influence["doc"].nunique()
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


def test_influence_is_plotted_against_the_mean_over_the_heads_of_a_kv_group(run: Run, frequencies: Effects) -> None:
    heads = run.heads[run.heads["model"] == "learned"]
    trace = plots.plot_against_statistic(frequencies, heads, "sink_mass", "sink mass").data[0]
    group_mean = heads[(heads["layer"] == 0) & (heads["kv_group"] == 0)]["sink_mass"].mean()
    assert trace.x[0] == pytest.approx(group_mean)
    assert list(trace.y) == pytest.approx(list(frequencies.units["effect"]))


def test_the_cumulative_effect_has_lines_for_top_and_random_units(run: Run) -> None:
    sets = ranked_sets(run, {"model": "learned", "intervention": "scale"})
    lines = {trace.name: trace for trace in plots.plot_cumulative_effect(sets).data if trace.mode == "lines+markers"}
    means = sweep_of(set_sweeps(run), intervention="scale").units.set_index(["choice", "size"])["effect"]
    assert list(lines["top by influence"].x) == [1, 2, 4, 24]
    assert lines["top by influence"].y[1] == pytest.approx(means["top", 2])
    assert lines["random, same layers"].y[0] == pytest.approx(means["random", 1])
    empty = plots.plot_cumulative_effect(sets.head(0))
    assert (len(empty.data), len(empty.layout.annotations)) == (0, 1), "a reason in place of the data"


def test_the_per_head_table_has_the_influence_of_each_heads_unit(run: Run, frequency_units: pd.DataFrame) -> None:
    heads = run.heads[run.heads["model"] == "learned"].set_index(["layer", "head"])
    unit = frequency_units.query("layer == 3 and kv_group == 1").iloc[0]
    for head in (3, 4, 5):
        for suffix, column in (("", "effect"), ("_low", "low"), ("_high", "high")):
            assert heads.loc[(3, head), f"influence_freq{suffix}"] == pytest.approx(unit[column])
    scale = sweep_of(all_sweeps(run), intervention="scale").units.set_index(["layer", "head"])
    assert heads.loc[(2, 5), "influence_scale"] == pytest.approx(scale.loc[(2, 5), "effect"])


def test_results_have_concentration_agreement_and_the_effect_of_all_units(run: Run, frequencies: Effects) -> None:
    every_result = [*results(run)]
    assert len({result.key for result in every_result}) == len(every_result)
    (best,) = agreements(frequencies)
    values = {result.where["intervention"]: result for result in answers(run, "agreement") if result.model == "learned"}
    assert "freq" not in values, "8 KV groups are too few for an agreement"
    assert best.compared == 8
    assert min(result.n for result in values.values()) >= 10
    (top,) = (
        one for one in answers(run, "concentration") if (one.model, one.where["intervention"]) == ("learned", "freq")
    )
    rises = frequencies.units["effect"].clip(lower=0)
    assert top.value == pytest.approx(rises.max() / rises.sum())
    assert (top.details["fraction"], top.details["top"], top.details["units"]) == (0.05, 1, 8)
    assert 0 < top.details["gini"] < 1
    sets = ranked_sets(run, {**frequencies.key}).query("choice == 'top'").set_index("size")["effect"]
    (whole,) = (
        one for one in answers(run, "all_units") if (one.model, one.where["intervention"]) == ("learned", "freq")
    )
    assert (whole.value, whole.details["first"], whole.details["size"]) == (sets[8], sets[1], 8)


def test_the_largest_effect_has_an_interval_that_allows_for_the_choice(run: Run, frequencies: Effects) -> None:
    (top,) = (one for one in answers(run, "top") if (one.model, one.where["intervention"]) == ("learned", "freq"))
    units = frequencies.units.set_index(["layer", "kv_group"])
    unit = units.loc[top.layer, top.kv_group]
    assert (top.value, top.selected_from) == (units["effect"].max(), 8)
    assert top.low < unit["low"] < unit["high"] < top.high
    assert top.by_sample == frequencies.by_sample(frequencies.units.loc[frequencies.units["effect"].idxmax()])


@pytest.mark.slow
def test_a_fall_of_the_loss_for_all_units_has_a_sign(run: Run, band_run: Run, answer_run: Run) -> None:
    def falling(run: Run, table: str) -> Run:
        rows = run.table(table)
        return with_tables(run, **run._frames | {table: rows.assign(delta_nll=-rows["delta_nll"].abs() - 0.001)})

    runs = [falling(run, "influence"), falling(band_run, "influence"), falling(answer_run, "influence_answers")]
    for changed_run, name in zip(runs, ("top", "band", "top"), strict=True):
        about_answers = "influence_answers" in changed_run.tables
        largest = [one for one in answers(changed_run, name) if one.question.startswith("answer") == about_answers]
        assert largest
        for result in largest:
            assert result.value < 0
            assert f", {result.value:+.2g} nats/token" in words.sentence(result)
        context = assembly.render_context(changed_run)
        charts = [chart for group in view.charts(context) for chart in group.charts]
        assert any(words.sentence(largest[0]) in chart.summary for chart in charts)


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
        group for group in view.charts(assembly.render_context(run)) if group.heading.startswith("Temperature")
    )
    _, histogram, *later_figures = [chart.figure for chart in group.charts]
    best = heads.loc[heads["retrieval"].idxmax()]
    start = f"top retrieval head: L{best['layer']}H{best['head']}, "
    assert any(annotation.text.startswith(start) for annotation in histogram.layout.annotations)
    titles = [figure.layout.title.text for figure in later_figures]
    assert "Influence against retrieval score: base" in titles


def test_the_page_has_the_sweeps_of_one_model_and_lists_models_with_sweeps(run: Run) -> None:
    page = view.page(assembly.render_context(run, selected_model="learned"))
    assert page.title == "Head influence: learned"
    assert [*page.sections] == [
        "Frequencies reset to the start of training, 1,024 tokens",
        "Temperature reset to the start of training, 1,024 tokens",
        "Frequencies and temperature reset to the start of training, 1,024 tokens",
        "In words",
    ]
    (summary,) = page.sections["In words"]
    assert summary.sentences == [words.sentence(one) for one in influence_results(run) if one.model == "learned"]
    assert len(summary.sentences) == 3 * 6 - 2, "six of each component; 8 KV groups are too few for an agreement"
    titles = [
        chart.figure.layout.title.text
        for name, charts in page.sections.items()
        if name != "In words"
        for chart in charts
    ]
    assert [title for title in titles if title.startswith("Influence: ")] == ["Influence: learned"] * 6
    page_without_sweeps = view.page(assembly.render_context(run, selected_model="other"))
    (advice,) = page_without_sweeps.sections[""]
    assert_names(advice.sentences[0], "other", "base", "learned")
    assert "headscope influence --model" in advice.sentences[1]


def test_head_results_have_the_influence_and_rank_of_the_heads_unit(run: Run, frequency_units: pd.DataFrame) -> None:
    unit = frequency_units.query("layer == 2 and kv_group == 1").iloc[0]
    rank = int((frequency_units["effect"] > unit["effect"]).sum()) + 1
    first, *others = head_results(run, "learned", 2, 4)
    assert len(others) == 2
    assert (first.value, first.low, first.high) == (unit["effect"], unit["low"], unit["high"])
    assert (first.question, first.model, first.unit) == ("influence.head", "learned", "L2 KV group 1")
    assert (first.where["intervention"], first.where["context_length"]) == ("freq", 1024)
    assert (first.details["change"], first.details["rank"], first.details["units"]) == (
        describe_change("freq", "init"),
        rank,
        8,
    )
    assert [*head_results(run, "learned", 99, 0)] == []


def test_every_component_of_a_sweep_is_a_statistic() -> None:
    for component in ("joint", "freq", "scale", "zero", "mean_text", "mean_document", "uniform"):
        assert statistic(f"influence_{component}").unit == "nats/token"
        assert statistic(f"influence_answer_{component}").label.startswith("influence on answers, ")
    assert statistic("influence_zero").format_number(-0.01234) == "-0.012"


def test_every_sweep_is_a_chart_group(run: Run) -> None:
    groups = [*view.charts(assembly.render_context(run))]
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


@pytest.mark.slow
def test_answers_are_one_sweep_with_trials_as_documents(answer_run: Run) -> None:
    groups = {group.heading: [*group.charts] for group in view.charts(assembly.render_context(answer_run))}
    assert len(groups) == 7 - 3, "groups of both models share a heading"
    forest, histogram, matrix, *_ = groups["Zero ablation (loss of the answer), up to 1,024 tokens"]
    assert forest.figure.layout.title.text == "Influence on answers, top heads: learned"
    assert_names(forest.caption, "8 trials")
    assert {trace.name for trace in forest.figure.data} == {"one trial", "mean, exact"}
    assert matrix.figure.data[0].z[1][4] == pytest.approx(1.5)
    assert int(np.nansum(histogram.figure.data[0].y)) == 24


@pytest.mark.slow
def test_results_about_answers_have_the_answered_trials_separately(answer_run: Run) -> None:
    (top,) = answers(answer_run, "top")[-1:]
    assert (top.question, top.unit, top.value, top.n) == ("answer_influence.top", "L1H4", 1.5, 8)
    (answered,) = answers(answer_run, "answered")
    assert (answered.value, answered.details["answered"], answered.n) == (0.5, 4, 8)
    (of_answered,) = answers(answer_run, "answered_top")
    assert (of_answered.unit, of_answered.value, of_answered.n) == ("L1H4", 2, 4)
    (head,) = answers(answer_run, "top_head")
    heads = answer_run.heads[answer_run.heads["model"] == "learned"]
    best = heads.loc[heads["retrieval"].idxmax()]
    assert (head.where["statistic"], head.unit) == ("retrieval", f"L{best['layer']}H{best['head']}")
    of_head = [one for one in head_results(answer_run, "learned", 1, 4) if one.question == "answer_influence.head"]
    assert [(one.where["intervention"], one.where["context_length"], one.value) for one in of_head] == [
        ("zero", 1024, 1.5)
    ]


def run_with_top_head(run: Run, answers: pd.DataFrame, layer: int, head: int) -> Run:
    """A copy of the run with these answers, in which one head has the highest retrieval score."""
    changed_run = with_tables(run, influence_answers=answers)
    is_top = (run.heads["layer"] == layer) & (run.heads["head"] == head)
    changed_run.__dict__["heads"] = run.heads.assign(retrieval=is_top.astype(float))
    return changed_run


def retrieval_claim(run: Run) -> Result:
    """The claim that the top retrieval head has the largest influence on answers."""
    (claim,) = [
        claim
        for claim in claims(run)
        if (claim.question, claim.where.get("statistic")) == ("answer_influence.largest_head", "retrieval")
    ]
    return claim


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "head", "verdict"), [(1, 4, "supported"), (0, 0, "not supported")])
def test_the_claim_about_answers_depends_on_the_rank_of_the_top_retrieval_head(
    answer_run: Run, layer: int, head: int, verdict: str
) -> None:
    claim = retrieval_claim(run_with_top_head(answer_run, answer_run.influence_answers, layer, head))
    assert claim.verdict == verdict
    assert (claim.where["intervention"], claim.details["noun"]) == ("zero", "head")
    (sweep,) = unit_sweeps(answer_run.influence_answers, ["learned"])
    effects = sweep.units.set_index(["layer", "head"])["effect"]
    rank = int((effects > effects[layer, head]).sum()) + 1
    assert claim.unit == claim.details["head_name"] == f"L{layer}H{head}"
    assert (claim.details["rank"], claim.details["units"]) == (rank, 24)
    assert claim.value == pytest.approx(effects[layer, head] - effects.drop((layer, head)).max())


def test_the_claim_about_answers_is_inconclusive_with_estimated_units(answer_run: Run) -> None:
    answers = answer_run.influence_answers
    is_estimated = (answers["layer"] == 0) & (answers["head"] == 0)
    partly = answers.assign(method=answers["method"].where(~is_estimated, "estimate"))
    claim = retrieval_claim(run_with_top_head(answer_run, partly, 1, 4))
    assert claim.verdict == "inconclusive"
    assert (claim.reason, claim.details["estimated"], claim.details["units"]) == ("estimated", 1, 24)


def test_bands_are_one_chart_group_of_single_heads_and_all_heads_at_once(band_run: Run) -> None:
    (group,) = view.charts(assembly.render_context(band_run))
    assert group.heading == "Rotary pairs by band, 1,024 tokens"
    ablated, unrotated, all_heads = group.charts
    heatmap = ablated.figure.data[0]
    assert list(heatmap.y) == ["0-1<br>6 to 63 tokens", "2-3<br>628 to 6,283 tokens", "long"]
    assert np.shape(heatmap.z) == (3, 24)
    assert heatmap.z[1][1 * 6 + 4] == pytest.approx(2 * 5 / 1000)
    assert list(heatmap.customdata[1][1 * 6 + 4][:2]) == [1, 4]
    assert "contribution to the logits removed" in ablated.figure.layout.title.subtitle.text
    assert "exact" in ablated.figure.layout.title.subtitle.text
    assert np.shape(unrotated.figure.data[0].z) == (1, 24)
    assert_names(ablated.summary, "pairs 2-3", "L3H5", "+0.024")
    bars = {
        trace.name: {band.partition("<br>")[0]: loss for band, loss in zip(trace.x, trace.y, strict=True)}
        for trace in all_heads.figure.data
    }
    assert bars == {
        "contribution to the logits removed": pytest.approx({"0-1": 1.5, "2-3": 3.0, "long": 0.6}),
        "rotation removed": pytest.approx({"0-1": 0.3}),
    }
    assert list(all_heads.figure.layout.xaxis.categoryarray) == ["0-1<br>6<br>to 63", "2-3<br>628<br>to 6,283", "long"]


def test_bands_have_one_result_per_kind_of_ablation(band_run: Run) -> None:
    ablated, unrotated = influence_results(band_run)
    assert (ablated.unit, ablated.value) == ("L3H5", pytest.approx(0.024))
    assert (ablated.model, ablated.n, ablated.where["context_length"]) == ("learned", 1, 1024)
    assert not ablated.has_interval
    assert (ablated.details["pairs"], ablated.details["noun"]) == ("pairs 2-3", "head")
    assert ablated.details["together"] == pytest.approx(
        {"pairs 0-1": 1.5, "pairs 2-3": 3, "pairs of long wavelength": 0.6}
    )
    assert unrotated.details["together"] == {"pairs 0-1": pytest.approx(0.3)}
    of_head = [*head_results(band_run, "learned", 1, 4)]
    assert [(one.question, one.unit, one.n, one.has_interval) for one in of_head] == [
        ("influence.head_band", "L1H4", 1, False)
    ] * 2
    assert [(one.details["bands"], one.where["intervention"]) for one in of_head] == [
        (3, "pairs-zero:2-3"),
        (1, "pairs-unrotated:0-1"),
    ]
    assert [one.value for one in of_head] == pytest.approx([0.01, 0.001])
    assert [*view.page(assembly.render_context(band_run, selected_model="learned")).sections] == [
        "Rotary pairs by band, 1,024 tokens",
        "In words",
    ]


def test_band_plot_without_rows_gives_a_reason() -> None:
    figure = plots.plot_joint_effects_by_band(pd.DataFrame())
    assert (len(figure.data), len(figure.layout.annotations)) == (0, 1)

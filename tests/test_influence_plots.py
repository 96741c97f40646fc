"""Figures, sentences and columns of head influence carry the numbers of their tables."""

import numpy as np
import pandas as pd
import pytest

from headscope.plots.learned_frequencies import plot_learned_frequencies
from headscope.report import assembly
from headscope.runs.column_metadata import statistic, statistics
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.influence import band_plots, findings
from probes.influence import plots as influence
from probes.influence import report as charts
from probes.influence.analysis import best_unit_effects, estimate_agreement, set_effects
from probes.influence.claims import claims


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "learned"), pairs=4, lengths=(1024,))


@pytest.fixture(scope="module")
def freq(run: Run):
    found = best_unit_effects(run.influence)
    return found[(found["model"] == "learned") & (found["component"] == "freq")]


def test_each_unit_is_shown_by_the_method_that_knows_it_best(run: Run) -> None:
    assert set(best_unit_effects(run.influence)["method"]) == {"exact"}
    rows = run.influence
    partly = best_unit_effects(rows[(rows["method"] == "estimate") | (rows["layer"] == 0)])
    assert ((partly["method"] == "exact") == (partly["layer"] == 0)).all()
    mine = partly[(partly["model"] == "learned") & (partly["component"] == "freq")]
    assert len(mine) == 8
    assert "exact for 2 of 8 units, else first-order estimate" in influence.plot_matrix(mine).layout.title.subtitle.text


def test_the_histogram_counts_every_unit_and_marks_the_group_of_a_head(run: Run, freq) -> None:
    head = run.heads.query("model == 'learned' and layer == 1 and head == 4").iloc[0]
    figure = influence.plot_histogram(freq, {"best head": head})
    assert int(np.nansum(figure.data[0].y)) == len(freq) == 8
    mine = freq[(freq["layer"] == 1) & (freq["kv_group"] == 1)].iloc[0]
    lines = [shape for shape in figure.layout.shapes if shape.x0 == pytest.approx(mine["delta"])]
    assert lines
    assert figure.layout.annotations[-1].text.startswith("best head: layer 1, KV group 1, Δ ")
    assert figure.layout.title.text == "Influence: learned"
    assert figure.layout.title.subtitle.text == "freq to init: exact"


def test_the_matrix_holds_each_units_mean_at_its_place(freq) -> None:
    heat = influence.plot_matrix(freq).data[0]
    for _, unit in freq.iterrows():
        assert heat.z[unit["layer"]][unit["kv_group"]] == pytest.approx(unit["delta"])
    assert heat.zmax == -heat.zmin > 0


def test_the_forest_has_a_dot_a_document_and_tells_evaluated_from_estimated(run: Run) -> None:
    rows = run.influence
    partly = best_unit_effects(rows[(rows["method"] == "estimate") | (rows["layer"] == 0)])
    units = partly[(partly["model"] == "learned") & (partly["component"] == "freq")]
    own = rows[(rows["model"] == "learned") & (rows["component"] == "freq") & (rows["method"] == "exact")]
    dots, filled, hollow = influence.plot_forest(units, own).data
    order = units.sort_values("delta", ascending=False).reset_index(drop=True)
    assert len(filled.x) == 2
    assert len(hollow.x) == 6
    assert {filled.marker.symbol, hollow.marker.symbol} == {"circle", "circle-open"}
    for trace in (filled, hollow):
        for x, y, place in zip(trace.x, trace.y, trace.customdata, strict=True):
            assert x == order.loc[y, "delta"]
            assert place[:2] == [order.loc[y, "layer"], -1]
    assert len(dots.x) == 8 * own["doc"].nunique()
    at = order.index[(order["layer"] == 0) & (order["kv_group"] == 0)][0]
    place = list(filled.y).index(at)
    assert filled.x[place] + filled.error_x.array[place] == pytest.approx(order.loc[at, "high"])
    assert "q = " in filled.text[place]


def test_the_spectrum_draws_base_start_and_learned_frequencies(run: Run) -> None:
    figure = plot_learned_frequencies(run.positions, "learned", 2, 1)
    rows = run.positions.query("model == 'learned' and layer == 2 and kv_group == 1").sort_values("pair")
    learned = [trace for trace in figure.data if trace.name == "learned"]
    np.testing.assert_allclose(learned[0].y, rows["log_theta"].astype(float) / np.log(10), rtol=1e-6)
    np.testing.assert_allclose(
        learned[1].y, rows["log_theta"].astype(float) - rows["log_theta_base"].astype(float), atol=1e-6
    )


def test_influence_is_drawn_against_the_mean_of_its_groups_heads(run: Run, freq) -> None:
    heads = run.heads[run.heads["model"] == "learned"]
    trace = influence.plot_against_statistic(freq, heads, "sink_mass", "sink mass").data[0]
    first = heads[(heads["layer"] == 0) & (heads["kv_group"] == 0)]["sink_mass"].mean()
    assert trace.x[0] == pytest.approx(first)
    assert list(trace.y) == pytest.approx(list(freq["delta"]))


def test_the_cumulative_curve_carries_both_lines(run: Run) -> None:
    sets = run.influence_sets[(run.influence_sets["model"] == "learned") & (run.influence_sets["component"] == "scale")]
    lines = {
        trace.name: trace
        for trace in influence.plot_cumulative_effect(set_effects(sets)).data
        if trace.mode == "lines+markers"
    }
    found = set_effects(sets).set_index(["choice", "size"])["mean"]
    assert list(lines["most influential"].x) == [1, 2, 4, 24]
    assert lines["most influential"].y[1] == pytest.approx(found["top", 2])
    assert lines["random, same layers"].y[0] == pytest.approx(found["random", 1])


@pytest.mark.parametrize("draw", [influence.plot_histogram, influence.plot_matrix, influence.plot_cumulative_effect])
def test_an_empty_table_is_explained(draw, run: Run) -> None:
    table = (
        set_effects(run.influence_sets)
        if draw is influence.plot_cumulative_effect
        else best_unit_effects(run.influence)
    )
    assert "no data to plot" in draw(table.head(0)).to_json()


def test_the_wide_table_gives_every_head_the_influence_of_its_unit(run: Run, freq) -> None:
    heads = run.heads[run.heads["model"] == "learned"].set_index(["layer", "head"])
    unit = freq[(freq["layer"] == 3) & (freq["kv_group"] == 1)].iloc[0]
    for head in (3, 4, 5):
        for end, column in (("", "delta"), ("_low", "low"), ("_high", "high")):
            assert heads.loc[(3, head), f"influence_freq{end}"] == pytest.approx(unit[column])
    scale = best_unit_effects(run.influence)
    scale = scale[(scale["model"] == "learned") & (scale["component"] == "scale")].set_index(["layer", "head"])
    assert heads.loc[(2, 5), "influence_scale"] == pytest.approx(scale.loc[(2, 5), "delta"])


def test_the_findings_tell_concentration_agreement_and_the_whole(run: Run) -> None:
    told = [finding.text for finding in findings.sweep_findings(run)]
    best = estimate_agreement(run.influence).iloc[0]
    assert any(f"{best['spearman']:.3f}, {best['shared']} of the top" in sentence for sentence in told)
    assert any("Gini" in sentence and "KV group" in sentence for sentence in told)
    assert any("with all 8 KV groups changed" in sentence for sentence in told)


def test_the_best_head_of_any_statistic_that_names_it_is_marked_and_drawn_against(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"]
    named = {name: known.best_head_name for name, known in statistics().items() if known.best_head_name}
    assert named["retrieval"] == "top retrieval head"
    group = next(
        group for group in charts.charts(assembly.render_context(run)) if group.heading.startswith("Temperature")
    )
    _, histogram, *others = [chart.figure for chart in group.charts]
    best = heads.loc[heads["retrieval"].idxmax()]
    start = f"top retrieval head: layer {best['layer']}, head {best['head']}, "
    assert any(said.text.startswith(start) for said in histogram.layout.annotations)
    titles = [figure.layout.title.text for figure in others]
    assert "Influence against retrieval score: base" in titles


def test_the_page_shows_the_sweeps_of_one_model_and_names_those_that_have_some(run: Run) -> None:
    page = charts.page(assembly.render_context(run, selected_model="learned"))
    assert page.title == "Head influence: learned"
    assert [*page.sections] == [
        "",
        "Frequencies reset to init, 1,024 tokens",
        "Temperature reset to init, 1,024 tokens",
        "Frequencies and temperature reset to init, 1,024 tokens",
    ]
    (words,) = page.sections[""]
    assert len(words.sentences) == 9
    assert all(sentence.startswith("learned, ") for sentence in words.sentences)
    titles = [chart.figure.layout.title.text for name, parts in page.sections.items() if name for chart in parts]
    assert [title for title in titles if title.startswith("Influence: ")] == ["Influence: learned"] * 6
    other = charts.page(assembly.render_context(run, selected_model="other"))
    (words,) = other.sections[""]
    assert words.sentences[0] == "This run has no influence sweep of other. It has sweeps of base, learned."
    assert "headscope influence --model" in words.sentences[1]


def test_a_head_is_told_by_the_influence_of_its_unit_and_its_rank(run: Run, freq) -> None:
    unit = freq[(freq["layer"] == 2) & (freq["kv_group"] == 1)].iloc[0]
    rank = int((freq["delta"] > unit["delta"]).sum()) + 1
    told = [*findings.head_findings(run, "learned", 2, 4)]
    assert len(told) == 3
    assert told[0].startswith(f"Influence in learned, frequencies reset to init: {unit['delta']:+.2g} nats/token")
    assert told[0].endswith(f"for layer 2, KV group 1, rank {rank} of 8.")
    assert [*findings.head_findings(run, "learned", 99, 0)] == []


def test_every_component_that_a_sweep_may_have_is_a_statistic() -> None:
    for component in ("joint", "freq", "scale", "zero", "mean", "uniform"):
        assert statistic(f"influence_{component}").unit == "nats/token"
        assert statistic(f"influence_answer_{component}").label.startswith("influence on answers, ")
    assert statistic("influence_zero").format_number(-0.01234) == "-0.012"


def test_every_sweep_is_a_group_of_the_chapter(run: Run) -> None:
    groups = [*charts.charts(assembly.render_context(run))]
    assert {group.chapter for group in groups} == {"Head influence"}
    assert len(groups) == 6, "three components of two models"
    assert len([*groups[0].charts]) >= 5


# Answers and bands -------------------------------------------------------------------------------------------------

KEYS = {"model": "learned", "context_length": 1024, "target": "none", "nll_before": 2.0}


def made(run: Run, **tables: pd.DataFrame) -> Run:
    """The run with these tables as well, or instead."""
    stored = run.manifest["tables"] | {name: {"rows": len(table)} for name, table in tables.items()}
    other = Run(run.path, {**run.manifest, "tables": stored})
    other._frames.update(tables)
    return other


@pytest.fixture(scope="module")
def asked(run: Run) -> Run:
    """Answers: head 4 of layer 1 matters most, twice as much in the half of the trials that the model answers."""
    heads = run.heads[run.heads["model"] == "learned"][["layer", "head", "kv_group"]]
    trials = [(doc, fact, depth) for doc in ("a", "b") for fact in ("bell", "ledger") for depth in (0.0, 1.0)]
    rows = []
    for at, (doc, fact, depth) in enumerate(trials):
        right, rng = at % 2, np.random.default_rng(at)
        delta = np.where((heads["layer"] == 1) & (heads["head"] == 4), 1 + right, 0.1 * rng.random(len(heads)))
        trial = {"doc": doc, "fact": fact, "depth": depth, "hits": 0.9 * right, "component": "zero"}
        rows.append(heads.assign(**KEYS, **trial, method="exact", delta_nll=delta))
    return made(run, influence_answers=pd.concat(rows, ignore_index=True))


@pytest.fixture(scope="module")
def banded(run: Run) -> Run:
    """Bands: head h of layer l costs (l + 1) x (h + 1) / 1000 without pairs 2-3, half of it without 0-1."""
    heads = run.heads[run.heads["model"] == "learned"][["layer", "head", "kv_group"]]
    cost = (heads["layer"] + 1) * (heads["head"] + 1) / 1000
    keys = KEYS | {"doc": "a"}
    shares = {"pairs-zero:0-1": 0.5, "pairs-zero:2-3": 1.0, "pairs-zero:long": 0.2, "pairs-unrotated:0-1": 0.1}
    units = [
        heads.assign(**keys, component=component, method="exact", delta_nll=share * cost)
        for component, share in shares.items()
    ]
    together = {"unit": "head", "choice": "top", "size": len(heads), "draw": 0}
    sets = [
        pd.DataFrame([{**keys, **together, "component": at, "delta_nll": 3 * share}]) for at, share in shares.items()
    ]
    return made(run, influence=pd.concat(units, ignore_index=True), influence_sets=pd.concat(sets, ignore_index=True))


def test_answers_are_a_sweep_of_their_own_whose_trials_are_its_documents(asked: Run) -> None:
    groups = {group.heading: [*group.charts] for group in charts.charts(assembly.render_context(asked))}
    assert len(groups) == 7 - 3, "one group of a heading for both models"
    forest, histogram, matrix, *_ = groups["Output set to zero: loss of the answer, up to 1,024 tokens"]
    assert forest.figure.layout.title.text == "Influence on answers, largest units: learned"
    assert forest.caption.startswith("8 trials.")
    assert {trace.name for trace in forest.figure.data} == {"one trial", "mean, exact"}
    assert matrix.figure.data[0].z[1][4] == pytest.approx(1.5)
    assert int(np.nansum(histogram.figure.data[0].y)) == 24


def test_the_answers_finding_counts_the_trials_that_the_model_fails_apart(asked: Run) -> None:
    (told,) = [finding.text for finding in findings.sweep_findings(asked) if "loss of the answer" in finding.text]
    assert "the loss rises most for layer 1, head 4, by +1.5 nats/token" in told
    assert "The top retrieval head, layer " in told
    assert "Unchanged, learned answers 4 of 8 trials" in told
    assert "over these trials the loss rises most for layer 1, head 4, by +2 (95 % confidence interval" in told
    of_head = [*findings.head_findings(asked, "learned", 1, 4)]
    assert any(
        line.startswith("Influence in learned, output set to zero: loss of the answer: +1.5") for line in of_head
    )


@pytest.mark.parametrize(("best", "verdict"), [((1, 4), "supported"), ((0, 0), "not supported")])
def test_whether_the_top_retrieval_head_stands_at_the_extreme_is_judged(
    asked: Run, best: tuple[int, int], verdict: str
) -> None:
    other = made(asked, influence_answers=asked.influence_answers)
    heads = run_heads(asked, best)
    other.__dict__["heads"] = heads
    told = [claim for claim in claims(other) if "has the largest influence on answers" in claim.statement]
    (claim,) = [claim for claim in told if "top retrieval head" in claim.statement]
    assert claim.verdict == verdict
    assert claim.statement.startswith("Output set to zero, one unit at a time: the top retrieval head")
    place = int((best_unit_effects(other.influence_answers)["delta"] > claim_delta(other, best)).sum()) + 1
    assert f"layer {best[0]}, head {best[1]}, " in claim.evidence
    assert f"has rank {place} of 24" in claim.evidence
    assert "the largest is +1.5" in claim.evidence


def test_where_a_unit_is_only_estimated_the_extreme_cannot_be_told(asked: Run) -> None:
    answers = asked.influence_answers
    one = (answers["layer"] == 0) & (answers["head"] == 0)
    other = made(asked, influence_answers=answers.assign(method=answers["method"].where(~one, "estimate")))
    other.__dict__["heads"] = run_heads(asked, (1, 4))
    (claim,) = [claim for claim in claims(other) if "top retrieval head has the largest influence" in claim.statement]
    assert claim.verdict == "inconclusive"
    assert "1 of 24 units are only estimated. Use --method exact" in claim.evidence


def run_heads(run: Run, best: tuple[int, int]) -> pd.DataFrame:
    """The per-head table with that head of the highest retrieval score."""
    heads = run.heads.copy()
    heads["retrieval"] = ((heads["layer"] == best[0]) & (heads["head"] == best[1])).astype(float)
    return heads


def claim_delta(run: Run, head: tuple[int, int]) -> float:
    found = best_unit_effects(run.influence_answers).set_index(["layer", "head"])
    return float(found.loc[head, "delta"])


def test_bands_are_one_group_with_every_head_by_band_and_all_heads_at_once(banded: Run) -> None:
    (group,) = charts.charts(assembly.render_context(banded))
    assert group.heading == "Rotary pairs by band, 1,024 tokens"
    zero, still, together = group.charts
    heat = zero.figure.data[0]
    assert list(heat.y) == ["0-1<br>6 to 63 tokens", "2-3<br>628 to 6,283 tokens", "long"]
    assert np.shape(heat.z) == (3, 24)
    assert heat.z[1][1 * 6 + 4] == pytest.approx(2 * 5 / 1000)
    assert list(heat.customdata[1][1 * 6 + 4][:2]) == [1, 4]
    assert zero.figure.layout.title.subtitle.text == "contribution to the logits removed: exact"
    assert np.shape(still.figure.data[0].z) == (1, 24)
    assert "Largest rise: pairs 2-3 of layer 3, head 5, +0.024" in zero.summary
    bars = {
        trace.name: {band.partition("<br>")[0]: loss for band, loss in zip(trace.x, trace.y, strict=True)}
        for trace in together.figure.data
    }
    assert bars == {
        "contribution to the logits removed": pytest.approx({"0-1": 1.5, "2-3": 3.0, "long": 0.6}),
        "rotation removed": pytest.approx({"0-1": 0.3}),
    }
    assert list(together.figure.layout.xaxis.categoryarray) == ["0-1<br>6<br>to 63", "2-3<br>628<br>to 6,283", "long"]


def test_bands_are_told_once_a_kind_and_the_leading_one_of_a_head(banded: Run) -> None:
    zero, still = [finding.text for finding in findings.sweep_findings(banded)]
    assert "learned, rotary pairs by band, contribution to the logits removed, 1,024 tokens" in zero
    assert "the loss rises most for pairs 2-3 of layer 3, head 5, by +0.024 nats/token (one document)" in zero
    assert zero.endswith("In all units at once: 0-1 +1.5, 2-3 +3, long +0.6.")
    assert still.endswith("In all units at once: 0-1 +0.3.")
    assert [*findings.head_findings(banded, "learned", 1, 4)] == [
        "Influence in learned, largest of 3 bands, pairs 2-3, contribution to the logits removed: +0.01 nats/token "
        "(one document) for layer 1, head 4.",
        "Influence in learned, largest of 1 bands, pairs 0-1, rotation removed: +0.001 nats/token "
        "(one document) for layer 1, head 4.",
    ]
    assert [*charts.page(assembly.render_context(banded, selected_model="learned")).sections] == [
        "",
        "Rotary pairs by band, 1,024 tokens",
    ]


def test_a_band_without_rows_is_explained(banded: Run) -> None:
    assert "no data to plot" in band_plots.plot_influence_by_band(best_unit_effects(banded.influence).head(0)).to_json()
    assert (
        "no data to plot" in band_plots.plot_joint_effects_by_band(set_effects(banded.influence_sets).head(0)).to_json()
    )

"""Figures, sentences and columns of head influence carry the numbers of their tables."""

from pathlib import Path

import numpy as np
import pytest

from headscope.figures.learned import spectrum
from headscope.report import html as report
from headscope.report import outline
from headscope.runs.run import Run
from headscope.runs.statistics import statistic, statistics
from headscope.runs.synthetic import synthetic_run
from probes.influence import charts, findings
from probes.influence import figures as influence
from probes.influence.found import agreement, curve, shown


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "learned"))


@pytest.fixture(scope="module")
def freq(run: Run):
    found = shown(run.influence)
    return found[(found["model"] == "learned") & (found["component"] == "freq")]


def test_each_unit_is_shown_by_the_method_that_knows_it_best(run: Run) -> None:
    assert set(shown(run.influence)["method"]) == {"exact"}
    rows = run.influence
    partly = shown(rows[(rows["method"] == "screen") | (rows["layer"] == 0)])
    assert ((partly["method"] == "exact") == (partly["layer"] == 0)).all()
    mine = partly[(partly["model"] == "learned") & (partly["component"] == "freq")]
    assert len(mine) == 8
    assert "exact for 2 of 8 units, else first-order estimate" in influence.matrix(mine).layout.title.subtitle.text


def test_the_histogram_counts_every_unit_and_marks_the_group_of_a_head(run: Run, freq) -> None:
    head = run.heads.query("model == 'learned' and layer == 1 and head == 4").iloc[0]
    figure = influence.histogram(freq, {"best head": head})
    assert int(np.nansum(figure.data[0].y)) == len(freq) == 8
    mine = freq[(freq["layer"] == 1) & (freq["kv_group"] == 1)].iloc[0]
    lines = [shape for shape in figure.layout.shapes if shape.x0 == pytest.approx(mine["delta"])]
    assert lines
    assert figure.layout.annotations[-1].text.startswith("best head: layer 1, key group 1, Δ ")
    assert figure.layout.title.text == "Influence: learned"
    assert figure.layout.title.subtitle.text == "freq to init: exact"


def test_the_matrix_holds_each_units_mean_at_its_place(freq) -> None:
    heat = influence.matrix(freq).data[0]
    for _, unit in freq.iterrows():
        assert heat.z[unit["layer"]][unit["kv_group"]] == pytest.approx(unit["delta"])
    assert heat.zmax == -heat.zmin > 0


def test_the_forest_has_a_dot_a_document_and_tells_evaluated_from_estimated(run: Run) -> None:
    rows = run.influence
    partly = shown(rows[(rows["method"] == "screen") | (rows["layer"] == 0)])
    units = partly[(partly["model"] == "learned") & (partly["component"] == "freq")]
    own = rows[(rows["model"] == "learned") & (rows["component"] == "freq") & (rows["method"] == "exact")]
    dots, filled, hollow = influence.forest(units, own).data
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
    figure = spectrum(run.positions, "learned", 2, 1)
    rows = run.positions.query("model == 'learned' and layer == 2 and kv_group == 1").sort_values("pair")
    learned = [trace for trace in figure.data if trace.name == "learned"]
    np.testing.assert_allclose(learned[0].y, rows["log_theta"].astype(float) / np.log(10), rtol=1e-6)
    np.testing.assert_allclose(
        learned[1].y, rows["log_theta"].astype(float) - rows["log_theta_base"].astype(float), atol=1e-6
    )


def test_influence_is_drawn_against_the_mean_of_its_groups_heads(run: Run, freq) -> None:
    heads = run.heads[run.heads["model"] == "learned"]
    trace = influence.against(freq, heads, "sink_mass", "sink mass").data[0]
    first = heads[(heads["layer"] == 0) & (heads["kv_group"] == 0)]["sink_mass"].mean()
    assert trace.x[0] == pytest.approx(first)
    assert list(trace.y) == pytest.approx(list(freq["delta"]))


def test_the_cumulative_curve_carries_both_lines(run: Run) -> None:
    sets = run.influence_sets[(run.influence_sets["model"] == "learned") & (run.influence_sets["component"] == "scale")]
    lines = {trace.name: trace for trace in influence.cumulative(sets).data if trace.mode == "lines+markers"}
    found = curve(sets).set_index(["choice", "size"])["mean"]
    assert list(lines["most influential"].x) == [1, 2, 4, 24]
    assert lines["most influential"].y[1] == pytest.approx(found["top", 2])
    assert lines["random, same layers"].y[0] == pytest.approx(found["random", 1])


@pytest.mark.parametrize("draw", [influence.histogram, influence.matrix, influence.cumulative])
def test_an_empty_table_is_explained(draw, run: Run) -> None:
    table = run.influence_sets if draw is influence.cumulative else shown(run.influence)
    assert "no rows to show" in draw(table.head(0)).to_json()


def test_the_wide_table_gives_every_head_the_influence_of_its_unit(run: Run, freq) -> None:
    heads = run.heads[run.heads["model"] == "learned"].set_index(["layer", "head"])
    unit = freq[(freq["layer"] == 3) & (freq["kv_group"] == 1)].iloc[0]
    for head in (3, 4, 5):
        for end, column in (("", "delta"), ("_low", "low"), ("_high", "high")):
            assert heads.loc[(3, head), f"influence_freq{end}"] == pytest.approx(unit[column])
    scale = shown(run.influence)
    scale = scale[(scale["model"] == "learned") & (scale["component"] == "scale")].set_index(["layer", "head"])
    assert heads.loc[(2, 5), "influence_scale"] == pytest.approx(scale.loc[(2, 5), "delta"])


def test_the_findings_tell_concentration_agreement_and_the_whole(run: Run) -> None:
    told = [finding.text for finding in outline.findings(run)["Head influence"]]
    best = agreement(run.influence).iloc[0]
    assert any(f"{best['spearman']:.3f} and {best['shared']} of the top" in sentence for sentence in told)
    assert any("Gini" in sentence and "key group" in sentence for sentence in told)
    assert any("all 8 groups together add" in sentence for sentence in told)


def test_the_best_head_of_any_statistic_that_names_it_is_marked_and_drawn_against(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"]
    named = {name: known.best for name, known in statistics().items() if known.best}
    assert named["retrieval"] == "top retrieval head"
    group = next(group for group in charts.charts(outline.shown(run)) if group.heading.startswith("Temperature"))
    _, histogram, *others = [chart.figure for chart in group.charts]
    best = heads.loc[heads["retrieval"].idxmax()]
    start = f"top retrieval head: layer {best['layer']}, head {best['head']}, "
    assert any(said.text.startswith(start) for said in histogram.layout.annotations)
    titles = [figure.layout.title.text for figure in others]
    assert "Influence against retrieval score: base" in titles


def test_the_page_shows_the_sweeps_of_one_model_and_names_those_that_have_some(run: Run) -> None:
    page = charts.page(outline.shown(run, model="learned"))
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
    other = charts.page(outline.shown(run, model="other"))
    (words,) = other.sections[""]
    assert words.sentences[0] == "This view has no sweep of other. It holds those of base, learned."
    assert "headscope influence --model" in words.sentences[1]


def test_a_head_is_told_by_the_influence_of_its_unit_and_its_rank(run: Run, freq) -> None:
    unit = freq[(freq["layer"] == 2) & (freq["kv_group"] == 1)].iloc[0]
    rank = int((freq["delta"] > unit["delta"]).sum()) + 1
    told = [*findings.of_head(run, "learned", 2, 4)]
    assert len(told) == 3
    assert told[0].startswith(f"Influence in learned, frequencies reset to init: {unit['delta']:+.2g} nats/token")
    assert told[0].endswith(f"for layer 2, key group 1, rank {rank} of 8.")
    assert [*findings.of_head(run, "learned", 99, 0)] == []


def test_every_component_that_a_sweep_may_have_is_a_statistic() -> None:
    for component in ("joint", "freq", "scale", "z-zero", "z-mean", "q-uniform"):
        assert statistic(f"influence_{component}").unit == "nats/token"
    assert statistic("influence_z-zero").number(-0.01234) == "-0.012"


def test_the_report_draws_head_influence(run: Run, tmp_path: Path) -> None:
    groups = outline.chapters(outline.shown(run))["Head influence"]
    assert len([chart for group in groups for chart in group.charts]) >= 12
    page = report.write([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Head influence" in page

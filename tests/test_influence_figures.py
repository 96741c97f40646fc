"""Figures, sentences and columns of head influence carry the numbers of their tables."""

from pathlib import Path

import numpy as np
import pytest

from headscope import charts, findings, report
from headscope.figures import influence
from headscope.influences import agreement, curve, shown
from headscope.store import Run
from headscope.synthetic import synthetic_run


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


def test_the_histogram_counts_every_unit_and_marks_the_retrieval_heads_group(freq) -> None:
    figure = influence.histogram(freq, (1, 1, 4))
    assert int(np.nansum(figure.data[0].y)) == len(freq) == 8
    mine = freq[(freq["layer"] == 1) & (freq["kv_group"] == 1)].iloc[0]
    lines = [shape for shape in figure.layout.shapes if shape.x0 == pytest.approx(mine["delta"])]
    assert lines
    assert "layer 1, key group 1" in figure.layout.annotations[-1].text
    assert figure.layout.title.text == "Influence: learned"
    assert figure.layout.title.subtitle.text == "freq to init: exact"


def test_the_matrix_holds_each_units_mean_at_its_place(freq) -> None:
    heat = influence.matrix(freq).data[0]
    for _, unit in freq.iterrows():
        assert heat.z[unit["layer"]][unit["kv_group"]] == pytest.approx(unit["delta"])
    assert heat.zmax == -heat.zmin > 0


def test_the_spectrum_draws_base_start_and_learned_frequencies(run: Run) -> None:
    figure = influence.spectrum(run.positions, "learned", 2, 1)
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
    told = findings.sentences(run)["Head influence"]
    best = agreement(run.influence).iloc[0]
    assert any(f"{best['spearman']:.3f} and {best['shared']} of the top" in sentence for sentence in told)
    assert any("Gini" in sentence and "key group" in sentence for sentence in told)
    assert any("all 8 groups together add" in sentence for sentence in told)


def test_the_report_draws_head_influence(run: Run, tmp_path: Path) -> None:
    drawn = charts.sections(run)["Head influence"]
    assert len(drawn) >= 12
    page = report.write([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Head influence" in page

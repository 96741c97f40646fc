"""The probe weights: value-weighted attention equals a loop over keys; a study stores valid tables and findings."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import families
from support.dense_circuits import DenseHead, dense_heads
from support.measure_laws import geometry_of, random_record
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import contents, save_checkpoint, save_texts

import headscope as hs
from dashboards.app import create_app
from headscope import rendering
from headscope.attention.record import AttentionRecord
from headscope.base.heads import format_head
from headscope.decomposition.attributed_rows import RowAndKey
from headscope.decomposition.qk_attribution import attribute_qk
from headscope.errors import BadInput, BadOption, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.forward.observe import observe
from headscope.measures.value_attention import ValueWeightedRows
from headscope.rendering import assembly
from headscope.rendering.blocks import TextTable
from headscope.results.collection import all_results
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run, combine_runs
from headscope.runs.run_tables import validate
from headscope.study.config import build_study
from headscope.study.runner import run_study
from probes.patterns.lens import lens_page
from probes.weights.analysis import mean_contributions
from probes.weights.declaration import ALL_OTHERS, WeightsOptions
from probes.weights.results import QUESTIONS, results
from probes.weights.run import TextObserver, attribution_tables
from probes.weights.view import charts

LENGTH = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("weights")
    save_checkpoint(place / "tiny")
    save_texts(place / "texts", 70)
    return place


def study(place: Path, **options: Any) -> dict[str, Any]:
    tiny, texts = str(place / "tiny"), {"source": f"file:{place}/texts/*.txt", "docs": 3}
    options = {"lengths": [48], "tokens": ["w5"], "pairs": ["w5>w6"], "heads": ["L2H1", "L3H0"]} | options
    return {"models": {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"}, "texts": texts, "weights": options}


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return run_study(build_study(study(place)), place / "runs")


# Value-weighted attention --------------------------------------------------------------------------------------------


def naive_statistics(record: AttentionRecord, row: int, head: int, outputs: torch.Tensor) -> list[float]:
    """ln ESS_2 and weight of key 0 of one row, plain and value-weighted, from a loop over keys in float64."""
    group = head * len(record.k) // len(record.q)
    first = 0 if record.window is None else max(0, row - record.window + 1)
    logits, norms = [], []
    for j in range(first, row + 1):
        logits.append(float(record.scaling * record.q[head, row].double() @ record.k[group, j].double()))
        norms.append(float((outputs.double() @ record.v[group, j].double()).norm()))
    plain = torch.tensor(logits, dtype=torch.float64).softmax(0)
    weighted = plain * torch.tensor(norms, dtype=torch.float64)
    statistics = []
    for weights in (plain, weighted / weighted.sum()):
        statistics += [float(-weights.square().sum().log()), float(weights[0]) if first == 0 else 0.0]
    return statistics


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt_neox", "granite"])
def test_value_weighted_attention_equals_a_loop_over_keys(name: str) -> None:
    model = hs.load(families.SPECS[name].build())
    ids = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(0))
    records: list[AttentionRecord] = []
    with torch.no_grad(), capturing(model) as layers:
        layers.listen(records.append)
        model.module(ids[None], use_cache=False)
    observers: list[TextObserver] = []

    def observer(batch: torch.Tensor) -> TextObserver:
        observers.append(TextObserver(model, batch, {"values"}))
        return observers[0]

    observe(model, ids, [observer])
    dense: list[list[DenseHead]] = dense_heads(model.module)
    for record in records:
        rows = np.array([3, 17, LENGTH - 1])
        ours = observers[0].values.row_values(record, rows)
        expected = [
            [naive_statistics(record, row, head, dense[record.layer][head].o) for row in rows] for head in range(4)
        ]
        torch.testing.assert_close(ours.double(), torch.tensor(expected).double().permute(2, 0, 1), atol=1e-5, rtol=0)


def test_value_weighting_follows_the_values_alone() -> None:
    geometry = geometry_of()
    record = random_record(geometry, LENGTH, 0)
    outputs = {0: torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1))}

    def statistics(values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        measure = ValueWeightedRows(geometry, LENGTH, None, 0, {0: scale * outputs[0]})
        changed = AttentionRecord(**{**vars(record), "v": values})
        return measure.row_values(changed, np.arange(LENGTH))

    equal = statistics(torch.ones_like(record.v))
    torch.testing.assert_close(equal[2:], equal[:2])
    torch.testing.assert_close(statistics(torch.zeros_like(record.v))[2:], equal[:2])
    values = torch.randn(record.v.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(statistics(values), statistics(values, 3.0))
    values[:, 0] = 0
    unread = statistics(values)
    assert float(unread[3, :, 1:].max()) < 1e-6
    assert float(unread[1].min()) > 0
    assert (unread[[0, 2]] >= 0).all()
    assert (unread[[0, 2]] <= torch.arange(1, LENGTH + 1).log() + 1e-5).all()


def test_chunks_of_queries_give_the_same_rows() -> None:
    geometry = geometry_of(windows=(7, None))
    whole, chunked = (
        ValueWeightedRows(geometry, LENGTH, 9, 5, {layer: torch.eye(8).expand(4, 8, 8) for layer in range(2)})
        for _ in range(2)
    )
    for layer in range(2):
        record = random_record(geometry, LENGTH, layer, layer)
        fields = {**vars(record), "v": torch.randn(record.v.shape, generator=torch.Generator().manual_seed(3))}
        whole.update(AttentionRecord(**fields))
        for start, stop in ((0, 13), (13, LENGTH)):
            cut = {name: fields[name][:, start:stop] for name in ("q", "z", "lse")}
            chunked.update(AttentionRecord(**{**fields, **cut, "k": fields["k"][:, :stop], "v": fields["v"][:, :stop]}))
    expected = whole.compute()
    for name, column in chunked.compute().items():
        np.testing.assert_allclose(column, expected[name], atol=1e-6)


def test_a_head_with_two_spellings_is_attributed_once() -> None:
    assert WeightsOptions(heads=["L2H1", "2.1", "L3H0"]).heads == ["L2H1", "L3H0"]


def test_gated_heads_are_refused_by_name() -> None:
    model = hs.load(families.OTHERS["qwen3_next"].build())
    with refuses(UnsupportedModel, model.name, "gate", "values"):
        observe(model, torch.arange(3, 20), [lambda batch: TextObserver(model, batch, {"values"})])


# A study -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_stores_valid_tables_and_repeats_byte_for_byte(place: Path, run: Run) -> None:
    assert validate(run) == []
    again = run_study(build_study(study(place)), place / "again")
    assert contents(again) == contents(run)
    columns = ["key_effective_length", "value_effective_length", "key_sink_mass", "value_sink_mass"]
    assert run.heads[columns].notna().all().all()


def test_stored_contributions_sum_to_the_logits(run: Run) -> None:
    keys = ["model", "doc", "layer", "head", "query", "key"]
    rows = run.table("qk_rows").set_index(keys)["logit"].sort_index()
    assert rows.groupby(["model", "doc", "layer", "head"], observed=True).size().between(1, 4).all()
    by_pair = run.table("qk_pairs").groupby(keys, observed=True)["contribution"].sum()
    sides = run.table("qk_components").groupby(["side", *keys], observed=True)["contribution"].sum()
    for sums in (by_pair, sides["query"], sides["key"]):
        pd.testing.assert_series_equal(sums.sort_index(), rows, check_names=False, rtol=1e-3, atol=1e-3)


def why_here(run: Run, **query: str) -> list[Any]:
    content = lens_page(assembly.render_context(run, "yarn"), {"layer": "3", "head": "1", "row": "7"} | query)
    return [*content.sections["Why here?"]]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["w5 w6 w7 w5 w9 w6 w5 w8 w7", None])
def test_the_lens_names_the_command_that_attributes_a_row_and_then_shows_it(
    place: Path, prompt: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = {"prompt": prompt} if prompt else {"lengths": [9], "rows": 9}
    content = study(place) | {"patterns": options}
    content.pop("weights")
    lens_run = run_study(build_study(content), tmp_path)
    doc = str(lens_run.top_keys["doc"].iloc[-1])
    (missing,) = why_here(lens_run, doc=doc)
    command = missing.sentences[0].partition("headscope weights ")[2]
    assert "--heads L3H1 --query-rows 7" in command
    code, _, err = request.getfixturevalue("headscope")(
        "weights", *shlex.split(command), "--out", str(tmp_path), "--quiet"
    )
    assert code == 0, err
    name = next(path for path in tmp_path.glob("*-weights-*"))
    both = combine_runs([lens_run, Run.open(name)])
    chart, pairs = why_here(both, doc=doc)
    top = lens_run.top_keys.query("model == 'yarn' and layer == 3 and head == 1 and query == 7 and rank == 0")
    top = top[top["doc"] == doc].iloc[0]
    assert_names(chart.caption, f"token {top['key']:,}", format_number(float(top["weight"])))
    assert "query 7" in chart.figure.layout.title.text
    assert len(pairs.rows) > 1
    assert why_here(both, doc=doc, row="6") != [chart, pairs], "another row is not attributed"


def test_others_contribute_exactly_zero_where_every_pair_of_components_is_listed(place: Path) -> None:
    model = hs.load(str(place / "tiny"))
    ids = torch.arange(3, 35)
    attributions = attribute_qk(model, ids, [RowAndKey(0, head, 31, key) for head in range(4) for key in (3, 17)])
    pairs = pd.DataFrame(attribution_tables(model, ids, attributions, [0.5] * 8)["qk_pairs"])
    others = pairs[pairs["query_component"] == ALL_OTHERS]
    assert len(others) == 8 * model.geometry.pairs
    assert (others["contribution"] == 0).all()


def test_mean_contributions_sum_to_the_mean_logit(run: Run) -> None:
    one = [table[(table["model"] == "base") & (table["layer"] == 3)] for table in (run.qk_components, run.qk_rows)]
    means = mean_contributions(one[0])
    assert means.sum().to_numpy() == pytest.approx(float(one[1]["logit"].mean()), rel=1e-3)


@pytest.mark.slow
def test_findings_charts_and_page_name_the_heads(run: Run, tmp_path: Path) -> None:
    by_question = {result.question: result for result in results(run)}
    rows = run.qk_rows[(run.qk_rows["model"] == by_question["weights.logit"].model)]
    logit = by_question["weights.logit"]
    assert logit.value == pytest.approx(rows[rows["layer"] == logit.layer]["logit"].astype("float64").mean())
    assert ("weights.logit", "L2H1") in {(result.question, result.unit) for result in results(run)}
    sinks = by_question["weights.value_sinks"]
    assert 0 <= sinks.value <= sinks.n <= sinks.details["heads"]
    groups = {group.heading: [*group.charts] for group in charts(assembly.render_context(run))}
    assert len(groups["Why heads attend where they do"]) == 4
    assert len(groups["Do sinks count in value-weighted attention?"]) == 2
    blocks = [*assembly.head_blocks(run, "base", 2, 1)]
    columns = [[*block.column_names] for block in blocks if isinstance(block, TextTable)]
    assert ["weight", "logit", "distance", "attended token", "query token"] in columns
    assert ["written at the query's token", "written at the key's token", "logits"] in columns
    rendering.write_report([run], tmp_path / "report.html")
    assert "What writes the logits of L2H1" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert create_app(run.path).server.test_client().get("/").status_code == 200


OTHERS = {"weights.inputs_of_head", "weights.copying_agreement", "weights.induction_inputs"}
"""Questions about one head, or about scores of other probes."""


def test_synthetic_runs_have_results_of_every_part(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, probes=("weights",))
    assert validate(run) == []
    by_question = {result.question for result in results(run)}
    assert by_question == {question.name for question in QUESTIONS} - OTHERS
    keys = [result.key for result in all_results(run)]
    assert len(keys) == len({*keys})
    heads = run.heads[run.heads["model"] == "base"]
    best = heads.loc[heads["ov_copying"].idxmax()]
    values = {result.question: result for result in results(run) if result.model == "base"}
    assert values["weights.copying_heads"].value == (heads["ov_copying"] > 0.5).sum()
    assert values["weights.highest_copying"].unit == format_head(best["layer"], best["head"])


def test_findings_list_only_compositions_that_exceed_chance(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base",), probes=("weights",))
    rows = run.head_composition.astype({"input": "str", "score": "float64"})
    rows.loc[rows["input"] == "q", "score"] = 0.05  # below random matrices, 0.1
    is_best = (rows["input"] == "k") & (rows["layer"] == 2) & (rows["sender_head"] == 1) & (rows["head"] == 0)
    rows.loc[rows["input"] == "k", "score"] = np.where(is_best, 0.3, 0.11)[rows["input"] == "k"]
    run._frames["head_composition"] = rows
    q, k, _ = (result for result in results(run) if result.question == "weights.composition")
    assert (q.where["input"], q.value, q.details["random"]) == ("Q", pytest.approx(-0.05), pytest.approx(0.1))
    assert (q.details["listed"], q.details["above"]) == ({}, 0)
    assert [*q.details["largest_by_chance"].values()] == pytest.approx([-0.05])
    assert {*k.details["listed"]} == {"L0H1 → L2H0", "L1H1 → L2H0"}
    assert (k.where["input"], k.details["above"], k.n) == ("K", is_best.sum(), (rows["input"] == "k").sum())
    assert k.details["chance"] == pytest.approx(0.12, abs=5e-4)


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (("weights.heads", "'L3'"), {"heads": ["L3"]}),
        (("weights.heads", "'3.g0'", "L3H0"), {"heads": ["3.g0"]}),
        (("weights.pairs", "'w5>w6>w7'", "QUERY>KEY"), {"pairs": ["w5>w6>w7"]}),
        (("weights.parts", "'value'", "'composition'", "'values'"), {"parts": ["value"]}),
        ((33, "'heads'", 34), {"lengths": [33, 64]}),
    ],
)
def test_bad_options_are_refused(place: Path, named: tuple[object, ...], options: dict[str, Any]) -> None:
    with refuses(BadOption, *named):
        build_study(study(place, **options))


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (("L9H0",), {"heads": ["L9H0"]}),
        (("'unheard-of'",), {"tokens": ["unheard-of"]}),
        (("query_rows", 48, 0, 47), {"query_rows": [3, 48]}),
        (("query_rows", 3, 34), {"prompt": "w1 w2 w3", "lengths": None}),
    ],
)
def test_heads_and_words_that_do_not_exist_are_refused(
    place: Path, named: tuple[object, ...], options: dict[str, Any]
) -> None:
    content = study(place, **options)
    content["weights"] = {name: value for name, value in content["weights"].items() if value is not None}
    with refuses(BadInput, *named):
        run_study(build_study(content), place / "refused")

"""KV-cache budgets: scores, orders, losses and sizes equal independent computations, and the study resumes."""

import json
import logging
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support import eager_reference, families
from support.harness_tasks import write_colours
from support.measure_laws import geometry_of, random_record, weights
from support.refusals import assert_names
from support.tiny_studies import StopsAfter, contents, save_checkpoint, save_texts

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import Interrupted
from headscope.forward.capture import capturing
from headscope.measures.far_mass import far_mass
from headscope.results import words
from headscope.results.result import Bound
from headscope.runs.aggregation import verdict_below
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.summary import model_table
from headscope.streaming import LayerCache, StreamingWindow
from headscope.study.config import build_study
from headscope.study.runner import run_study
from probes.budget import passes
from probes.budget import results as budget_results
from probes.budget.analysis import best_order, curves, largest_shares, loss_changes, summaries
from probes.budget.declaration import order_name
from probes.budget.results import changes_at_half, results
from probes.budget.streaming_order import (
    cache_bytes,
    kept_tokens,
    lowest_groups,
    measured_scores,
    rank_groups,
    set_stability,
    streaming_count,
)

OPTIONS: dict[str, Any] = {
    "lengths": [32, 64],
    "sink": 2,
    "recent": 6,
    "draws": 2,
    "shares": [0.5, 0.25],
    "rows": "exact",
    "prompts": ["induction"],
    "count": 3,
    "cache_lengths": [128],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("budget")
    save_checkpoint(place / "tiny")
    save_texts(place / "texts", 70)
    return place


def study(place: Path, **options: Any) -> dict[str, Any]:
    texts = {"source": f"file:{place}/texts/*.txt", "docs": 4}
    return {"models": {"base": str(place / "tiny")}, "texts": texts, "device": "cpu", "budget": OPTIONS | options}


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return run_study(build_study(study(place)), place / "runs")


def naive_far_mass(record: AttentionRecord, row: int, window: StreamingWindow) -> torch.Tensor:
    """Weight of one query row [H] on visible keys outside the window, from a loop over keys."""
    size, i = len(record.q) // len(record.k), record.k.shape[1] - record.q.shape[1] + row + record.first_key
    total = torch.zeros(len(record.q), dtype=torch.float64)
    for head in range(len(record.q)):
        for j in range(record.first_key, i + 1):
            visible = record.window is None or i - j < record.window
            if record.chunk_size is not None:
                visible &= j // record.chunk_size == i // record.chunk_size
            if visible and j >= window.sink and i - j >= window.recent:
                key = record.k[head // size, j - record.first_key].double()
                logit = record.scaling * key @ record.q[head, row].double()
                if record.softcap is not None:
                    logit = record.softcap * torch.tanh(logit / record.softcap)
                total[head] += (logit - record.lse[head, row].double()).exp()
    return total


@torch.no_grad()
@pytest.mark.parametrize("family", families.MEASURABLE)
def test_far_mass_equals_a_loop_over_keys_in_every_family(family: str) -> None:
    model = hs.load(families.MEASURABLE[family]())
    ids = torch.randint(3, families.VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    records: list[AttentionRecord] = []
    with capturing(model) as layers:
        layers.listen(records.append)
        model.module(ids, use_cache=False)
    rows, window = np.array([0, 9, 25, 39]), StreamingWindow(3, 5)
    for record in records:
        actual = far_mass(record, rows, window)
        expected = torch.stack([naive_far_mass(record, int(row), window) for row in rows], 1)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 99), sink=st.integers(0, 30), recent=st.integers(1, 40), more=st.integers(0, 9))
def test_a_wider_window_hides_less_and_one_as_long_as_the_text_hides_nothing(
    seed: int, sink: int, recent: int, more: int
) -> None:
    record = random_record(geometry_of(), 24, seed)
    rows = np.arange(24)
    narrow = far_mass(record, rows, StreamingWindow(sink, recent))
    assert 0 <= narrow.min() <= narrow.max() <= 1
    for wider in (StreamingWindow(sink + more, recent), StreamingWindow(sink, recent + more)):
        assert (far_mass(record, rows, wider) <= narrow + 1e-5).all()
    assert (far_mass(record, rows, StreamingWindow(sink, 24)) == 0).all()


@given(
    seed=st.integers(0, 999),
    length=st.integers(1, 60),
    streaming=st.builds(StreamingWindow, st.integers(0, 12), st.integers(1, 40)),
    rule=st.sampled_from([{}, {"chunk_size": 16}, {"softcap": 5.0}, {"sink": torch.tensor([0.0, 1, 2, 3])}]),
    window=st.none() | st.integers(1, 40),
)
def test_far_mass_is_the_sum_over_far_keys_and_exactly_zero_without_one(
    seed: int, length: int, streaming: StreamingWindow, rule: dict[str, Any], window: int | None
) -> None:
    record = random_record(geometry_of(windows=(window,)), length, seed, **rule)
    position = torch.arange(length)
    is_far = (position >= streaming.sink) & (position[:, None] - position >= streaming.recent)
    is_far &= eager_reference.visible(length, window, rule.get("chunk_size"))
    actual = far_mass(record, np.arange(length), streaming)
    expected = (weights(record).double() * is_far).sum(-1)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)
    assert ((actual > 0) == is_far.any(-1)).all()


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma2"])
def test_layers_in_which_nothing_is_far_stream_first_by_layer_and_group_on_every_machine(family: str) -> None:
    model = hs.load((families.SPECS | families.OTHERS)[family].build())
    ids = torch.randint(3, families.VOCAB, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pd.DataFrame(passes.scores_and_losses(model, ids, StreamingWindow(2, families.WINDOW), None, 0)[0])
    is_windowed = rows["layer"].map(dict(enumerate(model.geometry.windows))).notna()
    assert (rows.loc[is_windowed, ["far_mass", "far_mass_se", "local_mass_se"]] == 0).all(axis=None)
    assert (rows.loc[is_windowed, "local_mass"] == 1).all()
    assert (rows.loc[~is_windowed, "far_mass"] > 0).all()
    units = rows.loc[is_windowed, ["layer", "kv_group"]].drop_duplicates().to_numpy().tolist()
    for order in ("far-mass", "local-mass"):
        ranks = rank_groups(measured_scores(rows, order), "max").sort_values("rank")
        assert ranks[["layer", "kv_group"]].to_numpy().tolist()[: len(units)] == sorted(units)


@given(
    length=st.integers(1, 200),
    sink=st.integers(0, 80),
    recent=st.integers(1, 80),
    window=st.none() | st.integers(1, 90),
)
def test_kept_tokens_are_those_that_the_last_query_sees(
    length: int, sink: int, recent: int, window: int | None
) -> None:
    i = length - 1
    in_window = [j for j in range(length) if window is None or i - j < window]
    assert kept_tokens(length, window, None) == len(in_window)
    streaming = [j for j in in_window if j < sink or i - j < recent]
    assert kept_tokens(length, window, StreamingWindow(sink, recent)) == len(streaming)
    if window is None:
        assert len(streaming) == min(length, sink + recent)


@pytest.mark.slow
def test_the_run_is_valid_and_every_order_has_a_point_per_share(run: Run) -> None:
    assert validate(run) == []
    changes = loss_changes(run)
    assert [*changes.columns] == [0, 0.25, 0.5, 1]
    assert len(changes) == 2 * 4 * 4  # lengths, orders, documents
    assert (changes[0] == 0).all()
    assert changes.groupby(["context_length", "doc"])[1.0].nunique().eq(1).all()  # all streaming is one pass


@pytest.mark.slow
@torch.no_grad()
def test_losses_equal_the_model_under_a_boolean_mask(run: Run, place: Path) -> None:
    """Every key that a streaming head does not see is masked in a dense computation, layer by layer."""
    model = hs.load(str(place / "tiny"))
    rows = run.budget[(run.budget["share"] == 0.5) & (run.budget["order"] == "far-mass")]
    rows = rows[(rows["context_length"] == 64) & (rows["doc"] == rows["doc"].iloc[-1])].astype({"nll": "float64"})
    name = str(rows["doc"].iloc[0])
    ids = torch.tensor([model.tokenizer((place / name).read_text())["input_ids"][:64]])
    documents = list(dict.fromkeys(run.budget["doc"].astype(str)))
    half = documents.index(name) % 2
    order = run.budget_orders
    order = order[(order["order"] == "far-mass") & (order["half"] == half) & (order["rank"] < 4)]
    heads = [
        f"L{layer}H{head}"
        for layer, group in zip(order["layer"], order["kv_group"], strict=True)
        for head in range(group * 2, group * 2 + 2)
    ]
    with hs.ablated(model, heads, "streaming:2+6"):
        logits = model.module(ids, use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert np.average(rows["nll"], weights=rows["tokens"]) == pytest.approx(float(expected), rel=1e-5)


def test_scores_come_from_the_other_half_of_the_documents(run: Run) -> None:
    scores = run.budget_scores[run.budget_scores["context_length"] == 64].astype({"doc": "str"})
    names = list(dict.fromkeys(scores["doc"]))
    for half in (0, 1):
        other = scores[scores["doc"].isin([name for n, name in enumerate(names) if n % 2 != half])]
        means = other.groupby(["layer", "head", "kv_group"])["far_mass"].mean()
        expected = means.groupby(["layer", "kv_group"]).max()
        stored = run.budget_orders[(run.budget_orders["order"] == "far-mass") & (run.budget_orders["half"] == half)]
        stored = stored.set_index(["layer", "kv_group"])
        assert stored["score"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5)
        assert [*stored.sort_values("rank").index] == [*expected.sort_values(kind="stable").index]


def test_effective_length_and_local_mass_are_those_of_measure(run: Run, place: Path) -> None:
    measured = hs.measure(
        str(place / "tiny"),
        text=f"file:{place}/texts/*.txt",
        docs=4,
        lengths=[64],
        rows="exact",
        out=place / "runs",
        quiet=True,
    ).heads.set_index(["layer", "head"])
    scores = run.budget_scores[run.budget_scores["context_length"] == 64].groupby(["layer", "head"])
    assert np.exp(scores["log_ess2"].mean()).to_numpy() == pytest.approx(measured["ess2_64"].to_numpy(), rel=1e-5)
    assert scores["local_mass"].mean().to_numpy() == pytest.approx(measured["local_mass"].to_numpy(), rel=1e-5)


@pytest.mark.slow
def test_an_interrupted_study_resumes_to_the_same_bytes(run: Run, place: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run_study(build_study(study(place)), tmp_path, progress=StopsAfter(16))
    resumed = run_study(build_study(study(place)), tmp_path, resume=True)
    assert contents(resumed) == contents(run)


def test_orders_from_a_run_and_a_file_judge_all_documents(run: Run, place: Path, caplog: Any) -> None:
    scores = [[float(layer * 2 + group) for group in range(2)] for layer in range(4)]
    folder = place / "duo"
    folder.mkdir()
    (folder / "full_attention_heads.tsv").write_text("\n".join("\t".join(map(str, row)) for row in scores))
    measured = hs.measure(
        str(place / "tiny"), text=f"file:{place}/texts/*.txt", docs=2, lengths=[64], out=place / "runs", quiet=True
    )
    orders = [f"file:{folder}", f"run:{measured.path}:-local_mass", "random"]
    options = {"orders": orders, "lengths": [64], "shares": [0.5], "draws": 1, "prompts": []}
    content = study(place, **options)
    del content["budget"]["count"]
    fixed = run_study(build_study(content), place / "runs")
    ranks = fixed.budget_orders[fixed.budget_orders["order"] == "duo"].sort_values(["layer", "kv_group"])
    assert ranks["rank"].tolist() == [*range(8)]
    assert set(fixed.budget_orders["half"]) == {-1}
    heads = measured.heads.assign(score=-measured.heads["local_mass"])
    expected = rank_groups(heads, "max").sort_values("rank")
    stored = fixed.budget_orders[fixed.budget_orders["order"] == "-local_mass"].sort_values("rank")
    assert stored["layer"].tolist() == expected["layer"].tolist()
    (warning,) = (message for message in caplog.messages if "'-local_mass'" in message)
    assert_names(warning, 2, 4, "--text")


# Rows that order the KV groups --------------------------------------------------------------------------------------


def scores_by_seed(model: hs.Model, ids: list[int], rows: int | None, seeds: int) -> list[pd.DataFrame]:
    """Scores and their errors of every head, by seed."""
    tables = (passes.scores_and_losses(model, ids, StreamingWindow(4, 12), rows, seed)[0] for seed in range(seeds))
    return [pd.DataFrame(columns) for columns in tables]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_of_sampled_rows_are_unbiased_and_their_errors_are_those_over_seeds(family: str) -> None:
    model = hs.load(families.MEASURABLE[family]())
    ids = torch.randint(3, families.VOCAB, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    (exact,), samples = scores_by_seed(model, ids, None, 1), pd.concat(scores_by_seed(model, ids, 16, 40))
    units = samples.groupby(["layer", "head"])
    exact = exact.set_index(["layer", "head"])
    for name in ("log_ess2", "local_mass", "far_mass"):
        assert (exact[f"{name}_se"] == 0).all()
        spread = units[name].std()
        assert ((units[name].mean() - exact[name]).abs() <= 4.5 * spread / np.sqrt(40) + 1e-6).all()
        # Evenly drawn rows differ by no more than a simple random sample of them, whose error is stated.
        errors = units[f"{name}_se"].mean()
        assert 0.6 * errors.mean() <= spread.mean() <= 1.2 * errors.mean()


def test_the_stated_stability_is_that_of_the_sets_of_other_seeds() -> None:
    model = hs.load(families.MEASURABLE["llama"]())
    ids = torch.randint(3, families.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    samples = scores_by_seed(model, ids, 12, 30)
    sets = []
    for rows in samples:
        ranks = rank_groups(measured_scores(rows, "far-mass"), "max")
        sets.append({*ranks.index[ranks["rank"] < streaming_count(0.5, len(ranks))]})
    pairs = [*combinations(sets, 2)]
    kept = [len(first & second) / len(first) for first, second in pairs]
    same = [first == second for first, second in pairs]
    stated = pd.concat([set_stability(rows, rows, "far-mass", "max", [0.5]) for rows in samples])
    assert stated["kept"].mean() == pytest.approx(np.mean(kept), abs=0.1)
    assert stated["same_set"].mean() == pytest.approx(np.mean(same), abs=0.2)
    assert stated["same_set"].max() < 1


def test_all_rows_of_the_octave_give_one_set_and_the_findings_say_so(run: Run) -> None:
    assert (run.budget_stability[["kept", "same_set"]] == 1).all(axis=None)
    assert set(run.budget_stability["order"]) == {"effective-length", "local-mass", "far-mass"}
    (stability,) = (result for result in results(run) if result.question == "budget.stability")
    assert (stability.value, stability.details["same"]) == (1, 1)
    assert "--rows" not in words.sentence(stability)


def test_findings_state_the_stability_of_a_set_from_sampled_rows(place: Path) -> None:
    options = {"lengths": [64], "rows": 8, "orders": ["far-mass"], "shares": [0.5], "prompts": []}
    content = study(place, **options)
    del content["budget"]["count"], content["budget"]["draws"]
    sampled = run_study(build_study(content), place / "runs")
    kept = sampled.budget_stability["kept"].mean()
    (stability,) = (result for result in results(sampled) if result.question == "budget.stability")
    assert stability.value == pytest.approx(kept)
    assert stability.details["unstable"] == pytest.approx(1 - kept)
    assert_names(words.sentence(stability), "--rows exact")


def test_cache_sizes_of_unequal_layers() -> None:
    layers = {0: LayerCache(2 * 4 * 16, None, True), 2: LayerCache(2 * 2 * 32, 8, True)}
    groups, window, streams = {0: 4, 2: 2}, StreamingWindow(2, 4), {0: (1, 3), 2: (0,)}
    assert cache_bytes(layers, groups, {}, window, 100, 2) == 2 * 2 * (16 * 4 * 100 + 32 * 2 * 8)
    assert cache_bytes(layers, groups, streams, window, 100, 2) == 2 * 2 * (16 * (2 * 100 + 2 * 6) + 32 * (8 + 4))


def test_shares_and_summaries(run: Run) -> None:
    assert [streaming_count(share, 90) for share in (0, 0.1, 0.5, 1)] == [0, 9, 45, 90]
    ranks = pd.DataFrame({"layer": [0, 0, 1], "kv_group": [0, 1, 0], "rank": [2, 0, 1]})
    assert lowest_groups(ranks, 2) == {0: (1,), 1: (0,)}
    changes = pd.DataFrame({0.0: [0.0, 0, 0], 0.5: [0.005, 0.02, 0], 1.0: [0.02, 0.001, 0]})
    assert largest_shares(changes, 0.01).tolist() == [0.5, 0, 1]
    assert largest_shares(changes, 0.005 * (1 - 2e-7)).tolist() == [0.5, 0, 1], "a rise on the bound is within it"
    table = summaries(run)
    block = loss_changes(run).loc[("base", 64, "far-mass")]
    by_hand = 0.125 * block[0.25] + 0.125 * (block[0.25] + block[0.5]) + 0.25 * (block[0.5] + block[1.0])
    row = table.query("context_length == 64 and order == 'far-mass'").iloc[0]
    assert row["area"] == pytest.approx(by_hand.mean(), abs=1e-6)
    assert row["area_low"] < row["area"] < row["area_high"]
    assert row["n"] == 4
    assert best_order(table.query("context_length == 64"))["order"] != "random"


def test_results_have_the_values_of_the_tables_and_stable_keys(run: Run) -> None:
    all_results = [*results(run)]
    assert len({result.key for result in all_results}) == len(all_results)
    by_key = {result.key: result for result in all_results}
    for row in summaries(run).to_dict("records"):
        conditions = (f"context_length={row['context_length']}", f"order={row['order']}")
        area = by_key["budget.area", row["model"], "", *conditions]
        assert (area.value, area.low, area.high, area.n) == (row["area"], row["area_low"], row["area_high"], row["n"])
        assert np.mean([*area.by_sample.values()]) == pytest.approx(area.value)
    share = by_key["budget.largest_share", "base", "", "context_length=64"]
    assert [share.details[name] for name in ("sink", "recent", "max_rise")] == pytest.approx([2, 6, 0.01])
    assert share.n == 4
    assert model_table(run)["streaming_share_64"].tolist() == [share.value]
    assert any(result.question == "budget.cache_size" for result in all_results)
    assert json.loads((run.path / "run.json").read_text())["seed"] == 0


def test_a_selected_order_is_compared_with_an_interval_that_allows_for_the_choice(run: Run) -> None:
    (gain,) = (
        result
        for result in results(run)
        if result.question == "budget.order_gain" and result.where == {"context_length": 64}
    )
    values = np.array([*gain.by_sample.values()])
    half_width = stats.t.ppf(1 - 0.025 / 3, len(values) - 1) * stats.sem(values)
    assert gain.selected_from == 3
    assert (gain.low, gain.high) == pytest.approx((values.mean() - half_width, values.mean() + half_width))
    assert gain.verdict == verdict_below(gain.low, gain.high)
    assert (gain.model, gain.bound) == ("base", Bound("below"))


@pytest.mark.parametrize(("prompts", "noted"), [(4, ("-142 to +42", "4 prompts")), (1, ("1 prompt",))])
def test_changes_of_answers_are_in_percentage_points(prompts: int, noted: tuple[str, ...]) -> None:
    index = pd.MultiIndex.from_product(
        [["base"], ["ioi"], ["random"], range(prompts)], names=["model", "prompts", "order", "pair"]
    )
    scores = pd.DataFrame({0.0: 1.0, 0.5: [0.0, 1.0, 0.0, 1.0][:prompts]}, index)
    (result,) = changes_at_half("budget.right_answers", "base", {"prompts": "ioi"}, scores)
    share = scores[0.5].mean()
    assert (result.value, result.n, result.where["share"]) == (share - 1, prompts, 0.5)
    change = f"{100 * share - 100:+.0f} percentage points"
    assert_names(words.sentence(result), f"{100 * share:.0f} %", "100 %", change, *noted)


# Tasks of the lm-evaluation-harness --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task_run(place: Path) -> tuple[Run, str]:
    """A run that scores a task with prompts of more than 8 tokens, and its warnings."""
    options = {"lengths": [64], "orders": ["random"], "draws": 1, "shares": [0.5], "prompts": []}
    content = study(place, **options, tasks=[str(write_colours(place))])
    del content["budget"]["count"]
    log = logging.getLogger("headscope")
    with pytest.MonkeyPatch.context() as monkeypatch:
        warnings: list[str] = []
        monkeypatch.setattr(log, "warning", lambda message, *values: warnings.append(message % values))
        return run_study(build_study(content), place / "runs"), "\n".join(warnings)


def test_task_scores_equal_the_harness_on_the_model_whose_heads_stream(task_run: tuple[Run, str], place: Path) -> None:
    from headscope.tasks import harness

    run, model = task_run[0], hs.load(str(place / "tiny"))
    (task,) = harness.find_tasks([str(place / "colours.yaml")])
    first = run.budget_orders[run.budget_orders["rank"] < 4]
    heads = [
        f"L{layer}H{head}"
        for layer, group in zip(first["layer"], first["kv_group"], strict=True)
        for head in range(group * 2, group * 2 + 2)
    ]
    every_head = [f"L{layer}H{head}" for layer in range(4) for head in range(4)]
    for share, streaming in ((0.0, []), (0.5, heads), (1.0, every_head)):
        with hs.ablated(model, streaming, "streaming:2+6") if streaming else nullcontext():
            wrapped = harness.wrap_model(model.module, model.tokenizer, 64)
            scores = [*harness.score_tasks(wrapped, harness.build_task(task, 64, None), None, None)]
        expected = {score.metric: score.values for score in scores}
        rows = run.budget_tasks[run.budget_tasks["share"] == share]
        assert set(rows["metric"].astype(str)) == {"acc", "acc_norm"}
        for metric, values in rows.groupby("metric", observed=True)["score"]:
            assert values.tolist() == pytest.approx(expected[str(metric)])


def test_a_metric_without_a_value_per_document_is_left_out_with_a_warning(task_run: tuple[Run, str]) -> None:
    (warning,) = (line for line in task_run[1].splitlines() if "brier_score" in line)
    assert_names(warning, "colours")


def test_results_give_the_change_of_a_task_with_its_interval_over_documents(task_run: tuple[Run, str]) -> None:
    (change,) = (result for result in results(task_run[0]) if result.where.get("task") == "colours acc")
    assert (change.question, change.model, change.n) == ("budget.task_score", "base", 5)
    assert change.where == {"task": "colours acc", "order": "random", "share": 0.5}
    assert change.verdict == verdict_below(change.low, change.high)
    assert_names(words.sentence(change), change.verdict)
    assert validate(task_run[0]) == []


@pytest.mark.parametrize(
    ("task", "change", "verdict"),
    [
        ("a acc", -0.2, "supported"),
        ("a acc", 0.2, "not supported"),
        ("a acc", 0.0, "inconclusive"),
        ("a ppl (lower is better)", 0.2, "supported"),
    ],
)
def test_the_verdict_on_a_task_follows_the_interval_of_paired_differences(
    task: str, change: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = np.linspace(0, 1, 6)
    changes = change + np.array([0.1, -0.1] * 3)
    index = pd.MultiIndex.from_product(
        [["base"], [task], ["random"], range(6)], names=["model", "task", "order", "document"]
    )
    losses = pd.DataFrame({"model": ["base"], "context_length": [64], "order": ["random"], "area": [0.1]})
    monkeypatch.setattr(
        budget_results, "task_scores", lambda run: pd.DataFrame({0.0: before, 0.5: before + changes}, index)
    )
    (result,) = budget_results._task_results(SimpleNamespace(derived=lambda function: losses))  # type: ignore[arg-type]
    low, high = stats.t.interval(0.95, 5, changes.mean(), stats.sem(changes))
    assert (result.value, result.low, result.high) == pytest.approx((changes.mean(), low, high))
    assert (result.n, result.verdict) == (6, verdict)


def test_a_task_whose_prompts_are_shorter_than_the_window_is_named(place: Path) -> None:
    options = {"lengths": [64], "orders": ["random"], "draws": 1, "shares": [0.5], "prompts": [], "recent": 60}
    content = study(place, **options, tasks=[str(write_colours(place))], task_limit=2)
    del content["budget"]["count"]
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = logging.getLogger("headscope")
        monkeypatch.setattr(log, "warning", lambda message, *values: warnings.append(message % values))
        run_study(build_study(content), place / "runs")
    (warning,) = (line for line in warnings if "colours" in line and "--recent" in line)
    assert_names(warning, 2, 60, "--sink")


def test_a_file_that_is_named_like_an_order_is_an_order_of_its_own(place: Path) -> None:
    """random.csv was taken for the random order, and effective-length.csv for the measured one."""
    for name, best in (("random", 0), ("effective-length", 3)):
        rows = [f"{layer},{head},{int(layer == best)}" for layer in range(4) for head in range(4)]
        (place / f"{name}.csv").write_text("\n".join(["layer,head,score", *rows]))
    orders = [f"file:{place}/random.csv", f"file:{place}/effective-length.csv", "random"]
    options = {"orders": orders, "lengths": [32], "shares": [0.75], "prompts": [], "draws": 1}
    content = study(place, **options)
    del content["budget"]["count"]
    run = run_study(build_study(content), place / "named")
    ranks = run.budget_orders.set_index(["order", "layer"])["rank"]
    assert {*run.budget_orders["order"]} == {"file:random", "file:effective-length", "random"}
    assert {*ranks["file:random", 0]} == {6, 7}
    assert {*ranks["file:effective-length", 3]} == {6, 7}


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("random", "random"),
        ("file:x/every.json", "file:every"),
        ("run:x:random", "run:random"),
        ("run:x:-far", "-far"),
        ("file:far-mass/", "file:far-mass"),
        ("file:x/scores.v2.json", "scores"),
    ],
)
def test_the_name_of_an_order_of_a_file_is_never_that_of_another_order(order: str, name: str) -> None:
    assert order_name(order) == name


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def score_files(place: Path) -> Path:
    """Scores that do not fit the tiny model, which has 4 layers of 4 heads in 2 KV groups."""
    folder = place / "scores"
    for name, rows in {"other": [[1, 2, 3]] * 5, "nan": [[1, "nan"]] * 4, "text": [["a", "b"]] * 4}.items():
        (folder / name).mkdir(parents=True)
        lines = ["\t".join(map(str, row)) for row in rows]
        (folder / name / "full_attention_heads.tsv").write_text("\n".join(lines))
    (folder / "heads.json").write_text(json.dumps({f"{layer}-{head}": [1] for layer in range(5) for head in range(4)}))
    (folder / "some.json").write_text('{"0-0": [1]}')
    (folder / "twice.json").write_text('{"0-0": [1], "00-0": [2]}')
    return folder


@pytest.mark.parametrize(
    ("named", "flags"),
    [
        (("sink 0", "recent 0", 1), "--sink 0 --recent 0"),
        (("streaming:4+0", "recent"), "--sink 4 --recent 0"),
        (("--sink", 0, "'-1'"), "--sink -1"),
        (("--shares", 1.0, "'1.5'"), "--shares 1.5"),
        (("--shares", 0.0, "'-0.1'"), "--shares 0.5,-0.1"),
        (("--shares", "'nan'"), "--shares nan"),
        (("share", 0, 1, 0.5), "--shares 0,1"),
        (("--max-loss-increase", 0.0, "'0'"), "--max-loss-increase 0"),
        (("order", "'far'", "far-mass"), "--orders far"),
        (("other", "5 layers", "3 KV groups", "'base'", "4 layers", "2 KV groups"), "--orders file:other"),
        (("heads.json", "5 layers", "'base'", "4 layers", "4 heads"), "--orders file:heads.json"),
        (("nan", "0.g1"), "--orders file:nan"),
        (("1 of the 16 heads", "L0H1", "'base'"), "--orders file:some.json"),
        (("text", "'a'"), "--orders file:text"),
        (("twice", "L0H0"), "--orders file:twice.json"),
        (("orders", "'other'"), "--orders file:other,file:other.csv"),
        (("1 document", "--docs 2"), "--docs 1 --orders far-mass"),
    ],
)
def test_a_budget_that_cannot_be_measured_is_refused_in_one_line(
    refused: Any, place: Path, score_files: Path, named: tuple[object, ...], flags: str
) -> None:
    options = flags.replace("file:", f"file:{score_files}/").split()
    text = ("--text", f"file:{place}/texts/*.txt", "--length", "64", "--device", "cpu", "--quiet")
    assert_names(refused(2, "budget", "--model", f"base={place}/tiny", *text, *options), *named)


def test_a_missing_file_of_scores_and_an_unwritable_folder_are_refused(refused: Any, place: Path) -> None:
    command = ("budget", "--model", f"base={place}/tiny", "--text", f"file:{place}/texts/*.txt", "--length", "64")
    assert_names(refused(3, *command, "--orders", f"file:{place}/none.json"), f"'{place}/none.json'")
    file = place / "file"
    file.write_text("mine")
    refused(2, *command, "--orders", "random", out=file / "runs")
    assert file.read_text() == "mine"


def test_models_of_combined_runs_keep_their_own_shares(run: Run) -> None:
    """A combined run has one table for models that were measured at different shares."""
    rows = run.budget.astype({"model": "str"})
    other = rows[rows["share"] != 0.25].assign(model="other")
    tables = {"budget": pd.concat([rows, other], ignore_index=True)}
    settings = run.budget_settings.astype({"model": "str"})
    tables["budget_settings"] = pd.concat([settings, settings.assign(model="other")], ignore_index=True)
    combined = SimpleNamespace(tables=tables, table=tables.__getitem__, derived=lambda function: function(combined))
    shares = curves(loss_changes(cast(Run, combined))).groupby("model")["share"].unique().map(list)
    assert shares.to_dict() == {"base": [0, 0.25, 0.5, 1], "other": [0, 0.5, 1]}
    table = summaries(cast(Run, combined))
    own = table[table["model"] == "base"].reset_index(drop=True)
    pd.testing.assert_frame_equal(own, summaries(run), check_like=True)

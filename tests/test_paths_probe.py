"""The probe of paths between heads: stored rows, selection, resumed runs, refused inputs, charts and findings."""

import json
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import PAIRS, SAME_PAIR, StopsAfter, contents, equate_words, save_checkpoint, tokenizer

import headscope as hs
from headscope.errors import BadInput, Interrupted
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.path_patching import Path, PathPatching, inspect_paths
from headscope.prompts.pair_sets import file_pairs
from headscope.rendering import assembly
from headscope.rendering.blocks import Chart
from headscope.results.effects.sweep import effects_table
from headscope.results.questions import questions
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.patching.analysis import path_name
from probes.patching.paths import results as analysis
from probes.patching.paths import view
from probes.patching.paths.declaration import LOGITS, TOGETHER, PathsOptions
from probes.patching.paths.results import head_results, overview, results
from probes.patching.paths.run import select_paths

ALL_PATHS = 3 * (4 * 4 * 6) + 16
"""Paths of a tiny model of four layers of four heads: q, k and v between layers, and the logits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    """A folder with a tiny checkpoint and a file of four pairs, plus one whose prompts give equal metrics."""
    folder = tmp_path_factory.mktemp("paths")
    equate_words(save_checkpoint(folder / "tiny"))
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*PAIRS, SAME_PAIR])))
    return folder


def study(folder: FilePath, **section: Any) -> Any:
    return build_study(
        {
            "models": {"base": f"{folder}/tiny", "yarn": f"{folder}/tiny@yarn:factor=4"},
            "device": "cpu",
            "paths": {"pairs": [f"{folder}/pairs.jsonl"], "keep_failing": True, **section},
        }
    )


@pytest.fixture(scope="module")
def exact(folder: FilePath, tmp_path_factory: pytest.TempPathFactory) -> Run:
    section = {
        "method": "exact",
        "senders": ["L0H1", "L1H2"],
        "receivers": ["L2H3"],
        "directions": ["noising", "denoising"],
    }
    return runner.run_study(study(folder, **section), tmp_path_factory.mktemp("exact"), progress=NoProgress())


@pytest.fixture(scope="module")
def verified(folder: FilePath, tmp_path_factory: pytest.TempPathFactory) -> Run:
    section = {"verify_top": 2, "verify_random": 1}
    return runner.run_study(study(folder, **section), tmp_path_factory.mktemp("verified"), progress=NoProgress())


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), pairs=4, lengths=(256,))


# Stored rows -------------------------------------------------------------------------------------------------------


def test_every_chosen_path_direction_and_pair_has_one_row(exact: Run) -> None:
    assert validate(exact) == []
    rows = exact.table("paths")
    assert len(rows) == 2 * 2 * 5 * (3 * 2 + 2)
    assert rows.groupby("through", observed=True).size().to_dict() == {"q": 40, "k": 40, "v": 40, "logits": 40}
    assert set(rows.loc[rows["through"] == "logits", "receiver_layer"]) == {LOGITS}
    assert "path_estimates" not in exact.tables
    assert not rows.loc[rows["pair"] == "same", "is_normalised"].any()


def test_stored_metrics_equal_those_of_the_engine(exact: Run, folder: FilePath) -> None:
    model = hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu")
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    tokens = PairTokens.on_device(pairs.build(2), model.device)
    pair_runs = PairRuns(model, tokens, "logit_diff", 1e9)
    paths = [Path((0, 1), ((2, 3),), "k"), Path((1, 2), (), "logits")]
    with pair_runs.capturing():
        expected = dict(PathPatching(pair_runs, inspect_paths(model, tokens.clean), "noising").patch(paths))
    rows = exact.table("paths").query("model == 'yarn' and pair == 'pair 2' and direction == 'noising'")
    stored = rows.set_index(["sender_layer", "sender_head", "through"])["metric_patched"]
    for path, value in expected.items():
        assert stored[(*path.sender, path.end)] == pytest.approx(value, abs=1e-5)


def test_paths_by_position_are_rows_and_an_array(folder: FilePath, tmp_path: FilePath) -> None:
    """All sender positions, and two names of receiver positions, equal those of the engine."""
    heads = {"senders": ["L0H1"], "receivers": ["L2H3"], "through": ["k", "logits"], "method": "exact"}
    places = {"sender_positions": ["each", "all"], "receiver_positions": ["last", "1:3"]}
    run = runner.run_study(study(folder, **heads, **places), tmp_path, progress=NoProgress())
    assert validate(run) == []
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    model = hs.load(f"{folder}/tiny", device="cpu")
    tokens = PairTokens.on_device(pairs.build(1), model.device)
    length = len(pairs.build(1).clean)
    pair_runs = PairRuns(model, tokens, "logit_diff", 1e9)
    spans = [(at, at + 1) for at in range(length)] + [()]
    ends = {"last": (length - 1, length), "1:3": (1, 3)}
    paths = [Path((0, 1), ((2, 3),), "k", span, end) for span in spans for end in ends.values()]
    direct = [Path((0, 1), (), "logits", span) for span in spans]
    with pair_runs.capturing():
        values = dict(PathPatching(pair_runs, inspect_paths(model, tokens.clean), "denoising").patch([*paths, *direct]))
    own = {"model": "base", "pair": "pair 1"}
    stored = run.array("paths", "metric_patched", ["sender_positions", "receiver_positions"], through="k", **own)
    assert [*stored.labels["sender_positions"]] == [*map(str, range(length)), "all"]
    assert [*stored.labels["receiver_positions"]] == [*ends]
    np.testing.assert_allclose(stored.values.ravel(), [values[path] for path in paths], atol=1e-5)
    logits = run.array("paths", "metric_patched", ["sender_positions"], through="logits", **own)
    np.testing.assert_allclose(logits.values, [values[path] for path in direct], atol=1e-5)
    assert "L0H1@0 to k of L2H3@last" in {path_name(path) for _, path in analysis.sweeps(run)[0].units.iterrows()}
    assert any("@" in result.details.get("path", "") for result in results(run))
    charts = [chart for group in view.charts(assembly.render_context(run)) for chart in group.charts]
    figures = [chart.figure for chart in charts if isinstance(chart, Chart)]
    picture = next(figure for figure in figures if "by position" in figure.layout.title.text)
    assert [*picture.layout.xaxis.ticktext] == ["all", *map(str, range(length))]
    assert {*picture.data[0].y} == {"L0H1 to k of L2H3@last", "L0H1 to k of L2H3@1:3", "L0H1 to the logits"}
    cells = dict(zip(picture.data[0].y, picture.data[0].z, strict=True))
    for _, path in analysis.sweeps(run)[0].units.iterrows():
        end = "the logits" if path["through"] == "logits" else f"k of L2H3@{path['receiver_positions']}"
        at = picture.layout.xaxis.ticktext.index(path["sender_positions"])
        assert cells[f"L0H1 to {end}"][at] == pytest.approx(path["effect"])


@pytest.mark.slow
def test_estimates_are_means_over_the_pairs_that_differ_enough(verified: Run, folder: FilePath) -> None:
    estimates = verified.table("path_estimates")
    used = verified.table("paths").query("is_normalised").groupby("model", observed=True)["pair"].nunique()
    for label, block in estimates.groupby("model", observed=True):
        assert len(block) == ALL_PATHS
        assert set(block["pairs"]) == {used[label]}
    model = hs.load(f"{folder}/tiny", device="cpu")
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    changes, differences = [], []
    for number in range(4):
        tokens = PairTokens.on_device(pairs.build(number), model.device)
        pair_runs = PairRuns(model, tokens, "logit_diff", 1e9)
        difference = pair_runs.clean_value - pair_runs.corrupted_value
        if abs(difference) >= 0.5:
            with pair_runs.capturing():
                to_heads, _ = PathPatching(pair_runs, inspect_paths(model, tokens.clean), "denoising").estimate()
            changes.append(float(to_heads[0, 1, 3, 2, 2]))
            differences.append(difference)
    row = estimates.query(
        "model == 'base' and sender_layer == 0 and sender_head == 1 and receiver_layer == 3 and receiver_head == 2 and "
        "through == 'v'"
    )
    assert float(row["change"].iloc[0]) == pytest.approx(np.mean(changes), rel=1e-4)
    assert float(row["difference"].iloc[0]) == pytest.approx(np.mean(differences), rel=1e-4)


def test_verify_patches_the_same_number_of_paths_of_each_kind_in_every_pair(verified: Run) -> None:
    keys = analysis.PATH_COLUMNS
    for model, rows in verified.table("paths").groupby("model", observed=True):
        selections = [{*map(tuple, block[keys].to_numpy())} for _, block in rows.groupby("pair", observed=True)]
        assert all(selection == selections[0] for selection in selections)
        estimates = verified.table("path_estimates").query(f"model == '{model}'")
        for through in estimates["through"].unique():
            assert sum(path[keys.index("through")] == through for path in selections[0]) == 3


def test_paths_are_verified_if_their_estimates_are_large_in_any_direction() -> None:
    squares = pd.DataFrame({"path": range(20), "change": [0.2**2 + 0.2**2, *[0.05**2] * 19]}).sample(20, random_state=0)
    options = PathsOptions(verify_top=1, verify_random=3)
    selected = [row["path"] for row in select_paths(squares, options, [0])]
    assert selected[0] == 0
    assert len({*selected}) == 4
    assert len(select_paths(squares, PathsOptions(verify_top=15, verify_random=15), [0])) == 20


def test_an_interrupted_run_resumes_to_the_same_tables(folder: FilePath, verified: Run, tmp_path: FilePath) -> None:
    section = {"verify_top": 2, "verify_random": 1}
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        runner.run_study(study(folder, **section), tmp_path, progress=StopsAfter(13))
    resumed = runner.run_study(study(folder, **section), tmp_path, progress=NoProgress(), resume=True)
    assert contents(resumed) == contents(verified)


def test_prompts_of_different_lengths_run_with_align_end(folder: FilePath, tmp_path: FilePath) -> None:
    file = tmp_path / "unequal.jsonl"
    file.write_text(json.dumps({**PAIRS[0], "clean": f"w9 {PAIRS[0]['clean']}"}))
    section = {"pairs": [str(file)], "align": "end", "method": "exact", "senders": ["L0H0"], "receivers": ["L3H1"]}
    run = runner.run_study(study(folder, **section), tmp_path / "runs", progress=NoProgress())
    assert validate(run) == []


def test_receivers_together_through_recomputed_mlps_are_one_path_of_each_sender(
    folder: FilePath, tmp_path: FilePath
) -> None:
    section = {
        "method": "exact",
        "senders": ["L0H1", "L2H0"],
        "receivers": ["L2H3", "L3H0"],
        "together": True,
        "mlps": "recomputed",
        "norms": "recomputed",
    }
    run = runner.run_study(study(folder, **section), tmp_path / "runs", progress=NoProgress())
    assert validate(run) == []
    rows = run.table("paths")
    assert rows["mlps_recomputed"].all()
    assert len(rows) == 2 * 5 * 2 * 4
    assert set(rows["receiver_layer"]) == {LOGITS, TOGETHER}
    model = hs.load(f"{folder}/tiny", device="cpu")
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    tokens = PairTokens.on_device(pairs.build(1), model.device)
    pair_runs = PairRuns(model, tokens, "logit_diff", 1e9)
    path = Path((0, 1), ((2, 3), (3, 0)), "v")
    with pair_runs.capturing():
        patching = PathPatching(
            pair_runs, inspect_paths(model, tokens.clean), "denoising", "recomputed", mlps="recomputed"
        )
        ((_, expected),) = patching.patch([path])
    one = rows.query("model == 'base' and pair == 'pair 1' and sender_layer == 0 and through == 'v'")
    assert one["metric_patched"].item() == pytest.approx(expected, abs=1e-5)
    largest = [result for result in results(run) if result.question == "paths.top"]
    assert {(result.details["other_norms"], result.details["other_mlps"]) for result in largest} == {
        ("recomputed", "recomputed")
    }
    assert view.plot_graph(analysis.sweeps(run)[0]).data


# Refused inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "flags"),
    [
        (("sender", "L3H0"), ("--senders", "L0H1,L3H0", "--through", "q")),
        (("receiver", "L1H0"), ("--senders", "L1H1", "--receivers", "L1H0")),
        (("L9H0", "layers 0 to 3"), ("--senders", "L9H0")),
        (("L2H7", "layer 2"), ("--receivers", "L2H7")),
        (("--senders", "'head 3'"), ("--senders", "head 3")),
        (("--receivers", "'1.g0'", "KV group"), ("--receivers", "1.g0")),
        (("--through", "'mlp'"), ("--through", "mlp")),
        (("--norms", "'none'", "frozen", "recomputed"), ("--norms", "none")),
        (("'subject'",), ("--method", "exact", "--receiver-positions", "subject")),
        (("'9'", "5 tokens"), ("--method", "exact", "--sender-positions", 9)),
        (("kl", "noising", "exact"), ("--method", "verify", "--metric", "kl", "--direction", "noising")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refused: Callable[..., str], folder: FilePath, named: tuple[str, ...], flags: tuple[Any, ...]
) -> None:
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet")
    assert_names(refused(2, "paths", *tiny, "--pairs", folder / "pairs.jsonl", *flags), *named)


def test_without_a_pair_that_differs_enough_there_is_a_warning_and_no_effect(
    folder: FilePath, tmp_path: FilePath
) -> None:
    (tmp_path / "same.jsonl").write_text(json.dumps(SAME_PAIR))
    section = {"pairs": [str(tmp_path / "same.jsonl")], "verify_top": 2, "verify_random": 0}
    run = runner.run_study(study(folder, **section), tmp_path / "runs", progress=NoProgress())
    assert validate(run) == []
    *of_pairs, warning = results(run)
    assert {result.question for result in of_pairs} == {"paths.metric", "paths.answered"}
    assert warning.question == "paths.no_effects"
    assert questions()[warning.question].level == "warning"


def test_values_that_are_not_finite_are_refused(folder: FilePath, tmp_path: FilePath) -> None:
    model = hs.load(f"{folder}/tiny", device="cpu")
    with torch.no_grad():
        model.module.model.layers[1].self_attn.v_proj.weight[0] = float("nan")
    with refuses(BadInput, "finite", "layer 1", "--dtype"):
        hs.paths(model, pairs=[f"{folder}/pairs.jsonl"], method="estimate", out=tmp_path, quiet=True)


# Charts and findings -----------------------------------------------------------------------------------------------


def test_effects_are_ratios_of_means_over_pairs_and_estimates_have_no_interval(verified: Run) -> None:
    paths = effects_table(analysis.sweeps(verified))
    assert paths.groupby(["model", "method"], observed=True).size().to_dict() == {
        (model, method): count
        for model in ("base", "yarn")
        for method, count in (("estimate", ALL_PATHS - 12), ("exact", 12))
    }
    estimated = paths[paths["method"] == "estimate"]
    assert estimated[["low", "high", "p", "p_adjusted"]].isna().all(axis=None)
    rows = verified.table("paths").query("model == 'base' and is_counted")
    rows = rows.assign(
        change=rows["metric_patched"] - rows["metric_corrupted"],
        difference=rows["metric_clean"] - rows["metric_corrupted"],
    )
    sums = rows.astype({"change": float}).groupby(analysis.PATH_COLUMNS, observed=True)[["change", "difference"]].sum()
    ratios = sums["change"] / sums["difference"]
    exact = paths[(paths["method"] == "exact") & (paths["model"] == "base")].set_index(analysis.PATH_COLUMNS)
    for path, ratio in ratios.items():
        assert exact.loc[path, "effect"] == pytest.approx(ratio, rel=1e-4)
        assert not exact.loc[path, "low"] > ratio
        assert not exact.loc[path, "high"] < ratio


def test_results_give_the_effect_its_interval_and_the_number_of_pairs(verified: Run) -> None:
    by_question = {result.question: result for result in results(verified) if result.model == "base"}
    assert {*by_question} >= {"paths.metric", "paths.top", "paths.lowest", "paths.significant", "paths.agreement"}
    top = by_question["paths.top"]
    assert not top.low > top.value
    assert not top.high < top.value
    assert top.n == len(top.by_sample)
    assert (top.selected_from, by_question["paths.significant"].n) == (12, 12)
    details = by_question["paths.significant"].details
    assert (details["exact"], details["units"], details["rate"]) == (12, ALL_PATHS, 0.05)
    keys = [result.key for result in results(verified)]
    assert len(keys) == len({*keys})


def test_estimates_alone_decide_nothing(folder: FilePath, tmp_path: FilePath) -> None:
    run = runner.run_study(study(folder, method="estimate"), tmp_path, progress=NoProgress())
    all_results = [*results(run)]
    assert "paths.estimated" in {result.question for result in all_results}
    assert not {"paths.significant", "paths.agreement"} & {result.question for result in all_results}
    effects = [result for result in all_results if result.question in ("paths.top", "paths.lowest")]
    assert len(effects) == 4
    assert not any(result.is_exact or result.has_interval or not np.isnan(result.p_adjusted) for result in effects)


@pytest.mark.slow
def test_the_graph_has_the_strongest_paths_with_their_ends_and_effects(synthetic: Run) -> None:
    effects = analysis.sweeps(synthetic)[0]
    figure = view.plot_graph(effects)
    strongest = analysis.strongest_paths(effects, effects.units, view.MAX_EDGES)
    edges = {trace.name: trace for trace in figure.data if trace.mode == "lines" and trace.x[0] is not None}
    assert len(edges) == len(strongest) == 20
    layers = strongest[["sender_layer", "receiver_layer"]].to_numpy().max()
    assert max(figure.layout.xaxis.tickvals) <= layers, "the logits are at no layer"
    widths = []
    for _, path in strongest.iterrows():
        edge = edges[view.path_name(path)]
        assert (edge.x[0], edge.y[0]) == (path["sender_layer"], path["sender_head"])
        if path["receiver_layer"] != LOGITS:
            assert (edge.x[-1], edge.y[-1]) == (path["receiver_layer"], path["receiver_head"])
        assert f"{path['effect']:+.2f}" in edge.text[0]
        widths.append(edge.line.width)
    assert widths == sorted(widths, reverse=True)


def test_report_and_head_page_show_the_paths(synthetic: Run) -> None:
    assert validate(synthetic) == []
    groups = [*view.charts(assembly.render_context(synthetic))]
    assert [len([*group.charts]) for group in groups] == [3]
    effects = analysis.sweeps(synthetic)[0]
    strongest = analysis.strongest_paths(effects, effects.units, 1).iloc[0]
    own = head_results(synthetic, "base", strongest["sender_layer"], strongest["sender_head"])
    paths = [(result.details["end"], result.details["path"]) for result in own if result.question == "paths.head"]
    assert ("from", view.path_name(strongest)) in paths
    json_data = overview(synthetic)
    assert json_data is not None
    assert len(json_data.data) == 2


def test_heads_are_written_alike_and_once() -> None:
    options = PathsOptions(senders=["23.3", "L23H3", "l1h0"])
    assert options.senders == ["L23H3", "L1H0"]


def test_every_pair_has_a_row_with_its_strongest_patched_path(exact: Run) -> None:
    table = exact.table("paths").query("is_counted").astype({"effect": float, "model": str, "pair": str})
    rows = [result for result in results(exact) if result.question == "paths.pair"]
    groups = table.groupby(["model", "pair", "direction"], observed=True)
    assert len(rows) == groups.ngroups
    for row in rows:
        own = groups.get_group((row.model, row.where["pair"], row.where["direction"]))
        assert abs(row.value) == pytest.approx(own["effect"].abs().max())
        assert (row.n, row.has_interval, row.is_exact) == (None, False, True)
        assert str(row.where["pair"]) in sentence(row)

"""The patching probe: stored rows, selection of exact patches, resumed runs, refused inputs, charts and findings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import false_discovery_control
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run
from support.tiny_studies import PAIRS, SAME_PAIR, StopsAfter, contents, equate_words, save_checkpoint, tokenizer

import headscope as hs
from headscope.base.head_set import HeadSet
from headscope.errors import Interrupted
from headscope.interventions.heads import Unit
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns, patched_units
from headscope.prompts.pair_sets import file_pairs
from headscope.rendering import assembly
from headscope.results.effects.sweep import effects_table
from headscope.runs.aggregation import adjust_p_values
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.patching import analysis, plots, view
from probes.patching.analysis import pair_metrics, pairs_usable_in_all_models
from probes.patching.declaration import ALL_POSITIONS, MIN_DIFFERENCE, PatchingOptions, effect_columns
from probes.patching.results import head_results, overview, results
from probes.patching.run import select_verified

SPANS = {"spans": {"subject": "w10"}}
SUBJEKT = ("--positions", "subjekt")
SUBJECT_AT_END = ("--positions", "subject", "--align", "end")
SELECTION = {"verify_top": 2, "verify_random": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint and a file of four pairs, plus one whose prompts give equal metrics."""
    folder = tmp_path_factory.mktemp("patching")
    equate_words(save_checkpoint(folder / "tiny"))
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*PAIRS, SAME_PAIR])))
    return folder


def study(folder: Path, **section: Any) -> Any:
    return build_study(
        {
            "models": {"base": f"{folder}/tiny", "yarn": f"{folder}/tiny@yarn:factor=4"},
            "device": "cpu",
            "patching": {
                "pairs": [f"{folder}/pairs.jsonl"],
                "keep_failing": True,
                **({} if "method" in section else SELECTION),
                **section,
            },
        }
    )


@pytest.fixture(scope="module")
def exact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    section = {
        "method": "exact",
        "activations": ["z", "k"],
        "positions": "each",
        "directions": ["noising", "denoising"],
    }
    return runner.run_study(study(folder, **section), tmp_path_factory.mktemp("exact"), progress=NoProgress())


@pytest.fixture(scope="module")
def verified(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner.run_study(study(folder), tmp_path_factory.mktemp("verified"), progress=NoProgress())


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), pairs=4, lengths=(256,))


# Stored rows -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_unit_position_direction_and_pair_has_one_row(exact: Run) -> None:
    assert validate(exact) == []
    rows = exact.table("patching")
    units_and_models = {"z": 4 * 4 * 2, "k": 4 * 2 * 2}
    positions = 5 + 1
    counts = rows.groupby("activation", observed=True).size().to_dict()
    assert counts == {name: units * 2 * 5 * positions for name, units in units_and_models.items()}
    assert set(rows.loc[rows["activation"] == "k", "head"]) == {-1}
    assert set(rows["position"]) == {ALL_POSITIONS, *range(5)}
    assert set(rows["method"]) == {"exact"}
    assert set(rows["prompts"]) == {"pairs"}
    assert set(rows.loc[rows["pair"] == "pair 1", "group"]) == {"odd"}


@pytest.mark.slow
def test_stored_metrics_equal_those_of_the_engine(exact: Run, folder: Path) -> None:
    model = hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu")
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    pair_runs = PairRuns(model, PairTokens.on_device(pairs.build(2), model.device), "logit_diff", 1e9)
    rows = exact.table("patching").query(
        "model == 'yarn' and pair == 'pair 2' and activation == 'z' and direction == 'noising' and position == -1"
    )
    with pair_runs.capturing():
        units = patched_units(model, "z")
        values = pair_runs.evaluate("noising", [pair_runs.patch("z", "noising", [unit]) for unit in units])
    expected = {(unit.layer, unit.head): value for unit, value in zip(units, values, strict=True)}
    stored = rows.set_index(["layer", "head"])["metric_patched"].to_dict()
    assert stored == pytest.approx(expected, abs=1e-5)
    assert rows["metric_clean"].iloc[0] == pytest.approx(pair_runs.clean_value, abs=1e-5)
    expected_effect = (rows["metric_clean"] - rows["metric_patched"]) / (
        rows["metric_clean"] - rows["metric_corrupted"]
    )
    np.testing.assert_allclose(rows["effect"], expected_effect, rtol=1e-4)


def test_effects_are_0_for_the_unpatched_and_1_for_the_other_metric_in_both_directions() -> None:
    for direction, unpatched, other in (("denoising", -1.0, 2.0), ("noising", 2.0, -1.0)):
        assert effect_columns(unpatched, 2.0, -1.0, direction)["effect"] == 0
        assert effect_columns(other, 2.0, -1.0, direction)["effect"] == 1
    below = effect_columns(5.0, 0.0, 0.99 * MIN_DIFFERENCE, "noising")
    assert (below["effect"], below["is_normalised"]) == (0, False)


@pytest.mark.parametrize(("corrupted", "is_normalised"), [(100.005, False), (100.02, True), (100.0, False)])
def test_a_difference_of_an_own_metric_within_rounding_has_no_effect(corrupted: float, is_normalised: bool) -> None:
    columns = effect_columns(50.0, 100.0, corrupted, "noising", "own:loss")
    assert (columns["is_normalised"], columns["effect"] != 0) == (is_normalised, is_normalised)


def test_pairs_below_the_bound_are_counted_and_left_out_of_means(exact: Run) -> None:
    metrics = pair_metrics(exact)
    left_out = metrics[~metrics["is_normalised"]]
    assert "same" in set(left_out["pair"])
    assert set(effects_table(analysis.sweeps(exact))["n"]) == {5 - left_out["pair"].nunique()}
    result = next(result for result in results(exact) if result.question == "patching.metric")
    assert (result.model, result.n) == ("base", 5)
    assert result.details["excluded"] == (left_out["model"] == "base").sum()
    assert result.details["limit"] == f"{MIN_DIFFERENCE:g} logits"


@pytest.mark.slow
def test_tokens_are_stored_for_patches_by_position(exact: Run, verified: Run) -> None:
    tokens = exact.table("patching_tokens").query("model == 'base' and pair == 'pair 0'")
    assert tokens["clean"].to_list() == PAIRS[0]["clean"].split()
    assert tokens["corrupted"].to_list() == PAIRS[0]["corrupted"].split()
    assert "patching_tokens" not in verified.tables


def test_verify_estimates_all_units_and_patches_the_largest_and_random_ones_in_every_pair(verified: Run) -> None:
    rows = verified.table("patching")
    for _, block in rows.groupby("model", observed=True):
        estimated, patched = (block[block["method"] == name] for name in ("estimate", "exact"))
        assert len(estimated) == 16 * 5
        selections = [{*zip(b["layer"], b["head"], strict=True)} for _, b in patched.groupby("pair", observed=True)]
        assert len(selections) == 5
        shared = set.intersection(*selections)
        counted = estimated[estimated["is_counted"]]
        changes = counted.assign(change=counted["metric_patched"] - counted["metric_corrupted"])
        squares = changes.groupby(["layer", "head"])["change"].apply(lambda change: (change**2).mean())
        assert {*squares.nlargest(2).index} <= shared
        assert len(shared) >= 4


def test_random_units_are_seeded_and_not_among_the_top() -> None:
    rng = np.random.default_rng(0)
    estimates = pd.DataFrame({"layer": range(30), "kv_group": 0, "head": 1, "change": rng.normal(size=30)})
    options = PatchingOptions(verify_top=3, verify_random=5)
    first, again, other = (select_verified(estimates, options, [seed]) for seed in (0, 0, 1))
    assert first == again != other
    assert first[:3] == other[:3]
    assert len(set(first)) == 8


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_tables(folder: Path, verified: Run, tmp_path: Path) -> None:
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        runner.run_study(study(folder), tmp_path, progress=StopsAfter(13))
    resumed = runner.run_study(study(folder), tmp_path, progress=NoProgress(), resume=True)
    assert contents(resumed) == contents(verified)


def test_per_head_columns_are_ratios_of_means_and_heads_share_the_effect_of_their_kv_group(exact: Run) -> None:
    heads = exact.heads.set_index(["model", "layer", "head"])
    rows = exact.table("patching")
    rows = rows[(rows["position"] == -1) & (rows["direction"] == "denoising")]
    rows = rows.merge(exact.derived(pairs_usable_in_all_models)).astype({"model": str, "activation": str})
    changes = rows["metric_patched"].astype(float) - rows["metric_corrupted"]
    differences = rows["metric_clean"].astype(float) - rows["metric_corrupted"]
    keys = ["model", "activation", "layer", "kv_group", "head"]
    sums = rows.assign(change=changes, difference=differences).groupby(keys)[["change", "difference"]].sum()
    ratios = sums["change"] / sums["difference"]
    for layer in range(4):
        for head in range(4):
            row = heads.loc[("base", layer, head)]
            assert row["patching_z"] == pytest.approx(ratios["base", "z", layer, head // 2, head])
            assert row["patching_k"] == pytest.approx(ratios["base", "k", layer, head // 2, -1])
            assert not row["patching_z_low"] > row["patching_z"]
            assert not row["patching_z_high"] < row["patching_z"]


def test_prompts_of_different_lengths_run_with_align_end(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "unequal.jsonl"
    file.write_text(json.dumps({**PAIRS[0], "clean": f"w9 {PAIRS[0]['clean']}"}))
    section = {"pairs": [str(file)], "align": "end", "method": "exact", "positions": "each", "activations": ["z", "v"]}
    run = runner.run_study(study(folder, **section), tmp_path / "runs", progress=NoProgress())
    assert validate(run) == []
    assert set(run.table("patching")["position"]) == {ALL_POSITIONS, 5}
    assert run.table("patching_tokens")["clean"].to_list() == ["w4", "w4"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "verify"])
def test_a_named_span_is_patched_as_its_positions_are(folder: Path, tmp_path: Path, method: str) -> None:
    file = tmp_path / "spans.jsonl"
    pairs = [{**pair, "spans": {"subject": [1, 2], "end": "w4"}} for pair in PAIRS]
    file.write_text("\n".join(map(json.dumps, pairs)))
    section = {"pairs": [str(file)], "positions": ["subject", "end", "last", "each"], "method": method}
    section |= SELECTION if method == "verify" else {}
    run = runner.run_study(study(folder, **section, activations=["z", "k"]), tmp_path / "runs", progress=NoProgress())
    assert validate(run) == []
    keys = ["model", "pair", "layer", "kv_group", "head", "activation", "direction", "method"]
    spans, positions = run.table("patching_spans"), run.table("patching")
    assert set(spans["span"]) == {"subject", "end", "last"}
    for name, at in (("subject", 1), ("end", 4), ("last", 4)):
        rows = spans[spans["span"] == name]
        assert {*rows["first"], *rows["last"]} == {at}
        both = rows.merge(positions[positions["position"] == at], on=keys, suffixes=("", "_position"))
        assert len(both) == len(
            rows[rows["method"] == "exact"] if method == "exact" else rows[rows["method"] == "estimate"]
        )
        np.testing.assert_allclose(both["metric_patched"], both["metric_patched_position"], atol=1e-5)
    groups = [*view.charts(assembly.render_context(run))]
    titles = [chart.figure.layout.xaxis.categoryorder or chart.caption for group in groups for chart in group.charts]
    assert view.SPAN_CAPTION in titles
    assert {"subject", "end", "last"} == {
        result.where["span"] for result in results(run) if result.question == "patching.span"
    }


@pytest.mark.slow
def test_verify_patches_all_units_of_a_model_with_fewer_than_it_selects(folder: Path, tmp_path: Path) -> None:
    """The defaults select 20 units; the tiny model has 16 heads."""
    run = runner.run_study(
        study(folder, method="verify", verify_top=10, verify_random=10), tmp_path, progress=NoProgress()
    )
    assert set(effects_table(analysis.sweeps(run))["method"]) == {"exact"}


@pytest.mark.slow
def test_named_heads_are_patched_alone_and_together(folder: Path, tmp_path: Path) -> None:
    section = {"heads": HeadSet(((1, 0), (2, 3))), "activations": ["z", "v"], "positions": ["last"], "method": "exact"}
    run = runner.run_study(study(folder, **section), tmp_path, progress=NoProgress())
    assert validate(run) == []
    rows = run.table("patching").astype({"activation": str})
    assert {*zip(rows["activation"], rows["layer"], rows["kv_group"], rows["head"], strict=True)} == {
        ("z", 1, 0, 0),
        ("z", 2, 1, 3),
        ("v", 1, 0, -1),
        ("v", 2, 1, -1),
    }
    model = hs.load(f"{folder}/tiny", device="cpu")
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    pair_runs = PairRuns(model, PairTokens.on_device(pairs.build(2), model.device), "logit_diff", 1e9)
    with pair_runs.capturing():
        units = [Unit(1, 0, 0), Unit(2, 1, 3)]
        runs = [pair_runs.patch("z", "denoising", units, span) for span in (None, range(4, 5))]
        values = pair_runs.evaluate("denoising", runs)
    sets = run.table("patching_sets").query("model == 'base' and pair == 'pair 2' and activation == 'z'")
    stored = sets.astype({"span": str}).set_index("span")["metric_patched"]
    assert [stored[""], stored["last"]] == pytest.approx(values, abs=1e-5)
    together = [result for result in results(run) if result.question == "patching.set"]
    assert {(r.model, r.where["intervention"], r.where["span"]) for r in together} == {
        (model, activation, span) for model in ("base", "yarn") for activation in ("z", "v") for span in ("", "last")
    }
    assert {result.details["size"] for result in together} == {2}


# Refused inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "line", "flags"),
    [
        (("line 1", 6, 5, "--align end"), {"clean": "w1 w1 w1 w1 w1 w4"}, ()),
        (("line 1", "'answer'", "' w5 w6'", "'w5' + 'w6'"), {"answer": " w5 w6"}, ()),
        (("line 1", "answer", "wrong", "' w5'"), {"answer": " w5", "wrong": " w5"}, ()),
        (("line 1", "clean", "empty"), {"clean": ""}, ()),
        (("line 1", "'subject'"), {"subject": "w1"}, ()),
        (("line 1", "'wrong'", "--metric logprob"), {"wrong": ""}, ()),
        (("'pair 0'", "q", "z", "v"), {"clean": "w1 w1 w1 w1 w1 w4"}, ("--align", "end", "--activation", "q")),
        (("--metric", "accuracy"), {}, ("--metric", "accuracy")),
        (("--activations", "mlp"), {}, ("--activation", "mlp")),
        (("line 1", "'subjekt'", "'subject'", "last"), SPANS, SUBJEKT),
        (("line 1", "'subject'", "token 1", "token 4"), SPANS, SUBJECT_AT_END),
        (("L9H0",), {}, ("--heads", "L9H0")),
        (("--heads", "'L1'"), {}, ("--heads", "L1")),
        (("--verify-top", "some"), {}, ("--verify-top", "some")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refused: Callable[..., str],
    folder: Path,
    tmp_path: Path,
    named: tuple[object, ...],
    line: dict[str, Any],
    flags: tuple[Any, ...],
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(PAIRS[0] | line))
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet")
    assert_names(refused(2, "patch", *tiny, "--pairs", file, *flags), *named)


def test_a_generated_set_that_cannot_be_used_is_refused(refused: Callable[..., str], folder: Path) -> None:
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet")
    assert_names(refused(2, "patch", *tiny, "--pairs", "ioy"), "'ioy'", "'ioi'")
    assert_names(refused(2, "patch", *tiny, "--pairs", "induction", "--count", 0), "--count", 1, 0)
    line = refused(2, "patch", *tiny, "--pairs", "induction", "--length", 16, "--positions", "subject")
    assert_names(line, "'induction 0'", "'subject'")


def test_a_set_without_usable_words_and_a_missing_file_are_refused(
    refused: Callable[..., str], folder: Path, tmp_path: Path
) -> None:
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet")
    assert_names(refused(2, "patch", *tiny, "--pairs", "ioi"), "tokenizer", 40, 6)
    assert_names(refused(3, "patch", *tiny, "--pairs", tmp_path / "none"), f"'{tmp_path / 'none'}'")


# Charts and findings -----------------------------------------------------------------------------------------------


def test_units_that_were_patched_count_as_exact_and_the_others_as_estimates(verified: Run) -> None:
    effects = effects_table(analysis.sweeps(verified))
    counts = effects.groupby(["model", "method"]).size()
    assert counts.to_dict() == {(m, k): n for m in ("base", "yarn") for k, n in (("estimate", 12), ("exact", 4))}
    assert effects.loc[effects["method"] == "estimate", ["low", "p", "p_adjusted"]].isna().all(axis=None)
    by_question = {result.question: result for result in results(verified) if result.model == "yarn"}
    assert by_question["patching.significant"].n == 4
    assert "patching.agreement" not in by_question, "four heads are too few"
    assert by_question["patching.top"].selected_from == 4
    assert by_question["patching.models"].baseline == "base"
    estimated = effects[effects["method"] == "estimate"].drop_duplicates(["layer", "head"])
    assert by_question["patching.models"].details["estimated"] == len(estimated)


def test_estimates_alone_decide_nothing(folder: Path, tmp_path: Path) -> None:
    run = runner.run_study(study(folder, method="estimate"), tmp_path, progress=NoProgress())
    by_question = {result.question: result for result in results(run)}
    assert "patching.estimated" in by_question
    assert not {"patching.significant", "patching.agreement", "patching.kept"} & {*by_question}
    assert not by_question["patching.top"].is_exact


def test_the_matrix_has_the_mean_of_each_unit_and_marks_estimates(verified: Run) -> None:
    effects = analysis.sweeps(verified)[0]
    heatmap = plots.plot_matrix(effects).data[0]
    for _, unit in effects.units.iterrows():
        assert heatmap.z[unit["layer"]][unit["head"]] == pytest.approx(unit["effect"])
        assert (heatmap.text[unit["layer"]][unit["head"]] == plots.ESTIMATE_MARK) == (unit["method"] == "estimate")


@pytest.mark.slow
def test_report_and_head_page_show_the_effects_on_every_prompt_set(synthetic: Run) -> None:
    assert validate(synthetic) == []
    groups = [*view.charts(assembly.render_context(synthetic))]
    assert [len([*group.charts]) for group in groups] == [5, 3, 3, 3, 3, 4, 2, 2, 2, 2, 10, 5]
    prompts = [result.where["prompts"] for result in head_results(synthetic, "base", 1, 2)]
    assert sorted(prompts) == ["induction"] * 5 + ["ioi"] * 5
    (chart,) = view.head_charts(synthetic, "base", 1, 2)
    assert len(chart.figure.data) == 2
    json_data = overview(synthetic)
    assert json_data is not None
    assert len(json_data.data) == 2 * 2 * (5 + 2)


def test_units_without_a_p_value_count_as_tests_with_p_1() -> None:
    rng = np.random.default_rng(0)
    p = pd.Series(rng.uniform(0, 0.2, 50)).where(rng.uniform(size=50) < 0.4)
    expected = pd.Series(false_discovery_control(p.fillna(1))).where(p.notna())
    pd.testing.assert_series_equal(adjust_p_values(p), expected)

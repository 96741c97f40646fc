"""`headscope patch` of layers: stored rows, results, charts and refused options."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import assert_names
from support.tiny_studies import PAIRS, save_checkpoint, tokenizer

import headscope as hs
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.parts import inspect_layer_parts
from headscope.prompts.pair_sets import file_pairs
from headscope.rendering import assembly
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.patching import analysis, view
from probes.patching.declaration import ALL_POSITIONS
from probes.patching.results import overview, results

LAYERS, TOKENS = 4, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    save_checkpoint(folder / "tiny")
    pairs = [{**pair, "spans": {"subject": [1, 3]}} for pair in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def patched(folder: Path, out: Path, **section: Any) -> Run:
    section = {"pairs": [f"{folder}/pairs.jsonl"], "keep_failing": True, **section}
    study = build_study({"models": {"base": f"{folder}/tiny"}, "device": "cpu", "patching": section})
    return runner.run_study(study, out, progress=NoProgress())


@pytest.fixture(scope="module")
def exact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return patched(
        folder,
        tmp_path_factory.mktemp("exact"),
        method="exact",
        activations=["resid_pre", "attn_out", "mlp_out"],
        positions=["each", "subject"],
        directions=["denoising", "noising"],
    )


@pytest.mark.slow
def test_every_layer_place_direction_and_pair_has_one_row(exact: Run) -> None:
    assert validate(exact) == []
    assert set(exact.tables) >= {"patching_layers", "patching_tokens"}
    assert "patching" not in exact.tables
    rows = exact.table("patching_layers")
    places = {"resid_pre": TOKENS + 1, "attn_out": TOKENS + 2, "mlp_out": TOKENS + 2}
    counts = rows.groupby("activation", observed=True).size().to_dict()
    assert counts == {name: LAYERS * 2 * len(PAIRS) * count for name, count in places.items()}
    spans = rows[rows["span"] == "subject"]
    assert ({*spans["position"]}, {*spans["last"]}) == ({1}, {2})
    assert {*rows.loc[rows["position"] == ALL_POSITIONS, "activation"]} == {"attn_out", "mlp_out"}


def test_stored_metrics_equal_those_of_the_engine(exact: Run, folder: Path) -> None:
    model = hs.load(f"{folder}/tiny", device="cpu")
    pairs = file_pairs(f"{folder}/pairs.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    pair = PairTokens.on_device(pairs.build(1), model.device)
    pair_runs = PairRuns(model, pair, "logit_diff", 1e9, inspect_layer_parts(model, pair.clean))
    rows = exact.table("patching_layers").query(
        "pair == 'pair 1' and activation == 'mlp_out' and direction == 'noising'"
    )
    rows = rows[(rows["position"] == 3) & (rows["span"] == "")]
    with pair_runs.capturing():
        runs = [pair_runs.patch_part("mlp_out", "noising", layer, range(3, 4)) for layer in range(LAYERS)]
        values = pair_runs.evaluate("noising", runs)
    assert rows.sort_values("layer")["metric_patched"].to_list() == pytest.approx(values, abs=1e-5)


@pytest.mark.slow
def test_verify_patches_every_layer_and_estimates_single_positions(folder: Path, tmp_path: Path) -> None:
    activations = ["z", "resid_pre", "attn_out"]
    run = patched(folder, tmp_path, activations=activations, positions=["each", "last"], verify_top=2, verify_random=1)
    assert validate(run) == []
    rows = run.table("patching_layers")
    rows["place"] = (
        rows["span"].astype(str).where(rows["span"] != "", rows["position"].ge(0).map({True: "each", False: "all"}))
    )
    sizes = rows.groupby(["activation", "method", "place"], observed=True).size()
    places = {(a, m, p): n for (a, m, p), n in sizes.items()}
    whole, single = LAYERS * len(PAIRS), LAYERS * len(PAIRS) * TOKENS
    expected = {("attn_out", method, place): whole for method in ("exact", "estimate") for place in ("all", "last")}
    expected |= {("resid_pre", method, "last"): whole for method in ("exact", "estimate")}
    expected |= {(name, "estimate", "each"): single for name in ("attn_out", "resid_pre")}
    assert places == expected
    assert set(run.table("patching")["activation"]) == {"z"}
    sweep = next(e for e in analysis.layer_sweeps(run) if e.key["intervention"] == "attn_out")
    assert set(sweep.units["method"]) == {"exact"}


def test_results_name_layers_and_spans(exact: Run) -> None:
    by_question: dict[str, list[Any]] = {}
    for result in results(exact):
        by_question.setdefault(result.question, []).append(result)
        assert sentence(result)
    rows = exact.table("patching_layers").query("activation == 'attn_out' and direction == 'denoising' and span == ''")
    rows = rows[(rows["position"] == ALL_POSITIONS) & rows["is_counted"]]
    rows = rows.assign(
        change=rows["metric_patched"] - rows["metric_corrupted"],
        difference=rows["metric_clean"] - rows["metric_corrupted"],
    )
    sums = rows.groupby("layer")[["change", "difference"]].sum()
    ratios = sums["change"] / sums["difference"]
    top = next(
        result
        for result in by_question["patching_layers.top"]
        if result.where | {"span": ""} == result.where
        and (result.where["intervention"], result.where["direction"]) == ("attn_out", "denoising")
    )
    assert top.value == pytest.approx(ratios.max(), abs=1e-5)
    assert top.details["patched_layer"] == ratios.idxmax()
    assert {result.where["span"] for result in by_question["patching_layers.top"]} == {"", "subject"}


def test_the_page_has_all_charts(exact: Run) -> None:
    groups = [*view.charts(assembly.render_context(exact))]
    assert [len([*group.charts]) for group in groups] == [6 + 10, 0]
    table = overview(exact)
    assert table is not None
    assert len(table.data) == 10


def test_the_whole_residual_stream_is_refused(refused: Callable[..., str], folder: Path) -> None:
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet", "--pairs", f"{folder}/pairs.jsonl")
    line = refused(2, "patch", *tiny, "--activation", "resid_pre")
    assert_names(line, "'resid_pre'", "'each'", "'last'")

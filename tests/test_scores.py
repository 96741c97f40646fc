"""Exported head scores are read back by the rules of the tools that use them; imported ones are what the files say."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from support.families import SPECS
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import headscope as hs
from headscope import scores
from headscope.base.head_set import HeadSet
from headscope.cli.flags import example_run
from headscope.errors import BadInput, CannotWrite, ResourceMissing
from headscope.rendering import notebook
from headscope.results.collection import results_of_all_models
from headscope.run import Run
from headscope.runs.run import combine_runs

EXAMPLE = example_run()


@pytest.fixture(scope="module")
def example() -> Run:
    """The shipped run of SmolLM2: 30 layers, 9 query heads, 3 KV heads."""
    return Run.open(EXAMPLE)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base",), probes=("measure",))


def retrieval(run: Run, model: str = "base") -> np.ndarray:
    """[layers, query heads], built without `HeadScores`."""
    heads = run.heads[run.heads["model"] == model].sort_values(["layer", "head"])
    return heads["retrieval"].to_numpy(dtype=float).reshape(30, 9)


# Formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_duo_attention_loads_the_scores_of_kv_heads(example: Run, tmp_path: Path, reduction: str) -> None:
    folder = example.export("duo", tmp_path / "pattern", "retrieval", "base", reduction=reduction, sink=16, recent=32)
    loaded = np.clip(np.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t"), 0, 1)
    expected = getattr(retrieval(example).reshape(30, 3, 3), reduction)(axis=2)
    assert loaded == pytest.approx(expected, abs=1e-6)
    assert json.loads((folder / "config.json").read_text()) == {"sink_size": 16, "recent_size": 32}
    origin = json.loads((folder / "headscope.json").read_text())
    assert (origin["score"], origin["reduction"], origin["transform"]) == ("retrieval", reduction, "none")
    assert origin["weights_sha256"] == example.manifest["models"][0]["weights_sha256"]


def test_scores_outside_0_to_1_are_exported_to_duo_attention_as_ranks(small: Run, tmp_path: Path) -> None:
    folder = small.export("duo", tmp_path / "pattern", "ess2_1024", reduction="mean")
    loaded = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t")
    own = scores.HeadScores.from_run(small, "ess2_1024").by_group("mean")
    assert (loaded.min(), loaded.max()) == (0, 1)
    assert (loaded.ravel().argsort() == own.ravel().argsort()).all()
    assert json.loads((folder / "headscope.json").read_text())["transform"].startswith("rank")


def first_line_of_json(path: Path) -> dict[str, list[float]]:
    """As Retrieval_Head's README and HeadKV's code read a file: its first line alone."""
    with path.open() as file:
        content: dict[str, list[float]] = json.loads(file.readline())
    return content


def test_retrieval_head_ranks_the_heads_of_the_first_line_by_the_mean_of_their_lists(
    example: Run, tmp_path: Path
) -> None:
    content = first_line_of_json(example.export("retrieval-head", tmp_path / "m.json", "retrieval", "base"))
    ranked = sorted(
        ([[*map(int, key.split("-"))], np.mean(values)] for key, values in content.items()), key=lambda x: -x[1]
    )
    expected = retrieval(example)
    assert len(ranked) == 270
    assert [score for _, score in ranked] == pytest.approx(sorted(expected.ravel(), reverse=True))
    assert all(expected[layer, head] == pytest.approx(score) for (layer, head), score in ranked)


def headkv_shares(path: Path, layers: int, temperature: float) -> np.ndarray:
    """[layers, heads]: the share of the cache that HeadKV gives to each head, by the rule of its code."""
    means = torch.tensor([float(np.mean(values)) for values in first_line_of_json(path).values()], dtype=torch.float64)
    powers = (means / means.sum()) ** temperature
    return (powers / powers.sum()).reshape(layers, -1).numpy()


def test_headkv_gives_every_head_its_share_of_the_scores(example: Run, tmp_path: Path) -> None:
    shares = headkv_shares(example.export("headkv", tmp_path / "m.json", "retrieval", "base"), 30, 1.0)
    assert shares == pytest.approx(retrieval(example) / retrieval(example).sum())


def test_negative_scores_are_exported_to_headkv_as_ranks(small: Run, tmp_path: Path) -> None:
    """A negative score would give a head less than nothing, or nan."""
    run = Run.open(small.path)
    run.heads["change"] = np.linspace(-1, 1, len(run.heads))[::-1]
    path = run.export("headkv", tmp_path / "m.json", "change")
    shares = headkv_shares(path, 4, 0.5)
    assert np.isfinite(shares).all()
    assert (shares.ravel()[:-1] > shares.ravel()[1:]).all()
    assert json.loads((tmp_path / "m.json.headscope.json").read_text())["transform"].startswith("rank")


@pytest.mark.parametrize("name", ["duo", "headkv", "lukv"])
def test_formats_with_a_row_per_layer_refuse_a_model_with_layers_without_attention(
    small: Run, tmp_path: Path, name: str
) -> None:
    """Their tools find a layer by its number: a file of layers 0, 1, 3 would shift the last one."""
    run = Run.open(small.path)
    run.__dict__["heads"] = run.heads[run.heads["layer"] != 2]
    with refuses(BadInput, "layer 2", "base", "'ess2_1024'"):
        run.export(name, tmp_path / "out", "ess2_1024")
    assert json.loads(run.export("rtp-llm", tmp_path / "c.json", "ess2_1024").read_text())["headwise_config"]["3"]


def test_duo_refuses_a_single_column_that_its_tools_read_as_a_list(small: Run, tmp_path: Path) -> None:
    run = Run.open(small.path)
    run.__dict__["heads"] = run.heads[run.heads["kv_group"] == 0]
    with refuses(BadInput, "base", "4 layers", "1 KV heads", "headkv", "rtp-llm", "csv"):
        run.export("duo", tmp_path / "out", "ess2_1024")


def test_qrhead_selects_the_best_heads(example: Run, tmp_path: Path) -> None:
    with example.export("qrhead", tmp_path / "m.yaml", "retrieval", "base", top=3).open() as file:
        content = yaml.safe_load(file)
    indices = torch.tensor([tuple(map(int, head.split("-"))) for head in content["attn_head_set"].split(",")])
    scores_of_heads = torch.tensor(retrieval(example))[indices[:, 0], indices[:, 1]]
    assert scores_of_heads.tolist() == sorted(retrieval(example).ravel().tolist(), reverse=True)[:3]
    assert (content["model_name_or_path"], content["model_base_class"]) == ("smollm2-135m", "smollm2-135m")


def test_rtp_llm_keeps_the_best_share_of_whole_kv_groups(example: Run, tmp_path: Path) -> None:
    content = json.loads(example.export("rtp-llm", tmp_path / "c.json", "retrieval", "base", share=0.3).read_text())
    config = content["headwise_config"]
    flags = np.array([config[str(layer)] for layer in range(30)])
    groups = flags.reshape(30, 3, 3)
    assert (groups == groups[:, :, :1]).all()
    kept, best = groups[:, :, 0].astype(bool), retrieval(example).reshape(30, 3, 3).max(axis=2)
    assert kept.sum() == 27
    assert best[kept].min() >= best[~kept].max()
    window = [config[key] for key in ("sink_token_num", "swa_token_num", "seqlen_threshold")]
    assert window == [64, 256, 320]
    assert {flag for layer in range(30) for flag in config[str(layer)]} == {0, 1}


def test_lukv_prunes_the_lowest_heads_first_and_on_average_the_compression_ratio(example: Run, tmp_path: Path) -> None:
    ratios = np.load(example.export("lukv", tmp_path / "r.npy", "retrieval", "base"), allow_pickle=False)
    best = retrieval(example).reshape(30, 3, 3).max(axis=2)
    assert ratios.shape == (99, 30, 3)
    keep = (1 - torch.as_tensor(ratios[49, 0], dtype=torch.float32)).clamp(0, 1) * 1000  # tokens of layer 0 at 50 %
    assert keep.shape == (3,)
    assert ratios.mean(axis=(1, 2)) == pytest.approx(np.arange(1, 100) / 100, abs=1e-6)
    assert best[ratios[49] == 1].max() <= best[ratios[49] == 0].min()


def test_mha2mla_keeps_the_rotary_pairs_with_the_largest_scores(small: Run, tmp_path: Path) -> None:
    with small.export("mha2mla", tmp_path / "qk.pt", "norm_product").open("rb") as file:
        ranks = torch.load(file, weights_only=True)
    mask = ranks < 3  # as its 2-norm version selects the rotated pairs of keys, and of queries by repeating them
    assert mask.view(4, -1).sum(1).tolist() == [2 * 2 * 3] * 4
    assert mask.repeat_interleave(6 // 2, dim=1).shape == (4, 6, 16)
    pairs = small.pairs[small.pairs["context_length"] == 1024]
    assert ranks.shape == (4, 2, 16)  # layers, KV heads, head_dim
    assert (ranks[..., :8] == ranks[..., 8:]).all()
    for (layer, group), rows in pairs.groupby(["layer", "kv_group"]):
        sums = rows.groupby(["head", "pair"])["norm_product"].mean().groupby("pair").sum()
        kept = torch.nonzero(ranks[layer, group, :8] < 3).flatten().tolist()
        assert kept == sorted(sums.nlargest(3).index)


@pytest.mark.parametrize("content", ["heads: [1.10]", "[L0H1, 1.10]", '{"heads": [1.1]}', "heads: [5]"])
def test_numbers_in_a_head_set_are_refused_since_two_heads_are_one_number(content: str, tmp_path: Path) -> None:
    file = tmp_path / "heads.yaml"
    file.write_text(content)
    with refuses(BadInput, file, "is a number", "L1H10", "'1.10'"):
        HeadSet.read(file)
    file.write_text("heads: ['1.10']")
    assert [*HeadSet.read(file)] == [(1, 10)]
    model = hs.load(SPECS["llama"].build())
    for number in (1.1, np.float32(1.1), 5):
        with refuses(BadInput, f"{number} is a number"), hs.ablated(model, [number]):
            pass


def test_csv_latex_and_json_hold_the_scores(example: Run, tmp_path: Path) -> None:
    path = example.export("csv", tmp_path / "m.csv", "retrieval", "base")
    rows = [*csv.DictReader(path.open())]
    assert np.array([float(row["retrieval"]) for row in rows]).reshape(30, 9) == pytest.approx(retrieval(example))
    best = example.top_heads("retrieval", 5, "base")
    text = example.export("latex", tmp_path / "m.tex", "retrieval", "base", top=5).read_text()
    rows = [line.split(" & ") for line in text.splitlines() if line[0].isdecimal()]
    assert [(int(layer), int(head)) for layer, head, _ in rows] == [*best]
    heads = HeadSet.read(example.export("json", tmp_path / "m.json", "retrieval", "base", top=5))
    assert (heads.heads, heads.model_digests) == (best.heads, best.model_digests)


def test_exported_longrope_gives_the_frequencies_of_the_model(small: Run, tmp_path: Path) -> None:
    run = Run.open(small.path)
    for entry in run.manifest["models"]:
        entry["geometry"] |= {"native_context": 512, "head_dim": 16, "pairs": 8}
    run.scales.loc[:, ["gamma", "attention_factor", "softmax_factor"]] = [0.0, 1.0, 1.21]
    run.positions.loc[:, "theta"] *= 0.5
    parameters = json.loads(run.export("longrope", tmp_path / "rope.json").read_text())["rope_parameters"]
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    rotary = LlamaRotaryEmbedding(config)
    thetas = run.positions[(run.positions["layer"] == 0) & (run.positions["kv_group"] == 0)].sort_values("pair")[
        "theta"
    ]
    assert rotary.inv_freq.tolist() == pytest.approx(thetas.tolist(), rel=1e-5)
    assert rotary.attention_scaling**2 == pytest.approx(1.21)


def test_a_csv_has_a_column_for_each_of_several_scores(example: Run, tmp_path: Path) -> None:
    table = pd.read_csv(example.export("csv", tmp_path / "m.csv", "retrieval,cov", "base"))
    base = example.heads[example.heads["model"] == "base"].sort_values(["layer", "head"])
    assert [*table] == ["layer", "head", "kv_group", "retrieval", "cov"]
    for name in ("layer", "head", "kv_group", "retrieval", "cov"):
        assert table[name].to_numpy() == pytest.approx(base[name].to_numpy())
    with refuses(BadInput, tmp_path / "m.csv", "retrieval", "cov"):
        scores.read(tmp_path / "m.csv")
    with refuses(BadInput, "'cov'"):
        example.export("csv", tmp_path / "twice.csv", "cov, cov", "base")
    assert not (tmp_path / "twice.csv").exists()


# Reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["retrieval-head", "headkv", "csv"])
def test_files_of_all_heads_are_read_as_they_were_exported(example: Run, tmp_path: Path, name: str) -> None:
    path = example.export(name, tmp_path / f"m.{'csv' if name == 'csv' else 'json'}", "retrieval", "base")
    assert scores.read(path).by_head() == pytest.approx(retrieval(example))


def test_files_of_kv_groups_and_selections_are_read(example: Run, tmp_path: Path) -> None:
    duo = scores.read(example.export("duo", tmp_path / "pattern", "retrieval", "base"))
    assert duo.per_group
    assert duo.by_group() == pytest.approx(retrieval(example).reshape(30, 3, 3).max(axis=2), abs=1e-6)
    rtp = scores.read(example.export("rtp-llm", tmp_path / "c.json", "retrieval", "base", share=0.1))
    assert rtp.by_head().sum() == 27
    for name, file in (("qrhead", "h.yaml"), ("json", "h.json")):
        selected = scores.read(example.export(name, tmp_path / file, "retrieval", "base", top=4)).ranking
        assert {*selected} == {*example.top_heads("retrieval", 4, "base")}


def test_a_bare_tsv_of_duo_attention_and_a_csv_with_byte_order_mark_are_read(example: Run, tmp_path: Path) -> None:
    folder = example.export("duo", tmp_path / "pattern", "retrieval", "base")
    bare = scores.read(folder / "full_attention_heads.tsv")
    assert bare.per_group
    assert (bare.by_group() == scores.read(folder).by_group()).all()
    (tmp_path / "excel.csv").write_text("layer,head,score\n0,0,0.5\n0,1,1\n", encoding="utf-8-sig")
    assert scores.read(tmp_path / "excel.csv").by_head().tolist() == [[0.5, 1]]


def test_lists_of_a_published_retrieval_head_file_are_averaged(tmp_path: Path) -> None:
    trials = {"16-19": [0.9, 1.0, 0.8], "11-15": [0.2, 0.4], "8-26": [1.0]}
    (tmp_path / "Model.json").write_text(json.dumps(trials))
    ranking = scores.read(tmp_path / "Model.json").ranking
    assert [*ranking] == [(8, 26), (16, 19), (11, 15)]
    assert ranking.weights == pytest.approx((1.0, 0.9, 0.3))


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("duo", "retrieval", None, {}), ("4 models", "base")),
        (("duo", "retrieval", "other", {}), ("'other'", "base")),
        (("duo", "nothing", "base", {}), ("'nothing'", "numbers about heads")),
        (("duo", None, "base", {}), ("duo", "--score", "COLUMN")),
        (("longrope", "retrieval", "base", {}), ("longrope", "'retrieval'", "--score")),
        (("zip", "retrieval", "base", {}), ("'zip'", "duo", "retrieval-head")),
        (("duo", "retrieval", "base", {"sink": 0, "recent": 0}), ("sink=0", "recent=0")),
        (("duo", "retrieval", "base", {"top": 3}), ("duo", "'top'", "reduction", "sink", "recent")),
        (("csv", "retrieval", "base", {"top": 3}), ("csv", "'top'")),
        (("rtp-llm", "retrieval", "base", {"share": 1.5}), ("share=1.5", 0, 1)),
        (("duo", "retrieval", "base", {"reduction": "sum"}), ("reduction", "'sum'", "max", "mean")),
        (("qrhead", "retrieval", "base", {"top": 0}), ("top=0", 1)),
        (("longrope", None, "adarope", {}), ("longrope", "adarope", "frequencies")),
        (("mha2mla", "retrieval", "base", {}), ("'retrieval'", "mean_abs", "rms", "norm_product")),
        (("duo", "retrieval", "base", {"sink": "4"}), ("sink='4'", "integer")),
        (("rtp-llm", "retrieval", "base", {"share": None}), ("share=None", "number")),
    ],
)
def test_an_export_that_cannot_be_made_is_refused_and_writes_nothing(
    example: Run,
    tmp_path: Path,
    arguments: tuple[str, str | None, str | None, dict[str, Any]],
    named: tuple[str | int, ...],
) -> None:
    file_format, score, model, options = arguments
    with refuses(BadInput, *named) as error:
        example.export(file_format, tmp_path / "out", score, model, **options)
    assert "\n" not in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_existing_and_unwritable_paths_are_refused_and_nothing_is_left(example: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with refuses(CannotWrite, tmp_path / "file", "exists", "--out"):
        example.export("csv", tmp_path / "file", "retrieval", "base")
    (tmp_path / "other.headscope.json").write_text("mine")
    with refuses(CannotWrite, tmp_path / "other.headscope.json", "exists", "--out"):
        example.export("csv", tmp_path / "other", "retrieval", "base")
    (tmp_path / "other.headscope.json").unlink()
    for name in ("csv", "duo"):
        with refuses(CannotWrite, tmp_path / "file", "--out"):
            example.export(name, tmp_path / "file" / "inside", "retrieval", "base")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_with_many_scores_of_every_head_is_read(tmp_path: Path) -> None:
    """Published files hold a score of every trial."""
    content = {f"{layer}-{head}": [0.25, 0.75] * 200 for layer in range(32) for head in range(32)}
    (tmp_path / "large.json").write_text(json.dumps(content))
    assert (scores.read(tmp_path / "large.json").by_head() == np.full((32, 32), 0.5)).all()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with refuses(ResourceMissing, tmp_path / "none.json"):
        scores.read(tmp_path / "none.json")
    with refuses(ResourceMissing, "full_attention_heads.tsv", tmp_path):
        scores.read(tmp_path)


def test_the_command_exports_and_refuses_in_one_line(headscope: Any, tmp_path: Path) -> None:
    options = ("--format", "duo", "--score", "retrieval", "--model", "base", "--sink", 4)
    arguments = ("export", EXAMPLE, *options, "--out", tmp_path / "p")
    code, out, _ = headscope(*arguments)
    assert code == 0
    assert out == f"Export: {tmp_path / 'p'}\n"
    assert json.loads((tmp_path / "p" / "config.json").read_text())["sink_size"] == 4
    code, _, err = headscope(*arguments)
    assert code == 2
    assert err.count("\n") == 1
    code, _, err = headscope("export", "runs/a", "runs/b", *options, "--out", tmp_path / "q")
    assert code == 2
    assert err.count("\n") == 1
    assert_names(err, "export", 2, "runs/a", "runs/b")


# Imported scores in a run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder / "tiny")
    return folder / "tiny"


def import_scores(tiny: Path, file: Path, out: Path) -> Run:
    run: Run = hs.import_scores({"base": str(tiny)}, file=str(file), out=out, quiet=True)
    return run


def test_imported_scores_become_a_column_beside_the_measures_of_the_same_model(tiny: Path, tmp_path: Path) -> None:
    source = save_texts(tmp_path / "texts", 70)
    measured = hs.measure({"base": str(tiny)}, text=source, lengths=[64], docs=2, out=tmp_path / "runs", quiet=True)
    values = measured.heads.set_index(["layer", "head"])["ess2_64"]
    content = {f"{layer}-{head}": [value, value] for (layer, head), value in values.items()}
    (tmp_path / "scores.json").write_text(json.dumps(content))
    imported = import_scores(tiny, tmp_path / "scores.json", tmp_path / "runs")
    assert imported.heads.set_index(["layer", "head"])["imported"].to_dict() == pytest.approx(
        values.to_dict(), rel=1e-6
    )
    both = combine_runs([measured, imported])
    assert both.models == ["base"]
    assert both.heads["imported"].to_numpy() == pytest.approx(both.heads["ess2_64"].to_numpy(), rel=1e-6)
    (agreement,) = (result for result in results_of_all_models(both) if result.question == "imported.agreement")
    assert agreement.details["measures"]["effective length at 64"] == pytest.approx(1)
    assert notebook.charts(both, "Imported scores")


def test_the_score_of_a_kv_group_goes_to_its_query_heads(tiny: Path, tmp_path: Path) -> None:
    geometry = hs.load(str(tiny)).geometry
    values = np.arange(geometry.layers * geometry.kv_groups).reshape(geometry.layers, -1) / 100
    folder = tmp_path / "pattern"
    folder.mkdir()
    np.savetxt(folder / "full_attention_heads.tsv", values, delimiter="\t")
    heads = import_scores(tiny, folder, tmp_path / "runs").heads
    assert len(heads) == geometry.layers * geometry.heads
    for row in heads.itertuples():
        assert row.imported == pytest.approx(values[row.layer, row.kv_group], abs=1e-6)


@pytest.mark.parametrize(
    "content",
    [{"99-0": [1]}, {"0-99": [1]}, {"0-0": [1], "1-77": [2]}, {"0-0": [1], "0-1": [2]}],
    ids=["layer", "head", "second head", "all heads of a smaller model"],
)
def test_scores_of_a_head_or_shape_that_the_model_lacks_are_refused(tiny: Path, tmp_path: Path, content: Any) -> None:
    (tmp_path / "scores.json").write_text(json.dumps(content))
    own = hs.load(str(tiny)).geometry
    named = ["L" + [*content][-1].replace("-", "H"), "0 to 3"]
    if len(content) == 2 and "0-1" in content:
        named = ["1 layers", "2 heads", f"{own.layers} layers", f"{own.heads} heads"]
    with refuses(BadInput, tmp_path / "scores.json", "'base'", *named) as error:
        import_scores(tiny, tmp_path / "scores.json", tmp_path / "runs")
    assert "\n" not in str(error.value)


def test_fewer_kv_groups_than_the_model_has_are_refused(tiny: Path, tmp_path: Path) -> None:
    np.savetxt(tmp_path / "full_attention_heads.tsv", np.ones((1, 1)), delimiter="\t")
    with refuses(BadInput, "1 layers", "1 KV groups", "'base'"):
        import_scores(tiny, tmp_path, tmp_path / "runs")


def test_a_missing_file_of_scores_is_refused_in_one_line(tiny: Path, tmp_path: Path, refused: Any) -> None:
    line = refused(3, "import", "--model", tiny, "--file", tmp_path / "none.json")
    assert_names(line, tmp_path / "none.json")

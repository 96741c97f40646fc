"""Bins, and the per-head and per-model tables that analyses derive from stored rows."""

import sys

import numpy as np
import pandas as pd
import pytest
from support.refusals import refuses
from support.synthetic_rows import ROWS
from support.synthetic_runs import synthetic_run

from benchmarks.synthetic_run import synthetic_manifest
from headscope.base.bins import bin_center, in_last_octave, position_bin_edges, visible_bin_edges
from headscope.errors import BadInput
from headscope.runs import summary
from headscope.runs.aggregation import HEAD_KEYS, number_groups, plain_types
from headscope.runs.column_metadata import is_statistic, parse_column, statistic, statistics
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from probes.measure.analysis import LAST_OCTAVE_COLUMNS


def stored(out, models=("m",), **tables):
    """A run that holds these rows."""
    with RunWriter.open(out, "test", {}) as writer:
        writer.add("all", tables)
        return writer.commit(["all"], synthetic_manifest(models))


def attention(log_ess2, length=1024, doc="d", model="m", edges=None, **changes):
    """Rows of one head in one document: log_ess2(n) in every bin."""
    edges = visible_bin_edges(length) if edges is None else edges
    rows = np.diff(np.minimum(edges, length), prepend=0)
    values = log_ess2(bin_center(edges, length))
    counts = dict.fromkeys(("rows", "population", "sink_rows", "sink_population"), rows)
    frame = pd.DataFrame({"visible": edges, **counts, "log_ess2": values, "ess2": np.exp(values)})
    typical = {"ess1": 2.0, "max_weight": 0.5, "sink_mass": 0.1, "local_mass": 0.3, "mean_distance": 9.0} | changes
    same = {name: typical.get(name, 0.5) for name in LAST_OCTAVE_COLUMNS if name != "log_ess2"}
    return frame.assign(model=model, context_length=length, doc=doc, layer=0, head=0, kv_group=0, **same)


def pairs(mean_abs, theta, doc="d"):
    planes = {"pair": np.arange(len(theta)), "theta": theta, "mean_abs": mean_abs, "mean_abs_se": 0.0}
    unused = {"mean_signed": 0.0, "rms": np.square(mean_abs), "norm_product": 2.0}
    keys = {"model": "m", "context_length": 64, "doc": doc, "layer": 0, "head": 0, "kv_group": 0}
    return pd.DataFrame(planes | unused).assign(**keys)


# Bins


def test_bin_edges_are_four_per_octave_from_16():
    assert visible_bin_edges(128).tolist() == [16, 19, 23, 27, 32, 38, 45, 54, 64, 76, 91, 108, 128]


@pytest.mark.parametrize("limit", [1, 2, 15, 16, 17, 19, 20, 23, 63, 64, 65, 1000, 1024, 1025, 131072])
def test_bin_edges_cover_the_limit_without_an_empty_bin(limit):
    edges = visible_bin_edges(limit)
    assert edges[-1] >= limit
    assert len(edges) == 1 or edges[-2] < limit
    assert (np.diff(edges) > 0).all()


def test_bin_center_is_the_geometric_mean_of_the_bin_limits():
    edges = visible_bin_edges(5000)
    ends = zip(np.concatenate([[1], edges[:-1] + 1]), edges, strict=True)
    assert bin_center(edges) == pytest.approx([np.sqrt(low * high) for low, high in ends])
    assert float(bin_center(16)) == 4


def test_bin_center_of_a_cut_bin_uses_the_limit():
    assert float(bin_center(1024, limit=900)) == pytest.approx(np.sqrt(862 * 900))


@pytest.mark.parametrize("limit", [32, 64, 100, 512, 1000, 1024, 10000])
def test_last_octave_is_four_bins(limit):
    edges = visible_bin_edges(limit)
    far = edges[in_last_octave(edges, edges[-1])]
    assert len(far) == 4
    assert far[-1] == edges[-1]
    assert edges[len(edges) - 5] <= edges[-1] / 2 + 1


@pytest.mark.parametrize("length", [2, 3, 17, 18, 20, 256, 1000, 1025])
def test_position_bins_partition_the_predicted_tokens(length):
    edges = position_bin_edges(length)
    assert edges[-1] == length - 1
    assert np.diff(edges, prepend=0).min() >= 1
    assert set(edges[:-1]) <= set(visible_bin_edges(length))


# Attention


@pytest.mark.parametrize("slope", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("length", [256, 1000, 1024])
def test_growth_recovers_a_planted_slope(tmp_path, slope, length):
    run = stored(tmp_path, attention=attention(lambda n: slope * np.log(n), length))
    assert run.heads["growth"].item() == pytest.approx(slope, abs=1e-6)


def test_growth_uses_bins_from_64_at_the_longest_length(tmp_path):
    long = attention(lambda n: np.where(n >= 64, 0.5 * np.log(n), 3.0 + np.cos(n) ** 2), 1024)
    short = attention(lambda n: np.log(n), 512)
    run = stored(tmp_path, attention=pd.concat([short, long]))
    assert run.heads["growth"].item() == pytest.approx(0.5, abs=1e-6)


def test_a_short_context_has_no_growth(tmp_path):
    run = stored(tmp_path, attention=attention(lambda n: np.log(n), 64))
    assert np.isnan(run.heads["growth"].item())
    assert run.heads["ess2_64"].item() > 32


def test_effective_length_is_the_row_weighted_geometric_mean_over_the_last_octave(tmp_path):
    first = attention(lambda n: np.log(n) * 0.9, 512, "a")
    second = attention(lambda n: np.log(n) * 0.5, 512, "b")
    run = stored(tmp_path, attention=pd.concat([first, second]))
    log_lengths = []
    for table in (first, second):
        far = table[table["visible"] > 256]
        log_lengths.append(np.average(far["log_ess2"], weights=far["rows"]))
    assert run.heads["ess2_512"].item() == pytest.approx(np.exp(np.mean(log_lengths)), rel=1e-6)


def test_a_sliding_window_is_summarised_in_its_last_octave(tmp_path):
    inside = attention(lambda n: np.log(n), 4096, edges=visible_bin_edges(512))
    run = stored(tmp_path, attention=inside)
    far = inside[inside["visible"] > 256]
    expected = np.exp(np.average(far["log_ess2"], weights=far["rows"]))
    assert run.heads["ess2_4096"].item() == pytest.approx(expected, rel=1e-6)


def test_other_attention_statistics_come_from_the_longest_length(tmp_path):
    tables = [attention(lambda n: np.log(n), length, max_weight=length / 1024) for length in (256, 512)]
    run = stored(tmp_path, attention=pd.concat(tables))
    assert run.heads["max_weight"].item() == pytest.approx(0.5)
    assert run.heads["mean_distance"].item() == pytest.approx(9)


# Pairs and scales


def test_cov_is_population_std_over_mean(tmp_path):
    usage = np.array([1.0, 2.0, 3.0, 6.0])
    run = stored(tmp_path, pairs=pairs(usage, [1.0, 0.1, 0.01, 0.001]))
    by_hand = np.sqrt(((usage - 3) ** 2).mean()) / 3
    assert run.heads["cov"].item() == pytest.approx(by_hand, rel=1e-6)
    assert run.heads["cov_rms"].item() == pytest.approx(np.std(usage**2) / np.mean(usage**2), rel=1e-6)
    assert run.heads["cov_norm"].item() == 0


def test_cov_is_formed_within_each_document(tmp_path):
    run = stored(tmp_path, pairs=pd.concat([pairs([1.0, 3.0], [1.0, 0.1], "a"), pairs([3.0, 1.0], [1.0, 0.1], "b")]))
    assert run.heads["cov"].item() == pytest.approx(0.5)


def test_weighted_log_theta_skips_pairs_that_do_not_rotate(tmp_path):
    run = stored(tmp_path, pairs=pairs([1.0, 3.0, 5.0], [1.0, 0.01, 0.0]))
    assert run.heads["weighted_log_theta"].item() == pytest.approx(0.75 * np.log(0.01), rel=1e-6)


def test_a_head_without_rotation_has_no_weighted_log_theta(tmp_path):
    run = stored(tmp_path, pairs=pairs([1.0, 3.0], [0.0, 0.0]))
    assert np.isnan(run.heads["weighted_log_theta"].item())
    assert run.heads["cov"].item() == pytest.approx(0.5)


@pytest.mark.slow
def test_scales_are_copied_to_the_head_table(tmp_path):
    run = synthetic_run(tmp_path)
    keys = ["model", "layer", "head"]
    merged = run.heads.merge(run.scales, on=keys, suffixes=("", "_stored"))
    for name in ("tau", "gamma", "logit_scale", "effective_base", "mean_log_theta"):
        assert merged[name].to_numpy() == pytest.approx(merged[f"{name}_stored"].to_numpy())


# Intervals


@pytest.mark.slow
def test_confidence_interval_of_a_head_contains_its_value(tmp_path):
    heads = synthetic_run(tmp_path, docs=5).heads
    for name in ("ess2_1024", "growth", "cov"):
        assert (heads[f"{name}_low"] < heads[name]).all()
        assert (heads[name] < heads[f"{name}_high"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("docs", [1, 2])
def test_one_or_two_documents_give_no_interval(docs, tmp_path):
    run = synthetic_run(tmp_path, docs=docs)
    bounds = [name for name in run.heads if name.endswith(("_low", "_high"))]
    assert len(bounds) > 40
    tokens = (f"{kind}_token" for kind in ("previous", "current", "first", "duplicate", "induction"))
    elsewhere = ("retrieval", "needle_write", "prompt_", *tokens)  # over trials, prompts and sequences
    over_documents = [name for name in bounds if not name.startswith(elsewhere)]
    assert run.heads[over_documents].isna().all(axis=None)
    assert run.heads[["ess2_256", "growth", "cov"]].notna().all(axis=None)
    assert summary.model_table(run)["nll_256_diff_low"].isna().all()


@pytest.mark.slow
def test_summaries_are_the_same_every_time(tmp_path):
    run = synthetic_run(tmp_path)
    pd.testing.assert_frame_equal(summary.head_table(run), summary.head_table(type(run).open(run.path)))


# The tables as a whole


@pytest.mark.slow
def test_there_is_one_row_per_model_layer_and_head_in_order(tmp_path):
    heads = synthetic_run(tmp_path, models=("zeta", "alpha"), layers=3, heads=4).heads
    assert list(heads[HEAD_KEYS].drop_duplicates()["model"].unique()) == ["zeta", "alpha"]
    assert len(heads) == 2 * 3 * 4
    assert heads[["layer", "head"]].head(5).to_numpy().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]
    assert (heads["kv_group"] == heads["head"] // 2).all()


@pytest.mark.slow
def test_every_column_of_the_wide_table_is_described(tmp_path):
    run = synthetic_run(tmp_path, probes=("measure", *ROWS))
    heads = run.heads
    plain = [name for name in heads if name not in HEAD_KEYS and not name.endswith(("_low", "_high"))]
    assert all(statistic(name).meaning for name in plain)
    ablations = ("zero", "mean_text", "mean_document", "uniform", "kv-int8", "kv-int4")
    answers = {f"influence_answer_{name}" for name in ("joint", "freq", "scale", *ablations)}
    elsewhere = {"retrieval_wu", "retrieval_indirect", "needle_write_indirect", "learned_sink", "max_logit", "nll"}
    elsewhere |= answers | {f"influence_{name}" for name in ablations} | {"prompt_own_pattern"}
    elsewhere |= {"circuit_resample", "circuit_zero"}
    stems = {parse_column(name).stem for name in plain}
    elsewhere |= {parse_column(name).stem for name in summary.model_table(run)} - stems
    elsewhere |= {"retrieval_success_indirect", "retrieval_success_wu", "task_accuracy", "task_match"}
    assert set(statistics()) - elsewhere == stems
    assert statistic("ess2_1024").label == "effective length at 1,024"
    assert statistic("influence_freq_method").label == f"{statistic('influence_freq').label}, method"


@pytest.mark.slow
def test_a_column_of_methods_is_no_statistic(tmp_path):
    methods = [name for name in synthetic_run(tmp_path).heads if name.endswith("_method")]
    assert methods
    assert not any(is_statistic(name) for name in methods)
    with refuses(BadInput, "'growht_method'"):
        statistic("growht_method")


def test_an_unknown_statistic_is_refused_with_the_nearest():
    with refuses(BadInput, "'growht'", "'growth'"):
        statistic("growht")


@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_groups_are_numbered_as_pandas_numbers_them(tmp_path, order):
    run = synthetic_run(tmp_path, layers=2, docs=2, probes=("measure",))
    rows = run.attention.sort_values([*HEAD_KEYS, "doc"]) if order == "sorted" else run.attention.sample(frac=1)
    for frame in (rows, plain_types(rows), plain_types(rows[:0])):
        groups = frame.groupby([*HEAD_KEYS, "doc"], observed=True)
        numbers, index = number_groups(frame, [*HEAD_KEYS, "doc"])
        assert (numbers == groups.ngroup()).all()
        assert index.equals(groups.size().index)


def test_summaries_do_not_depend_on_the_order_of_rows(tmp_path):
    run = synthetic_run(tmp_path, layers=2, docs=3, probes=("measure",))
    expected = run.heads
    mixed = Run.open(run.path)
    for name in run.tables:
        mixed._frames[name] = run.table(name).sample(frac=1, random_state=0, ignore_index=True)
    pd.testing.assert_frame_equal(mixed.heads, expected)


def test_models_measured_at_different_lengths_share_one_table(tmp_path):
    short, long = attention(lambda n: n * 0 + 1, 256, model="a"), attention(lambda n: n * 0 + 2, 512, model="b")
    run = stored(tmp_path, ["a", "b"], attention=pd.concat([short, long]))
    assert run.heads["ess2_256"].isna().tolist() == [False, True]
    assert run.heads["growth"].notna().all()


def test_loss_differences_are_paired_by_document(tmp_path):
    rng = np.random.default_rng(0)
    level, gain = rng.normal(4, 1, 8).clip(2), rng.normal(0.05, 0.01, 8)
    same = {"context_length": 32, "doc": [f"d{i}" for i in range(8)], "position": 31, "tokens": 31}
    nll = [
        pd.DataFrame({"model": "base", "nll": level, **same}),
        pd.DataFrame({"model": "yarn", "nll": level - gain, **same}),
    ]
    table = summary.model_table(stored(tmp_path, ["base", "yarn"], nll=pd.concat(nll))).set_index("model")
    assert table.loc["base", "nll_32"] == pytest.approx(level.mean(), rel=1e-6)
    assert table.loc["yarn", "nll_32_diff"] == pytest.approx(-gain.mean(), rel=1e-4)
    assert -0.07 < table.loc["yarn", "nll_32_diff_low"] < table.loc["yarn", "nll_32_diff_high"] < -0.03


def test_loss_difference_uses_only_documents_of_both_models(tmp_path):
    same = {"context_length": 32, "position": 31, "tokens": 31}
    losses = [("base", "a", 3.0), ("base", "b", 4.0), ("yarn", "b", 3.5), ("yarn", "c", 9.0)]
    nll = pd.DataFrame(losses, columns=["model", "doc", "nll"]).assign(**same)
    table = summary.model_table(stored(tmp_path, ["base", "yarn"], nll=nll)).set_index("model")
    assert table.loc["yarn", "nll_32_diff"] == pytest.approx(-0.5)


def test_loss_of_a_document_is_weighted_by_tokens(tmp_path):
    nll = {"model": "m", "context_length": 32, "doc": "d", "position": [16, 31], "nll": [4.0, 2.0], "tokens": [30, 10]}
    assert summary.model_table(stored(tmp_path, nll=nll))["nll_32"].item() == pytest.approx(3.5)


@pytest.mark.slow
def test_models_are_medians_over_heads(tmp_path):
    run = synthetic_run(tmp_path)
    table = summary.model_table(run)
    assert table["model"].tolist() == ["base", "yarn"]
    yarn = run.heads[run.heads["model"] == "yarn"]
    assert table["growth"].iloc[1] == pytest.approx(yarn["growth"].median())


def test_a_run_without_tables_of_heads_has_an_empty_wide_table(tmp_path):
    nll = {"model": "m", "context_length": 32, "doc": "d", "position": [31], "nll": 4.0, "tokens": 31}
    assert len(stored(tmp_path, nll=nll).heads) == 0


@pytest.mark.slow
def test_hundreds_of_heads_are_summarised_in_as_many_calls_as_a_few(tmp_path):
    """Nothing loops over heads."""

    def calls(layers, heads, groups):
        sizes = {"pairs": 4, "lengths": (256,), "docs": 2}
        run = synthetic_run(tmp_path / str(layers), ("m",), layers=layers, heads=heads, groups=groups, **sizes)
        _ = [run.table(name) for name in run.tables]
        count = 0

        def counting(frame, event, argument):
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(counting)
        try:
            assert len(run.heads) == layers * heads
        finally:
            sys.setprofile(before)
        return count

    assert calls(16, 24, 8) < 1.1 * calls(4, 6, 2)

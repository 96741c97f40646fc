"""Families whose queries attend to keys that an indexer chose: equal to their own eager attention at any length."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refuses
from support.tiny_studies import save_texts, tokenizer
from torch import Tensor, nn
from transformers import StaticCache
from zoo.build import tiny
from zoo.yarn import FACTOR, yarn_by_hand

import headscope as hs
from headscope.attention.families import sparse_attention
from headscope.attention.record import AttentionRecord
from headscope.decomposition.attributed_rows import find_top_far_rows
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.selfcheck import run_checks as run_checks_of_model
from headscope.interventions.edits import registered
from headscope.interventions.heads import head_units
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.path_patching import Path, PathPatching, inspect_paths
from headscope.interventions.sparse_attention import attending_by
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics, with_row_sums
from headscope.measures.copying import last_query_weights
from headscope.measures.detectors import attention_weights_at
from headscope.measures.far_mass import far_mass
from headscope.measures.max_logit import max_logits
from headscope.measures.pooled_map import PooledMaps
from headscope.measures.span_mass import row_weights
from headscope.measures.sparse_rows import SparseRows
from headscope.measures.sparse_rules import Indexer, parse_rule
from headscope.measures.top_keys import find_top_keys
from headscope.results.check_file import parse_checks
from headscope.results.checks import run_checks
from headscope.streaming import StreamingWindow
from probes.measure.run import measure_tokens
from probes.sparsity.results import results

pytestmark = pytest.mark.slow  # many models

LENGTH = 40
IDS = torch.randint(3, 120, (1, LENGTH), generator=torch.Generator().manual_seed(1))
BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 8, "index_topk_blocks": 2}
INDEXED: dict[str, dict[str, Any]] = {
    # Many heads of the indexer: with few, the scores of many keys are 0, and rounding chooses among them.
    **{
        name: {"index_topk": 16, "index_n_heads": 16}
        for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")
    },
    "minimax_m3_vl_text": BLOCKS | {"index_head_dim": 32},
    "qwen4_exp_text": {"indexer_budget": 16, "indexer_compress_ratio": 4},
}
"""Each chooses 16 keys, Qwen4 also up to 3 keys of the last block."""


@cache
def module_of(model_type: str) -> Any:
    return tiny(model_type, INDEXED[model_type])


@cache
def eager(model_type: str) -> tuple[Tensor, list[Tensor]]:
    """Logits [1, L, V] and weights [H, L, L] by layer of the model's own eager attention."""
    with torch.no_grad():
        output = module_of(model_type)(input_ids=IDS, use_cache=False, output_attentions=True)
    return output.logits, [weights[0] for weights in output.attentions if weights is not None]


@cache
def records(model_type: str) -> list[AttentionRecord]:
    all_records: list[AttentionRecord] = []
    model = hs.load(module_of(model_type))
    with hs.capturing(model) as layers, torch.no_grad():
        layers.listen(all_records.append)
        model.module(input_ids=IDS, use_cache=False)
    return all_records


def chosen_weights(record: AttentionRecord, is_chosen: Tensor) -> Tensor:
    """Weights [H, L, L] by plain float64 products of the record's q and k over the keys of a mask [H, L, L].

    With a learned sink a row sums to less than 1.
    """
    k = record.k.double().repeat_interleave(len(record.q) // len(record.k), 0)
    logits = record.q.double() @ k.mT * record.scaling
    logits = logits.masked_fill(~is_chosen.tril(), -torch.inf)
    if record.sink is None:
        return logits.softmax(-1)
    sink = record.sink.double()[:, None, None].expand(-1, len(logits[0]), 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def decoded(module: Any, prompt: int, step: int = 1) -> Tensor:
    """Logits [1, L, V] of a prompt that is read at once and tokens that follow, `step` at a time."""
    with torch.no_grad():
        output = module(input_ids=IDS[:, :prompt], use_cache=True)
        logits = [output.logits]
        for token in IDS[:, prompt:].split(step, 1):
            output = module(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("model_type", INDEXED)
def test_weights_and_logits_equal_the_eager_attention_of_the_family(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, weights = eager(model_type)
    of_layers = records(model_type)
    assert sum(record.chosen is not None for record in of_layers) >= 2
    assert len(of_layers) == len(weights)
    for record, expected in zip(of_layers, weights, strict=True):
        # The eager mask of the layer, on the q and k of the record: rounding of earlier layers does not count.
        own = chosen_weights(record, expected > 0)
        torch.testing.assert_close(record.weights(range(LENGTH)).double(), own, rtol=0, atol=1e-5)
        torch.testing.assert_close(own.float(), expected, rtol=0, atol=1e-4)
        assert ((own > 0).sum(-1) <= 19).all() or record.chosen is None
    model = hs.load(module_of(model_type))
    with hs.capturing(model):
        with torch.no_grad():
            ours = model.module(input_ids=IDS, use_cache=False).logits
        monkeypatch.setattr(sparse_attention, "QUERIES_PER_BLOCK", 7)
        with torch.no_grad():
            in_blocks = model.module(input_ids=IDS, use_cache=False).logits
        for result in (ours, in_blocks, decoded(model.module, 25), decoded(model.module, 12, 14)):
            torch.testing.assert_close(result, logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
    with torch.no_grad():
        assert torch.equal(module_of(model_type)(input_ids=IDS, use_cache=False).logits, logits)


@pytest.mark.parametrize("model_type", [name for name in INDEXED if name != "dots3_note_text"])
def test_under_yarn_the_indexer_has_the_frequencies_of_the_scheme(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the family itself computes with these frequencies; the layers of Dots 3 share no rotary pairs."""
    module = module_of(model_type)
    with yarn_by_hand(module), torch.no_grad():
        expected = module(input_ids=IDS, use_cache=False).logits
    model = hs.load(module)
    monkeypatch.setattr(sparse_attention, "QUERIES_PER_BLOCK", 7)
    with hs.attached(model, f"yarn:factor={FACTOR:g}"), hs.capturing(model), torch.no_grad():
        for found in (module(input_ids=IDS, use_cache=False).logits, decoded(module, 25)):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert not torch.allclose(expected, eager(model_type)[0], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("model_type", INDEXED)
def test_statistics_of_rows_are_those_over_the_chosen_keys(model_type: str) -> None:
    for record, of_layer in zip(records(model_type), eager(model_type)[1], strict=True):
        weights = chosen_weights(record, of_layer > 0)
        # The weights of large logits are rounded: those of Dots 3 reach 100.
        largest_logit = float((weights.clamp(min=1e-300).log() + record.lse[..., None]).amax())
        rows = np.arange(LENGTH)
        close: dict[str, Any] = {"rtol": 0, "atol": max(1e-5, 3e-7 * largest_logit)}
        statistics = dict(zip(ROW_STATISTICS, row_statistics(record, rows).double(), strict=True))
        distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).double()
        p = weights / weights.sum(-1, keepdim=True)
        expected = {
            "log_ess2": -p.square().sum(-1).log(),
            "ess1": (-(p * p.clamp(min=1e-300).log()).sum(-1)).exp(),
            "max_weight": weights.amax(-1),
            "sink_mass": weights[..., 0],
            "local_mass": (weights * (distance < 32)).sum(-1),
            "mean_distance": (p * distance).sum(-1),
        }
        for name, values in expected.items():
            torch.testing.assert_close(statistics[name], values, rtol=1e-4, atol=1e-4, msg=name)
        torch.testing.assert_close(row_weights(record, rows)[1].double(), weights, **close)
        torch.testing.assert_close(last_query_weights([record])[0].double(), weights[:, -1], **close)
        pairs = ((distance >= 0) & (distance < record.visible_counts[:, None])).nonzero()
        at = attention_weights_at(record, pairs[:, 0], pairs[:, 1]).double()
        torch.testing.assert_close(at, weights[:, pairs[:, 0], pairs[:, 1]], **close)
        far = weights.masked_fill((distance < 6) | (torch.arange(LENGTH) < 2), 0).sum(-1)
        torch.testing.assert_close(far_mass(record, rows, StreamingWindow(sink=2, recent=6)).double(), far, **close)
        top = find_top_keys(record, rows, 3)
        torch.testing.assert_close(top.weights[:, 3:].double(), weights.topk(3).values[:, 3:], **close)
        hidden = weights == 0
        logits = (weights.log() + record.lse[..., None]).masked_fill(hidden, -torch.inf)
        largest, query, key = max_logits(with_row_sums(record))
        torch.testing.assert_close(largest.double(), logits.flatten(1).amax(-1), rtol=1e-5, atol=1e-4)
        assert not hidden[torch.arange(len(hidden)), query, key].any()
        maps = PooledMaps(hs.load(module_of(model_type)).geometry, LENGTH)
        maps.update(record)
        (pooled,) = maps.compute().values()
        torch.testing.assert_close(pooled.double(), weights, **close)  # blocks of one token


@torch.no_grad()
@pytest.mark.parametrize("model_type", INDEXED)
def test_the_rule_indexer_compares_the_chosen_keys_with_the_dense_row(model_type: str) -> None:
    model, rows = hs.load(module_of(model_type)), np.arange(20, LENGTH)
    measure = SparseRows(model.geometry, [parse_rule("top:16"), Indexer()], lambda *_: rows)
    for record in records(model_type):
        measure.update(record)
    by_rule, _ = measure.compute()
    recall = by_rule["recall"][by_rule["rule"] == 1].reshape(len(records(model_type)), -1)
    best = by_rule["recall"][by_rule["rule"] == 0].reshape(recall.shape)
    for record, of_layer, found, bound in zip(records(model_type), eager(model_type)[1], recall, best, strict=True):
        is_chosen = (of_layer > 0) if record.chosen is not None else torch.ones_like(of_layer, dtype=torch.bool)
        dense = chosen_weights(record, torch.ones_like(is_chosen))
        expected = ((dense * is_chosen).sum(-1) / dense.sum(-1))[:, rows].mean(-1)  # a sink has no key
        np.testing.assert_allclose(found, expected, atol=1e-5)
        if model_type != "qwen4_exp_text" and record.chosen is not None:  # Qwen4 also keeps the last block
            assert (found <= bound + 1e-6).all()


def test_an_indexer_that_follows_one_head_is_shown_to_ignore_the_other() -> None:
    """The indexer's only head has the q and k of head 0, and chooses single keys: those of `top` in head 0."""
    module = tiny("minimax_m3_vl_text", {
        "layer_types": ["minimax_m3_sparse"] * 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "index_head_dim": 32, "index_n_heads": 1, "index_block_size": 1, "index_topk_blocks": 6,
        "index_local_blocks": 0,
    })  # fmt: skip
    for layer in module.model.layers:
        attention = layer.self_attn
        for ours, theirs in (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("q_norm", "q_norm"), ("k_norm", "k_norm")):
            own: nn.Parameter = getattr(attention.indexer, ours).weight
            own.data.copy_(getattr(attention, theirs).weight[: len(own)])
    model, rows = hs.load(module), np.arange(20, LENGTH)
    measure = SparseRows(model.geometry, [parse_rule("top:6"), Indexer()], lambda *_: rows)
    with hs.capturing(model) as layers, torch.no_grad():
        layers.listen(measure.update)
        module(input_ids=IDS, use_cache=False)
    by_rule, _ = measure.compute()
    top, chosen = (by_rule["recall"][by_rule["rule"] == rule].reshape(-1, 2) for rule in (0, 1))
    np.testing.assert_allclose(chosen[:, 0], top[:, 0], atol=1e-6)
    assert (chosen[:, 1] < top[:, 1] - 0.05).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("indexer")
    module = tiny("deepseek_v32", INDEXED["deepseek_v32"] | {"vocab_size": len(tokenizer())})
    module.save_pretrained(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    save_texts(folder / "texts")
    return hs.sparsity(
        {"sparse": str(folder / "tiny")}, text=f"file:{folder}/texts/*.txt", docs=3, lengths=[LENGTH], rows=8,
        rules=["top:8", "top:16", "streaming:1:15"], loss=True, out=folder / "runs", quiet=True,
    )  # fmt: skip


def test_every_model_with_an_indexer_has_its_rule_in_tables_results_and_checks(run: Any) -> None:
    rows = run.rows("sparse_rows", rule="indexer")
    assert len(rows) == 3 * len(rows[["layer", "head"]].drop_duplicates())
    assert (rows["kept"] == 16).all()
    means = rows.groupby(["layer", "head"])["recall"].mean()
    (found,) = [
        result
        for result in results(run)
        if result.question == "sparsity.worst_head" and result.where["rule"] == "indexer"
    ]
    assert (found.layer, found.head) == means.idxmin()
    (checked,) = run_checks(
        run,
        parse_checks(
            [
                {"result": "sparsity.worst_in_layer", "model": "sparse", "at_least": 0.9999,
                 "where": {"rule": "indexer", "in_layer": 1}}
            ],
            "checks.yaml",
        ),
    )  # fmt: skip
    assert checked.value == pytest.approx(means[1].min())


def test_in_the_whole_model_dense_means_all_keys(run: Any) -> None:
    """Without the indexer: eager attention of a model whose indexer chooses all keys."""
    model_type = "deepseek_v32"
    module, dense = module_of(model_type), tiny(model_type, INDEXED[model_type] | {"index_topk": LENGTH})
    with torch.no_grad():
        expected = dense(input_ids=IDS, use_cache=False).logits
    with attending_by(hs.load(module), None) as sparse:
        found = module(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert sparse.mean == (LENGTH + 1) / 2
    losses = run.rows("sparse_loss").groupby("rule")["nll"].mean()
    assert losses["top:16"] != losses["dense"]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "minimax_m3_vl_text"])
def test_edits_of_heads_see_the_chosen_keys_and_tables_are_measured(model_type: str) -> None:
    model = hs.load(module_of(model_type))
    tables = measure_tokens(model, IDS[0], ["attention", "pairs", "distance", "nll", "max_logit"], None)
    assert np.isfinite(tables["attention"]["ess2"]).all()
    layer = model.geometry.layer_numbers[1]
    with hs.ablated(model, [f"L{layer}H1"], f"top:{LENGTH}"), torch.no_grad():  # all keys, also those not chosen
        changed = model.module(input_ids=IDS, use_cache=False).logits
    assert not torch.allclose(changed, eager(model_type)[0], atol=1e-3)
    assert find_top_far_rows(model, IDS[0], [(layer, 0)], 1)[0][0].layer == layer
    with hs.ablated(model, [f"L{layer}H1"], "streaming:2+6"), refuses(UnsupportedModel, "stream", 40, "indexer"):
        model.module(input_ids=IDS, use_cache=False)


CAUSAL_STUDIES = pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"])


def pair_of(ids: Tensor, other: Tensor) -> PairTokens:
    """Two prompts [1, L] with one answer."""
    token = torch.tensor([5])
    return PairTokens(torch.cat([ids, token[None]], 1), torch.cat([other, token[None]], 1), token, token + 1, LENGTH)


@CAUSAL_STUDIES
def test_a_patched_pattern_is_that_of_the_keys_chosen_in_its_own_run(model_type: str) -> None:
    model = hs.load(module_of(model_type))
    runs, last = PairRuns(model, pair_of(IDS, IDS.roll(1, 1)), "logit_diff", 1e9), model.geometry.layers - 1
    units = [unit for unit in head_units(model.geometry) if unit.layer == last]
    with runs.capturing(), torch.no_grad():
        _, call = runs.clean.attention(last)
        with registered(model, [runs.patch("pattern", "noising", units)]):
            patched, _ = runs.clean.attention(last)
        weights = runs.corrupted.records()[last].weights(range(LENGTH + 1))
    expected = weights @ call.v[0].repeat_interleave(len(weights) // call.v.shape[1], 0)
    torch.testing.assert_close(patched[0], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@CAUSAL_STUDIES
def test_paths_patched_together_equal_those_patched_alone(model_type: str) -> None:
    """Receivers in several layers: the indexer chooses other keys in each run."""
    model, other = hs.load(module_of(model_type)), IDS.roll(1, 1)
    pair = pair_of(IDS, other)
    paths = [Path((0, head), ((2, head), (3, 1)), end) for head in (0, 1) for end in ("q", "k", "v")]
    replay = PairRuns(model, pair, "logit_diff", memory_bytes=1e9)
    with replay.capturing():
        patching = PathPatching(replay, inspect_paths(model, pair.clean), "denoising", "frozen", 0)
        together = dict(patching.patch(paths))
        for path in paths:
            (alone,) = dict(patching.patch([path])).values()
            assert together[path] == pytest.approx(alone, abs=1e-4)


def test_a_static_cache_and_the_name_of_the_rule_are_refused_in_one_line() -> None:
    model = hs.load(module_of("deepseek_v32"))
    cache = StaticCache(config=model.module.config, max_cache_len=64)
    with hs.capturing(model), torch.no_grad(), refuses(UnsupportedModel, "indexer", "static"):
        model.module(input_ids=IDS, past_key_values=cache, use_cache=True)
    with refuses(BadInput, "'rules'", "'indexer'"):
        hs.sparsity(model, rules=["indexer"])
    with refuses(BadInput, f"'{model.name}'", "selfcheck", "indexer"):
        list(run_checks_of_model(model, IDS[0]))


@pytest.mark.parametrize("model_type", INDEXED)
def test_padding_is_refused_where_an_indexer_would_choose_other_keys(model_type: str) -> None:
    model = hs.load(module_of(model_type))
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    with hs.capturing(model), refuses(UnsupportedModel, model_type, "indexer", "padded"):
        model.module(input_ids=IDS, attention_mask=mask, use_cache=False)

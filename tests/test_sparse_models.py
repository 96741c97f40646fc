"""Whole models whose heads attend by a rule: against eager attention with an explicit mask, decoded, and refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from support import eager_reference, families
from support.dense_sparse_sets import dense_sets
from support.eager_reference import Layer
from support.refusals import refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import StopsAfter, contents, save_checkpoint, save_texts, tokenizer
from torch import Tensor

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, Interrupted
from headscope.interventions.sparse_attention import attending_by
from headscope.measures.row_tile import RowTile
from headscope.measures.sparse_rules import Rule, parse_rule
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from headscope.rendering import assembly
from headscope.results.words import headline, sentence
from headscope.runs.aggregation import mean_losses
from headscope.runs.run import Run
from headscope.study.config import Study, build_study
from headscope.study.runner import run_study
from probes.sparsity import results as sparsity_results
from probes.sparsity.view import charts

LENGTH, MAX_ERROR = 45, 1e-5
IDS = torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
RULES = ("top:5", "group-top:5", "layer-top:5", "block:4:2", "block-mean:4:2", "block-bounds:4:2", "streaming:2:5",
         "vertical-slash:6:6")  # fmt: skip
FAMILIES = ("llama-gqa", "mistral-sliding", "gemma2", "gpt_oss", "deepseek_v2", "deepseek_v3")
BUILD = families.MEASURABLE | {name: other.build for name, other in families.OTHERS.items()}


def rule_sets(rule: str, layer: Layer) -> Tensor:
    return dense_sets(rule, eager_reference.layer_weights(layer), layer.q.double(), layer.k.double())


def masked_logits(model: Model, rule: str, ids: Tensor = IDS) -> Tensor:
    """Logits of eager attention in which every head sees the keys of the rule only."""
    return eager_reference.eager_qk(model.module, ids, lambda layer: rule_sets(rule, layer))[0]


def logits(model: Model, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model.module(ids, use_cache=False).logits


def assert_equal_logits(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest logit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=MAX_ERROR * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_in_every_layer_equals_eager_attention_with_an_explicit_mask(family: str) -> None:
    model = hs.load(BUILD[family](), device="cpu")
    plain = logits(model)
    for rule in RULES:
        with attending_by(model, parse_rule(rule)):
            actual = logits(model)
        assert_equal_logits(actual, masked_logits(model, rule))
        assert (actual - plain).abs().max() > 100 * MAX_ERROR
    assert torch.equal(logits(model), plain)


def test_padding_is_no_key() -> None:
    model = hs.load(BUILD["llama-gqa"](), device="cpu")
    padded = torch.cat([torch.zeros_like(IDS[:, :5]), IDS], 1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # bounds of keys depend on their rotation
    for rule in map(parse_rule, RULES):
        with attending_by(model, rule):
            expected = logits(model)
            actual = model.module(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert_equal_logits(actual[:, 5:], expected)


def test_each_head_can_have_its_own_rule_and_the_others_keep_all_keys() -> None:
    model = hs.load(BUILD["llama-gqa"](), device="cpu")

    def choose(layer: Layer) -> Tensor:
        sets = torch.ones_like(layer.mask).repeat(len(layer.q), 1, 1)
        sets[1], sets[2] = rule_sets("top:3", layer)[1], rule_sets("streaming:1:4", layer)[2]
        return sets

    layers = range(families.LAYERS)
    of_one, of_other = ([f"L{layer}H{head}" for layer in layers] for head in (1, 2))
    with hs.ablated(model, of_one, "top:3"), hs.ablated(model, of_other, "streaming:1:4"):
        actual = logits(model)
    assert_equal_logits(actual, eager_reference.eager_qk(model.module, IDS, choose)[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows_per_tile", [None, 1])
def test_a_rule_that_keeps_everything_changes_no_bit(
    family: str, rows_per_tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top` leaves keys without weight out, which changes nothing."""
    if rows_per_tile is not None:
        monkeypatch.setattr("headscope.attention.edited_attention.LOGITS_PER_BLOCK", rows_per_tile)
    model = hs.load(BUILD[family](), device="cpu")
    with attending_by(model, None) as dense:
        plain = logits(model)
    for rule in ("top:45", "layer-top:1000", "block:4:12", "block-bounds:8:6", "streaming:1:45", "vertical-slash:45:1"):
        with attending_by(model, parse_rule(rule)) as sparse:
            assert torch.equal(logits(model), plain), rule
        assert sparse.mean == dense.mean


@dataclass(frozen=True)
class OddRows(Rule):
    step: int
    name: ClassVar[str] = "odd"
    meaning: ClassVar[str] = "the own key of every n-th row"

    def select(self, tile: RowTile) -> Tensor:
        is_shown = torch.from_numpy(tile.rows % self.step == 0)[:, None]
        return (is_shown & (tile.distance == 0))[None]


@pytest.mark.parametrize("family", ["llama-gqa", "gpt_oss"])
def test_a_row_without_a_key_has_the_output_0(family: str) -> None:
    model, outputs = hs.load(BUILD[family](), device="cpu"), list[AttentionRecord]()
    with attending_by(model, OddRows(2)) as sparse, hs.capturing(model) as layers:
        layers.listen(outputs.append)
        layers.listen(lambda record: record.weights(range(LENGTH)))  # keys are counted once
        assert logits(model).isfinite().all()
    assert sparse.mean == pytest.approx(23 / 45)
    for record in outputs:
        assert (record.z[:, 1::2] == 0).all()
        assert (record.z[:, ::2] != 0).any(-1).all()
        if family == "llama-gqa":
            torch.testing.assert_close(record.z[:, ::2], record.v.repeat_interleave(2, 0)[:, ::2])


@dataclass(frozen=True)
class SortedRows(Rule):
    name: ClassVar[str] = "sorted"
    meaning: ClassVar[str] = "keys of the own row, counted from the first row of the tile"

    def select(self, tile: RowTile) -> Tensor:
        assert (np.diff(tile.rows) >= 0).all(), "the rows of a tile ascend"
        return (tile.distance <= torch.from_numpy(tile.rows)[:, None] % 3)[None]


def test_a_rule_gets_ascending_rows_in_whatever_order_a_listener_reads_weights() -> None:
    model, records = hs.load(BUILD["llama-gqa"](), device="cpu"), list[AttentionRecord]()
    with attending_by(model, SortedRows()), hs.capturing(model) as layers:
        layers.listen(records.append)
        logits(model)
    rows = [17, 3, 3, -1, 20]
    for record in records:
        assert torch.equal(record.weights(rows), record.weights(range(LENGTH))[:, rows])


def test_a_windowed_cache_and_later_queries_are_refused_by_name() -> None:
    full, windowed = (hs.load(BUILD[name](), device="cpu") for name in ("llama-gqa", "mistral-sliding"))
    later, dropped = ("1 of 31",), (23,)
    cases = (
        (full, "vertical-slash:4:4", later),
        (windowed, "block-mean:4:2", dropped),
        (windowed, "block-bounds:4:2", dropped),
    )
    for model, rule, named in cases:
        with attending_by(model, parse_rule(rule)):
            with refuses(BadInput, rule, *named, "use_cache=False") as e:
                model.module.generate(IDS[:, :30], max_new_tokens=6, do_sample=False, pad_token_id=0)
            model.module.generate(IDS[:, :30], max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
        assert "\n" not in str(e.value)


@dataclass(frozen=True)
class LastQueryKeys(Rule):
    """A rule of another package that says only that it needs the whole text."""

    count: int
    name: ClassVar[str] = "last-query"
    meaning: ClassVar[str] = "the keys of largest logit of the last query"
    needs_whole_text: ClassVar[bool] = True

    def select(self, tile: RowTile) -> Tensor:
        raise AssertionError("it must be refused")


def test_a_rule_that_needs_the_whole_text_does_not_decode_unless_it_says_so() -> None:
    model = hs.load(BUILD["llama-gqa"](), device="cpu")
    cache = model.module(IDS[:, :8], use_cache=True).past_key_values
    with attending_by(model, LastQueryKeys(4)), refuses(BadInput, "1 of 9", "use_cache=False"):
        model.module(IDS[:, 8:9], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("family", ["llama-gqa", "gpt_oss"])
def test_gradients_are_those_of_eager_attention_with_the_chosen_keys(family: str) -> None:
    """The choice is a constant."""
    model = hs.load(BUILD[family](), device="cpu")
    embeddings = model.module.get_input_embeddings().weight
    with hs.ablated(model, "all", "top:5"):
        loss = model.module(IDS, use_cache=False).logits.square().mean()
    (actual,) = torch.autograd.grad(loss, embeddings)
    choose = lambda layer: rule_sets("top:5", layer)  # noqa: E731
    logits, _ = eager_reference.eager_qk(model.module, IDS, choose, with_gradients=True)
    (expected,) = torch.autograd.grad(logits.square().mean(), embeddings)
    assert_equal_logits(actual, expected)


DECODED = [
    (family, rule)
    for family in ("llama-gqa", "mistral-sliding", "gpt_oss", "deepseek_v3")
    for rule in ("streaming:2:7", "top:5", "group-top:5", "block:4:3", "block-mean:4:3")
    if not (rule.startswith("block-mean") and family in ("mistral-sliding", "gpt_oss"))  # refused, see above
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "rule"), DECODED)
def test_decoding_under_a_rule_equals_masked_full_passes(family: str, rule: str) -> None:
    module, steps = BUILD[family]().double(), 6  # float32 rounds one row in another way than many, by processor
    module.set_experts_implementation("eager")  # the grouped one has no float64
    model = hs.load(module, device="cpu")
    prompt, ids = IDS[:, :30], IDS[:, :30]
    decoded = []
    with attending_by(model, parse_rule(rule)):
        cache = None
        for _ in range(steps):
            output = model.module(ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            decoded.append(output.logits[0, -1])
            ids = torch.cat([ids, decoded[-1].argmax()[None, None]], 1)
        generated = model.module.generate(prompt, max_new_tokens=steps, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, ids)
    expected = masked_logits(model, rule, ids=ids)[0, len(prompt[0]) - 1 : -1]
    assert_equal_logits(torch.stack(decoded), expected)
    assert torch.equal(expected.argmax(-1), ids[0, len(prompt[0]) :])


TEXT, DOCS = 40, 3
TEXT_RULES = ["top:4", "top:8", "top:40", "streaming:1:3", "streaming:1:15", "block-mean:4:2", "vertical-slash:3:3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, texts, and a pattern file that gives each head its own sizes."""
    folder = tmp_path_factory.mktemp("sparse_models")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    sizes = [
        {str(head): ["vertical_and_slash", 1 + head, 2, 0.9] for head in range(families.HEADS)}
        for _ in range(families.LAYERS)
    ]
    (folder / "pattern.json").write_text(json.dumps(sizes))
    return folder


def study(folder: Path, **changes: Any) -> Study:
    options = {"lengths": [24, TEXT], "rows": 4, "rules": TEXT_RULES, "loss": True, **changes}
    tiny = str(folder / "tiny")
    return build_study(
        {
            "models": {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"},
            "texts": {"source": f"file:{folder}/texts/*.txt", "docs": DOCS},
            "device": "cpu",
            "sparsity": {**options, "patterns": str(folder / "pattern.json")},
        }
    )


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return run_study(study(folder), folder / "runs")


def mean_nll(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:]))


@pytest.mark.slow
def test_the_stored_loss_is_that_of_masked_eager_attention(folder: Path, run: Run) -> None:
    model = hs.load(str(folder / "tiny"), device="cpu")
    documents = load_token_documents(f"file:{folder}/texts/*.txt", tokenizer(), DOCS, TEXT)
    stored = run.rows("sparse_loss", model="base", context_length=TEXT).astype({"nll": float, "rule": str})
    losses = mean_losses(stored, ["rule", "doc"])
    best = {f"best:top:{size}" for size in (4, 8, 40)}  # see test_own_rules.py
    assert {*losses.index.unique("rule")} == {"dense", "minference", *TEXT_RULES, *best}
    for document in documents:
        ids = torch.tensor(document.ids[:TEXT])[None]
        expected = {rule: mean_nll(masked_logits(model, rule, ids), ids) for rule in TEXT_RULES}
        expected["dense"] = mean_nll(logits(model, ids), ids)
        for rule, value in expected.items():
            assert losses[rule, document.name] == pytest.approx(value, abs=MAX_ERROR)

    def own_sizes(layer: Layer) -> Tensor:
        sets = [rule_sets(f"vertical-slash:{1 + head}:2", layer)[head] for head in range(len(layer.q))]
        return torch.stack(sets)

    published = eager_reference.eager_qk(model.module, ids, own_sizes)[0]
    assert losses["minference", document.name] == pytest.approx(mean_nll(published, ids), abs=MAX_ERROR)


@pytest.mark.slow
def test_a_rule_that_keeps_everything_has_the_dense_loss_to_the_bit(run: Run) -> None:
    columns = ["model", "context_length", "doc", "position", "nll", "tokens", "kept"]
    for rule in ("top:40", "streaming:1:15"):
        lengths = (24, TEXT) if rule == "top:40" else (24,)
        for length in lengths:
            ours, dense = (
                run.rows("sparse_loss", rule=name, context_length=length)[columns].reset_index(drop=True)
                for name in (rule, "dense")
            )
            assert ours.equals(dense) == (rule == "top:40")
    kept = run.rows("sparse_loss", rule="streaming:1:3", context_length=24)["kept"].astype(float)
    np.testing.assert_allclose(kept, (1 + 2 + 3 + 4 * 21) / 24, rtol=1e-6)


@pytest.mark.slow
def test_results_compare_every_rule_with_dense_attention_over_documents(run: Run) -> None:
    answers = [result for result in sparsity_results.results(run) if result.model == "yarn"]
    stored = run.rows("sparse_loss", model="yarn", context_length=TEXT).astype({"nll": float, "rule": str})
    losses = mean_losses(stored, ["rule", "doc"]).unstack("doc")
    by_rule = {r.where["rule"]: r for r in answers if r.question == "sparsity.loss"}
    assert [*by_rule][: len(TEXT_RULES) + 1] == [*TEXT_RULES, "minference"]
    for rule, result in by_rule.items():
        changes = losses.loc[rule] - losses.loc["dense"]
        assert result.value == pytest.approx(changes.mean())
        assert result.by_sample == pytest.approx(changes.to_dict())
        assert result.low <= result.value <= result.high
    assert by_rule["top:40"].value == 0
    for result in answers:
        assert "{" not in sentence(result) + headline(result)


def test_rules_of_whole_models_are_compared_at_an_equal_number_of_kept_keys(run: Run) -> None:
    (lowest,) = (r for r in sparsity_results.results(run) if (r.question, r.model) == ("sparsity.lowest_loss", "yarn"))
    stored = run.rows("sparse_loss", model="yarn", context_length=TEXT).astype({"nll": float, "rule": str})
    losses, kept = mean_losses(stored, ["rule", "doc"]), stored.groupby(["rule", "doc"])["kept"].first().astype(float)
    expected = {}
    for doc in losses.index.unique("doc"):
        share = np.log(kept["top:8", doc] / kept["streaming:1:3", doc])
        share /= np.log(kept["streaming:1:15", doc] / kept["streaming:1:3", doc])
        at_cost = (1 - share) * losses["streaming:1:3", doc] + share * losses["streaming:1:15", doc]
        expected[doc] = at_cost - losses["dense", doc]
    assert lowest.by_sample == pytest.approx(expected)
    assert lowest.details["cost"] == pytest.approx(kept["top:8"].mean())
    assert lowest.details["bound_change"] == pytest.approx((losses["top:8"] - losses["dense"]).mean())
    names = {name: lowest.details.get(name) for name in ("family", "families", "bound", "missing")}
    assert names == {"family": "streaming:1", "families": None, "bound": "top", "missing": 2}  # with one size each


def test_the_interval_of_the_rule_with_the_lowest_loss_allows_for_the_choice(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, ("base",), probes=("sparsity",), layers=2, heads=4, docs=4)
    results = [*sparsity_results.results(run)]
    (lowest,) = (result for result in results if result.question == "sparsity.lowest_loss")
    own = {r.where["rule"]: r for r in results if r.question == "sparsity.loss"}["vertical-slash:128:128"]
    assert (lowest.details["family"], lowest.details["families"], lowest.selected_from) == ("vertical-slash", 2, 2)
    assert lowest.value == pytest.approx(own.value)
    assert lowest.low < own.low < own.high < lowest.high


@pytest.mark.slow
def test_charts_of_whole_models_are_those_of_the_shown_models(tmp_path: Path) -> None:
    labels = [f"m{number}" for number in range(9)]
    run = synthetic_run(tmp_path, labels, probes=("sparsity",), layers=1, heads=2, docs=2)
    context = assembly.render_context(run)
    (group,) = (g for g in charts(context) if g.heading == "Rules in the whole model")
    drawn = [{note.text for note in chart.figure.layout.annotations} & {*labels} for chart in group.charts]
    assert drawn == [{*context.models}] * 2
    assert len(context.models) < 9


def test_the_charts_of_whole_models_have_a_line_per_family(run: Run) -> None:
    (group,) = (g for g in charts(assembly.render_context(run)) if g.heading == "Rules in the whole model")
    (chart,) = group.charts
    names = {trace.name for trace in chart.figure.data}
    assert {"top", "streaming:1", "block-mean:4", "vertical-slash", "minference"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("cells", [8, 30])
def test_an_interrupted_run_resumes_to_the_same_tables(folder: Path, run: Run, cells: int, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run_study(study(folder), tmp_path, progress=StopsAfter(cells))
    resumed = run_study(study(folder), tmp_path, resume=True)
    assert len([*tmp_path.iterdir()]) == 1
    assert contents(resumed) == contents(run)


@pytest.mark.slow
def test_reading_in_chunks_changes_neither_loss_nor_kept_keys(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscope.forward.observe.choose_chunk_size", lambda model, ids: 16)
    chunked = run_study(study(folder, lengths=[TEXT]), tmp_path)
    keys = ["model", "doc", "rule", "position"]
    ours, theirs = (
        r.rows("sparse_loss", context_length=TEXT).astype({"rule": str}).set_index(keys)[["nll", "kept"]].sort_index()
        for r in (chunked, run)
    )
    pd.testing.assert_frame_equal(ours, theirs, rtol=1e-5)


@pytest.mark.model
def test_the_real_model_under_rules(tmp_path: Path) -> None:
    rules = ["top:512", "streaming:4:28", "vertical-slash:30:30"]
    run = hs.sparsity(
        "smollm2-135m", docs=1, lengths=[512], rows=4, rules=rules, needles=1, loss=True, out=tmp_path, quiet=True
    )  # fmt: skip
    loss = run.rows("sparse_loss").set_index("rule")["nll"].groupby(level=0, observed=True).agg(list)
    assert loss["top:512"] == loss["dense"]
    nll = run.rows("sparse_answers").set_index("rule")["nll"].astype(float)
    assert {*nll.index} == {"dense", "top:512", "streaming:4:28", "vertical-slash:30:30", "best:top:512"}
    assert nll["top:512"] == nll["dense"]
    assert nll["streaming:4:28"] > nll["dense"] + 1, "the fact is out of sight"
    assert nll["vertical-slash:30:30"] < nll["streaming:4:28"], "the question chooses the columns of the fact"

"""Detectors probe: planted heads score 1, uniform heads score chance, all scores equal those of eager weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import stdtrit
from support import eager_reference, families
from support.measure_laws import full_pass_record, geometry_of
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, tokenizer
from tokenizers import Tokenizer, decoders, models, processors
from torch import Tensor
from transformer_lens import head_detector
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import headscope
import probes.detectors.run as runner
from headscope.attention.record import AttentionRecord
from headscope.errors import BadOption
from headscope.measures.detectors import DETECTOR_KINDS, DetectorScores
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.rendering import assembly
from headscope.results.words import sentence
from headscope.runs.column_metadata import heads_with_role
from headscope.runs.run import Run
from headscope.runs.summary import model_table
from headscope.study.config import build_study
from probes.detectors import PROBE, results, view
from probes.detectors.declaration import TARGETS
from probes.detectors.run import repeated_random_tokens, sequence_scores

PERIOD = 20
FIVE = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3")


def scores(columns: Any, kind: str, layer: int = 0) -> list[float]:
    """Scores of one kind and layer, by head."""
    frame = pd.DataFrame(columns)
    return list(frame[(frame["kind"] == kind) & (frame["layer"] == layer)].sort_values("head")["score"])


def expected(alpha: Tensor, opening: int, period: int, kind: str, visible: Tensor) -> tuple[Tensor, float, int] | None:
    """Mean weight [H], chance and number of rows, computed from alpha [H, L, L] row by row."""
    length = opening + 2 * period
    second = range(opening + period, length)
    pairs = {
        "previous": [(i, i - 1) for i in range(1, length)],
        "current": [(i, i) for i in range(length)],
        "first": [(i, 0) for i in range(length)],
        "duplicate": [(i, i - period) for i in second],
        "induction": [(i, i - period + 1) for i in second],
    }[kind]
    rows, keys = (torch.tensor(indices) for indices in zip(*pairs, strict=True))
    visible_pairs = visible[rows, keys]
    if not visible_pairs.any():
        return None
    rows, keys = rows[visible_pairs], keys[visible_pairs]
    chance = float((1 / visible.sum(-1)[rows].double()).mean())
    return alpha[:, rows, keys].mean(-1), chance, len(rows)


def assert_eager(columns: Any, layer: int, alpha: Tensor, opening: int, period: int, visible: Tensor) -> float:
    """Compare every kind of one layer with eager weights; returns the largest error."""
    frame = pd.DataFrame(columns)
    frame = frame[frame["layer"] == layer]
    max_error = 0.0
    for kind in DETECTOR_KINDS:
        rows = frame[frame["kind"] == kind].sort_values("head")
        reference_values = expected(alpha, opening, period, kind, visible)
        if reference_values is None:
            assert rows.empty
            continue
        assert set(rows["rows"]) == {reference_values[2]}
        np.testing.assert_allclose(rows["chance"], reference_values[1], rtol=1e-12)
        max_error = max(max_error, float(np.abs(rows["score"].to_numpy() - reference_values[0].numpy()).max()))
    return max_error


# Planted -----------------------------------------------------------------------------------------------------------


def planted(opening: int = 1) -> tuple[Tensor, Tensor]:
    """q and k [5, L, L] of five heads, each with all its weight on one kind of key."""
    length = opening + 2 * PERIOD
    k = torch.eye(length).expand(5, -1, -1)
    position = torch.arange(length)
    targets = [position - 1, position, torch.zeros_like(position), position - PERIOD, position - PERIOD + 1]
    visible_targets = [torch.where(target < 0, position // 2, target) for target in targets]
    q = torch.stack([torch.eye(length)[target] for target in visible_targets])
    return 200 * q, k


def test_planted_heads_score_one() -> None:
    q, k = planted()
    geometry = geometry_of(5, 5, q.shape[-1], 4, windows=(None,))
    detectors = DetectorScores(geometry, 1, PERIOD)
    detectors.update(full_pass_record(q, k, scaling=1.0))
    columns = detectors.compute()
    for index, kind in enumerate(DETECTOR_KINDS):
        kind_scores = scores(columns, kind)
        assert kind_scores[index] == pytest.approx(1, abs=1e-6)
        assert max(kind_scores[:index] + kind_scores[index + 1 :]) < 0.2


@pytest.mark.parametrize("window", [None, PERIOD, PERIOD - 1, 8])
def test_heads_without_preference_score_chance(window: int | None) -> None:
    geometry = geometry_of(2, 1, 8, 4, windows=(window,))
    detectors = DetectorScores(geometry, 0, PERIOD)
    detectors.update(full_pass_record(torch.zeros(2, 2 * PERIOD, 8), torch.ones(1, 2 * PERIOD, 8), window=window))
    frame = pd.DataFrame(detectors.compute())
    np.testing.assert_allclose(frame["score"], frame["chance"], rtol=1e-6)
    far = {"duplicate", "induction"}
    unseen = {None: set(), PERIOD: {"duplicate"}, PERIOD - 1: far, 8: far}[window]
    assert set(DETECTOR_KINDS) - set(frame["kind"]) == unseen


# Against eager -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FIVE)
def test_scores_of_every_family_equal_those_of_eager_weights(family: str) -> None:
    model = headscope.load(families.MEASURABLE[family](), device="cpu")
    ids, opening = repeated_random_tokens(tokenizer(), PERIOD, (0,))
    columns = sequence_scores(model, torch.from_numpy(ids)[None], opening, PERIOD)[0]
    _, layers = eager_reference.eager_qk(model.module, torch.from_numpy(ids)[None])
    for layer, record in enumerate(layers):
        window = model.geometry.windows[layer]
        alpha = eager_reference.weights(record.q, record.k, record.scaling, window)
        visible = eager_reference.visible(len(ids), window)
        assert assert_eager(columns, layer, alpha, opening, PERIOD, visible) <= 1e-5


@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"chunk_size": 27}, {"sink": torch.tensor([1.0, -1.0])}])
def test_scores_respect_soft_caps_chunks_and_sinks(extra: Any) -> None:
    q, k = torch.randn(2, 2 * PERIOD + 1, 8), torch.randn(1, 2 * PERIOD + 1, 8)
    alpha, visible, lse = eager_reference.explicit_weights(q, k, **extra)
    detectors = DetectorScores(geometry_of(2, 1, windows=(None,)), 1, PERIOD)
    detectors.update(AttentionRecord(0, 0, q, k, torch.zeros_like(k), torch.zeros_like(q), lse, 0.7, None, **extra))
    assert assert_eager(detectors.compute(), 0, alpha, 1, PERIOD, visible) <= 1e-5


def test_random_tiny_models_score_near_chance() -> None:
    """With small weights attention is nearly uniform."""
    model = headscope.load(families.build("llama", {"initializer_range": 0.02}), device="cpu")
    table = pd.DataFrame([])
    for sequence in range(3):
        ids, opening = repeated_random_tokens(tokenizer(), PERIOD, (sequence,))
        table = pd.concat(
            [table, pd.DataFrame(sequence_scores(model, torch.from_numpy(ids)[None], opening, PERIOD)[0])]
        )
    assert (table["score"] / table["chance"]).between(0.8, 1.25).all()


@pytest.mark.model
def test_scores_of_smollm2_equal_those_of_eager_weights(smollm2: Model) -> None:
    period = 80
    ids, opening = repeated_random_tokens(smollm2.tokenizer, period, (0,))
    assert (len(ids), opening) == (2 * period, 0)
    columns = sequence_scores(smollm2, torch.from_numpy(ids)[None], opening, period)[0]
    _, layers = eager_reference.eager_qk(smollm2.module, torch.from_numpy(ids)[None])
    visible = eager_reference.visible(2 * period)
    errors = [
        assert_eager(columns, layer, eager_reference.weights(record.q, record.k, record.scaling), 0, period, visible)
        for layer, record in enumerate(layers)
    ]
    assert max(errors) <= 1e-5


@pytest.mark.model
def test_scores_of_smollm2_equal_those_of_transformer_lens(smollm2: Model) -> None:
    """TransformerLens' `detect_head` divides by all L rows, headscope by the rows that have such a key.

    It also counts every earlier copy of a token, so these tokens are all different.
    """
    period = 128
    rng = np.random.default_rng(0)
    sequence = rng.choice(np.arange(1000, 40_000), period, replace=False)
    ids = torch.from_numpy(np.concatenate([sequence, sequence]))
    module = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=module, tokenizer=smollm2.tokenizer)
    with torch.no_grad():
        _, cache = lens.run_with_cache(
            ids[None], names_filter=lambda name: name.endswith("hook_pattern"), remove_batch_dim=True
        )
    lens.to_tokens = lambda *_, **__: ids[None]  # detect_head accepts only text
    table = pd.DataFrame(sequence_scores(smollm2, ids[None], 0, period)[0])
    kinds = {"previous": "previous_token_head", "duplicate": "duplicate_token_head", "induction": "induction_head"}
    for kind, name in kinds.items():
        lens_scores = head_detector.detect_head(lens, "", name, cache=cache).double().numpy()
        rows = table[table["kind"] == kind]
        own_scores = np.zeros_like(lens_scores)
        own_scores[rows["layer"], rows["head"]] = rows["score"] * rows["rows"] / len(ids)
        assert np.abs(own_scores - lens_scores).max() <= 1e-3


# Sequences ---------------------------------------------------------------------------------------------------------


def test_sequences_are_seeded_and_repeat_ordinary_tokens() -> None:
    words = tokenizer()
    ids, opening = repeated_random_tokens(words, 50, (0, 50, 1))
    assert opening == 0
    assert (ids[:50] == ids[50:]).all()
    assert not set(ids.tolist()) & set(words.all_special_ids)
    assert (repeated_random_tokens(words, 50, (0, 50, 1))[0] == ids).all()
    assert (repeated_random_tokens(words, 50, (0, 50, 2))[0] != ids).any()


def test_byte_tokens_and_partial_characters_are_excluded_and_opening_tokens_kept() -> None:
    vocabulary = {token: n for n, token in enumerate(["<s>", "<0x41>", "<0xE2>", "a", "b", "c"])}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ids, opening = repeated_random_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), 40, (0,))
    assert opening == 1
    assert ids[0] == 0
    assert set(ids[1:].tolist()) == {3, 4, 5}


# A run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_the_head_table_has_the_mean_over_sequences_at_the_longest_length(run: Run) -> None:
    rows = run.detectors[(run.detectors["context_length"] == 1024) & (run.detectors["model"] == "yarn")]
    heads = run.heads[run.heads["model"] == "yarn"].set_index(["layer", "head"])
    for kind, name in {kind: f"{kind}_token" for kind in TARGETS}.items():
        means = rows[rows["kind"] == kind].astype({"score": "float64"}).groupby(["layer", "head"])["score"].mean()
        np.testing.assert_allclose(heads[name], means, rtol=1e-6)
        assert (heads[f"{name}_low"] <= heads[name]).all()
        assert (heads[name] <= heads[f"{name}_high"]).all()


@pytest.mark.slow
def test_unmeasured_detector_is_missing_and_not_zero(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = run.detectors[(run.detectors["kind"] != "duplicate") & ~run.detectors["layer"].eq(1)]
    other = Run(run.path, run.manifest)
    monkeypatch.setitem(other._frames, "detectors", remaining)
    assert "duplicate_token" not in other.heads
    assert other.heads.loc[other.heads["layer"] == 1, "induction_token"].isna().all()
    assert not heads_with_role(other.heads, "induction")[other.heads["layer"] == 1].any()
    assert not heads_with_role(other.heads, "duplicate-token").any()
    assert all([*group.charts] for group in PROBE.charts(assembly.render_context(other)))
    assert len([*results.head_results(other, "base", 1, 0)]) == 0


@pytest.mark.slow
def test_roles_results_and_charts_have_the_same_numbers(run: Run) -> None:
    base = run.heads[run.heads["model"] == "base"]
    induction = heads_with_role(base, "induction")
    assert induction.equals(base["induction_token"] > 0.5)
    answers = {(result.question, result.model): result for result in PROBE.results(run)}
    assert len({result.key for result in PROBE.results(run)}) == len([*PROBE.results(run)])
    count, top = answers["induction.heads", "base"], answers["induction.top_head", "base"]
    assert (count.value, count.n) == (induction.sum(), 24)
    assert model_table(run).set_index("model").loc["base", "induction_heads"] == induction.sum()
    best = base.loc[base["induction_token"].idxmax()]
    assert (top.layer, top.head, top.value) == (best["layer"], best["head"], best["induction_token"])
    assert top.low < best["induction_token_low"], "it allows for the choice among 24 heads"
    rows = run.table("detectors").query("model == 'base' and kind == 'induction'")
    longest = rows[rows["context_length"] == rows["context_length"].max()]
    assert top.details["chance"] == pytest.approx(longest["chance"].mean())
    assert_names(sentence(top), "base", top.unit, f"{top.value:.3f}")
    kept = answers["induction.kept_heads", "yarn"]
    top_heads = base[induction].sort_values("induction_token").index[-6:]
    yarn = run.heads[run.heads["model"] == "yarn"].set_index(base.index)
    assert (kept.value, kept.n) == ((yarn.loc[top_heads, "induction_token"] > 0.5).sum(), len(top_heads))
    (result,) = results.head_results(run, "base", int(best["layer"]), int(best["head"]))
    assert (result.value, result.details["target"]) == (best["induction_token"], "the token after an earlier copy")
    kinds = run.table("detectors")["kind"].nunique()
    n = longest["sequence"].nunique()
    widening = stdtrit(n - 1, 1 - 0.025 / kinds) / stdtrit(n - 1, 0.975)  # it is the largest of the kinds
    half_width = widening * (best["induction_token_high"] - best["induction_token"])
    assert (result.low, result.high) == pytest.approx((result.value - half_width, result.value + half_width))
    titles = {chart.figure.layout.title.text for chart in view.head_charts(run, "base", 0, 1)}
    assert {"Detector scores of layer 0, head 1", "Detector scores by context length: base"} <= titles


def test_a_study_stores_both_lengths_of_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, as on a GPU, the scores are those of single sequences to rounding."""
    tiny = save_checkpoint(tmp_path / "tiny")
    models = {"base": str(tiny), "yarn": f"{tiny}@yarn:factor=4"}
    options: dict[str, Any] = {"periods": [8, 16], "sequences": 3, "out": tmp_path / "runs", "quiet": True}
    run = headscope.detectors(models, **options)
    passes, real = [], runner.run_listener

    def counting(model: Model, ids: torch.Tensor, listener: Any) -> None:
        passes.append(len(ids))
        real(model, ids, listener)

    monkeypatch.setattr(runner, "texts_per_batch", lambda *_: 2)
    monkeypatch.setattr(runner, "run_listener", counting)
    together = headscope.detectors(models, **options).detectors
    assert passes == [2, 1] * 4
    pd.testing.assert_frame_equal(together, run.detectors, rtol=1e-4, atol=1e-6)
    table = run.detectors
    assert set(table["context_length"]) == {16, 32}
    assert len(table) == 2 * 2 * 3 * 16 * len(DETECTOR_KINDS)
    assert {f"{kind}_token" for kind in TARGETS} <= set(run.heads)
    assert run.heads["induction_token_low"].notna().all()


@pytest.mark.parametrize(
    ("options", "key", "named"),
    [
        ({"periods": [4]}, "detectors.periods", ("period", 4, 8)),
        ({"periods": []}, "detectors.periods", ("period",)),
        ({"sequences": 0}, "detectors.sequences", (1, 0)),
        ({"length": 4}, "", ("'detectors.length'",)),
    ],
)
def test_bad_options_are_refused_in_one_line(options: Any, key: str, named: tuple[object, ...]) -> None:
    with refuses(BadOption, *named) as raised:
        build_study({"detectors": options})
    assert raised.value.key == key
    assert "\n" not in str(raised.value)

"""Detectors on the user's prompts and tokens: scores equal eager weights, those of random tokens, TransformerLens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import eager_reference, families
from support.measure_laws import full_pass_record, geometry_of
from support.refusals import assert_names, refuses
from support.tiny_studies import save_checkpoint, tokenizer
from transformer_lens import head_detector
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import headscope as hs
from headscope.cli import app as cli
from headscope.errors import BadInput, BadOption, ResourceMissing
from headscope.measures.detectors import DetectorScores
from headscope.measures.key_patterns import PatternScores, token_patterns
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.rendering import run_results
from headscope.results import words
from headscope.run import Run
from probes.detectors import PROBE
from probes.detectors import results as detector_results
from probes.detectors.declaration import PROMPT_TARGETS, SCORES
from probes.detectors.run import run_listener

IDS = np.array([5, 6, 7, 5, 5, 6, 8, 7, 5, 6, 6, 9])
FAMILIES = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3", "olmo2", "gpt_neox", "qwen2")


def matched_keys(ids: np.ndarray, kind: str, row: int) -> list[int]:
    """The keys of a query row, one kind at a time, from the definition."""
    copies = [key for key in range(row) if ids[key] == ids[row]]
    return {
        "previous": [row - 1] if row else [],
        "current": [row],
        "first": [0],
        "duplicate": copies,
        "induction": [key + 1 for key in copies],
    }[kind]


def naive_score(alpha: np.ndarray, keys_of: Callable[[int], dict[int, float]], first: int) -> float | None:
    """The score of one head, from its weights [L, L] and the weighted keys of each row, row by row."""
    matched = total = 0.0
    for row in range(first, len(alpha)):
        keys = {key: value for key, value in keys_of(row).items() if key >= first and alpha[row, key] > 0}
        if keys:
            matched += sum(value * alpha[row, key] for key, value in keys.items())
            total += alpha[row, first:].sum()
    return matched / total if total else None


def score_table(model: Model, ids: np.ndarray, exclude_first: bool, own: np.ndarray | None = None) -> pd.DataFrame:
    patterns = token_patterns(ids) | ({} if own is None else {"own": own})
    scores = PatternScores(model.geometry, patterns, exclude_first)
    run_listener(model, torch.from_numpy(ids), scores.update)
    return pd.DataFrame(scores.compute())


@pytest.mark.slow
@pytest.mark.parametrize("exclude_first", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_every_family_equal_those_of_eager_weights(family: str, exclude_first: bool) -> None:
    model = hs.load(families.MEASURABLE[family](), device="cpu")
    own = np.tril(np.random.default_rng(0).random((len(IDS), len(IDS))), -2)
    table = score_table(model, IDS, exclude_first, own)
    _, layers = eager_reference.eager_qk(model.module, torch.from_numpy(IDS)[None])
    for row in table.itertuples():
        record = layers[row.layer]
        window = model.geometry.windows[row.layer]
        alpha = eager_reference.weights(record.q, record.k, record.scaling, window)[row.head].double().numpy()

        def keys_of(i: int, kind: str = row.kind) -> dict[int, float]:
            if kind == "own":
                return {key: float(own[i, key]) for key in range(len(IDS)) if own[i, key]}
            return dict.fromkeys(matched_keys(IDS, kind, i), 1.0)

        assert row.score == pytest.approx(naive_score(alpha, keys_of, int(exclude_first)), abs=1e-5)
    kinds = {"previous", "current", "duplicate", "induction", "own"} | (set() if exclude_first else {"first"})
    assert set(table["kind"]) == kinds


@given(st.integers(8, 16), st.integers(0, 1000), st.sampled_from([None, 12]))
def test_scores_of_a_repeated_sequence_of_different_tokens_are_those_of_random_tokens(
    period: int, seed: int, window: int | None
) -> None:
    rng = torch.Generator().manual_seed(seed)
    ids = np.tile(np.arange(period), 2)
    q, k = (torch.randn(heads, 2 * period, 4, generator=rng) for heads in (4, 2))
    geometry = geometry_of(4, 2, 4, 2, windows=(window,))
    repeated, patterns = DetectorScores(geometry, 0, period), PatternScores(geometry, token_patterns(ids))
    for scores in (repeated, patterns):
        scores.update(full_pass_record(q, k, window=window))
    keys = ["layer", "head", "kind"]
    tables = [pd.DataFrame(scores.compute()).sort_values(keys).set_index(keys) for scores in (repeated, patterns)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-5, check_dtype=False)


@given(st.integers(2, 12), st.integers(0, 1000), st.booleans())
def test_uniform_weights_score_chance(length: int, seed: int, exclude_first: bool) -> None:
    ids = np.random.default_rng(seed).integers(0, 3, length)
    scores = PatternScores(geometry_of(2, 1, 4, 2, windows=(None,)), token_patterns(ids), exclude_first)
    scores.update(full_pass_record(torch.zeros(2, length, 4), torch.ones(1, length, 4)))
    table = pd.DataFrame(scores.compute())
    np.testing.assert_allclose(table["score"], table["chance"], rtol=1e-5)


@pytest.mark.model
@pytest.mark.parametrize("exclude_first", [False, True])
def test_scores_of_smollm2_equal_those_of_transformer_lens(smollm2: Model, exclude_first: bool) -> None:
    """detect_head divides by the weight of all rows, headscope by that of the rows that have such a key."""
    text = "<|endoftext|>Mr Smith met Mrs Jones. Then Mr Smith left Mrs Jones and Mr Brown."
    ids = np.array(smollm2.tokenizer(text)["input_ids"])
    module = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=module, tokenizer=smollm2.tokenizer)
    with torch.no_grad():
        _, cache = lens.run_with_cache(
            torch.from_numpy(ids)[None], names_filter=lambda name: name.endswith("hook_pattern"), remove_batch_dim=True
        )
    lens.to_tokens = lambda *_, **__: torch.from_numpy(ids)[None]  # detect_head accepts only text
    table = score_table(smollm2, ids, exclude_first)
    patterns = token_patterns(ids)
    kinds = {"previous": "previous_token_head", "duplicate": "duplicate_token_head", "induction": "induction_head"}
    for kind, name in kinds.items():
        lens_scores = head_detector.detect_head(
            lens, "", name, cache=cache, exclude_bos=exclude_first, error_measure="mul"
        )
        rows = table[table["kind"] == kind]
        own = np.zeros(lens_scores.shape)
        for row in rows.itertuples():
            weights = cache["pattern", row.layer, "attn"][row.head][:, int(exclude_first) :].double()
            in_mean = patterns[kind][:, int(exclude_first) :].any(1)
            own[row.layer, row.head] = row.score * float(weights[in_mean].sum() / weights.sum())
        assert np.abs(own - lens_scores.double().numpy()).max() <= 1e-5


# Options -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"](), device="cpu", tokenizer=tokenizer())


def detect(model: Model, tmp_path: Path, **options: Any) -> Run:
    return hs.detectors(model, out=tmp_path, quiet=True, **options)


def test_lists_of_prompts_and_of_tokens_give_scores_per_prompt_and_means(model: Model, tmp_path: Path) -> None:
    texts = ["w1 w2 w3 w1 w2", "w4 w5 w4 w5 w4 w5 w6"]
    ids = [model.tokenizer(text)["input_ids"] for text in texts]
    of_texts, of_tokens = detect(model, tmp_path, prompt=texts), detect(model, tmp_path, tokens=ids)
    table = of_texts.table("prompt_detectors")
    pd.testing.assert_frame_equal(table, of_tokens.table("prompt_detectors"))
    assert [*table.groupby("prompt")["tokens"].first()] == [len(ids[0]), len(ids[1])]
    means = table[table["kind"] == "duplicate"].groupby(["layer", "head"], observed=True)["score"].mean()
    heads = of_texts.heads.set_index(["layer", "head"])
    np.testing.assert_allclose(heads["prompt_duplicate_token"], means, rtol=1e-6)
    top = next(result for result in PROBE.results(of_texts) if result.where.get("kind") == "duplicate")
    assert (top.value, top.n) == (pytest.approx(means.max()), 2)


def test_each_of_several_prompts_has_a_line_with_the_top_head_of_every_kind(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts were in the table only; the second one repeats no token."""
    run = detect(model, tmp_path, prompt=["w1 w2 w3 w1 w2", "w4 w5 w6"])
    table = run.table("prompt_detectors")
    lines = [result for result in PROBE.results(run) if result.question == "prompt_detectors.prompt"]
    assert [result.where["prompt"] for result in lines] == [0, 1]
    for number, result in enumerate(lines):
        of_prompt = table[table["prompt"] == number]
        top = of_prompt.sort_values("score").groupby("kind", observed=True).last()
        expected = {f"{kind} L{row['layer']}H{row['head']}": row["score"] for kind, row in top.iterrows()}
        assert result.details["heads"] == pytest.approx(expected)
        assert_names(words.sentence(result), f"prompt {number}", *expected)
    assert [name.split()[0] for name in lines[1].details["heads"]] == ["previous", "current", "first"]
    assert len(run_results.row_lines(run)) == 2
    monkeypatch.setattr(detector_results, "MAX_SUBSETS", 1)
    assert "prompt_detectors.prompt" not in {result.question for result in PROBE.results(run)}


def test_a_function_a_matrix_and_a_file_are_the_same_pattern(model: Model, tmp_path: Path) -> None:
    def two_back(ids: list[int]) -> torch.Tensor:
        return torch.diag(torch.ones(len(ids) - 2), -2)

    matrix = np.eye(len(IDS), k=-2)
    np.save(tmp_path / "two.npy", matrix)
    np.savetxt(tmp_path / "two.csv", matrix, delimiter=",")
    patterns = [two_back, matrix, matrix.tolist(), str(tmp_path / "two.npy"), str(tmp_path / "two.csv")]
    runs = [detect(model, tmp_path, tokens=IDS, pattern=pattern) for pattern in patterns]
    for run in runs[1:]:
        pd.testing.assert_frame_equal(run.table("prompt_detectors"), runs[0].table("prompt_detectors"))
    stored = [run.manifest["config"]["detectors"]["pattern"] for run in runs[:2]]
    assert stored[0] == "function two_back"
    assert stored[1].startswith("matrix 12 x 12")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"prompt": ["w1 w2", " "]}, BadOption, ("blank",)),
        ({"tokens": [1]}, BadOption, ("'tokens'", "1 tokens", 2)),
        ({"tokens": [1, 99_999]}, BadInput, ("token 99999",)),
        ({"tokens": [1, -2]}, BadOption, (-2,)),
        ({"tokens": [1, 2, 3], "pattern": np.eye(2)}, BadInput, ("pattern", "2 x 2", 3)),
        ({"tokens": [1, 2], "pattern": 2 * np.eye(2)}, BadInput, ("pattern", 2, "0 to 1")),
        ({"tokens": [1, 2], "pattern": np.full((2, 2), np.nan)}, BadInput, ("pattern", "nan", "0 to 1")),
        ({"tokens": [1, 2], "pattern": np.eye(2, k=1)}, BadInput, ("pattern", "key <= query")),
        ({"tokens": [1, 2], "pattern": lambda ids: "x"}, BadInput, ("pattern", "str", "numbers")),
        ({"tokens": [1, 2], "pattern": "no-such.npy"}, ResourceMissing, ("no-such.npy",)),
    ],
)
def test_unusable_options_are_named(
    model: Model,
    tmp_path: Path,
    options: dict[str, Any],
    error: type[Exception],
    named: tuple[str | int, ...],
) -> None:
    with refuses(error, *named):
        detect(model, tmp_path, **options)


def test_command_takes_a_prompt_and_tokens(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "tiny")
    for flags in (["--prompt", "w1 w2 w1 w2 w1 w3"], ["--tokens", "5,6,7,5,6"]):
        arguments = ["detectors", "--model", f"base={checkpoint}", *flags, "--exclude-first", "--quiet"]
        result = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path / flags[0])])
        assert result.exit_code == 0, result.output
        run = Run.open(next((tmp_path / flags[0]).glob("2*")))
        (top, *_) = run.findings().query("question == 'prompt_detectors.top_head'")["unit"]
        assert_names(result.output, top)


def test_a_run_of_prompts_has_charts_of_each_kind(model: Model, tmp_path: Path) -> None:
    run = detect(model, tmp_path, prompt="w1 w2 w1 w2 w1 w3", pattern=lambda ids: np.eye(len(ids)))
    columns = {score.column for score in SCORES if score.column.startswith("prompt_")}
    assert len(columns) == len(PROMPT_TARGETS)
    assert columns <= {*run.heads}
    assert len(run.charts("own-pattern")) >= 1

"""Attention patterns: top keys equal those of eager L x L weights, and stored rows can be queried."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import eager_reference, families
from support.measure_laws import full_pass_record, geometry_of, random_record
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import headscope
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, BadOption, HeadscopeError, Interrupted, ResourceMissing
from headscope.forward import observe as observing
from headscope.measures.top_keys import (
    MIN_FAR_DISTANCE,
    TopKeysAccumulator,
    _top_indices,
    _top_k_stable,
    find_top_keys,
    stratified_rows,
)
from headscope.positions.model import Model
from headscope.prompts.token_text import _BYTE_BY_CHARACTER, token_texts
from headscope.rendering import assembly
from headscope.rendering.token_spans import TokenizedText, mark_token, text_with_weights, to_display_line
from headscope.results.words import sentence
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run, combine_runs
from headscope.runs.run_tables import validate
from headscope.study.config import build_study
from headscope.study.runner import run_study as run_study
from probes.patterns import PROBE, results, view
from probes.patterns.run import collect_top_keys

KEYS = 5
IDS = torch.randint(3, families.VOCAB, (48,), generator=torch.Generator().manual_seed(0))
FIVE = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3")


class ByRow:
    """Top keys and far keys, by layer and query."""

    def __init__(self, reads: TopKeysAccumulator) -> None:
        tables = [pd.DataFrame(columns) for columns in (reads.compute(), reads.compute_far_keys())]
        self.top, self.far = (
            {key: {name: part.to_numpy() for name, part in block.items()} for key, block in rows}
            for rows in (table.groupby(["layer", "query"]) for table in tables)
        )


def assert_eager(reads: TopKeysAccumulator | ByRow, layer: int, alpha: Tensor, visible: Tensor, rows: Tensor) -> float:
    """Compare every row of one layer with alpha [H, L, L]; returns the largest error of a weight."""
    by_row = reads if isinstance(reads, ByRow) else ByRow(reads)
    heads = len(alpha)
    largest_error = 0.0
    for query in rows.tolist():
        top = by_row.top[layer, query]
        count = min(KEYS, int(visible[query].sum()))
        row = alpha[:, query]
        keys, weights = (torch.from_numpy(top[name]).view(heads, count) for name in ("key", "weight"))
        assert top["rank"].tolist() == [*range(count)] * heads
        largest_error = max(largest_error, float((weights - row.topk(count).values).abs().max()))
        largest_error = max(largest_error, float((weights - row.gather(1, keys)).abs().max()))
        distance = query - torch.arange(alpha.shape[-1])
        is_far = visible[query] & (distance >= MIN_FAR_DISTANCE) & (torch.arange(alpha.shape[-1]) > 0)
        assert ((layer, query) in by_row.far) == bool(is_far.any())
        if is_far.any():
            far = by_row.far[layer, query]
            weights, keys = torch.from_numpy(far["weight"]), torch.from_numpy(far["key"])
            assert len(weights) == heads
            assert is_far[keys].all()
            at_key = row.gather(1, keys[:, None])[:, 0]
            largest = row.masked_fill(~is_far, -1).amax(-1)
            largest_error = max(largest_error, *(float((weights - other).abs().max()) for other in (largest, at_key)))
    return largest_error


# Top keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FIVE)
def test_top_keys_of_every_family_equal_those_of_eager_weights(family: str) -> None:
    model = headscope.load(families.MEASURABLE[family](), device="cpu")
    rows = torch.arange(len(IDS))
    reads = ByRow(collect_top_keys(model, IDS, rows, KEYS))
    for layer, eager in enumerate(eager_reference.eager_qk(model.module, IDS[None])[1]):
        window = model.geometry.windows[layer]
        alpha = eager_reference.weights(eager.q, eager.k, eager.scaling, window)
        assert assert_eager(reads, layer, alpha, eager_reference.visible(len(IDS), window), rows) <= 1e-5


@pytest.mark.model
def test_top_keys_of_smollm2_equal_those_of_eager_weights(smollm2: Model, tokens: Tensor) -> None:
    rows = stratified_rows(512, 24, 0)
    reads = ByRow(collect_top_keys(smollm2, tokens[0, :512], rows, KEYS))
    visible = eager_reference.visible(512)
    errors = []
    for layer, eager in enumerate(eager_reference.eager_qk(smollm2.module, tokens[:, :512])[1]):
        alpha = eager_reference.weights(eager.q, eager.k, eager.scaling)
        errors.append(assert_eager(reads, layer, alpha, visible, rows))
    assert max(errors) <= 1e-5


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"chunk_size": 37}, {"sink": torch.tensor([1.0, -1.0])}])
def test_top_keys_with_soft_caps_chunks_and_sinks(options: Any) -> None:
    q, k = torch.randn(2, 90, 8), torch.randn(1, 90, 8)
    alpha, visible, lse = eager_reference.explicit_weights(q, k, **options)
    record = AttentionRecord(0, 0, q, k, torch.zeros_like(k), torch.zeros_like(q), lse, 0.7, None, **options)
    reads = TopKeysAccumulator(geometry_of(2, 1, windows=(None,)), torch.arange(90), KEYS)
    reads.update(record)
    assert assert_eager(reads, 0, alpha, visible, torch.arange(90)) <= 1e-5


@pytest.mark.parametrize("max_keys", [1, 3, 8, 20])
def test_indices_of_top_keys_are_the_same_where_no_number_may_be_read(max_keys: int) -> None:
    """On a GPU, where a look for ties would wait. Few distinct values, so that most rows have ties; some are hidden."""
    logits = torch.randint(0, 4, (3, 50, 20), generator=torch.Generator().manual_seed(0)).float()
    logits[:, ::4, 5:] = -torch.inf
    values, expected = _top_k_stable(logits, max_keys)
    indices = _top_indices(logits, values)
    indices, expected = (top.masked_fill(logits.gather(-1, top) == -torch.inf, -1) for top in (indices, expected))
    assert torch.equal(indices.sort(dim=-1).values, expected.sort(dim=-1).values)


@pytest.mark.parametrize("window", [None, 9])
def test_the_later_of_two_keys_of_equal_weight_comes_first(window: int | None) -> None:
    even = full_pass_record(torch.ones(2, 40, 8), torch.ones(1, 40, 8), window=window)
    top = find_top_keys(even, torch.tensor([0, 2, 39]), 4)
    assert top.keys[0, 2].tolist() == [39, 38, 37, 36]
    assert top.keys[1, 1, :3].tolist() == [2, 1, 0]
    assert top.weights[1, 1].isnan().tolist() == [False, False, False, True]
    assert top.far_keys[0, 2] == 39 - MIN_FAR_DISTANCE or window == 9
    assert bool(top.far_weights[0, 2].isnan()) == (window == 9)


def test_keys_of_equal_weight_at_the_last_rank_are_the_later_ones() -> None:
    k = torch.zeros(1, 40, 8)
    k[0, 3, 0] = 1
    top = find_top_keys(full_pass_record(torch.ones(1, 40, 8), k, scaling=1.0), torch.tensor([30]), 3)
    assert top.keys[0, 0].tolist() == [3, 30, 29]


def test_tiling_does_not_change_top_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    record = random_record(geometry_of(windows=(11,)), 90, 0)
    untiled = find_top_keys(record, torch.arange(90), 6)
    monkeypatch.setattr("headscope.measures.top_keys.LOGITS_PER_TILE", 4 * 90 * 7)
    tiled = find_top_keys(record, torch.arange(90), 6)
    assert torch.equal(untiled.keys[~untiled.weights.isnan()], tiled.keys[~tiled.weights.isnan()])
    torch.testing.assert_close(untiled.weights, tiled.weights, equal_nan=True)


def test_stratified_rows_are_one_per_stratum_and_reproducible() -> None:
    rows = stratified_rows(1000, 64, 3)
    assert len(rows) == len(rows.unique()) == 64
    assert ((rows >= torch.arange(64) * 1000 // 64) & (rows < torch.arange(1, 65) * 1000 // 64)).all()
    assert torch.equal(rows, stratified_rows(1000, 64, 3))
    assert stratified_rows(10, 64, 0).tolist() == [*range(10)]


# Tokens ------------------------------------------------------------------------------------------------------------

TRICKY = "é e\u0301 שלום 😀👨\u200d👩\u200d👧 a\ufffdb\n\n\ttab <b>bold</b>"


def test_joined_token_texts_are_the_text_and_split_characters_belong_to_their_last_token(smollm2: Model) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer(TRICKY)["input_ids"]
    texts, special = token_texts(tokenizer, ids)
    assert "".join(texts) == TRICKY
    assert not any(special)
    at = texts.index("😀")
    assert texts[at - 1] in ("", " ")
    assert tokenizer.decode(ids[at : at + 1]) == "\ufffd"


def test_special_tokens_have_their_name_and_incomplete_characters_a_replacement(smollm2: Model) -> None:
    tokenizer = smollm2.tokenizer
    incomplete = tokenizer("a😀")["input_ids"][:-1]
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    texts, flags = token_texts(tokenizer, [*incomplete, special, *tokenizer("b")["input_ids"], *incomplete])
    assert flags.index(True) == len(incomplete)
    assert texts[len(incomplete)] == "<|im_start|>"
    assert "".join(texts) == "a\ufffd<|im_start|>ba\ufffd"


def test_bytes_of_byte_level_tokenizers_equal_those_of_transformers() -> None:
    assert {byte: character for character, byte in _BYTE_BY_CHARACTER.items()} == bytes_to_unicode()


def test_byte_fallback_tokens_are_decoded_as_bytes() -> None:
    vocabulary = {token: n for n, token in enumerate(["<s>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁hi", "x"])}
    tokens = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokens.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>")
    assert token_texts(fast, [0, 5, 1, 2, 3, 4, 5, 6])[0] == ["<s>", "hi", "", "", "", "😀", " hi", "x"]


def test_tokens_of_byt5_are_bytes_and_no_character_is_lost() -> None:
    """Decoding its tokens one by one drops the bytes of every character that is split over tokens."""
    tokens = ByT5Tokenizer()
    ids = tokens(TRICKY, add_special_tokens=False)["input_ids"]
    texts, _ = token_texts(tokens, ids)
    assert "".join(texts) == TRICKY
    assert texts[-len("x</b>") :] == [*"d</b>"]
    cut = tokens("a😀", add_special_tokens=False)["input_ids"][:-1]
    assert token_texts(tokens, [*cut, *tokens("b")["input_ids"]])[0] == ["a", "", "", "", "\ufffdb", "</s>"]


def test_tokens_of_word_tokenizers_are_joined_with_spaces() -> None:
    by_word = tokenizer()
    assert token_texts(by_word, by_word("w1 w2 w3")["input_ids"])[0] == ["w1", " w2", " w3"]


def test_displayed_text_is_one_line_without_control_characters() -> None:
    assert to_display_line("a\n\tb\u202e\x1b") == "a⏎⇥b\ufffd\ufffd"
    assert to_display_line("\u0301x") == "◌\u0301x"
    assert to_display_line(" שלום") == "\u2068 שלום\u2069"
    assert to_display_line("👨\u200d👩") == "👨\u200d👩"
    text = results.TokenizedText(np.array(["a", "", "😀", "<b>"], dtype=object), np.zeros(4, bool))
    assert mark_token(text, 1) == "a‹😀›<b>"


# A run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study_folder = tmp_path_factory.mktemp("patterns")
    save_checkpoint(study_folder / "tiny")
    save_texts(study_folder / "texts")
    return study_folder


@pytest.fixture(scope="module")
def run(study_folder: Path) -> Run:
    """Two models, two lengths, two documents."""
    tiny = str(study_folder / "tiny")
    models = {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"}
    text = f"file:{study_folder}/texts/*.txt"
    options: dict[str, Any] = {"lengths": [24, 48], "rows": 12, "keys": KEYS}
    return headscope.patterns(models, text=text, docs=2, out=study_folder / "runs", quiet=True, **options)


def test_tokens_are_stored_once_per_document_and_all_heads_share_rows(run: Run) -> None:
    assert len(run.token_text) == 2 * 48
    assert len(run.pattern_texts) == 2 * 2 * 2
    assert validate(run) == []
    for _, block in run.top_keys.groupby(["context_length", "doc"], observed=True):
        rows = block.groupby(["model", "layer", "head"], observed=True)["query"].agg(
            lambda queries: tuple(sorted(set(queries)))
        )
        assert rows.nunique() == 1
        assert len(rows) == 2 * families.LAYERS * families.HEADS
        assert len(rows.iloc[0]) == 12


def test_a_stored_row_equals_the_measured_row(run: Run, study_folder: Path) -> None:
    doc = str(run.pattern_texts["doc"].iloc[0])
    model = headscope.load(f"{study_folder / 'tiny'}@yarn:factor=4", device="cpu")
    text = results.document_text(run, "yarn", doc)
    ids = torch.tensor(run.token_text[run.token_text["doc"] == doc].sort_values("position")["token"].to_numpy())
    assert "".join(text.token_texts) == model.tokenizer.decode(ids)
    pattern_key = ("yarn", 48, doc, 3, 1)
    queries = results.stored_queries(run, pattern_key)
    expected = pd.DataFrame(collect_top_keys(model, ids.long(), torch.tensor(queries), KEYS).compute())
    measured = expected[(expected["layer"] == 3) & (expected["head"] == 1) & (expected["query"] == queries[7])]
    stored = results.top_keys(run, pattern_key, queries[7])
    assert stored["key"].tolist() == measured["key"].tolist()
    np.testing.assert_allclose(stored["weight"], measured["weight"], rtol=1e-6)
    assert (stored["distance"] == queries[7] - stored["key"]).all()
    assert results.top_keys(run, pattern_key, 10**6).empty
    assert results.top_keys(run, ("no", 48, doc, 3, 1), 0).empty


def test_top_far_rows_have_the_largest_far_weights_and_a_least_distance(run: Run) -> None:
    far = run.far_keys[(run.far_keys["model"] == "base") & (run.far_keys["layer"] == 1) & (run.far_keys["head"] == 0)]
    far = far[far["context_length"] == 48]
    rows = results.top_far_rows(run, "base", 1, 0, max_per_document=2)
    assert rows["weight"].max() == far["weight"].max()
    assert rows["weight"].is_monotonic_decreasing
    assert (rows["distance"] >= MIN_FAR_DISTANCE).all()
    for _, block in rows.groupby("doc"):
        assert len(block) <= 2
        assert (np.diff(np.sort(block["query"])) >= results.MIN_ROW_DISTANCE).all()
    mean = far.astype({"weight": "float64"}).groupby("doc", observed=True)["weight"].mean().mean()
    heads = run.heads[(run.heads["model"] == "base") & (run.heads["layer"] == 1) & (run.heads["head"] == 0)]
    assert heads["far_weight"].item() == pytest.approx(mean)


@pytest.mark.slow
def test_a_pass_shared_with_another_probe_gives_the_same_tables_even_after_an_interruption(
    study_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, passes, run_pass = str(study_folder / "tiny"), list[int](), observing.finite_hidden_states
    shared_study = build_study(
        {
            "name": "both",
            "models": {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"},
            "texts": {"source": f"file:{study_folder}/texts/*.txt", "docs": 2},
            "measure": {"lengths": [24, 48], "rows": 8},
            "patterns": {"lengths": [12, 24, 48], "rows": 12, "keys": KEYS},
        }
    )

    def execute(out: Path, max_passes: int = 1000, resume: bool = False) -> Run:
        def counted(model: Any, ids: Tensor) -> Tensor:
            if len(passes) == max_passes:
                raise KeyboardInterrupt
            passes.append(ids.shape[1])
            return run_pass(model, ids)

        passes.clear()
        monkeypatch.setattr(observing, "finite_hidden_states", counted)
        return run_study(shared_study, out, resume=resume)

    together = execute(tmp_path / "whole")
    assert sorted(passes) == [12] * 4 + [24] * 4 + [48] * 4, "each text is read once per model"
    alone = headscope.patterns(
        shared_study.models,
        text=shared_study.texts.source,
        docs=2,
        lengths=[12, 24, 48],
        rows=12,
        keys=KEYS,
        out=tmp_path,
        quiet=True,
    )
    for name in ("pattern_texts", "token_text", "top_keys", "far_keys"):
        assert (together.path / f"{name}.parquet").read_bytes() == (alone.path / f"{name}.parquet").read_bytes(), name
    with pytest.raises(Interrupted):
        execute(tmp_path / "cut", max_passes=5)
    resumed = execute(tmp_path / "cut", resume=True)
    for file in together.path.glob("*.parquet"):
        assert file.read_bytes() == (resumed.path / file.name).read_bytes(), file.name


def test_every_token_of_a_prompt_is_a_query_row(study_folder: Path) -> None:
    prompt = "w1 w2 w3\nw1 w2 </s> w3"
    run = headscope.patterns(str(study_folder / "tiny"), prompt=prompt, out=study_folder / "prompts", quiet=True)
    assert run.token_text["text"].tolist() == ["w1", " w2", " w3", " w1", " w2", "</s>", " w3"]
    assert run.token_text["special"].tolist() == [False] * 5 + [True, False]
    assert results.stored_queries(run, ("base", 7, "prompt", 0, 0)) == [*range(7)]
    assert "far_keys" not in run.tables
    assert "attention_maps" in run.tables
    assert not [*results.head_results(run, "base", 0, 0), *view.head_charts(run, "base", 0, 0)]
    file = study_folder / "own.txt"
    file.write_text(prompt)
    again = headscope.patterns(
        str(study_folder / "tiny"), prompt_file=str(file), out=study_folder / "prompts", quiet=True
    )
    assert again.pattern_texts["doc"].tolist() == ["prompt/own.txt"]
    assert (again.top_keys["weight"] == run.top_keys["weight"]).all()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"prompt": "w1"}, BadInput, ("prompt", 1)),
        ({"prompt": " \n"}, BadInput, ("prompt", "blank")),
        ({"prompt": "a\x00b"}, BadOption, (r"'a\x00b'", "control")),
        ({"prompt_file": "./none.txt"}, ResourceMissing, ("'./none.txt'",)),
        ({"prompt": "w1 " * 1100}, BadInput, ("prompt", "1,024")),
        ({"rows": 0}, BadOption, ("'rows'", 2, "'map'", 0)),
        ({"rows": 1, "map": True}, BadOption, ("'rows'", 2, "'map'", 1)),
        ({"lengths": [1]}, BadOption, ("lengths", 1)),
        ({"keys": 0}, BadOption, ("keys", 1, 0)),
        ({"prompt": "w1 w2", "key": "w7"}, BadInput, ("'w7'", "'key'", "w1", "w2")),
    ],
)
def test_bad_input_gives_one_line_and_no_run(
    options: Any, error: type[HeadscopeError], named: tuple[object, ...], study_folder: Path, tmp_path: Path
) -> None:
    with refuses(error, *named) as raised:
        headscope.patterns(str(study_folder / "tiny"), out=tmp_path / "runs", quiet=True, **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "query", "key"),
    [({}, 5, None), ({"query": "w2"}, 4, None), ({"key": " w3"}, None, 2), ({"query": "w1", "key": "w1"}, 3, 3)],
)
def test_a_prompt_lists_the_heads_that_attend_most_and_the_prompt_with_their_weights(
    options: Any, query: int | None, key: int | None, study_folder: Path, tmp_path: Path
) -> None:
    prompt = "w1 w2 w3 w1 w2 w4"
    run = headscope.patterns(str(study_folder / "tiny"), prompt=prompt, out=tmp_path, quiet=True, **options)
    rows = run.top_keys[run.top_keys["key"] == key if key is not None else run.top_keys["key"] > 0]
    rows = rows[rows["query"] == query] if query is not None else rows
    expected = rows.groupby(["layer", "head"])["weight"].max().nlargest(5)
    listed = [result for result in PROBE.results(run) if result.question == "patterns.prompt"]
    assert [result.value for result in listed] == pytest.approx([*expected])
    assert len({result.key for result in listed}) == len(listed) == min(5, len(expected))
    first = listed[0]
    row = rows[(rows["layer"] == first.layer) & (rows["head"] == first.head)].nlargest(1, "weight").iloc[0]
    words = prompt.split()
    assert first.details["query"].strip() == words[row["query"]]
    assert first.details["key"].strip() == words[row["key"]]
    assert f"{words[row['key']]}[{first.value:.2f}]" in first.details["weights"]
    assert re.sub(r"\[.*?\]", "", first.details["weights"]).split() == words[: row["query"] + 1]


def test_a_long_prompt_is_abridged_to_the_attended_tokens() -> None:
    text = TokenizedText(np.array([f" t{n}" for n in range(40)], object), np.zeros(40, bool))
    assert (
        text_with_weights(text, 39, {10: 0.5, 30: 0.3, 3: 0.01})
        == "… t8 t9 t10[0.50] … t28 t29 t30[0.30] … t37 t38 t39"
    )


def test_combined_runs_show_each_prompt_in_its_own_tokens(study_folder: Path) -> None:
    prompts = ["w1 w2 w3 w4", "w5 w6 w7 w8"]
    runs = [
        headscope.patterns(str(study_folder / "tiny"), prompt=p, out=study_folder / "two", quiet=True, seed=n)
        for n, p in enumerate(prompts)
    ]
    run = combine_runs(runs)
    assert run.conflicting_row_counts == {}
    for label, prompt in zip(run.models, prompts, strict=True):
        assert "".join(results.document_text(run, label, "prompt").token_texts).split() == prompt.split()
    assert not results.have_same_tokens(run, "prompt", run.pattern_texts["context_length"][0], *run.models)


def test_a_prompt_file_that_is_not_text_gives_one_line(study_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00")
    with refuses(BadInput, tmp_path / "image.txt", "UTF-8"):
        headscope.patterns(
            str(study_folder / "tiny"), prompt_file=str(tmp_path / "image.txt"), out=tmp_path / "runs", quiet=True
        )


def test_a_prompt_may_have_several_lines() -> None:
    study = build_study({"patterns": {"prompt": "a\nb"}})
    assert study.probe_options["patterns"].model_dump()["prompt"] == "a\nb"


# Report ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_findings_and_charts_show_the_top_far_rows_without_markup(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, layers=3, lengths=(256,), docs=1)
    base = run.heads[run.heads["model"] == "base"]
    best = base.loc[base["far_weight"].idxmax()]
    at = int(best["layer"]), int(best["head"])
    by_question = {result.question: result for result in PROBE.results(run) if result.model == "base"}
    far_weight, example = by_question["patterns.far_weight"], by_question["patterns.example"]
    assert (far_weight.layer, far_weight.head, far_weight.value) == (*at, best["far_weight"])
    assert far_weight.n == 1
    rows = results.top_far_rows(run, "base", *at)
    assert [*results.head_results(run, "base", *at)] == [example]
    assert (example.value, example.details["distance"]) == (rows["weight"].iloc[0], rows["distance"].iloc[0])
    assert_names(sentence(example), rows["distance"].iloc[0])
    (passage,) = view.head_charts(run, "base", *at)
    expected = [[format_number(row.weight), f"{row.distance:,}"] for row in rows.itertuples()]
    assert [row[:2] for row in passage.rows] == expected
    groups = {group.heading: group for group in view.charts(assembly.render_context(run))}
    weights, distances, keys, _ = next(iter(groups["Top far rows"].charts)).figure.data[0].cells["values"]
    assert len(weights) == len(rows[: results.MAX_FAR_ROWS])
    assert distances[0] == f"{rows['distance'].iloc[0]}"
    assert not any("<b>" in cell for cell in keys)
    assert any("&lt;b&gt;" in cell for cell in keys)

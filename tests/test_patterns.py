"""Reads: top keys are those of the eager L x L weights, tokens are told byte for byte, and rows are found again."""

from pathlib import Path
from typing import Any

import families
import numpy as np
import pandas as pd
import pytest
import reference
import torch
from measure_laws import geometry_of, heard, random_heard
from test_study import save_checkpoint, save_texts, tokenizer
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import headscope
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, HeadscopeError, Interrupted, Missing
from headscope.measures.top_keys import NEAR, Reads, stratified, top_keys
from headscope.positions.model import Model
from headscope.report import assembly
from headscope.runs.column_metadata import number
from headscope.runs.run import Run, concatenate
from headscope.runs.synthetic import synthetic_run
from headscope.runs.validate import validate
from headscope.study.config import build_study
from headscope.study.runner import run_study as run_study
from probes.measure import run as measuring
from probes.patterns import analysis, findings
from probes.patterns import report as charts
from probes.patterns import run as cells
from probes.patterns.run import collect_top_keys
from probes.patterns.token_text import token_texts
from probes.patterns.words import mark_token, to_display_line

KEYS = 5
IDS = torch.randint(3, families.VOCAB, (48,), generator=torch.Generator().manual_seed(0))
FIVE = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3")


class ByRow:
    """What was read, looked up by layer and query."""

    def __init__(self, reads: Reads) -> None:
        self.top, self.far = (
            {key: {name: part.to_numpy() for name, part in block.items()} for key, block in frame}
            for frame in (pd.DataFrame(table).groupby(["layer", "query"]) for table in (reads.compute(), reads.far()))
        )


def assert_eager(reads: Reads | ByRow, layer: int, alpha: Tensor, seen: Tensor, rows: Tensor) -> float:
    """Every row of one layer against alpha [H, L, L]: the largest error of a weight. Ranks are right where weights are
    not within that of each other."""
    found = reads if isinstance(reads, ByRow) else ByRow(reads)
    heads = len(alpha)
    worst = 0.0
    for query in rows.tolist():
        here = found.top[layer, query]
        count = min(KEYS, int(seen[query].sum()))
        row = alpha[:, query]
        keys, weights = (torch.from_numpy(here[name]).view(heads, count) for name in ("key", "weight"))
        assert here["rank"].tolist() == [*range(count)] * heads
        worst = max(worst, float((weights - row.topk(count).values).abs().max()))
        worst = max(worst, float((weights - row.gather(1, keys)).abs().max()))
        back = query - torch.arange(alpha.shape[-1])
        distant = seen[query] & (back >= NEAR) & (torch.arange(alpha.shape[-1]) > 0)
        assert ((layer, query) in found.far) == bool(distant.any())
        if distant.any():
            there = found.far[layer, query]
            best, keys = torch.from_numpy(there["weight"]), torch.from_numpy(there["key"])
            assert len(best) == heads
            assert distant[keys].all()
            at_key = row.gather(1, keys[:, None])[:, 0]
            largest = row.masked_fill(~distant, -1).amax(-1)
            worst = max(worst, *(float((best - each).abs().max()) for each in (largest, at_key)))
    return worst


# Top keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FIVE)
def test_every_family_reads_as_its_eager_weights_do(family: str) -> None:
    model = headscope.load(families.MEASURABLE[family](), device="cpu")
    rows = torch.arange(len(IDS))
    reads = ByRow(collect_top_keys(model, IDS, rows, KEYS))
    for layer, seen in enumerate(reference.eager_qk(model.module, IDS[None])[1]):
        window = model.geometry.windows[layer]
        alpha = reference.weights(seen.q, seen.k, seen.scaling, window)
        assert assert_eager(reads, layer, alpha, reference.visible(len(IDS), window), rows) <= 1e-5


@pytest.mark.model
def test_smollm2_reads_as_its_eager_weights_do(smollm2: Model, tokens: Tensor) -> None:
    rows = stratified(512, 24, 0)
    reads = ByRow(collect_top_keys(smollm2, tokens[0, :512], rows, KEYS))
    shown_keys = reference.visible(512)
    errors = []
    for layer, seen in enumerate(reference.eager_qk(smollm2.module, tokens[:, :512])[1]):
        alpha = reference.weights(seen.q, seen.k, seen.scaling)
        errors.append(assert_eager(reads, layer, alpha, shown_keys, rows))
    assert max(errors) <= 1e-5


@pytest.mark.parametrize("more", [{"cap": 2.0}, {"chunk": 37}, {"sink": torch.tensor([1.0, -1.0])}])
def test_soft_caps_chunks_and_sinks_count(more: Any) -> None:
    q, k = torch.randn(2, 90, 8), torch.randn(1, 90, 8)
    alpha, seen, lse = explicit(q, k, **more)
    record = AttentionRecord(0, 0, q, k, torch.zeros_like(k), torch.zeros_like(q), lse, 0.7, None, **more)
    reads = Reads(geometry_of(2, 1, windows=(None,)), torch.arange(90), KEYS)
    reads.update(record)
    assert assert_eager(reads, 0, alpha, seen, torch.arange(90)) <= 1e-5


def explicit(
    q: Tensor, k: Tensor, cap: float | None = None, chunk: int | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """alpha [H, L, L] in float64, which keys are seen [L, L], and the log-sum-exp [H, L], for one key head."""
    s = 0.7 * q.double() @ k[0].double().T
    s = s if cap is None else cap * torch.tanh(s / cap)
    at = torch.arange(q.shape[1])
    seen = at[:, None] >= at
    if chunk is not None:
        seen &= at[:, None] // chunk == at // chunk
    total = s.masked_fill(~seen, -torch.inf).logsumexp(-1)
    if sink is not None:
        total = torch.logaddexp(total, sink.double()[:, None])
    return (s - total[..., None]).exp() * seen, seen, total.float()


@pytest.mark.parametrize("window", [None, 9])
def test_of_equal_weights_the_later_key_comes_first(window: int | None) -> None:
    even = heard(torch.ones(2, 40, 8), torch.ones(1, 40, 8), window=window)
    top = top_keys(even, torch.tensor([0, 2, 39]), 4)
    assert top.keys[0, 2].tolist() == [39, 38, 37, 36]
    assert top.keys[1, 1, :3].tolist() == [2, 1, 0]
    assert top.weights[1, 1].isnan().tolist() == [False, False, False, True]
    assert top.far[0, 2] == 39 - NEAR or window == 9
    assert bool(top.far_weights[0, 2].isnan()) == (window == 9)


def test_equal_weights_at_the_last_place_are_those_of_the_later_keys() -> None:
    k = torch.zeros(1, 40, 8)
    k[0, 3, 0] = 1
    top = top_keys(heard(torch.ones(1, 40, 8), k, scaling=1.0), torch.tensor([30]), 3)
    assert top.keys[0, 0].tolist() == [3, 30, 29]


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    record = random_heard(geometry_of(windows=(11,)), 90, 0)
    whole = top_keys(record, torch.arange(90), 6)
    monkeypatch.setattr("headscope.measures.top_keys.TILE", 4 * 90 * 7)
    tiled = top_keys(record, torch.arange(90), 6)
    assert torch.equal(whole.keys[~whole.weights.isnan()], tiled.keys[~tiled.weights.isnan()])
    torch.testing.assert_close(whole.weights, tiled.weights, equal_nan=True)


def test_rows_are_one_of_each_part_and_the_same_for_all() -> None:
    rows = stratified(1000, 64, 3)
    assert len(rows) == len(rows.unique()) == 64
    assert ((rows >= torch.arange(64) * 1000 // 64) & (rows < torch.arange(1, 65) * 1000 // 64)).all()
    assert torch.equal(rows, stratified(1000, 64, 3))
    assert stratified(10, 64, 0).tolist() == [*range(10)]


# Tokens ------------------------------------------------------------------------------------------------------------

TRICKY = "é e\u0301 שלום 😀👨\u200d👩\u200d👧 a\ufffdb\n\n\ttab <b>bold</b>"


def test_pieces_joined_are_the_text_and_split_characters_stand_on_their_last_token(smollm2: Model) -> None:
    words = smollm2.tokenizer
    ids = words(TRICKY)["input_ids"]
    told, special = token_texts(words, ids)
    assert "".join(told) == TRICKY
    assert not any(special)
    at = told.index("😀")
    assert told[at - 1] in ("", " ")
    assert words.decode(ids[at : at + 1]) == "\ufffd"


def test_special_tokens_are_told_by_name_and_torn_characters_show(smollm2: Model) -> None:
    words = smollm2.tokenizer
    torn = words("a😀")["input_ids"][:-1]
    special = words.convert_tokens_to_ids("<|im_start|>")
    told, flags = token_texts(words, [*torn, special, *words("b")["input_ids"], *torn])
    assert flags.index(True) == len(torn)
    assert told[len(torn)] == "<|im_start|>"
    assert "".join(told) == "a\ufffd<|im_start|>ba\ufffd"


def test_tokenizers_that_fall_back_to_bytes_are_read_as_bytes() -> None:
    vocabulary = {token: n for n, token in enumerate(["<s>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁hi", "x"])}
    tokens = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokens.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>")
    assert token_texts(fast, [0, 5, 1, 2, 3, 4, 5, 6])[0] == ["<s>", "hi", "", "", "", "😀", " hi", "x"]


def test_tokenizers_of_words_join_them_with_spaces() -> None:
    words = tokenizer()
    assert token_texts(words, words("w1 w2 w3")["input_ids"])[0] == ["w1", " w2", " w3"]


def test_shown_text_is_one_line_that_nothing_turns_or_renders() -> None:
    assert to_display_line("a\n\tb\u202e\x1b") == "a⏎⇥b\ufffd\ufffd"
    assert to_display_line("\u0301x") == "◌\u0301x"
    assert to_display_line(" שלום") == "\u2068 שלום\u2069"
    assert to_display_line("👨\u200d👩") == "👨\u200d👩"
    text = analysis.TokenizedText(np.array(["a", "", "😀", "<b>"], dtype=object), np.zeros(4, bool))
    assert mark_token(text, 1) == "a‹😀›<b>"


# A run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reads")
    save_checkpoint(place / "tiny")
    save_texts(place / "texts")
    return place


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    """Two models, two lengths, two documents."""
    tiny = str(place / "tiny")
    models = {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"}
    text = f"file:{place}/texts/*.txt"
    options: dict[str, Any] = {"lengths": [24, 48], "rows": 12, "keys": KEYS}
    return headscope.reads(models, text=text, docs=2, out=place / "runs", quiet=True, **options)


def test_tokens_are_stored_once_a_document_and_rows_are_the_same_for_all(run: Run) -> None:
    assert len(run.pieces) == 2 * 48
    assert len(run.passages) == 2 * 2 * 2
    assert validate(run) == []
    same = run.reads.groupby(["context_length", "doc"], observed=True)
    for _, block in same:
        rows = block.groupby(["model", "layer", "head"], observed=True)["query"].agg(
            lambda each: tuple(sorted(set(each)))
        )
        assert rows.nunique() == 1
        assert len(rows) == 2 * families.LAYERS * families.HEADS
        assert len(rows.iloc[0]) == 12


def test_a_stored_row_is_the_measured_one_and_is_found_again(run: Run, place: Path) -> None:
    doc = str(run.passages["doc"].iloc[0])
    model = headscope.load(f"{place / 'tiny'}@yarn:factor=4", device="cpu")
    text = analysis.document_text(run, "yarn", doc)
    ids = torch.tensor(run.pieces[run.pieces["doc"] == doc].sort_values("position")["token"].to_numpy())
    assert "".join(text.token_texts) == model.tokenizer.decode(ids)
    at = ("yarn", 48, doc, 3, 1)
    queries = analysis.stored_queries(run, at)
    expected = pd.DataFrame(collect_top_keys(model, ids.long(), torch.tensor(queries), KEYS).compute())
    mine = expected[(expected["layer"] == 3) & (expected["head"] == 1) & (expected["query"] == queries[7])]
    kept = analysis.top_keys(run, at, queries[7])
    assert kept["key"].tolist() == mine["key"].tolist()
    np.testing.assert_allclose(kept["weight"], mine["weight"], rtol=1e-6)
    assert (kept["distance"] == queries[7] - kept["key"]).all()
    assert analysis.top_keys(run, at, 10**6).empty
    assert analysis.top_keys(run, ("no", 48, doc, 3, 1), 0).empty


def test_telling_rows_are_the_largest_far_weights_kept_apart(run: Run) -> None:
    far = run.far_keys[
        (run.far_keys["model"] == "base") & (run.far_keys["layer"] == 1) & (run.far_keys["head"] == 0)
    ]
    far = far[far["context_length"] == 48]
    rows = analysis.top_far_rows(run, "base", 1, 0, max_per_document=2)
    assert rows["weight"].max() == far["weight"].max()
    assert rows["weight"].is_monotonic_decreasing
    assert (rows["distance"] >= NEAR).all()
    for _, block in rows.groupby("doc"):
        assert len(block) <= 2
        assert (np.diff(np.sort(block["query"])) >= analysis.MIN_ROW_DISTANCE).all()
    mean = far.astype({"weight": "float64"}).groupby("doc", observed=True)["weight"].mean().mean()
    heads = run.heads[(run.heads["model"] == "base") & (run.heads["layer"] == 1) & (run.heads["head"] == 0)]
    assert heads["far_weight"].item() == pytest.approx(mean)


def test_documents_that_are_measured_are_read_in_the_same_pass_to_the_same_bytes(
    place: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the run is interrupted: what was heard then is forgotten, and read again."""
    tiny, passes, hear = str(place / "tiny"), {"measure": 0, "reads": 0}, measuring.finite_hidden
    both = build_study(
        {
            "name": "both",
            "models": {"base": tiny, "yarn": f"{tiny}@yarn:factor=4"},
            "texts": {"source": f"file:{place}/texts/*.txt", "docs": 2},
            "measure": {"lengths": [24, 48], "rows": 8},
            "reads": {"lengths": [12, 24, 48], "rows": 12, "keys": KEYS},
        }
    )

    def counted(name: str, most: int) -> Any:
        def listened(*given: Any) -> Any:
            if sum(passes.values()) == most:
                raise KeyboardInterrupt
            passes[name] += 1
            return hear(*given)

        return listened

    def made(out: Path, most: int = 1000, resume: bool = False) -> Run:
        passes.update(measure=0, reads=0)
        monkeypatch.setattr(measuring, "finite_hidden", counted("measure", most))
        monkeypatch.setattr(cells, "finite_hidden", counted("reads", most))
        return run_study(both, out, resume=resume)

    together = made(tmp_path / "whole")
    assert passes == {"measure": 2 * 2 * 2, "reads": 2 * 2}, "only the shortest length has passes of its own"
    apart = headscope.reads(
        both.models, text=both.texts.source, docs=2, lengths=[12, 24, 48], rows=12, keys=KEYS, out=tmp_path, quiet=True
    )
    for name in ("pattern_texts", "pieces", "reads", "far_keys"):
        assert (together.path / f"{name}.parquet").read_bytes() == (apart.path / f"{name}.parquet").read_bytes(), name
    with pytest.raises(Interrupted):
        made(tmp_path / "cut", most=5)
    again = made(tmp_path / "cut", resume=True)
    assert passes["reads"] > 2 * 2
    for file in together.path.glob("*.parquet"):
        assert file.read_bytes() == (again.path / file.name).read_bytes(), file.name


def test_a_prompt_keeps_every_row_of_it(place: Path) -> None:
    prompt = "w1 w2 w3\nw1 w2 </s> w3"
    run = headscope.reads(str(place / "tiny"), prompt=prompt, out=place / "prompts", quiet=True)
    assert run.pieces["piece"].tolist() == ["w1", " w2", " w3", " w1", " w2", "</s>", " w3"]
    assert run.pieces["special"].tolist() == [False] * 5 + [True, False]
    assert analysis.stored_queries(run, ("base", 7, "prompt", 0, 0)) == [*range(7)]
    assert "far_keys" not in run.tables
    overview = findings.overview(run)
    assert overview is not None
    assert "no token lies further back than 32" in overview.warnings[0]
    assert not [*findings.head_findings(run, "base", 0, 0), *charts.head_charts(run, "base", 0, 0), *findings.findings(run)]
    file = place / "own.txt"
    file.write_text(prompt)
    again = headscope.reads(str(place / "tiny"), prompt_file=str(file), out=place / "prompts", quiet=True)
    assert again.passages["doc"].tolist() == ["prompt/own.txt"]
    assert (again.reads["weight"] == run.reads["weight"]).all()


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"prompt": "w1"}, BadInput, "the prompt holds 1 token: give a text of 2 or more"),
        ({"prompt": " \n"}, BadInput, "the prompt holds no text"),
        ({"prompt": "a", "prompt_file": "b"}, BadInput, "give prompt or prompt_file, not both"),
        ({"prompt": "a b", "rows": 4}, BadInput, "rows says nothing of a prompt"),
        ({"prompt": "a\x00b"}, BadInput, "holds the character"),
        ({"prompt_file": "./none.txt"}, Missing, "no prompt file './none.txt'"),
        ({"prompt": "w1 " * 1100}, BadInput, "more than 1,024 tokens"),
        ({"rows": 1}, BadInput, "greater than or equal to 2"),
        ({"lengths": [1]}, BadInput, "context length 1 is too short"),
        ({"keys": 0}, BadInput, "greater than or equal to 1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: Any, kind: type[HeadscopeError], told: str, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=told) as refused:
        headscope.reads(str(place / "tiny"), out=tmp_path / "runs", quiet=True, **options)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_two_prompts_read_as_one_are_each_shown_in_their_own_words(place: Path) -> None:
    told = ["w1 w2 w3 w4", "w5 w6 w7 w8"]
    made = [
        headscope.reads(str(place / "tiny"), prompt=p, out=place / "two", quiet=True, seed=n)
        for n, p in enumerate(told)
    ]
    run = concatenate(made)
    assert run.dropped == {}
    for label, prompt in zip(run.models, told, strict=True):
        assert "".join(analysis.document_text(run, label, "prompt").token_texts).split() == prompt.split()
    assert not analysis.have_same_tokens(run, "prompt", *run.models)


def test_a_prompt_file_that_is_no_text_is_one_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        headscope.reads(str(place / "tiny"), prompt_file=str(tmp_path / "image.txt"), out=tmp_path / "runs", quiet=True)


def test_options_of_a_prompt_may_have_lines() -> None:
    study = build_study({"reads": {"prompt": "a\nb"}})
    assert study.probe_options["reads"].model_dump()["prompt"] == "a\nb"


# What is shown -----------------------------------------------------------------------------------------------------


def test_words_and_charts_carry_the_telling_rows_and_no_markup(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, layers=3, lengths=(256,), docs=1)
    base = run.heads[run.heads["model"] == "base"]
    best = base.loc[base["far_weight"].idxmax()]
    at = int(best["layer"]), int(best["head"])
    (told,) = [each.text for each in findings.findings(run) if each.model == "base"]
    assert f"layer {at[0]}, head {at[1]} picks out tokens far back most" in told
    rows = analysis.top_far_rows(run, "base", *at)
    (sentence,) = findings.head_findings(run, "base", *at)
    assert f"{rows['distance'].iloc[0]} tokens back" in sentence
    (passage,) = charts.head_charts(run, "base", *at)
    assert [row[:2] for row in passage.rows] == [
        [number(each.weight), f"{each.distance:,}"] for each in rows.itertuples()
    ]
    drawn = next(
        group for group in charts.charts(assembly.render_context(run)) if group.heading == "What they find there"
    )
    weights, distances, seen, _ = next(iter(drawn.charts)).figure.data[0].cells["values"]
    assert len(weights) == len(rows[: analysis.MAX_FAR_ROWS])
    assert distances[0] == f"{rows['distance'].iloc[0]}"
    assert not any("<b>" in cell for cell in seen)
    assert any("&lt;b&gt;" in cell for cell in seen)

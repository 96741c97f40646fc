"""Prompts hold exactly what they should, whatever the tokenizer: length, span, sentence start, haystack, one BOS."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refuses
from support.tokenizers import KINDS, play, tokenizer

from headscope.errors import BadInput, ResourceMissing
from headscope.models import loading
from headscope.prompts import haystack as wu_prompts
from headscope.prompts.haystack import Haystack, NeedlePromptBuilder, decode_tokens
from headscope.prompts.needles import INDIRECT_NEEDLES, LITERAL_NEEDLES, Needle, read_needles
from headscope.prompts.texts import first_tokens

LONGEST = 1500
END = re.compile(r"[.!?…]+[\"'’”)\]»_]*$")


def ground(kind: str, needle: int = 0, template: str = "prefix") -> tuple[Haystack, NeedlePromptBuilder]:
    tokens = loading.load_tokenizer("smollm2-135m") if kind == "smollm2" else tokenizer(kind)
    haystack = Haystack("play", first_tokens(play(), tokens, LONGEST), tokens)
    return haystack, NeedlePromptBuilder(LITERAL_NEEDLES[needle], tokens, template)


def assert_sound(kind: str, needle: int, length: int, depth: float) -> None:
    """Everything that a prompt promises, checked by decoding it and by comparing tokens."""
    haystack, prompter = ground(kind, needle)
    prompt = prompter.prompt_with_needle(haystack, length, depth)
    ids, tokens = prompt.ids, prompter.tokenizer
    first = prompt.start - prompter.cue_count
    opening = len(haystack.special_prefix)
    assert len(ids) == length
    # the span is the fact, the whole needle stands before it, and the prompt ends with what it gives away
    assert decode_tokens(tokens, ids[prompt.start : prompt.end]).strip() == LITERAL_NEEDLES[needle].fact
    assert decode_tokens(tokens, ids[first : prompt.end]).strip() == LITERAL_NEEDLES[needle].text
    assert decode_tokens(tokens, ids[-20:]).endswith(LITERAL_NEEDLES[needle].opening[-12:])
    assert np.array_equal(ids[first : prompt.start], ids[len(ids) - prompter.cue_count :])
    # around it stands the haystack, from its start, unbroken
    after = len(ids) - len(prompter.suffix_ids)
    around = np.concatenate([ids[opening:first], ids[prompt.end : after]])
    assert np.array_equal(around, haystack.ids[: len(around)])
    assert [token for token in ids[1:].tolist() if token in tokens.all_special_ids] == []
    # it begins a sentence, no later than asked
    before = decode_tokens(tokens, ids[opening:first]).rstrip()
    assert first - opening <= depth * len(around)
    assert before == "" or END.search(before)
    assert before == "" or not re.search(r"[A-Z][.!?…]+$", before)
    joined = " ".join(f"{before[-20:]} {LITERAL_NEEDLES[needle].text}".split())
    assert " ".join(decode_tokens(tokens, ids[: prompt.end]).split()).endswith(joined)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(needle=st.integers(0, len(LITERAL_NEEDLES) - 1), length=st.integers(400, LONGEST), depth=st.floats(0, 1))
def test_a_prompt_is_exact_and_the_needle_begins_a_sentence(kind: str, needle: int, length: int, depth: float) -> None:
    assert_sound(kind, needle, length, depth)


@pytest.mark.model
@settings(max_examples=6, deadline=None)
@given(needle=st.integers(0, len(LITERAL_NEEDLES) - 1), length=st.integers(120, LONGEST), depth=st.floats(0, 1))
def test_a_prompt_is_exact_for_smollm2(needle: int, length: int, depth: float) -> None:
    assert_sound("smollm2", needle, length, depth)


@pytest.mark.parametrize("kind", KINDS)
def test_needle_is_at_the_last_possible_sentence_start(kind: str) -> None:
    haystack, prompter = ground(kind)
    tried = 0
    for depth in (0.3, 0.55, 0.9, 1.0):
        target = int(depth * prompter.haystack_length(haystack, 1200))
        at = prompter.insertion_point(haystack, 1200, depth)
        for later in range(at + 1, target + 1):
            preceding_text = decode_tokens(prompter.tokenizer, haystack.ids[:later])
            right = decode_tokens(prompter.tokenizer, haystack.ids[: later + 6])[len(preceding_text) :]
            assert not (re.search(r"[a-z][.!?]\Z", preceding_text) and right[:1].isspace()), preceding_text[-40:]
            tried += 1
    assert tried > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depths", [(0.0, 0.5, 1.0)])
def test_control_prompt_has_haystack_at_the_needle_position(kind: str, depths: tuple[float, ...]) -> None:
    haystack, prompter = ground(kind)
    controls = prompter.control_prompts(haystack, 900, depths)
    for control, depth in zip(controls, depths, strict=True):
        hidden = prompter.prompt_with_needle(haystack, 900, depth)
        assert (control.start, control.end, len(control.ids)) == (hidden.start, hidden.end, 900)
        opening = len(haystack.special_prefix)
        room = 900 - opening - len(prompter.suffix_ids)
        assert np.array_equal(control.ids[opening : opening + room], haystack.ids[:room])


def test_without_opening_words_the_whole_needle_is_scored() -> None:
    haystack, prompter = ground("byte-level", template="plain")
    prompt = prompter.prompt_with_needle(haystack, 900, 0.5)
    assert decode_tokens(prompter.tokenizer, prompt.ids[prompt.start : prompt.end]).strip() == LITERAL_NEEDLES[0].text
    assert decode_tokens(prompter.tokenizer, prompt.ids).endswith("Answer:")


def test_the_chat_template_wraps_haystack_and_question() -> None:
    tokens = tokenizer("byte-level")
    tokens.chat_template = "{% for m in messages %}[user]{{ m['content'] }}[/user]{% endfor %}[assistant]"
    try:
        haystack, prompter = ground("byte-level", template="chat")
        prompt = prompter.prompt_with_needle(haystack, 900, 0.5)
        text = decode_tokens(tokens, prompt.ids)
    finally:
        tokens.chat_template = None
    assert len(prompt.ids) == 900
    assert text.startswith("[user]" + play()[:40])
    assert text.endswith(f"\n\n{LITERAL_NEEDLES[0].question}[/user][assistant]")


@pytest.mark.parametrize("template", ["prefix", "plain"])
def test_an_indirect_needle_has_a_paraphrased_question_and_only_its_fact_is_scored(template: str) -> None:
    tokens = tokenizer("byte-level")
    haystack = Haystack("play", first_tokens(play(), tokens, 900), tokens)
    for needle in INDIRECT_NEEDLES:
        prompter = NeedlePromptBuilder(needle, tokens, template)
        prompt = prompter.prompt_with_needle(haystack, 700, 0.5)
        text = decode_tokens(tokens, prompt.ids)
        assert len(prompt.ids) == 700
        assert (
            decode_tokens(tokens, prompt.ids[prompt.start : prompt.end]).strip() == needle.fact == prompter.scored_text
        )
        assert decode_tokens(tokens, prompt.ids[prompt.start - prompter.cue_count : prompt.end]).strip() == needle.text
        assert text.count(needle.opening) == 1
        assert text.endswith(f"Question: {needle.question}\nAnswer:{f' {needle.cue}' if template == 'prefix' else ''}")
        (control,) = prompter.control_prompts(haystack, 700, [0.5])
        assert (control.start, control.end, len(control.ids)) == (prompt.start, prompt.end, 700)


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    with refuses(BadInput, "--template"):
        ground("characters", template="chat")


def test_a_needle_longer_than_the_context_names_the_shortest_that_fits() -> None:
    haystack, prompter = ground("characters")
    with refuses(BadInput, "haystack", 64) as refusal:
        prompter.prompt_with_needle(haystack, 64, 0.5)
    least = int(re.findall(r"\d+", str(refusal.value))[-1])
    assert len(prompter.prompt_with_needle(haystack, least, 0.5).ids) == least
    with refuses(BadInput, "haystack", least - 1, least):
        prompter.prompt_with_needle(haystack, least - 1, 0.5)


def test_fact_in_the_haystack_is_detected_despite_spacing() -> None:
    tokens = tokenizer("byte-level")
    haystack = Haystack(
        "x", first_tokens("It rained. In 1847\n  by Odette  marchbanks of Tarn Street, of course.", tokens, 99), tokens
    )
    assert haystack.contains_text("1847 by Odette Marchbanks of Tarn Street.")
    assert not haystack.contains_text("1848 by Odette Marchbanks of Tarn Street.")


def test_shipped_needles_are_at_least_six_facts_that_no_play_states() -> None:
    assert len(LITERAL_NEEDLES) >= 6
    assert len({needle.name for needle in LITERAL_NEEDLES}) == len(LITERAL_NEEDLES)
    for needle in LITERAL_NEEDLES:
        assert re.search(r"\d", needle.fact), needle
        assert re.search(r"\b[A-Z][a-z]+", f"{needle.opening[1:]} {needle.fact}"), needle
    assert not [
        stated for stated in (*LITERAL_NEEDLES, *INDIRECT_NEEDLES) if ground("byte-level")[0].contains_text(stated.fact)
    ]


def test_needles_of_a_file_are_read_in_order(tmp_path: Path) -> None:
    lines = [json.dumps(vars(Needle(name, f"Who is {name}?", "It was", "nobody."))) for name in "abc"]
    (tmp_path / "mine.jsonl").write_text("\n\n".join(lines))
    assert [needle.name for needle in read_needles(str(tmp_path / "mine.jsonl"), 2)] == ["a", "b"]


def test_needles_are_chosen_by_kind_and_a_cue_makes_one_indirect(tmp_path: Path) -> None:
    assert read_needles(None, 2) == [*LITERAL_NEEDLES[:2]]
    assert read_needles(None, 2, "indirect") == [*INDIRECT_NEEDLES[:2]]
    assert read_needles(None, 1, "both") == [LITERAL_NEEDLES[0], INDIRECT_NEEDLES[0]]
    lines = [json.dumps(vars(Needle("a", "Who?", "It was", "nobody.", cue))) for cue in ("", "They say")]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines).replace('"a"', '"b"', 1))
    assert [needle.is_indirect for needle in read_needles(str(tmp_path / "mine.jsonl"), 2)] == [False, True]


OWN_NEEDLE = {"name": "a", "question": "c", "opening": "d", "fact": "b"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", ("line 1", "JSON")),
        ('{"name": "a"}', ("line 1", "name", "question", "opening", "fact", "cue")),
        ('{"name": "a", "question": "c", "opening": "d", "fact": "..."}', ("line 1", "'fact'", "'...'")),
        ('{"name": 1, "question": "c", "opening": "d", "fact": "b"}', ("line 1", "'name'", 1)),
        ('{"name": "a", "question": " ", "opening": "d", "fact": "b"}', ("line 1", "'question'", "' '")),
        ('{"name": "a", "question": "c", "opening": "", "fact": "b"}', ("line 1", "'opening'", "''")),
        ('{"name": "a", "question": "c", "opening": "d", "fact": "b", "ceu": "e"}', ("line 1", "'ceu'", "'cue'")),
        ('{"question": "c", "needle": "d e", "real_needle": "e", "id": 1}', ("line 1", "'id'")),
        ('{"question": "c", "needle": "d e", "real_needle": "e"}\n' * 2, ("line 2", "copy", "line 1")),
        ("\n", ("name", "question", "opening", "fact")),
        ("\n".join(json.dumps({**OWN_NEEDLE, "question": text}) for text in "cd"), ("'a'",)),
    ],
)
def test_a_bad_file_of_needles_is_refused_by_line(tmp_path: Path, content: str, named: tuple[object, ...]) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with refuses(BadInput, f"'{file}'", *named):
        read_needles(str(tmp_path / "bad.jsonl"), 6)
    with refuses(ResourceMissing, f"'{tmp_path}/none.jsonl'"):
        read_needles(str(tmp_path / "none.jsonl"), 6)


def test_wu_prompts_have_the_fuzzy_span_on_the_fact() -> None:
    haystack, prompter = ground("byte-level")
    prompt = wu_prompts.prompt_with_needle(prompter, haystack, 1200, 0.5)
    text = decode_tokens(prompter.tokenizer, prompt.ids)
    true = len(prompter.tokenizer(text[: text.index(LITERAL_NEEDLES[0].fact)])["input_ids"])
    assert prompt.end - prompt.start == len(prompter.needle_ids) - prompter.cue_count
    assert prompt.start <= true < prompt.end  # the fuzzy span of so small a vocabulary may begin early
    tail = len(prompter.suffix_ids)
    assert abs(len(prompt.ids) - (1200 - wu_prompts.RESERVED_TOKENS + tail)) <= 3
    with refuses(BadInput, 200, "mode wu"):
        wu_prompts.prompt_with_needle(prompter, haystack, 200, 0.5)


def test_the_fuzzy_span_is_the_first_window_with_nearly_the_same_set() -> None:
    needle = np.arange(20, 32, dtype=np.int32)
    ids = np.concatenate([np.arange(10), needle, np.arange(5)]).astype(np.int32)
    assert wu_prompts.fuzzy_span(ids, needle) == 9  # eleven of twelve tokens already lie in the window before
    assert wu_prompts.fuzzy_span(ids[:15], needle) is None

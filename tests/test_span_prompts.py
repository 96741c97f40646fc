"""Prompts with named spans: which token belongs to which span, chat templates, token classes, errors by line."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tokenizers
from support.refusals import assert_names, refuses

from headscope.errors import BadInput, ResourceMissing
from headscope.prompts.span_tokens import SpanTokens, tokenize_spans
from headscope.prompts.spans import MAX_GENERATED, parse_marks, parse_prompt, read_span_prompts
from headscope.prompts.token_classes import class_masks, matching_brackets, parse_classes
from headscope.prompts.token_text import token_texts

KINDS = pytest.mark.parametrize("kind", [*tokenizers.KINDS])
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def chat_tokenizer(template: str | dict[str, str] = TEMPLATE) -> Any:
    tokenizer = tokenizers.tokenizer.__wrapped__("byte-level")
    tokenizer.chat_template = template
    return tokenizer


def test_a_tokenizer_with_named_chat_templates_uses_its_default() -> None:
    prompt = parse_prompt({"messages": [{"role": "user", "content": "a letter"}]}, "p", "line 1")
    named = chat_tokenizer({"default": TEMPLATE, "tool_use": "{{ messages }}"})
    assert tokenize_spans(named, prompt).ids == tokenize_spans(chat_tokenizer(), prompt).ids


def texts_by_span(tokenizer: Any, tokens: SpanTokens) -> dict[str, str]:
    """The joined text of every span."""
    texts, _ = token_texts(tokenizer, tokens.ids)
    return {name: "".join(np.array(texts, dtype=object)[mask]) for name, mask in tokens.spans.items()}


def assert_partition(tokens: SpanTokens) -> None:
    assert (np.array([*tokens.spans.values()]).sum(0) == 1).all()
    assert all(mask.any() for mask in tokens.spans.values())


@KINDS
def test_segments_become_the_tokens_of_their_text(kind: str) -> None:
    tokenizer = tokenizers.tokenizer(kind)
    segments = [{"text": "Speak.\n"}, {"name": "context", "text": "The king is dead."}, {"text": "\n"}]
    segments += [{"name": "question", "text": "Who is dead?"}]
    tokens = tokenize_spans(tokenizer, parse_prompt({"segments": segments}, "p", "line 1"))
    assert_partition(tokens)
    texts = texts_by_span(tokenizer, tokens)
    assert "".join(texts[name] for name in texts if name == "context").strip() == "The king is dead."
    assert texts["question"].strip() == "Who is dead?"
    assert [*tokens.spans][:2] == ["first", "context"]
    assert tokens.prompt_length == len(tokens.ids)
    has_bos = kind == "metaspace"
    assert (tokens.ids[0] == tokenizer.bos_token_id) == has_bos


def test_marks_give_the_same_tokens_as_segments() -> None:
    tokenizer = tokenizers.tokenizer("byte-level")
    marked = parse_prompt({"text": "So [[context]]the king[[/context]] is [[ end ]]dead[[/end]]"}, "p", "line 1")
    segments = [{"text": "So "}, {"name": "context", "text": "the king"}, {"text": " is "}]
    segmented = parse_prompt({"segments": [*segments, {"name": "end", "text": "dead"}]}, "p", "line 1")
    one, other = (tokenize_spans(tokenizer, prompt) for prompt in (marked, segmented))
    assert one.ids == other.ids == tokenizer("So the king is dead")["input_ids"]
    assert {name: mask.tolist() for name, mask in one.spans.items()} == {
        name: mask.tolist() for name, mask in other.spans.items()
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.text("ab. \né", min_size=1)), min_size=1))
def test_every_token_belongs_to_the_span_with_most_of_its_characters(parts: list[tuple[str, str]]) -> None:
    tokenizer = tokenizers.tokenizer("characters")
    segments = [{"name": name, "text": text} if name else {"text": text} for name, text in parts]
    prompt = parse_prompt({"segments": segments}, "p", "line 1")
    labels = [name or "rest" for name, text in parts for _ in text]
    if {*labels[1:]} != {*labels}:
        with refuses(BadInput, "line 1", f"'{labels[0]}'") if labels[0] != "rest" else nullcontext():
            tokenize_spans(tokenizer, prompt)
        return
    tokens = tokenize_spans(tokenizer, prompt)
    assert_partition(tokens)
    names = [next(name for name, mask in tokens.spans.items() if mask[at]) for at in range(len(tokens.ids))]
    assert names == ["first", *labels[1:]]
    assert tokens.cut_tokens == ()


def test_a_token_in_two_spans_is_named_with_the_side_that_it_went_to() -> None:
    tokenizer = tokenizers.tokenizer("byte-level")
    content = {"segments": [{"name": "a", "text": "I say the ki"}, {"name": "b", "text": "ng is here"}]}
    tokens = tokenize_spans(tokenizer, parse_prompt(content, "p", "'file', line 3"))
    assert_partition(tokens)
    (line,) = tokens.cut_tokens
    assert_names(line, "'file'", "line 3", "'a'", "'b'")
    texts = texts_by_span(tokenizer, tokens)
    cut = max("ab", key=lambda name: line.count(f"'{name}'"))  # named again as the span that it went to
    assert {"a": texts["a"].endswith("king"), "b": texts["b"].lstrip().startswith("king")}[cut]


def test_a_continuation_is_a_span_of_its_own_and_must_not_merge() -> None:
    tokenizer = tokenizers.tokenizer("byte-level")
    content = {"text": "[[context]]The king is[[/context]]", "continuation": " dead. Long"}
    tokens = tokenize_spans(tokenizer, parse_prompt(content, "p", "line 1"))
    assert_partition(tokens)
    assert texts_by_span(tokenizer, tokens)["generated"] == " dead. Long"
    assert tokens.spans["generated"].sum() == len(tokens.ids) - tokens.prompt_length
    with refuses(BadInput, "line 1", "continuation", "'ng'"):
        tokenize_spans(tokenizer, parse_prompt({"text": "[[a]]The ki[[/a]]", "continuation": "ng"}, "p", "line 1"))


# Chats -------------------------------------------------------------------------------------------------------------


def test_messages_become_spans_by_role_and_by_message() -> None:
    tokenizer = chat_tokenizer()
    messages = [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "I hear you."},
        {"role": "user", "content": "Here is [[data]]a letter[[/data]] for you"},
    ]
    tokens = tokenize_spans(tokenizer, parse_prompt({"messages": messages}, "p", "line 1"))
    text = tokenizer.apply_chat_template(
        [{**one, "content": one["content"].replace("[[data]]", "").replace("[[/data]]", "")} for one in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokens.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert_partition(tokens)
    texts = texts_by_span(tokenizer, tokens)
    assert (texts["system"], texts["assistant"], texts["data"]) == ("Be brief.", "I hear you.", " a letter")
    assert texts["user"] == "userHere is for you"
    assert texts["template"].count("<s>") == 4, "the first of five is the first token"
    every, _ = token_texts(tokenizer, tokens.ids)
    by_message = {name: "".join(np.array(every, dtype=object)[mask]) for name, mask in tokens.messages.items()}
    assert by_message == {"user 1": "user", "user 2": "Here is a letter for you"}


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, ("tokenizer", "'segments'", "'text'")),
        (TEMPLATE.replace("| trim", "| upper"), ("message 1 (user",)),
        ("{{ messages[-1]['content'] }}", ("message 1 (user", "drops")),
        ("{{ raise_exception('no roles') }}", ("no roles", "'segments'")),
    ],
)
def test_a_template_that_drops_or_changes_a_message_is_refused_by_line(template: Any, named: tuple[str, ...]) -> None:
    messages = [{"role": "user", "content": "Hear me"}, {"role": "assistant", "content": "I hear"}]
    with refuses(BadInput, "line 4", *named):
        tokenize_spans(chat_tokenizer(template), parse_prompt({"messages": messages}, "p", "line 4"))


# Files -------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


SEGMENTS = {"segments": [{"name": "a", "text": "Hear me"}]}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", ("JSON",)),
        ([1], ("[1]",)),
        ({"segment": []}, ("'segment'", "segments", "messages", "text")),
        ({"group": "a"}, ("no text", "segments", "messages", "text")),
        ({**SEGMENTS, "text": "x"}, ("'segments'", "'text'")),
        ({"segments": []}, ("'segments'", "[]")),
        ({"segments": [{"name": "a"}]}, ("'segments'", "[{'name': 'a'}]")),
        ({"segments": [{"name": "last", "text": "x"}]}, ("span", "'last'")),
        ({"segments": [{"name": "a", "text": ""}]}, ("segment", "'a'")),
        ({**SEGMENTS, "group": " "}, ("'group'", "' '")),
        ({**SEGMENTS, "generate": 0}, ("'generate'", 0, f"{MAX_GENERATED:,}")),
        ({**SEGMENTS, "generate": 3, "continuation": "x"}, ("'continuation'", "'generate'")),
        ({"messages": [{"role": "usr", "content": "x"}]}, ("role", "'usr'", "user")),
        ({"messages": [{"role": "user", "content": " "}]}, ("message", "'user'")),
        ({"messages": [{"role": "user", "content": "[[tool]]x[[/tool]]"}]}, ("'tool'", "mark")),
        ({"messages": [{"role": "user", "content": "[[user 1]]x[[/user 1]]"}]}, ("'user 1'", "mark")),
        ({"text": "[[a]]x [[b]]y[[/b]][[/a]]"}, ("'b'", "'a'", "[[/a]]")),
        ({"text": "[[a]]x[[/b]]"}, ("[[/b]]", "'a'")),
        ({"text": "x[[/b]]"}, ("[[/b]]", "[[b]]")),
        ({"text": "[[a]]x"}, ("'a'", "[[/a]]")),
        ({"text": "[[a]][[/a]]x"}, ("span", "'a'", "empty")),
        ({"text": ""}, ("'text'", "''")),
    ],
)
def test_errors_name_the_line(line: Any, named: tuple[object, ...], tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", SEGMENTS, "", line)
    with refuses(BadInput, f"'{file}'", "line 3", *named) as raised:
        read_span_prompts(file)
    assert "\n" not in str(raised.value)


def test_groups_names_and_files_are_checked(tmp_path: Path) -> None:
    grouped = [{"text": f"[[a]]{name}[[/a]]", "group": name} for name in "abc"]
    assert [prompt.group for prompt in read_span_prompts(write(tmp_path / "g.jsonl", *grouped[:2]))] == ["a", "b"]
    with refuses(BadInput, "line 3", "'c'", "a", "b"):
        read_span_prompts(write(tmp_path / "g.jsonl", *grouped))
    with refuses(BadInput, "line 2", "'group'"):
        read_span_prompts(write(tmp_path / "g.jsonl", grouped[0], SEGMENTS))
    with refuses(BadInput, "line 2", "'x'", "line 1"):
        read_span_prompts(write(tmp_path / "g.jsonl", {**SEGMENTS, "name": "x"}, {**SEGMENTS, "name": "x"}))
    with refuses(BadInput, f"'{tmp_path / 'empty.jsonl'}'", "'segments'", "'messages'", "'text'"):
        read_span_prompts(write(tmp_path / "empty.jsonl", ""))
    with refuses(ResourceMissing, f"'{tmp_path / 'none.jsonl'}'"):
        read_span_prompts(str(tmp_path / "none.jsonl"))


def test_a_span_whose_only_token_is_the_first_is_refused() -> None:
    tokenizer = tokenizers.tokenizer("characters")
    with refuses(BadInput, "line 1", "'a'", "first"):
        tokenize_spans(tokenizer, parse_prompt({"text": "[[a]]x[[/a]]y"}, "p", "line 1"))


def test_columns_of_a_dataset_are_spans(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"context": f"The king {n}", "question": "Who?", "group": "ab"[n % 2], "other": n} for n in range(3)]
    write(folder / "train.jsonl", *rows)
    prompts = read_span_prompts(f"hf:{folder}:train:context,question")
    assert [prompt.group for prompt in prompts] == ["a", "b", "a"]
    assert prompts[1].marked.text == "The king 1\n\nWho?"
    assert [name for name, *_ in prompts[1].marked.spans] == ["context", "question"]
    with refuses(BadInput, "'answer'", f"hf:{folder}", "context", "question", "missing"):
        read_span_prompts(f"hf:{folder}:train:context,answer")


# Token classes -----------------------------------------------------------------------------------------------------


def test_classes_are_found_in_the_text_of_tokens() -> None:
    texts = ["<s>", " if", " (", "x", ",", "\n", "12", ")", ".", " a-b", "::"]
    special = [True] + [False] * (len(texts) - 1)
    masks = class_masks(
        texts, special, parse_classes(["delimiter", "bracket", "newline", "digit", "same", "x=^ ?[a-z]"])
    )
    found = {name: [texts[at] for at in np.flatnonzero(mask)] for name, mask in masks.items()}
    assert found == {
        "delimiter": [",", ".", "::"],
        "bracket": [" (", ")"],
        "newline": ["\n"],
        "digit": ["12"],
        "x": [" if", "x", " a-b"],
    }


def test_brackets_match_in_order() -> None:
    texts = ["f(", "[", "x", "]", "()", "y", ")", ")", "{", ")", "}"]
    assert matching_brackets(texts, [False] * len(texts)).tolist() == [-1, -1, -1, 1, -1, -1, 0, -1, -1, -1, 8]


@settings(max_examples=50, deadline=None)
@given(st.text("([{}])x", max_size=30))
def test_matching_brackets_enclose_balanced_text(text: str) -> None:
    matches = matching_brackets([*text], [False] * len(text))
    closing = {")": "(", "]": "[", "}": "{"}
    pairs = [(int(start), end) for end, start in enumerate(matches) if start >= 0]
    assert all(text[start] == closing[text[end]] for start, end in pairs)
    assert len({start for start, _ in pairs}) == len(pairs)
    assert not any(a < c < b < d for a, b in pairs for c, d in pairs), "pairs nest"


@pytest.mark.parametrize(
    ("entry", "named"),
    [("digits", "'digits'"), ("last=x", "'last=x'"), ("=x", "'=x'"), ("x=", "'x='"), ("x=(", "'x'")],
)
def test_a_bad_class_is_refused(entry: str, named: str) -> None:
    with refuses(ValueError, "class", named):
        parse_classes([entry])


def test_two_classes_of_one_name_are_refused() -> None:
    with refuses(ValueError, "'x'", "twice"):
        parse_classes(["x=a", "digit", "x=b"])


def test_marks_are_removed_from_the_text() -> None:
    marked = parse_marks("a [[x]]b[[/x]] c [[y z]]d[[/y z]]", "here")
    assert marked.text == "a b c d"
    assert [(name, marked.text[start:end]) for name, start, end in marked.spans] == [("x", "b"), ("y z", "d")]

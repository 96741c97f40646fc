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

from headscope.errors import BadInput, ResourceMissing
from headscope.prompts.span_tokens import SpanTokens, tokenize_spans
from headscope.prompts.spans import parse_marks, parse_prompt, read_span_prompts
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
        with pytest.raises(BadInput, match=r"line 1: span .* has no token") if labels[0] != "rest" else nullcontext():
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
    assert line.startswith("'file', line 3: token ")
    assert "lies in 'a' and 'b' and counts as '" in line
    texts = texts_by_span(tokenizer, tokens)
    cut = line.split("counts as '")[1].rstrip("'")
    assert {"a": texts["a"].endswith("king"), "b": texts["b"].lstrip().startswith("king")}[cut]


def test_a_continuation_is_a_span_of_its_own_and_must_not_merge() -> None:
    tokenizer = tokenizers.tokenizer("byte-level")
    content = {"text": "[[context]]The king is[[/context]]", "continuation": " dead. Long"}
    tokens = tokenize_spans(tokenizer, parse_prompt(content, "p", "line 1"))
    assert_partition(tokens)
    assert texts_by_span(tokenizer, tokens)["generated"] == " dead. Long"
    assert tokens.spans["generated"].sum() == len(tokens.ids) - tokens.prompt_length
    with pytest.raises(BadInput, match="line 1: the continuation 'ng' merges"):
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
    ("template", "message"),
    [
        (None, "line 4: the model's tokenizer has no chat template"),
        (
            TEMPLATE.replace("| trim", "| upper"),
            r"line 4: the chat template drops message 1|changes message 1 \(user\)",
        ),
        ("{{ messages[-1]['content'] }}", r"line 4: the chat template drops message 1 \(user\)"),
        ("{{ raise_exception('no roles') }}", "line 4: the chat template fails"),
    ],
)
def test_a_template_that_drops_or_changes_a_message_is_refused_by_line(template: Any, message: str) -> None:
    messages = [{"role": "user", "content": "Hear me"}, {"role": "assistant", "content": "I hear"}]
    with pytest.raises(BadInput, match=message):
        tokenize_spans(chat_tokenizer(template), parse_prompt({"messages": messages}, "p", "line 4"))


# Files -------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


SEGMENTS = {"segments": [{"name": "a", "text": "Hear me"}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ([1], "is not a JSON object"),
        ({"segment": []}, "unknown key 'segment'"),
        ({"group": "a"}, "has none of them. Give one of segments, messages, text"),
        ({**SEGMENTS, "text": "x"}, "has 'segments' and 'text'"),
        ({"segments": []}, "'segments' is"),
        ({"segments": [{"name": "a"}]}, "'segments' is"),
        ({"segments": [{"name": "last", "text": "x"}]}, "a span cannot be named 'last'"),
        ({"segments": [{"name": "a", "text": ""}]}, "segment 'a' is empty"),
        ({**SEGMENTS, "group": " "}, "'group' is ' '. Write a text"),
        ({**SEGMENTS, "generate": 0}, "'generate' is 0"),
        ({**SEGMENTS, "generate": 3, "continuation": "x"}, "has 'continuation' and 'generate'"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "unknown role 'usr'"),
        ({"messages": [{"role": "user", "content": " "}]}, "the message of role 'user' is empty"),
        ({"messages": [{"role": "user", "content": "[[tool]]x[[/tool]]"}]}, "'tool' is the name of a mark and of mess"),
        ({"messages": [{"role": "user", "content": "[[user 1]]x[[/user 1]]"}]}, "'user 1' is the name of a mark"),
        ({"text": "[[a]]x [[b]]y[[/b]][[/a]]"}, "span 'b' starts inside of span 'a'. Spans must not overlap"),
        ({"text": "[[a]]x[[/b]]"}, r"\[\[/b\]\] ends a span inside of span 'a'"),
        ({"text": "x[[/b]]"}, "but no span is open"),
        ({"text": "[[a]]x"}, "span 'a' has no end"),
        ({"text": "[[a]][[/a]]x"}, "span 'a' is empty"),
        ({"text": ""}, "'text' is ''"),
    ],
)
def test_errors_name_the_line(line: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", SEGMENTS, "", line)
    with pytest.raises(BadInput, match=message) as raised:
        read_span_prompts(file)
    assert f"'{file}', line 3" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_groups_names_and_files_are_checked(tmp_path: Path) -> None:
    grouped = [{"text": f"[[a]]{name}[[/a]]", "group": name} for name in "abc"]
    assert [prompt.group for prompt in read_span_prompts(write(tmp_path / "g.jsonl", *grouped[:2]))] == ["a", "b"]
    with pytest.raises(BadInput, match="line 3: group 'c' is the third, after a and b"):
        read_span_prompts(write(tmp_path / "g.jsonl", *grouped))
    with pytest.raises(BadInput, match="line 2 has no 'group', but other prompts do"):
        read_span_prompts(write(tmp_path / "g.jsonl", grouped[0], SEGMENTS))
    with pytest.raises(BadInput, match="line 2: the name 'x' is that of"):
        read_span_prompts(write(tmp_path / "g.jsonl", {**SEGMENTS, "name": "x"}, {**SEGMENTS, "name": "x"}))
    with pytest.raises(BadInput, match="has no prompt"):
        read_span_prompts(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ResourceMissing, match="no file of prompts with spans"):
        read_span_prompts(str(tmp_path / "none.jsonl"))


def test_a_span_whose_only_token_is_the_first_is_refused() -> None:
    tokenizer = tokenizers.tokenizer("characters")
    with pytest.raises(BadInput, match="line 1: span 'a' has no token: its only token is the first of the prompt"):
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
    with pytest.raises(BadInput, match=r"column 'answer' of hf:.* is missing"):
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


@pytest.mark.parametrize("entry", ["digits", "last=x", "=x", "x=", "x=("])
def test_a_bad_class_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="class"):
        parse_classes([entry])


def test_marks_are_removed_from_the_text() -> None:
    marked = parse_marks("a [[x]]b[[/x]] c [[y z]]d[[/y z]]", "here")
    assert marked.text == "a b c d"
    assert [(name, marked.text[start:end]) for name, start, end in marked.spans] == [("x", "b"), ("y z", "d")]

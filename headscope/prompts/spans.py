"""Prompts with named spans: JSON lines of segments, chat messages or text with marks, and rows of a dataset.

A line has `segments` ([{"name": "context", "text": "..."}, ...]), `messages` ([{"role": "user", "content": "..."},
...]) or `text`. Parts of them may be marked: [[name]]...[[/name]]. Optional: `name`, `group` (a label), `continuation`
(a text that follows the prompt) and `wrong` (another one to compare it with), or `generate` (a number of tokens that
the model writes). A message may have `images`, file names of images before its text.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headscope.base import input_files, user_input
from headscope.errors import BadInput, ResourceMissing, did_you_mean, first_line
from headscope.prompts.hub_datasets import read_dataset_rows

IMAGE = "image"
"""The span of the tokens that stand for the images of a chat."""
FIRST, TEMPLATE, GENERATED, REST = "first", "template", "generated", "rest"
"""Spans that headscope names itself: the first token, the text of a chat template, generated tokens, and all others."""
LAST, ALL = "last", "all"
"""Query spans that headscope names itself: the last token of the prompt, and all tokens."""
RESERVED_NAMES = (FIRST, TEMPLATE, GENERATED, REST, LAST, ALL, "prompt", "same", "matching")
ROLES = ("system", "user", "assistant", "tool", "developer")
MARK = re.compile(r"\[\[(/?)([^\[\]\n]+)\]\]")
MAX_GENERATED = 4096
_SOURCES = ("segments", "messages", "text")
_KEYS = ("name", *_SOURCES, "group", "continuation", "wrong", "generate")


@dataclass(frozen=True)
class MarkedText:
    """A text without its marks, and its named spans: (name, first character, the one after the last), in order."""

    text: str
    spans: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class ImageFile:
    """An image before the text of a message, which is counted from 0; `digest` is that of the file."""

    message: int
    digest: str
    path: Path = field(compare=False, repr=False)


@dataclass(frozen=True)
class SpanPrompt:
    """A prompt with named spans: `messages` (role, content) of a chat, or one `marked` text.

    `group` is a label, "" for none. `continuation` follows the prompt, or the model generates `generate` tokens.
    `wrong` is another continuation, which steering compares with it.
    `location` is where the prompt comes from, for messages.
    """

    name: str
    marked: MarkedText = MarkedText("")
    messages: tuple[tuple[str, MarkedText], ...] = ()
    group: str = ""
    continuation: str = ""
    wrong: str = ""
    generate: int = 0
    images: tuple[ImageFile, ...] = ()
    location: str = field(default="", compare=False, repr=False)

    @property
    def span_names(self) -> list[str]:
        """The names of its spans: those of its marks and segments, then the roles of its messages."""
        parts = [part for _, part in self.messages] or [self.marked]
        names = [name for part in parts for name, *_ in part.spans]
        images = [IMAGE] if self.images else []
        return [*dict.fromkeys([*names, *(role for role, _ in self.messages), *images])]

    @property
    def message_names(self) -> list[str]:
        """For each message its own name, "user 2", if its role occurs more than once; else ""."""
        roles = [role for role, _ in self.messages]
        return [
            f"{role} {roles[: number + 1].count(role)}" if roles.count(role) > 1 else ""
            for number, role in enumerate(roles)
        ]


def read_span_prompts(source: str) -> list[SpanPrompt]:
    """The prompts in a file of JSON lines, or in the rows of `hf:DATASET:SPLIT:COLUMN,...`.

    Every named column of a dataset is a span, in this order, with a blank line between two; a column `group` is the
    label. Raises ResourceMissing without the file, BadInput naming the first invalid line.
    """
    if source.startswith("hf:"):
        prompts = [*_read_dataset(source.removeprefix("hf:"))]
    else:
        stem = Path(source).name.removesuffix(".jsonl")
        lines = input_files.read_json_lines(source, "file of prompts with spans")
        prompts = [
            parse_prompt(content, f"{stem}/{number}", location, Path(source).expanduser().parent)
            for number, (location, content) in enumerate(lines, start=1)
        ]
    if not prompts:
        raise BadInput(
            f"'{source}' has no prompt. Write one JSON object per line, with 'segments', 'messages' or 'text'"
        )
    _check_names(prompts)
    check_groups(prompts)
    return prompts


def parse_prompt(content: Any, name: str, location: str, folder: Path = Path()) -> SpanPrompt:
    """The prompt in one JSON object; `name` if it has none. Paths of images are relative to `folder`.

    Raises BadInput naming the location.
    """
    input_files.check_keys(content, location, (), _KEYS)
    if len(sources := [key for key in _SOURCES if key in content]) != 1:
        listed = " and ".join(f"'{key}'" for key in sources) or "no text of a prompt"
        raise BadInput(f"{location} has {listed}. Give one of the keys {', '.join(_SOURCES)}")
    texts = {key: content[key] for key in ("name", "group", "continuation", "wrong") if key in content}
    for key, value in texts.items():
        if not isinstance(value, str) or not value.strip():
            raise BadInput(f"{location}: '{key}' is {user_input.quote(value)}. Write a text, or leave the key out")
        if key not in ("continuation", "wrong"):
            _check_line(value, location)
    count = content.get("generate", 0)
    if "generate" in content and (type(count) is not int or not 0 < count <= MAX_GENERATED):
        raise BadInput(f"{location}: 'generate' is {user_input.quote(count)}. Use a number from 1 to {MAX_GENERATED:,}")
    if count and "continuation" in content:
        raise BadInput(f"{location} has 'continuation' and 'generate'. Give one of them")
    if "wrong" in texts and (texts["wrong"] == texts.get("continuation") or "continuation" not in texts):
        raise BadInput(f"{location} has 'wrong' without another 'continuation'. Give both, with different texts")
    parts = _PARSERS[sources[0]](content[sources[0]], location, folder)
    if count and parts.get("images"):
        raise BadInput(f"{location} has 'images' and 'generate'. Give a 'continuation', or remove one of them")
    return SpanPrompt(**{"name": name, **texts, **parts}, generate=count, location=location)


def parse_marks(text: str, location: str) -> MarkedText:
    """The text without its marks, and the spans between them. Raises BadInput for marks that overlap or stay open."""
    plain, spans, position = "", [], 0
    opened: tuple[str, int] | None = None
    for mark in MARK.finditer(text):
        plain += text[position : mark.start()]
        position, name = mark.end(), mark[2].strip()
        if not mark[1]:
            if opened is not None:
                raise BadInput(
                    f"{location}: span '{name}' starts inside of span '{opened[0]}'. Spans must not overlap: close "
                    f"'{opened[0]}' with [[/{opened[0]}]] first"
                )
            _check_span_name(name, location)
            opened = name, len(plain)
        elif opened is None or opened[0] != name:
            inside = f"inside of span '{opened[0]}'" if opened else "but no span is open"
            raise BadInput(f"{location}: [[/{name}]] ends a span {inside}. Open it with [[{name}]]")
        else:
            spans.append((name, opened[1], len(plain)))
            opened = None
    if opened is not None:
        raise BadInput(f"{location}: span '{opened[0]}' has no end. Close it with [[/{opened[0]}]]")
    if empty := [name for name, start, end in spans if start == end]:
        raise BadInput(f"{location}: span '{empty[0]}' is empty. Put text between its marks")
    return MarkedText(plain + text[position:], tuple(spans))


def parse_message(text: str, location: str) -> MarkedText:
    """The text of a message without its marks, and its spans.

    Raises BadInput as `parse_marks`, and for a mark named like a role or a message, whose tokens it would join.
    """
    marked = parse_marks(text, location)
    names = [name for name, *_ in marked.spans if re.fullmatch(rf"({'|'.join(ROLES)})( \d+)?", name)]
    if names:
        raise BadInput(f"{location}: '{names[0]}' is the name of a mark and of messages of the chat. Rename the mark")
    return marked


def check_class_names(prompts: Sequence[SpanPrompt], classes: Iterable[str]) -> None:
    """Raise BadInput for a class of tokens with the name of a span, role or message."""
    for prompt in prompts:
        names = {*prompt.span_names, *prompt.message_names}
        if clashes := [name for name in classes if name in names]:
            raise BadInput(
                f"{prompt.location}: '{clashes[0]}' is the name of a span and of a class of tokens. Rename the span, "
                "or give the class another name with NAME=REGEX"
            )


def check_groups(prompts: Sequence[SpanPrompt]) -> None:
    """Raise BadInput if some prompts have no group and others do, or if there are more than two groups."""
    groups = [*dict.fromkeys(prompt.group for prompt in prompts)]
    if "" in groups and len(groups) > 1:
        without = next(prompt for prompt in prompts if not prompt.group)
        raise BadInput(f"{without.location} has no 'group', but other prompts do. Give every prompt a group, or none")
    if len(groups) > 2:
        third = next(prompt for prompt in prompts if prompt.group == groups[2])
        raise BadInput(
            f"{third.location}: group {user_input.quote(groups[2])} is the third, after {groups[0]} and {groups[1]}. "
            "Use two groups"
        )


def _parse_segments(segments: Any, location: str, folder: Path) -> Mapping[str, Any]:
    """One text with the spans of its segments; the marks in a segment without a name are spans, too."""
    text, spans = "", []
    for segment in _objects(segments, "segments", ("name", "text"), "text", location):
        name = segment.get("name", "")
        part = parse_marks(segment["text"], location) if not name else MarkedText(segment["text"])
        if name:
            _check_span_name(name, location)
            if not part.text:
                raise BadInput(f"{location}: segment {user_input.quote(name)} is empty. Give it a text, or remove it")
            spans.append((name, len(text), len(text) + len(part.text)))
        spans += [(inner, len(text) + start, len(text) + end) for inner, start, end in part.spans]
        text += part.text
    return {"marked": MarkedText(text, tuple(spans))}


def _parse_messages(messages: Any, location: str, folder: Path) -> Mapping[str, Any]:
    parsed, images = [], list[ImageFile]()
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        for number, message in enumerate(messages):
            images += _read_images(message.get("images", []), number, location, folder)
        messages = [{key: value for key, value in message.items() if key != "images"} for message in messages]
    for message in _objects(messages, "messages", ("role", "content"), "content", location):
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(str(role), ROLES)
            raise BadInput(f"{location}: unknown role {user_input.quote(role)}{hint}. Use one of {', '.join(ROLES)}")
        if not message["content"].strip():
            raise BadInput(f"{location}: the message of role '{role}' is empty. Write a text")
        parsed.append((role, parse_message(message["content"], location)))
        if images and IMAGE in (name for name, *_ in parsed[-1][1].spans):
            raise BadInput(f"{location}: '{IMAGE}' is the name of a mark and of the images. Rename the mark")
    return {"messages": tuple(parsed), "images": tuple(images)}


def _read_images(paths: Any, message: int, location: str, folder: Path) -> Iterable[ImageFile]:
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise BadInput(f"{location}: 'images' is {user_input.quote(paths)}. Write a list of file names")
    for path in (folder / name for name in paths):
        if not path.is_file():
            raise ResourceMissing(f"{location}: there is no image '{path}'. Check the path")
        yield ImageFile(message, hashlib.sha256(path.read_bytes()).hexdigest(), path)


def _parse_text(text: Any, location: str, folder: Path) -> Mapping[str, Any]:
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{location}: 'text' is {user_input.quote(text)}. Write a text")
    return {"marked": parse_marks(text, location)}


_PARSERS = {"segments": _parse_segments, "messages": _parse_messages, "text": _parse_text}


def _objects(values: Any, key: str, known: Sequence[str], text_key: str, location: str) -> list[dict[str, Any]]:
    """The objects of a list in one line, each with a text under `text_key`. Raises BadInput otherwise."""
    example = ", ".join(f'"{name}": "..."' for name in known)
    is_valid = isinstance(values, list) and all(
        isinstance(value, dict) and {*value} <= {*known} and all(isinstance(text, str) for text in value.values())
        and text_key in value
        for value in values
    )  # fmt: skip
    if not is_valid or not values:
        raise BadInput(f"{location}: '{key}' is {user_input.quote(values)}. Write a list of {{{example}}}")
    return list(values)


def _check_span_name(name: str, location: str) -> None:
    if name in RESERVED_NAMES or not name.strip() or re.search(r"[,=\[\]]", name):
        raise BadInput(f"{location}: a span cannot be named {user_input.quote(name)}. Use another name")
    _check_line(name, location)


def _check_line(text: str, location: str) -> None:
    try:
        user_input.check_text(text)
    except ValueError as error:
        raise BadInput(f"{location}: {error}") from error


def _check_names(prompts: Sequence[SpanPrompt]) -> None:
    locations: dict[str, str] = {}
    for prompt in prompts:
        if prompt.name in locations:
            raise BadInput(
                f"{prompt.location}: the name {user_input.quote(prompt.name)} is that of {locations[prompt.name]}. Use "
                "another one"
            )
        locations[prompt.name] = prompt.location


def _read_dataset(source: str) -> Iterable[SpanPrompt]:
    dataset, rows = read_dataset_rows(source)
    for number, (columns, group) in enumerate(rows, start=1):
        location = f"hf:{source}, row {number}"
        filled = [(name, text) for name, text in columns.items() if text.strip()]
        separators = [{"text": "\n\n"}] * (len(filled) - 1)
        segments = [{"name": name, "text": text} for name, text in filled]
        mixed = [item for pair in zip(segments, [*separators, {"text": ""}], strict=True) for item in pair]
        content = {"segments": mixed, **({"group": group} if group else {})}
        yield parse_prompt(content, f"{dataset}/{number}", location)


TOKEN_INPUTS = ("input_ids", "attention_mask")
"""What a processor makes of the text alone."""


def process_images(processor: Any, prompt: SpanPrompt, text: str) -> tuple[list[int], Mapping[str, Any]]:
    """Token ids of a rendered chat with its images, and the model's other inputs, such as pixel values.

    Raises BadInput for a file that is no image and for a text whose images the processor does not accept,
    ResourceMissing without the package Pillow.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ResourceMissing(
            "prompts with images need the package pillow, which is not installed. Run pip install 'headscope[vision]'"
        ) from error
    pictures = []
    for image in prompt.images:
        try:
            pictures.append(Image.open(image.path).convert("RGB"))
        except OSError as error:
            raise BadInput(f"{prompt.location}: '{image.path}' is not an image. Use a PNG or JPEG file") from error
    try:
        inputs = dict(processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False))
    except Exception as error:  # processors of other libraries may raise any error
        raise BadInput(
            f"{prompt.location}: the model's processor refuses the images ({first_line(error)}). Change their number "
            "or their place"
        ) from error
    ids = inputs["input_ids"][0].tolist()
    return ids, {name: value for name, value in inputs.items() if name not in TOKEN_INPUTS}


def align_images(ids: Sequence[int], expanded: Sequence[int], image_token: int, location: str) -> list[int]:
    """For every token of `expanded` its place in `ids`, or -1 for the tokens that stand for an image.

    In `ids` one `image_token` stands for each image. Raises BadInput if the other tokens differ, or if the processor
    divides each of several images into rows, because it is then unknown where an image ends.
    """
    places = [place for place, token in enumerate(ids) if token == image_token]
    blocks = sum(token == image_token != before for before, token in pairwise([None, *expanded]))
    if 1 < len(places) < blocks:
        raise BadInput(f"{location}: the model's processor writes images in rows. Use one image per prompt")
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(ids)]
    source: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        chunk, is_last = list(ids[start:end]), end == len(ids)
        first = len(expanded) - len(chunk) if is_last else len(source) + (start > 0)
        while list(expanded[first : first + len(chunk)]) != chunk and first < len(expanded) and not is_last and start:
            first += 1
        if first < len(source) or list(expanded[first : first + len(chunk)]) != chunk:
            raise BadInput(f"{location}: the model's processor changes the text around an image. Use text only")
        source += [-1] * (first - len(source)) + [*range(start, end)]
    return source

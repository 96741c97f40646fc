"""Reading of files that users write: text, JSON, JSON lines and YAML. Every mistake becomes a one-line message."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from headscope.base.user_input import expand_path, quote
from headscope.errors import BadInput, ResourceMissing, did_you_mean

MAX_YAML_DEPTH, MAX_YAML_NODES = 100, 100_000
"""Deepest nesting of a YAML file, and most nodes after its aliases are replaced by what they refer to."""


def read_text_file(file: Path, source_name: str) -> str:
    """The text of a regular file in UTF-8, without a byte order mark.

    Raises FileNotFoundError if it does not exist, and BadInput, which names it `source_name`, for a folder, a pipe or a
    device, and for a file that cannot be read or is not UTF-8.
    """
    try:
        if file.exists() and not file.is_file():
            raise BadInput(f"cannot read {source_name}: it is not a regular file. Give the path of a file")
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"cannot read {source_name}: it is not UTF-8 text (byte {error.start}). Save it as UTF-8"
        ) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadInput(f"cannot read {source_name}: {error.strerror}. Check its path and permissions") from error
    if "\0" in text:
        raise BadInput(f"cannot read {source_name}: it has zero bytes, as UTF-16 or binary data. Save it as UTF-8 text")
    return text


def read_json_lines(file: str, file_kind: str) -> list[tuple[str, Any]]:
    """The values of a file with one JSON value per line, each after its location, as messages name it.

    Blank lines are skipped. `file_kind` names the file in messages. Raises ResourceMissing if the file does not exist,
    BadInput if it cannot be read, or naming the first line that is not JSON.
    """
    try:
        lines = read_text_file(expand_path(file, file_kind), f"{file_kind} '{file}'").split("\n")
    except FileNotFoundError as error:
        raise ResourceMissing(f"no {file_kind} at '{file}'. Check the path") from error
    values = []
    for number, line in enumerate(lines, start=1):
        location = f"'{file}', line {number}"
        try:
            values += [(location, parse_json(line))] if line.strip() else []
        except ValueError as error:
            raise BadInput(f"{location}: {json_fault(error)}. Write one JSON object per line") from error
    return values


def check_keys(content: Any, location: str, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise BadInput, naming the location, for anything but an object with the required keys and no unknown one."""
    if not isinstance(content, dict):
        raise BadInput(f"{location} is not a JSON object: {quote(content)}. Write keys and values in braces")
    known = [*required, *optional]
    problems = [f"no key '{key}'" for key in required if key not in content][:1]
    problems += [f"the unknown key {quote(key)}{did_you_mean(key, known)}" for key in content if key not in known][:1]
    if problems:
        raise BadInput(f"{location} has {' and '.join(problems)}. Use the keys {', '.join(known)}")


def read_json(file: Path, source_name: str) -> Any:
    """The content of a JSON file, which may be large. Raises FileNotFoundError if it does not exist, BadInput for
    another text and for a key that appears twice."""
    try:
        return parse_json(read_text_file(file, source_name))
    except ValueError as error:
        raise BadInput(f"cannot read {source_name}: {json_fault(error)}. Check the file") from error


def json_fault(error: ValueError | RecursionError) -> str:
    """What is wrong with a JSON text, by the error of reading it."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (line {error.lineno}, column {error.colno})"
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start]!a} is half of a character"
    if "sys.set_int_max_str_digits" in str(error):
        return "a number has too many digits"
    return " ".join(str(error).split())[:200]


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError also for deep nesting, for a key that appears twice, of which JSON keeps the last, and for half of
    a character, such as \\ud800, which can be neither stored nor read by a tokenizer.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise ValueError(json_fault(error)) from error
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {quote(key)} appears twice")
        values[key] = value
    return values


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that also refuses repeated keys, and keys without a value inside braces.

    YAML itself would keep the last of repeated keys. An unquoted value with a comma leaves a key without a value.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if node.flow_style and value.start_mark.index == value.end_mark.index:
                    raise BadInput(
                        f"key {quote(key.value)} in line {line} has no value. Quote values that contain a comma"
                    )
                if key.value in lines:
                    raise BadInput(
                        f"key {quote(key.value)} appears twice, in lines {lines[key.value]} and {line}. Keep one"
                    )
                lines[key.value] = line
        return node


def _construct_int(loader: _StrictLoader, node: yaml.ScalarNode) -> int | str:
    """The number; 1:04 is text, which YAML would read as 64 in base 60. Raises BadInput for 0100, octal in YAML."""
    if ":" in node.value:
        return str(node.value)
    if re.fullmatch("[-+]?0[0-9_]+", node.value):
        line = node.start_mark.line + 1
        raise BadInput(
            f"number {quote(node.value)} in line {line} starts with 0. Remove the 0, or put the value in quotes"
        )
    return int(loader.construct_yaml_int(node))


def _construct_float(loader: _StrictLoader, node: yaml.ScalarNode) -> float | str:
    """The number; 1:04.5 is text, which YAML would read in base 60."""
    return str(node.value) if ":" in node.value else float(loader.construct_yaml_float(node))


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_StrictLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def check_yaml_size(text: str) -> None:
    """Raise BadInput for a text that is nested too deeply, or whose aliases stand for too many nodes, before it is
    built."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, total))
            if len(open_nodes) > MAX_YAML_DEPTH:
                raise BadInput("it is nested too deeply. Reduce the nesting")
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = total - start
        elif isinstance(event, yaml.AliasEvent):
            total += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
        if total > MAX_YAML_NODES:
            raise BadInput(f"it has more than {MAX_YAML_NODES:,} values with its aliases. Use fewer aliases")


def read_yaml(file: Path, source_name: str) -> Any:
    """Read a YAML file. Raises FileNotFoundError if it does not exist, BadInput for any other problem."""
    text = read_text_file(file, source_name)
    try:
        check_yaml_size(text)
        return yaml.load(text, _StrictLoader)
    except BadInput as error:
        raise BadInput(f"{source_name}: {error}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"cannot read {source_name}: {reason}. Use a readable YAML file in UTF-8") from error
    except RecursionError as error:
        raise BadInput(f"cannot read {source_name}: it is nested too deeply. Reduce the nesting") from error
    except (
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:  # PyYAML raises these for a value that does not fit its tag
        raise BadInput(
            f"cannot read {source_name}: a value does not match its YAML tag ({error}). Remove the tag"
        ) from error

"""Checkpoints of a training run: found by a pattern, ordered by training step."""

import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from headscope.base import user_input
from headscope.base.model_spec import ANY_WEIGHTS, ModelSpec, shortest_distinct_names, step_of_name
from headscope.errors import BadInput

FAMILY_KEYS = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
"""Entries of config.json that are equal in all checkpoints of one training."""
ADAPTER_MARKER = "@adarope:adapter="


def checkpoint_models(patterns: Iterable[str]) -> dict[str, str]:
    """Expand several patterns (see `expand_checkpoints`) into model specs by label.

    If two patterns give the same label, all labels are lengthened: by folders until they differ, and by the position
    scheme, such as step-10 and step-10 yarn:factor=8. Raises BadInput if two patterns give the same model.
    """
    matches = [item for pattern in patterns for item in expand_checkpoints(pattern).items()]
    if len(dict(matches)) < len(matches):
        parsed = {text: ModelSpec.parse(text) for _, text in matches}
        names = shortest_distinct_names([*dict.fromkeys(spec.name for spec in parsed.values())])
        matches = [(f"{names[parsed[text].name]}{_scheme_suffix(text, parsed[text])}", text) for _, text in matches]
    models: dict[str, str] = {}
    for label, text in matches:
        if label in models:
            raise BadInput(f"two patterns of --checkpoints match '{label}' ('{text}'). Leave one out")
        models[label] = text
    return models


def _scheme_suffix(text: str, spec: ModelSpec) -> str:
    """The position scheme in a label, if the text names one: a checkpoint without one has positions of its own."""
    if not text.endswith(f"@{spec.scheme.text}"):
        return ""
    adapter = spec.scheme.options.get("adapter")
    return f" {spec.scheme.text}" if adapter is None else f" {spec.scheme.name} {Path(adapter).stem}"


def expand_checkpoints(pattern: str) -> dict[str, str]:
    """Model specs by label, one for each match of a pattern, ordered by training step.

    The pattern names folders, GLOB[@SCHEME]; LoRAs on one checkpoint, BASE+GLOB[@SCHEME]; branches and tags on the hub,
    ORG/NAME:GLOB[@SCHEME]; or adapters, CHECKPOINT@adarope:adapter=GLOB. "@" and "+" may also be part of a folder name:
    the longest glob that matches something counts. A label is the end of a path, as long as needed to be unique.
    """
    checkpoint, marker, glob = pattern.partition(ADAPTER_MARKER)
    if marker and has_magic(glob):
        if adapters := [file for file in _matching_paths(glob) if file.is_file()]:
            return _specs_by_step(adapters, f"{checkpoint}{marker}", "")
        raise BadInput(f"no adapter matches '{glob}'. Check the pattern")
    for glob, scheme in _split_from_end(pattern, "@"):
        if folders := _folders_with_file("config.json", glob):
            _check_same_family(folders)
            return _specs_by_step(folders, "", scheme)
        for lora_glob, base in _split_from_start(glob, "+"):
            any_base = ANY_WEIGHTS if lora_glob.endswith(ANY_WEIGHTS) else ""
            if folders := _folders_with_file("adapter_config.json", lora_glob.removesuffix(ANY_WEIGHTS)):
                return _specs_by_step(folders, base, f"{any_base}{scheme}")
    glob, at_sign, scheme = pattern.partition("@")
    repository, colon, revision_glob = glob.partition(":")
    if colon and repository.count("/") == 1 and not user_input.is_folder(repository):
        return _revision_specs(repository, revision_glob, f"{at_sign}{scheme}")
    raise BadInput(f"no checkpoint folder (with a config.json) and no LoRA matches '{pattern}'. Check the pattern")


def _check_same_family(folders: list[Path]) -> None:
    """Raise BadInput if checkpoints differ in model type or geometry: they are not steps of one training."""
    families: dict[str, Path] = {}
    for folder in folders:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # opening the checkpoint gives the reason
            continue
        if isinstance(config, dict):
            families.setdefault(", ".join(f"{key} {config.get(key)}" for key in FAMILY_KEYS), folder)
    if len(families) > 1:
        (first, first_folder), (other, other_folder) = [*families.items()][:2]
        raise BadInput(
            f"checkpoints '{first_folder.name}' ({first}) and '{other_folder.name}' ({other}) are not steps of one "
            "training. Use --model NAME=SPEC for each"
        )


def _specs_by_step(paths: list[Path], prefix: str, suffix: str) -> dict[str, str]:
    labels = _unique_labels(paths)
    specs = {path: f"{prefix}{path}{suffix}" for path in paths}
    steps = {path: ModelSpec(str(path)).step if path.is_dir() else step_of_name(path.name) for path in paths}
    ordered = sorted(paths, key=lambda path: (steps[path] is None, steps[path] or 0, path.name, path))
    return {labels[path]: specs[path] for path in ordered}


def _revision_specs(repository: str, pattern: str, scheme: str) -> dict[str, str]:
    """Specs of the matching branches and tags of a hub repository."""
    from headscope.models.hub import list_revisions

    names = dict.fromkeys(list_revisions(repository))
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        examples = ", ".join([*names][:5])
        raise BadInput(
            f"no branch or tag of '{repository}' matches '{pattern}'. Use another pattern; it has {len(names)}, "
            f"e.g. {examples}"
        )
    steps = {name: step_of_name(name) for name in matches}
    ordered = sorted(matches, key=lambda name: (steps[name] is None, steps[name] or 0, name))
    return {name: f"{repository}:{name}{scheme}" for name in ordered}


def _split_from_end(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """The whole text, then its splits before each separator, from the last to the first."""
    yield text, ""
    for match in reversed([*re.finditer(re.escape(separator), text)]):
        yield text[: match.start()], text[match.start() :]


def _split_from_start(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """The splits behind each separator, from the first to the last: (text behind it, text up to it)."""
    for match in re.finditer(re.escape(separator), text):
        yield text[match.end() :], text[: match.end()]


def _folders_with_file(file_name: str, glob: str) -> list[Path]:
    return [folder for folder in _matching_paths(glob) if (folder / file_name).is_file()]


def _matching_paths(pattern: str) -> list[Path]:
    root = user_input.expand_path(pattern, "checkpoint pattern")
    if root.exists() or not has_magic(pattern):  # a "[" in an existing name is not a glob
        return [root] if root.exists() else []
    fixed = Path(*root.parts[: next(n for n, part in enumerate(root.parts) if has_magic(part))])
    if "**" in root.parts and fixed.resolve() == Path(fixed.resolve().anchor):
        raise BadInput(
            f"checkpoint pattern {user_input.quote(pattern)} would search the whole machine. Start it with a folder"
        )
    try:
        return list(fixed.glob(str(root.relative_to(fixed))))
    except ValueError:  # not a valid glob, such as "**@yarn:factor=4"; a split of it may be one
        return []
    except OSError as error:
        raise BadInput(f"checkpoint pattern {user_input.quote(pattern)} cannot be used ({error}). Check it") from error


def _unique_labels(paths: list[Path]) -> dict[Path, str]:
    """Each path's last part, or as many of its last parts as make all labels unique, such as rope-s0/step-64."""
    names = shortest_distinct_names([str(path).removesuffix(".safetensors") for path in paths])
    return {path: names[str(path).removesuffix(".safetensors")] for path in paths}

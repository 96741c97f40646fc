"""Many checkpoints of one training run: found by a pattern, in the order of their steps."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from headscope import user_input
from headscope.errors import BadInput

MAX_STEP = 2**63 - 1
ADAPTER_MARKER = "@adarope:adapter="


def training_step(checkpoint: str) -> int | None:
    """The training step of a checkpoint: by its trainer's state file, else by its name, else None.

    A name tells it as in "step-10", "checkpoint-10" or "10". Of BASE+LORA the LoRA counts, of ORG/NAME:REVISION the
    revision.
    """
    named = checkpoint if user_input.folder(checkpoint) else checkpoint.rpartition("+")[2]
    folder = Path(named).expanduser()
    if user_input.folder(named):
        state = folder / "trainer_state.json"
        return _step_from_trainer_state(state) if state.is_file() else _step_from_name(folder.name)
    from headscope.models.hub import HubId

    wanted = HubId.read(named)
    return _step_from_name(wanted.revision) if wanted and wanted.revision else None


def _step_from_name(name: str) -> int | None:
    named = re.search(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)", name, re.IGNORECASE) or re.fullmatch(r"(\d+)", name)
    return int(named[1]) if named and int(named[1]) <= MAX_STEP else None


def _step_from_trainer_state(state: Path) -> int:
    """The step that a trainer's state file tells. Raises BadInput where it tells none."""
    mend = "mend that file, or remove it to take the step from the folder's name"
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise BadInput(f"cannot read a training step in '{state}' ({type(error).__name__}): {mend}") from error
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise BadInput(f"cannot read a training step in '{state}' (global_step is {user_input.shown(step)}): {mend}")
    return step


def expand_checkpoints(pattern: str) -> dict[str, str]:
    """One model per match of a pattern, labelled by as much of its path's end as tells all apart, by training step.

    The pattern names folders, GLOB[@SCHEME]; LoRAs on one checkpoint, BASE+GLOB[@SCHEME]; branches and tags on the hub,
    ORG/NAME:GLOB[@SCHEME]; or adapters, CHECKPOINT@adarope:adapter=GLOB. "@" and "+" may also stand in the name of a
    folder: the longest glob that matches something counts.
    """
    checkpoint, adapter, glob = pattern.partition(ADAPTER_MARKER)
    if adapter and has_magic(glob):
        if found := [file for file in _matching_paths(glob) if file.is_file()]:
            return _specs_by_step(found, f"{checkpoint}{adapter}", "")
        raise BadInput(f"no adapter matches '{glob}'")
    for glob, scheme in _split_from_end(pattern, "@"):
        if found := _folders_with_file("config.json", glob):
            return _specs_by_step(found, "", scheme)
        for loras, base in _split_from_start(glob, "+"):
            if found := _folders_with_file("adapter_config.json", loras):
                return _specs_by_step(found, base, scheme)
    glob, at, scheme = pattern.partition("@")
    repository, colon, names = glob.partition(":")
    if colon and repository.count("/") == 1 and not user_input.folder(repository):
        return _revision_specs(repository, names, f"{at}{scheme}")
    raise BadInput(f"no checkpoint folder (with a config.json) matches '{pattern}', and no LoRA's; check the pattern")


def _specs_by_step(paths: list[Path], prefix: str, suffix: str) -> dict[str, str]:
    labels = _unique_labels(paths)
    specs = {path: f"{prefix}{path}{suffix}" for path in paths}
    steps = {path: training_step(str(path)) if path.is_dir() else _step_from_name(path.name) for path in paths}
    ordered = sorted(paths, key=lambda path: (steps[path] is None, steps[path] or 0, path.name, path))
    return {labels[path]: specs[path] for path in ordered}


def _revision_specs(repository: str, pattern: str, scheme: str) -> dict[str, str]:
    """The branches and tags of a hub repository that match."""
    from headscope.models.hub import revisions

    known = dict.fromkeys(revisions(repository))
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        some = ", ".join([*known][:5])
        raise BadInput(f"no branch or tag of '{repository}' matches '{pattern}'; it has {len(known)}, e.g. {some}")
    steps = {name: _step_from_name(name) for name in found}
    ordered = sorted(found, key=lambda name: (steps[name] is None, steps[name] or 0, name))
    return {name: f"{repository}:{name}{scheme}" for name in ordered}


def _split_from_end(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """The text whole, and cut before each `mark`, from the last to the first: what is before, and the rest."""
    yield text, ""
    for each in reversed([*re.finditer(re.escape(separator), text)]):
        yield text[: each.start()], text[each.start() :]


def _split_from_start(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """The text cut behind each `mark`, from the first to the last: what is behind, and the rest."""
    for each in re.finditer(re.escape(separator), text):
        yield text[each.end() :], text[: each.end()]


def _folders_with_file(file_name: str, glob: str) -> list[Path]:
    return [folder for folder in _matching_paths(glob) if (folder / file_name).is_file()]


def _matching_paths(pattern: str) -> list[Path]:
    root = user_input.path(pattern, "checkpoint pattern")
    if root.exists() or not has_magic(pattern):  # a name that holds "[" is not a glob
        return [root] if root.exists() else []
    fixed = Path(*root.parts[: next(n for n, part in enumerate(root.parts) if has_magic(part))])
    if "**" in root.parts and fixed.resolve() == Path(fixed.resolve().anchor):
        raise BadInput(
            f"checkpoint pattern {user_input.shown(pattern)} would search the whole machine: name a folder first"
        )
    try:
        return list(fixed.glob(str(root.relative_to(fixed))))
    except ValueError:  # no glob, as "**@yarn:factor=4" is none; cut, it may be one
        return []
    except OSError as error:
        raise BadInput(f"checkpoint pattern {user_input.shown(pattern)} cannot be used ({error}): check it") from error


def _unique_labels(paths: list[Path]) -> dict[Path, str]:
    """Each path by its last part, or by as many of its last parts as tell all of them apart: rope-s0/step-64."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        labels = {path: str(Path(*path.parts[-count:])).removesuffix(".safetensors") for path in paths}
        if len({*labels.values()}) == len(paths):
            break
    return labels

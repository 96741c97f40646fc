"""Model specs, CHECKPOINT[+LORA[,weights=any]][@SCHEME[:key=value,...]], parsed once and without torch."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath

from headscope.base import user_input
from headscope.errors import BadInput, did_you_mean

SCHEME_NAMES = (
    *("base", "unscaled", "yarn", "linear", "ntk", "abf", "llama3"),
    *("logn", "prope", "nope", "alibi", "adarope"),
)
ANY_WEIGHTS = ",weights=any"
"""Suffix of a LoRA that is applied to another base model than the one that it names."""
MAX_STEP = 2**63 - 1
_STEP_AT_END = re.compile(r"(?:(?:step|checkpoint|ckpt|iter)[-_]?\d+|^\d+)(?:\.safetensors)?$", re.IGNORECASE)


@dataclass(frozen=True)
class HubId:
    """A repository on the hub, with an optional revision."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """Parse ORG/NAME[:REVISION]; None if `text` is not a hub id."""
        match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::([^\s:@]+))?", text)
        return cls(match[1], match[2]) if match else None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}:{self.revision}"


@dataclass(frozen=True)
class SchemeSpec:
    """A position scheme as text, with its name and the text of its options."""

    text: str = "base"
    name: str = "base"
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "SchemeSpec":
        """Parse "NAME[:key=value,...]", e.g. "yarn:factor=8,attention_factor=1".

        Raises BadInput for an unknown name, an item that is not key=value, or a key given twice.
        """
        name, _, rest = text.partition(":")
        if name not in SCHEME_NAMES:
            raise BadInput(
                f"unknown position scheme '{name}'{did_you_mean(name, SCHEME_NAMES)}. "
                f"Use one of: {', '.join(SCHEME_NAMES)}"
            )
        options: dict[str, str] = {}
        for item in rest.split(",") if rest else ():
            key, equals, value = item.partition("=")
            if not equals:
                raise BadInput(f"bad item '{item}' in scheme '{text}'. Write key=value")
            if key in options:
                raise BadInput(f"key '{key}' is given twice in scheme '{text}'. Give it once")
            options[key] = value
        return cls(text, name, options)


def normalized_scheme(text: str) -> str:
    """A scheme with its options in alphabetical order and equal numbers written alike: "yarn:factor=4.0" becomes
    "yarn:factor=4". Names of files stay as they are."""

    def normalized(option: str) -> str:
        key, equals, value = option.partition("=")
        try:
            return option if key == "adapter" else f"{key}{equals}{repr(float(value)).removesuffix('.0')}"
        except ValueError:  # a word
            return option

    name, colon, options = text.partition(":")
    return name + colon + ",".join(map(normalized, sorted(options.split(","))))


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint under a position scheme, as a user wrote it.

    `checkpoint` is a folder, a GGUF file, a shipped name or a hub id; `lora` is the folder or hub id of a LoRA on it.
    A LoRA that names another base model is applied only if `any_base`, written LORA,weights=any.
    """

    checkpoint: str
    lora: str | None = None
    scheme: SchemeSpec = field(default_factory=SchemeSpec)
    any_base: bool = False

    @classmethod
    def parse(cls, text: str) -> "ModelSpec":
        """Parse a spec, split at the last "@" before the name of a scheme; the scheme defaults to "base".

        An existing folder is a checkpoint, whatever its name contains. Raises BadInput for an incomplete spec or an
        invalid scheme.
        """
        if "@" not in text or user_input.is_folder(text):
            name, scheme = text, "base"
        else:
            ends = [match.end() for match in re.finditer("@", text)]
            scheme_starts = [end for end in ends if text[end:].partition(":")[0] in SCHEME_NAMES]
            start = scheme_starts[-1] if scheme_starts else ends[-1]
            name, scheme = text[: start - 1], text[start:]
        if not name or not scheme:
            raise BadInput(
                f"bad model spec '{text}'. Write CHECKPOINT or CHECKPOINT@SCHEME, e.g. smollm2-135m@yarn:factor=8"
            )
        any_base = name.endswith(ANY_WEIGHTS) and "+" in name
        checkpoint, lora = _split_lora(name.removesuffix(ANY_WEIGHTS) if any_base else name)
        return cls(checkpoint, lora, SchemeSpec.parse(scheme), any_base)

    @property
    def name(self) -> str:
        """The checkpoint and its LoRA: CHECKPOINT[+LORA]."""
        return self.checkpoint if self.lora is None else f"{self.checkpoint}+{self.lora}"

    @cached_property
    def step(self) -> int | None:
        """The training step: from the trainer's state file of the LoRA, else of the checkpoint, else from its name.

        Names such as "step-10", "checkpoint-10" or "10" contain a step; of a hub id, the revision counts. Raises
        BadInput for a state file without a step.
        """
        name = self.checkpoint if self.lora is None else self.lora
        if user_input.is_folder(name):
            folder = Path(name).expanduser()
            state = folder / "trainer_state.json"
            return _step_of_trainer(state) if state.is_file() else step_of_name(folder.name)
        hub_id = HubId.parse(name)
        return step_of_name(hub_id.revision) if hub_id and hub_id.revision else None

    @property
    def has_step_in_adapter(self) -> bool:
        """Whether the file name of the AdaRoPE adapter ends with a step: then it is a checkpoint of a training."""
        return self.scheme.name == "adarope" and _ends_with_step(self.scheme.options.get("adapter", ""))

    @property
    def training_folder(self) -> str | None:
        """The folder or the hub repository of the checkpoints of a training: None if no name ends with a step.

        It holds the AdaRoPE adapter if its name ends with a step, else the LoRA or the checkpoint.
        """
        path = self.scheme.options["adapter"] if self.has_step_in_adapter else self.name
        if not _ends_with_step(path):
            return None
        repository, colon, _ = path.rpartition(":")
        return repository if colon else str(PurePath(path).parent)

    @property
    def training_run(self) -> str | None:
        """The name of the training: the last part of its folder or repository."""
        return None if self.training_folder is None else PurePath(self.training_folder).name or "training"


def shortest_distinct_names(paths: Sequence[str]) -> dict[str, str]:
    """Each path's last part, or as many of its last parts as make all names distinct."""
    names: dict[str, str] = {}
    for count in range(1, max((len(PurePath(path).parts) for path in paths), default=0) + 1):
        names = {path: str(PurePath(*PurePath(path).parts[-count:])) for path in paths}
        if len({*names.values()}) == len(names):
            break
    return names


def _ends_with_step(path: str) -> bool:
    return _STEP_AT_END.search(PurePath(path).name) is not None


def step_of_name(name: str) -> int | None:
    """The training step in the name of a folder, a file or a revision; None if it has none."""
    match = re.search(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)", name, re.IGNORECASE) or re.fullmatch(r"(\d+)", name)
    return int(match[1]) if match and int(match[1]) <= MAX_STEP else None


def _step_of_trainer(state: Path) -> int:
    remedy = "Repair that file, or remove it to take the step from the name of the folder"
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise BadInput(f"cannot read a training step in '{state}' ({type(error).__name__}). {remedy}") from error
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise BadInput(f"cannot read a training step in '{state}' (global_step is {user_input.quote(step)}). {remedy}")
    return step


def _split_lora(name: str) -> tuple[str, str | None]:
    """Split CHECKPOINT+LORA at the first "+" before an existing folder, else at the last "+".

    An existing path is never split.
    """
    if user_input.expand_path(name, "checkpoint").exists():
        return name, None
    pluses = [match.start() for match in re.finditer(r"\+", name)]
    for plus in pluses:
        if user_input.is_folder(name[plus + 1 :]):
            return name[:plus], name[plus + 1 :]
    return (name[: pluses[-1]], name[pluses[-1] + 1 :]) if pluses else (name, None)

"""The models of the playground: loaded on demand, and opened again when their files change."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.base import user_input
from headscope.base.model_spec import ModelSpec
from headscope.errors import BadInput

if TYPE_CHECKING:
    from headscope.positions.model import Model

log = logging.getLogger("headscope")

MODEL_FILES = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of the files in a folder from which a model, its tokenizer or a LoRA is opened."""
FileStates = Mapping[Path, tuple[int, ...]]
"""Inode, size and times of last change of files. Each write changes them; they are read without opening the files."""


def file_states(spec: ModelSpec) -> FileStates:
    """The states of the local files of a model: of its checkpoint, its LoRA, and the adapter of its position scheme.

    A hub id or a shipped name has none: what it names does not change while the app runs.
    """
    names = filter(None, (spec.checkpoint, spec.lora, *spec.scheme.options.values()))
    paths = [user_input.expand_path(name, "model") for name in names]
    places = [*paths, *(path.with_suffix(".lora") for path in paths if path.is_file())]  # the LoRA of an adapter
    files = {path for path in places if path.is_file()} | {
        file for place in places for pattern in MODEL_FILES for file in place.glob(pattern)
    }
    statuses = {file: file.stat() for file in files if file.name != "trainer_state.json"}
    return {file: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in statuses.items()}


class ModelSession:
    """The models of the playground, loaded on demand; models of one checkpoint share its weights.

    A model whose files change, as in a training that goes on, is opened again when the prompt is run.
    """

    def __init__(self, specs: Mapping[str, str]):
        self.spec_texts = dict(specs)
        self.specs = {label: ModelSpec.parse(spec) for label, spec in specs.items()}
        self.cache: dict[Any, Any] = {}
        """Results that later requests need again, such as the mean head outputs of mean ablation."""
        self._models: dict[str, Model] = {}
        self._files: dict[str, FileStates] = {}
        self._outdated: set[str] = set()

    @property
    def labels(self) -> list[str]:
        """The labels of the models."""
        return [*self.specs]

    def model(self, label: str) -> "Model":
        """The model with this label."""
        from headscope.models.checkpoint import open_checkpoint
        from headscope.positions.model import Model
        from headscope.positions.schemes import build_scheme

        if label not in self._models:
            spec = self.specs[label]
            self._files.setdefault(label, file_states(spec))  # before they are read, so that no change is missed
            same = (other for name, other in self._models.items() if self.specs[name].name == spec.name)
            loaded = next(same, None)
            checkpoint = open_checkpoint(spec, "auto", "auto", None) if loaded is None else loaded.checkpoint
            self._models[label] = Model(checkpoint, spec.scheme, build_scheme(spec.scheme))
        return self._models[label]

    def start_request(self, task: str) -> None:
        """Close the models whose files have changed since they were opened.

        The page would mix the results of earlier and present weights, so every other task than "predict" raises
        BadInput until the prompt is run again.
        """
        for label in [label for label, states in self._files.items() if file_states(self.specs[label]) != states]:
            log.warning("the files of '%s' have changed. The model is opened again", label)
            self._outdated.add(label)
            del self._files[label]
            for other in [other for other in self._models if self.specs[other].name == self.specs[label].name]:
                del self._models[other]
            self.cache.clear()
        if self._outdated and task != "predict":
            raise BadInput(
                f"the files of '{min(self._outdated)}' have changed since the prompt was run, so the page shows "
                "results of earlier weights. Run the prompt again"
            )

    def finish_request(self, task: str) -> None:
        """Record that a task is done: after "predict", the page shows results of the present models."""
        if task == "predict":
            self._outdated.clear()

    def close_models(self) -> None:
        """Free the memory of the models. The next request loads them again."""
        self._models.clear()

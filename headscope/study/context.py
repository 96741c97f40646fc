"""Opens what a study names: models, one checkpoint at a time, and documents, by each model's own tokenizer."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.errors import BadInput
from headscope.models import loading
from headscope.models.checkpoint import Checkpoint, open_checkpoint, pick_device, pick_dtype
from headscope.positions.model import Model, Spec
from headscope.prompts.texts import TokenDocument, documents
from headscope.study import digests
from headscope.study.config import Study
from headscope.study.progress import Progress, Silent


@dataclass
class Materials:
    """The models and documents of `study`.

    `given` holds models that came in memory, by label; `files` is where a section keeps what no table holds;
    `stored(cell, table)` reads a finished cell, "section/id", back, and `tables(cell)` names its tables. `inputs` are
    digests of what was handed out, by the model it is for (None: for all) and what it is: with other inputs a run does
    not go on. Before a section passes over a document it asks all that stand `beside` it, by the model's label, the
    tokens and the model, for who listens to that pass too.
    """

    study: Study
    given: Mapping[str, Model] = field(default_factory=dict)
    progress: Progress = field(default_factory=Silent)
    files: Path = Path()
    advanced: float = 0.0
    beside: list[Callable[[str, Sequence[int], Model], Callable[[Any], None] | None]] = field(default_factory=list)
    inputs: dict[str | None, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    specs: Mapping[str, Spec] = field(init=False)
    stored: Callable[[str, str], pd.DataFrame] = field(init=False)
    tables: Callable[[str], Sequence[str]] = field(init=False)
    _open: tuple[str, Checkpoint] | None = None
    _checkpoints: dict[str, dict[str, str]] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict)
    _tokenizers: dict[str, Any] = field(default_factory=dict)
    _documents: dict[tuple[int, int], list[TokenDocument]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs = {label: Spec.read(spec) for label, spec in self.study.models.items() if label not in self.given}

    @property
    def labels(self) -> list[str]:
        """The study's models."""
        return list(self.study.models)

    @property
    def seed(self) -> int:
        return self.study.seed

    def checkpoint(self, label: str) -> str:
        """The name of that model's checkpoint."""
        return self.given[label].name if label in self.given else self.specs[label].checkpoint

    def model(self, label: str) -> Model:
        """The model of that label; the checkpoint opened before is dropped unless it is the same."""
        if label in self.given:
            return self.given[label]
        spec = self.specs[label]
        if self._open is None or self._open[0] != spec.checkpoint:
            self._open, self._models = None, {}
            device = pick_device(self.study.device)
            self.inputs[None]["dtype"] = str(pick_dtype(self.study.dtype, device))  # "auto" may be another elsewhere
            self._open = (spec.checkpoint, open_checkpoint(spec.checkpoint, self.study.device, self.study.dtype))
        if label not in self._models:
            self._models[label] = Model(self._open[1], spec.scheme, spec.rule)
        return self._models[label]

    def identify(self, label: str) -> None:
        """Take the digests of a model: of its checkpoint, by its files, and of its adapter. Opens nothing."""
        if label in self.given:
            self.inputs[label] |= {**digests.of_model(self.given[label]), **digests.of_scheme(self.given[label].rule)}
            return
        spec = self.specs[label]
        if spec.checkpoint not in self._checkpoints:
            self._checkpoints[spec.checkpoint] = digests.of_checkpoint(spec.checkpoint)
        self.inputs[label] |= {**self._checkpoints[spec.checkpoint], **digests.of_scheme(spec.rule)}

    def uses(self, what: str, content: digests.Content) -> None:
        """Take the digest of something else that a section reads; `what` says it in a few words."""
        self.inputs[None][what] = digests.digest(content)

    def advance(self, cost: float, doing: str) -> None:
        """Tell of progress within a long cell: a share of its cost, and what is being done."""
        self.advanced += cost
        self.progress.done(cost)
        self.progress.doing(doing)

    def documents(self, label: str, length: int) -> list[TokenDocument]:
        """The study's documents in this model's tokens, each exactly `length` long.

        Every length takes the documents that hold the longest one, so lengths are compared on the same texts.
        """
        tokenizer = self.tokenizer(label)
        key = (id(tokenizer), length)
        if key not in self._documents:
            texts = self.study.texts
            self._documents[key] = documents(texts.source, tokenizer, texts.docs, length, self.study.seed)
        what = f"texts of {length:,} tokens"
        if what not in self.inputs[label]:
            self.inputs[label][what] = digests.of_documents(self._documents[key])
        return self._documents[key]

    def tokenizer(self, label: str) -> Any:
        """The tokenizer of the model of that label, which need not be open."""
        tokenizer = self.given[label].tokenizer if label in self.given else self._own_tokenizer(label)
        if tokenizer is None:
            raise BadInput(f"model '{label}' came without a tokenizer: hs.load(model, tokenizer=...)")
        if "tokenizer" not in self.inputs[label]:
            self.inputs[label]["tokenizer"] = digests.of_tokenizer(tokenizer)
        return tokenizer

    def _own_tokenizer(self, label: str) -> Any:
        checkpoint = self.specs[label].checkpoint
        if checkpoint not in self._tokenizers:
            self._tokenizers[checkpoint] = loading.load_tokenizer(checkpoint)
        return self._tokenizers[checkpoint]

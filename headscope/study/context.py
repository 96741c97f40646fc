"""What the probes of a study share: opened models, tokenizers, documents, and digests of everything that was read."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.base.model_spec import ModelSpec
from headscope.errors import BadInput
from headscope.models import loading
from headscope.models.checkpoint import Checkpoint, open_checkpoint, pick_device, pick_dtype
from headscope.positions.model import Model
from headscope.positions.schemes import Scheme, build_scheme
from headscope.prompts.special_tokens import opening_tokens, with_bos
from headscope.prompts.texts import TokenDocument, load_token_documents
from headscope.study import digests
from headscope.study.config import Study
from headscope.study.progress import NoProgress, Progress

OTHER_WEIGHTS = "other weights of"
"""Start of the names of inputs (heads, scores) that were measured on other weights than those of the model."""


@dataclass
class StudyContext:
    """The models and documents of `study`, opened on demand.

    `in_memory_models` are opened models by label; `files_folder` is for files that are not tables. `completed_cost`
    is the part of the running job's cost that was reported as progress, and `cells_ahead` the number of further
    cells that it has computed beside its own. `read_stored(job_id, table)` reads a table of a finished job, and
    `stored_tables(job_id)` lists its tables; `shared_jobs` are those of the running job. `input_digests` are
    digests by label (None: of all models) and input: an unfinished run continues only from the same inputs.
    `document_digests` are those of the documents' texts by label and document. `measured_lengths` are the context
    lengths of the planned jobs by label, and `prompt_lengths` those of the shortest and longest prompts with answers.
    """

    study: Study
    in_memory_models: Mapping[str, Model] = field(default_factory=dict)
    progress: Progress = field(default_factory=NoProgress)
    files_folder: Path = Path()
    completed_cost: float = 0.0
    cells_ahead: int = 0
    shared_jobs: Mapping[str, str] = field(default_factory=dict)
    input_digests: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    document_digests: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    measured_lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prompt_lengths: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    specs: Mapping[str, ModelSpec] = field(init=False)
    schemes: Mapping[str, Scheme] = field(init=False)
    read_stored: Callable[[str, str], pd.DataFrame] = field(init=False)
    stored_tables: Callable[[str], Sequence[str]] = field(init=False)
    _open: tuple[str, Checkpoint] | None = None
    _checkpoint_digests: dict[str, dict[str, str]] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict)
    _tokenizers: dict[str, Any] = field(default_factory=dict)
    _tokenizers_by_digest: dict[str, Any] = field(default_factory=dict)
    _tokenizers_with_bos: dict[int, Any] = field(default_factory=dict)
    _documents: dict[tuple[int, int], list[TokenDocument]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = self.study.models.items()
        self.specs = {label: ModelSpec.parse(spec) for label, spec in specs if label not in self.in_memory_models}
        self.schemes = {label: build_scheme(spec.scheme) for label, spec in self.specs.items()}

    @property
    def labels(self) -> list[str]:
        """Labels of the study's models."""
        return list(self.study.models)

    @property
    def seed(self) -> int:
        """The random seed of the study."""
        return self.study.seed

    def checkpoint_name(self, label: str) -> str:
        """The name of that model's checkpoint."""
        return self.in_memory_models[label].name if label in self.in_memory_models else self.specs[label].name

    def model(self, label: str) -> Model:
        """The model of that label. Opening another checkpoint drops the previous one."""
        if label in self.in_memory_models:
            return self.in_memory_models[label]
        spec = self.specs[label]
        if self._open is None or self._open[0] != spec.name:
            self._open, self._models = None, {}
            device = pick_device(self.study.device)
            dtype = pick_dtype(self.study.dtype, device)
            self.input_digests[""]["dtype"] = str(dtype)  # "auto" may resolve differently on another machine
            tokenizer = self._load_tokenizer(label)
            self._open = (spec.name, open_checkpoint(spec, self.study.device, self.study.dtype, tokenizer))
        if label not in self._models:
            self._models[label] = Model(self._open[1], spec.scheme, self.schemes[label])
        return self._models[label]

    def record_model_digests(self, label: str) -> None:
        """Record digests of a model's checkpoint files and adapter, without opening them."""
        if label in self.in_memory_models:
            model = self.in_memory_models[label]
            self.input_digests[label] |= {**digests.digest_model(model), **digests.digest_scheme(model.position_scheme)}
            return
        spec = self.specs[label]
        if spec.name not in self._checkpoint_digests:
            self._checkpoint_digests[spec.name] = digests.digest_checkpoint(spec)
        self.input_digests[label] |= {
            **self._checkpoint_digests[spec.name],
            **digests.digest_scheme(self.schemes[label]),
        }

    def record_input(self, name: str, content: digests.DigestParts) -> None:
        """Record the digest of another input that a probe reads; `name` appears in messages."""
        self.input_digests[""][name] = digests.compute_digest(content)

    def record_other_weights(self, label: str, source: str, digest: str) -> None:
        """Record that a model is measured with heads or scores of other weights, as the user allowed."""
        self.input_digests[label][f"{OTHER_WEIGHTS} {source}"] = digest

    def read_cell(self, probe: str, cell: str, table: str) -> pd.DataFrame:
        """A table of a finished cell that the running one needs; other probes may have observed the same pass."""
        name = f"{probe}/{cell}"
        return self.read_stored(self.shared_jobs.get(name, name), table)

    def advance(self, cost: float, description: str = "") -> None:
        """Report progress within a long job: a share of its cost, and what is being done if that changes."""
        self.completed_cost += cost
        self.progress.advance(cost)
        if description:
            self.progress.set_activity(description)

    def documents(self, label: str, length: int) -> list[TokenDocument]:
        """The study's documents in this model's tokens, each exactly `length` tokens long."""
        tokenizer = self.tokenizer(label)
        key = (id(tokenizer), length)
        if key not in self._documents:
            texts = self.study.texts
            self._documents[key] = load_token_documents(texts.source, tokenizer, texts.docs, length, self.study.seed)
        name = f"texts of {length:,} tokens"
        if name not in self.input_digests[label]:
            self.input_digests[label][name] = digests.digest_documents(self._documents[key])
            self.document_digests[label] |= {document.name: document.digest for document in self._documents[key]}
        return self._documents[key]

    def tokenizer(self, label: str) -> Any:
        """The tokenizer of that model, which need not be open, with the study's choice of BOS."""
        tokenizer = (
            self.in_memory_models[label].tokenizer if label in self.in_memory_models else self._load_tokenizer(label)
        )
        if tokenizer is None:
            raise BadInput(f"model '{label}' has no tokenizer. Pass one: hs.load(model, tokenizer=...)")
        if "tokenizer" not in self.input_digests[label]:
            self.input_digests[label]["tokenizer"] = digests.digest_tokenizer(tokenizer)
        if id(tokenizer) not in self._tokenizers_with_bos:
            self._tokenizers_with_bos[id(tokenizer)] = with_bos(tokenizer, self.study.bos)
        return self._tokenizers_with_bos[id(tokenizer)]

    def opening_tokens(self, label: str) -> list[str] | None:
        """The special tokens that begin every prompt and text of that model; None if it has no tokenizer."""
        model = self.in_memory_models.get(label)
        return None if model is not None and model.tokenizer is None else opening_tokens(self.tokenizer(label))

    def _load_tokenizer(self, label: str) -> Any:
        """The tokenizer of that model's checkpoint. Checkpoints with equal tokenizer files share one."""
        checkpoint = self.specs[label].checkpoint
        if checkpoint not in self._tokenizers:
            digest = digests.digest_tokenizer_files(Path(loading.locate(checkpoint)[0]))
            if digest not in self._tokenizers_by_digest:
                self._tokenizers_by_digest[digest] = loading.load_tokenizer(checkpoint)
            self._tokenizers[checkpoint] = self._tokenizers_by_digest[digest]
        return self._tokenizers[checkpoint]

"""Digests of the inputs of a run, so that an interrupted run continues only from the same inputs.

For a checkpoint or an adapter the digests are of its files, so that they can be compared before anything is opened.
So equal weights in other files, such as other shards, count as changed: a refusal may be needless, but no run continues
from other weights.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headscope import user_input
from headscope.model_spec import ModelSpec
from headscope.models import loading
from headscope.models.conversion import DIGESTS_FILE, SOURCE_FILE, file_digest
from headscope.positions.adarope import find_adapter_file, lora_folder_of
from headscope.positions.model import Model
from headscope.positions.schemes import AdaRoPEScheme, Scheme
from headscope.prompts.texts import TokenDocument

DigestParts = Iterable[str | bytes | Sequence[int] | np.ndarray]
"""Texts, bytes and token ids."""

WEIGHTS_AND_TRAINING_STATE = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json"),
    *("trainer_state.json", "generation_config.json", "README.md", DIGESTS_FILE, SOURCE_FILE),
)
"""Patterns of the files of a checkpoint folder that no tokenizer reads."""


def compute_digest(parts: DigestParts) -> str:
    """One digest of all parts and the boundaries between them."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        data = encoded if isinstance(encoded, bytes) else np.asarray(encoded, np.int64).tobytes()
        digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()


def digest_files(files: Iterable[Path]) -> str:
    """Digest of files and their names."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} ".encode() + file_digest(file))
    return digest.hexdigest()


def digest_checkpoint(spec: ModelSpec) -> dict[str, str]:
    """Digests of a checkpoint by input: configuration, weights and LoRA."""
    folder = Path(loading.locate(spec.checkpoint)[0])
    inputs = {
        "configuration": digest_files([folder / "config.json"]),
        "weights": digest_files(file for file in folder.glob("*.safetensors") if file.is_file()),
    }
    if spec.lora is None:
        return inputs
    return {**inputs, "LoRA": digest_files(loading.locate_lora(spec).glob("adapter_*"))}


def digest_tokenizer_files(folder: Path) -> str:
    """Digest of the files of a checkpoint folder that its tokenizer may read: all but weights and training state."""
    files = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    return digest_files(
        file for file in files if file.is_file() and not any(map(file.match, WEIGHTS_AND_TRAINING_STATE))
    )


def digest_scheme(scheme: Scheme) -> dict[str, str]:
    """Digests of the adapter that a position scheme reads, with its LoRA or its key map, by input."""
    if not isinstance(scheme, AdaRoPEScheme):
        return {}
    if scheme.keys is None:
        return {"adapter": digest_adarope_adapter(scheme.adapter)}
    checkpoint = user_input.expand_path(scheme.adapter, "checkpoint")
    files = list(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    keys = user_input.expand_path(scheme.keys, "key map")
    return {"adapter": digest_files(files), "key map": digest_files([keys] if keys.is_file() else [])}


def digest_adarope_adapter(name: str) -> str:
    """Digest of an adapter (a path or the name of a shipped one) and of the LoRA in its folder."""
    file = find_adapter_file(name)
    return digest_files([file, *(part for part in lora_folder_of(file).glob("adapter_*") if part.is_file())])


def digest_model(model: Model) -> dict[str, str]:
    """The identity of an opened model by input. No file may describe the model, so every part is digested by value."""
    identity = model.identity
    described = {
        "configuration": identity.configuration,
        "constants of modules": identity.constants,
        "hooks": identity.hooks,
        "headscope contexts": identity.contexts,
        "quantization": identity.quantization,
    }
    return {
        "weights": identity.weights.exact,
        "dtype": str(identity.dtype),
        "positions": str(identity.positions),
        **{name: compute_digest([json.dumps(value, sort_keys=True)]) for name, value in described.items()},
    }


def digest_tokenizer(tokenizer: Any) -> str:
    """Digest of a tokenizer's rules and chat template, without its padding and truncation settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else getattr(tokenizer, "get_vocab", dict)()
    rules = {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
    template = getattr(tokenizer, "chat_template", None)
    special = sorted(map(str, getattr(tokenizer, "all_special_tokens", ())))
    return compute_digest([json.dumps([rules, template, special], sort_keys=True)])


def digest_documents(documents: Iterable[TokenDocument]) -> str:
    """Digest of the names and token ids of documents."""
    return compute_digest(part for document in documents for part in (document.name, document.ids))

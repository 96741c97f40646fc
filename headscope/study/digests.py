"""Digests of the inputs of a run, so that an interrupted run continues only from the same inputs.

For a checkpoint or an adapter the digests are of its files, so that they can be compared before anything is opened.
So equal weights in other files, such as other shards, count as changed: a refusal may be needless, but no run continues
from other weights.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from headscope.base import user_input
from headscope.base.model_spec import ModelSpec
from headscope.errors import InputChanged
from headscope.models import loading
from headscope.models.conversion import DIGESTS_FILE, SOURCE_FILE, file_digest
from headscope.positions.adarope import find_adapter_file, lora_folder_of
from headscope.positions.model import Model
from headscope.positions.schemes import AdaRoPEScheme, Scheme
from headscope.prompts.texts import TokenDocument

log = logging.getLogger("headscope")

LIBRARIES = ("headscope", "torch", "transformers", "pandas", "pyarrow")
COMPUTING = ("headscope", "torch", "transformers", "triton")
"""Libraries whose version may change a measured number."""


@cache
def library_versions() -> Mapping[str, str]:
    """The versions of this process, by library; on a GPU also that of Triton, "none" without it."""
    import torch

    versions = {name: version(name) for name in LIBRARIES}
    return versions | {"triton": _triton_version()} if torch.cuda.is_available() else versions


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def check_versions(stored: Sequence[Mapping[str, str]], partial: Path) -> None:
    """Compare the versions of finished work items with those of this process.

    Warns if the version of a library that computes numbers differs. Raises InputChanged for another major version: the
    first number of a version, or the first two if the first is 0.
    """
    if any("headscope" not in versions for versions in stored):
        raise InputChanged(
            "cannot resume this run: its finished work items were measured with an unknown earlier headscope. "
            f"Delete {partial} to start again"
        )
    for name in COMPUTING:
        current = library_versions().get(name, "none")
        for earlier in dict.fromkeys(versions[name] for versions in stored if name in versions):
            if earlier == current:
                continue
            if _major(earlier) != _major(current):
                raise InputChanged(
                    f"cannot resume this run: its finished work items were measured with {name} {earlier}, and {name} "
                    f"{current} may compute other numbers. Install {name} {earlier}, or delete {partial} to start again"
                )
            log.warning(
                "this run was started with %s %s and continues with %s; its work items may differ slightly. Delete %s "
                "to measure everything with one version",
                *(name, earlier, current, partial),
            )


def other_versions(versions: Mapping[str, str]) -> str:
    """The recorded versions that differ from those of this process, such as "torch 2.12.0"; "" if none does."""
    recorded = [name for name in COMPUTING if name in versions]
    return ", ".join(
        f"{name} {versions[name]}" for name in recorded if versions[name] != library_versions().get(name, "none")
    )


def _major(text: str) -> tuple[int, ...]:
    """The numbers of a version whose change may change results."""
    numbers = tuple(map(int, re.findall(r"\d+", text)[:2]))
    return numbers[:1] if numbers and numbers[0] else numbers


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

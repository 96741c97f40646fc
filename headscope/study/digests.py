"""What a run is made from, as digests: a run that goes on must go on from the same.

Of a checkpoint or an adapter its files count, so that they can be compared before anything is opened.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope import user_input
from headscope.models import loading
from headscope.positions import lora
from headscope.positions.adarope import adapter_file
from headscope.positions.model import Model
from headscope.positions.schemes import Adapted, Scheme
from headscope.prompts.texts import TokenDocument

DigestParts = Iterable[str | bytes | Sequence[int] | np.ndarray]
"""Texts, bytes and token ids."""


def compute_digest(parts: DigestParts) -> str:
    """One digest of all the parts, each told apart from the next."""
    whole = hashlib.sha256()
    for part in parts:
        plain = part.encode() if isinstance(part, str) else part
        data = plain if isinstance(plain, bytes) else np.asarray(plain, np.int64).tobytes()
        whole.update(f"{len(data)} ".encode() + data)
    return whole.hexdigest()


def digest_files(files: Iterable[Path]) -> str:
    """Digest of files and their names; large ones are never in memory as a whole."""
    whole = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            whole.update(f"{file.name} ".encode() + hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def digest_checkpoint(name: str) -> dict[str, str]:
    """Digests of a checkpoint's configuration, weights and LoRA, by what they are."""
    base, adapter = loading.split(name)
    folder = Path(loading.locate(base)[0])
    made_of = {
        "configuration": digest_files([folder / "config.json"]),
        "weights": digest_files(folder.glob("*.safetensors")),
    }
    if adapter is None:
        return made_of
    return {**made_of, "LoRA": digest_files(each for each in loading.lora_folder(adapter).glob("adapter_*"))}


def digest_scheme(scheme: Scheme) -> dict[str, str]:
    """Digest of the adapter that a position scheme reads, with the LoRA beside it or the key map it is read by."""
    if not isinstance(scheme, Adapted):
        return {}
    if scheme.keys is None:
        return {"adapter": digest_adapter(scheme.adapter)}
    trained = user_input.path(scheme.adapter, "checkpoint")
    files = list(trained.glob("*.safetensors")) if trained.is_dir() else [trained]
    keys = user_input.path(scheme.keys, "key map")
    return {"adapter": digest_files(files), "key map": digest_files([keys] if keys.is_file() else [])}


def digest_adapter(name: str) -> str:
    """Digest of an adapter, given by path or by the name of a shipped one, and of the LoRA beside it."""
    file = adapter_file(name)
    return digest_files([file, *(each for each in lora.beside(file).glob("adapter_*") if each.is_file())])


def digest_model(model: Model) -> dict[str, str]:
    """Digests of a model that came in memory, by what they are: its positions may be at hand, and told by no text."""
    positions, geometry = model.schedule, model.geometry
    visible = torch.tensor([[1, positions.reference_length, 8 * positions.reference_length]], device=model.device)
    made_of: list[Tensor] = [] if positions.slopes is None else [positions.slopes]
    for layer in range(geometry.layers):
        made_of += [positions.theta(layer), torch.tensor(positions.factor(layer))]
        made_of += [positions.query_scale(layer, visible)] if positions.scales_queries else []
    return {
        "configuration": compute_digest([model.module.config.to_json_string()]),
        "weights": model.weights_sha256,
        "dtype": str(model.module.dtype),
        "positions": compute_digest(each.detach().cpu().numpy().tobytes() for each in made_of),
    }


def digest_tokenizer(tokenizer: Any) -> str:
    """Digest of how a tokenizer makes tokens and wraps a chat; not of how it was last asked to pad or cut."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else getattr(tokenizer, "get_vocab", dict)()
    rules = {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
    template = getattr(tokenizer, "chat_template", None)
    special = sorted(map(str, getattr(tokenizer, "all_special_tokens", ())))
    return compute_digest([json.dumps([rules, template, special], sort_keys=True)])


def digest_documents(documents: Iterable[TokenDocument]) -> str:
    """Digest of documents: their names and token ids."""
    return compute_digest(part for document in documents for part in (document.name, document.ids))

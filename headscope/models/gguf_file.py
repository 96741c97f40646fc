"""Metadata of a GGUF file: the settings of its architecture and the tensors of rotary factors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from headscope.errors import BadInput, UnsupportedModel

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors of the rotary frequencies [pairs]: of all texts, or of texts beyond and within the original length."""


@dataclass(frozen=True, eq=False)
class GgufFile:
    """The metadata of a GGUF file.

    `settings` are the keys of its architecture, without the prefix "ARCHITECTURE."; `divisors` its tensors of rotary
    factors [pairs], float32.
    """

    path: Path
    architecture: str
    settings: dict[str, Any]
    divisors: dict[str, Tensor]
    tensor_names: frozenset[str]

    def setting(self, *names: str, default: Any) -> Any:
        """A setting that has several names. Raises UnsupportedModel if they contradict each other."""
        values = {name: self.settings[name] for name in names if name in self.settings}
        if len({*values.values()}) > 1:
            first, *_, last = values
            raise self.unsupported_error(last, f"contradicts '{self.architecture}.{first}'")
        return next(iter(values.values()), default)

    def unsupported_error(self, key: str, reason: str) -> UnsupportedModel:
        """The error for a setting that the model of transformers cannot have."""
        value = f" ({self.settings[key]})" if key in self.settings and not isinstance(self.settings[key], list) else ""
        name = f"{self.architecture}.{key}" if key in self.settings else key
        return UnsupportedModel(
            f"cannot open GGUF file '{self.path}': its setting '{name}'{value} {reason}. Use the folder or the hub id "
            "that it was made from"
        )


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file. Raises BadInput if it is a part, or has no weights for some layers.

    transformers would allocate the whole model and fill missing layers with random numbers.
    """
    reader = GGUFReader(path)
    if "split.count" in reader.fields and (parts := reader.fields["split.count"].contents()) > 1:
        raise BadInput(f"GGUF file '{path}' is one of {parts} parts. Merge them with llama-gguf-split --merge")
    names = frozenset(tensor.name for tensor in reader.tensors)
    if not names:
        raise BadInput(f"GGUF file '{path}' has no weights. Download the file with the weights")
    architecture = reader.fields["general.architecture"].contents()
    prefix = f"{architecture}."
    settings = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    layers = settings["block_count"]
    present = {int(name.split(".")[1]) for name in names if name.startswith("blk.")}
    if missing := sorted({*range(layers)} - present):
        listed = ", ".join(map(str, missing[:3]))
        raise BadInput(
            f"GGUF file '{path}' lacks the weights of {len(missing)} of {layers} layers, e.g. {listed}. Download it "
            "again"
        )
    divisors = {
        tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)).float().flatten()
        for tensor in reader.tensors
        if tensor.name in ROPE_TENSORS
    }
    return GgufFile(path, architecture, settings, divisors, names)

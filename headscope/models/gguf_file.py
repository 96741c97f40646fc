"""A GGUF file: its metadata, the settings of some architectures, and weights that transformers does not load."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import PreTrainedModel

from headscope.compat import transformers as compat
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
    if missing := sorted({*range(min(layers, len(present) + 3))} - present):
        listed, count = ", ".join(map(str, missing[:3])), layers - sum(layer < layers for layer in present)
        raise BadInput(
            f"GGUF file '{path}' lacks the weights of {count} of {layers} layers, e.g. {listed}. Download it again"
        )
    divisors = {
        tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)).float().flatten()
        for tensor in reader.tensors
        if tensor.name in ROPE_TENSORS
    }
    return GgufFile(path, architecture, settings, divisors, names)


def family_values(file: GgufFile) -> dict[str, Any]:
    """Values of the configuration for the families below; empty for others.

    Raises UnsupportedModel for settings that transformers cannot express.
    """
    match file.architecture:
        case "falcon":
            return _falcon(file)
        case "gemma4":
            return _gemma4(file)
    return {}


def _falcon(file: GgufFile) -> dict[str, Any]:
    if file.settings["attention.head_count_kv"] != 1:
        raise file.unsupported_error(
            "attention.head_count_kv", "is not 1: transformers cannot read the order of its weights"
        )
    return {"multi_query": True}


def _gemma4(file: GgufFile) -> dict[str, Any]:
    """Head dimensions, KV heads and feed-forward widths by layer, keys shared between layers, embeddings by layer."""
    settings, layers = file.settings, file.settings["block_count"]
    sliding = settings.get("attention.sliding_window_pattern")
    if not isinstance(sliding, list) or len(sliding) != layers or all(sliding) or not any(sliding):
        raise file.unsupported_error(
            "attention.sliding_window_pattern", "does not name layers with and without a window"
        )
    groups, widths = settings["attention.head_count_kv"], settings["feed_forward_length"]
    groups = groups if isinstance(groups, list) else [groups] * layers
    widths = widths if isinstance(widths, list) else [widths] * layers
    if {*widths} - {widths[0], 2 * widths[0]}:
        raise file.unsupported_error("feed_forward_length", "is neither equal in all layers nor double in some")
    full = sliding.index(False)
    return {
        "head_dim": settings["attention.key_length_swa"],
        "global_head_dim": settings["attention.key_length"],
        "num_key_value_heads": groups[sliding.index(True)],
        "num_global_key_value_heads": groups[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensor_names,
        "num_kv_shared_layers": settings.get("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": 2 * widths[0] in widths,
        "hidden_size_per_layer_input": settings.get("embedding_length_per_layer_input", 0),
    }


def copy_weights_without_suffix(module: PreTrainedModel, file: GgufFile, missing: Iterable[str]) -> set[str]:
    """Copy `missing` parameters such as Gemma 4's `layer_scalar`, and return those that the file lacks too.

    llama.cpp appends ".weight" to the names of their tensors, and transformers does not find them.
    """
    lacking = set(missing)
    if not lacking:
        return lacking
    parameters = {f"{name}.weight": key for name, key in _parameter_names(module, file).items() if key in lacking}
    states = module.state_dict()
    with torch.no_grad():
        for tensor in GGUFReader(file.path).tensors:
            if (key := parameters.get(tensor.name)) is not None:
                values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
                states[key].copy_(values.reshape(states[key].shape))
                lacking.remove(key)
    return lacking


def refuse_unused_tensors(module: PreTrainedModel, file: GgufFile, unused: Iterable[str]) -> None:
    """Refuse weights that transformers drops silently, such as biases that its class does not have.

    `unused` are the tensors that transformers reports as unused; it does so for some architectures only.
    """
    if file.architecture in compat.GGUF_ARCHITECTURES.resolve():
        dropped = sorted(unused)
    else:
        names = _parameter_names(module, file)
        dropped = sorted(
            name
            for name in file.tensor_names - {*ROPE_TENSORS, "output.weight"}
            if name not in names and name.removesuffix(".weight") not in names
        )
    if dropped:
        raise UnsupportedModel(
            f"cannot open GGUF file '{file.path}': transformers does not use its tensor '{dropped[0]}' "
            f"({len(dropped)} in all). Use the folder or the hub id that it was made from"
        )


def _parameter_names(module: PreTrainedModel, file: GgufFile) -> Mapping[str, str]:
    """The parameters of the model by the names of their tensors."""
    processors, default = compat.GGUF_TENSOR_PROCESSORS.resolve(), compat.GGUF_TENSOR_PROCESSOR.resolve()
    processor = processors.get(file.architecture, default)(config=module.config.to_dict())
    names: Mapping[str, str] = compat.GGUF_WEIGHTS_MAP.resolve()(module, processor)
    return names

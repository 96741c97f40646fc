"""Weights of a GGUF file that transformers does not load: unused tensors, and parameters without the suffix .weight."""

from collections.abc import Iterable, Mapping

import torch
from gguf import GGUFReader, dequantize
from transformers import PreTrainedModel
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from headscope.errors import UnsupportedModel
from headscope.models.gguf_file import ROPE_TENSORS, GgufFile


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
    if file.architecture in GGUF_CONFIG_ARCHS:
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
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=module.config.to_dict())
    names: Mapping[str, str] = get_gguf_hf_weights_map(module, processor)
    return names

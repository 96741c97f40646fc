"""Weights of a GGUF file that transformers does not load: unused tensors, and parameters without the suffix .weight."""

from collections.abc import Iterable, Mapping

import torch
from gguf import GGUFReader, dequantize
from transformers import PreTrainedModel

from headscope.compat import transformers as compat
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

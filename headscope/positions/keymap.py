"""AdaRoPE trained elsewhere, inside a checkpoint: which of its tensors are xi, tau and gamma is told by a key map.

A key map is a YAML file of patterns; {layer} stands for the layer's number:

    xi: model.layers.{layer}.self_attn.adafreq.log_freq     # log-frequencies, [kv groups, pairs]
    tau: model.layers.{layer}.self_attn.adascale.tau        # temperatures, [heads]
    gamma: model.layers.{layer}.self_attn.adascale.gamma    # growth, [heads]
    reference_length: 8192                                  # L_ref, by default the native context

A tensor with one row a query head is accepted for xi where the heads of a group agree. Without tau or gamma they are
1 and 0. Where training started is not known: the checkpoint's own frequencies, 1 and 0 count as the start.
"""

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headscope import user_input
from headscope.errors import BadInput, Missing, nearest
from headscope.models.checkpoint import LoadedModel
from headscope.positions.adapter_validation import refuse_unsound
from headscope.positions.adarope import AdaRoPE
from headscope.positions.schedule import Fixed


class KeyMap(BaseModel):
    """The content of a key map file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    xi: str
    tau: str | None = None
    gamma: str | None = None
    reference_length: int | None = Field(None, ge=1)


def mapped(trained: Path | str, keys: Path | str, checkpoint: LoadedModel) -> AdaRoPE:
    """AdaRoPE's parameters out of `trained` (a .safetensors file or a folder of them) by the key map `keys`.

    Raises Missing if either is not there, BadInput for a key map that cannot be read, a key that is not in
    it, or a tensor that does not fit the geometry of `checkpoint`.
    """
    key_map, stored = (
        _read(user_input.expand_path(keys, "key map")),
        _tensors(user_input.expand_path(trained, "checkpoint")),
    )
    geometry = checkpoint.geometry
    shape = (geometry.kv_groups, geometry.pairs)
    adarope = AdaRoPE.untrained(checkpoint, Fixed.own(checkpoint), key_map.reference_length)
    wanted = {"xi": shape, "tau": (geometry.heads,), "gamma": (geometry.heads,)}
    with torch.no_grad():
        for name, fitting in wanted.items():
            pattern = getattr(key_map, name)
            for layer in range(geometry.layers if pattern else 0):
                key = pattern.replace("{layer}", str(geometry.layer_numbers[layer]))
                if key not in stored:
                    raise BadInput(f"'{trained}' has no tensor '{key}'{nearest(key, stored)}: check {name} in '{keys}'")
                refuse_unsound(stored[key], name, f"'{key}' of '{trained}'")
                tensor = stored[key].float().squeeze()
                if name == "xi" and tensor.shape == (geometry.heads, geometry.pairs):
                    tensor = _by_group(tensor, geometry.kv_groups, key)
                if tensor.shape != torch.empty(fitting).squeeze().shape:
                    raise BadInput(f"'{key}' has shape {tuple(stored[key].shape)}, '{checkpoint.name}' needs {fitting}")
                getattr(adarope, name)[layer] = tensor.reshape(fitting)
    return adarope.to(checkpoint.device)


def _by_group(tensor: Tensor, groups: int, key: str) -> Tensor:
    """Frequencies of query heads [H, P] as those of their groups [G, P]."""
    grouped = tensor.reshape(groups, -1, tensor.shape[-1])
    if not torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
        raise BadInput(f"'{key}' gives query heads of one KV group different frequencies, which share a key")
    return grouped[:, 0]


def _read(file: Path) -> KeyMap:
    try:
        return KeyMap.model_validate(user_input.read_yaml(file, f"key map '{file}'"))
    except FileNotFoundError as error:
        raise Missing(f"no key map at '{file}': check keys=PATH") from error
    except ValidationError as error:
        raise BadInput(
            f"key map '{file}' cannot be used: it needs xi (and takes tau, gamma, reference_length), each a pattern "
            "such as model.layers.{layer}.self_attn.xi"
        ) from error


def _tensors(trained: Path) -> dict[str, Tensor]:
    files = sorted(trained.glob("*.safetensors")) if trained.is_dir() else [trained]
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"'{trained}' is not a readable safetensors file ({error})") from error
    if not tensors:
        raise Missing(f"no .safetensors file in '{trained}': check adapter=PATH")
    return tensors

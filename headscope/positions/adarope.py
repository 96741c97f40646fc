"""AdaRoPE's parameters: log-frequencies per KV group, temperature and growth per head.

(ICML 2026, equations AdaFreq and AdaScale.)

theta_f = exp(xi_f); the query is multiplied by lambda(n) = (1/tau) ln(1 + max(n, L_ref) / L_ref)^gamma, where n is the
number of keys the query sees, so cached decoding and a full pass agree. Parameters are float32 whatever the model's
dtype. An adapter file is safetensors (the parameters and what they started from) with json metadata.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headscope import user_input
from headscope.errors import BadInput, Missing
from headscope.models.checkpoint import LoadedModel
from headscope.positions import adapter_validation, lora
from headscope.positions.schedule import Schedule, refuse_shared_keys, refuse_without_rotation

FORMAT = "headscope-adarope/1"
METADATA = "headscope"
"""The one entry of a file's metadata: a JSON object."""
LEARNED = ("xi", "tau", "gamma")
SHIPPED = Path(__file__).parents[1] / "adapters"
"""Adapters that come with headscope, named after the alias of their checkpoint."""


def adapter_file(path: Path | str) -> Path:
    """The file of an adapter, given by path or by the name of a shipped one; Missing if it is not there."""
    file = user_input.expand_path(path, "adapter")
    shipped = SHIPPED / f"{path}.safetensors"
    if not file.is_file() and not shipped.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.safetensors")))
        raise Missing(f"no adapter at '{path}': check adapter=PATH, or name a shipped one: {names}")
    return file if file.is_file() else shipped


class AdaRoPE(nn.Module):
    """A schedule with learned parameters. T layers, G kv groups, P rotary pairs, H heads.

    xi [T, G, P] log rad/token; tau, gamma [T, H]; `*_init` buffers hold what they started from (`theta_init` the
    frequencies themselves, so that an untrained adapter rotates by exactly those). `rotary_factor` [T] multiplies cos
    and sin: 1 where every dimension rotates (tau then carries YaRN's temperature), YaRN's own factor where some
    dimensions pass unrotated and tau could not express it.
    """

    rotates = True
    scales_queries = True
    slopes = None

    def __init__(
        self,
        theta: Tensor,
        tau: Tensor,
        gamma: Tensor,
        rotary_factor: Tensor,
        reference_length: int,
        metadata: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        learned = (theta.float().log(), tau, gamma)
        self.xi, self.tau, self.gamma = (nn.Parameter(t.detach().float().clone()) for t in learned)
        self.register_buffer("theta_init", theta.detach().float().clone())
        for name in LEARNED:
            self.register_buffer(f"{name}_init", getattr(self, name).detach().clone())
        self.register_buffer("rotary_factor", rotary_factor.detach().float().clone())
        self.reference_length = reference_length
        self.by_sequence = False
        self.lora: Path | None = None
        self.metadata = dict(metadata or {})

    @classmethod
    def untrained(cls, checkpoint: LoadedModel, start: Schedule, reference_length: int | None = None) -> "AdaRoPE":
        """Parameters under which the model behaves exactly as under `start` (YaRN, usually), ready to learn.

        1/tau = m^2 with the start's attention factor m, gamma = 0, L_ref the native context (paper, context extension).
        """
        refuse_without_rotation(checkpoint, "adarope")
        refuse_shared_keys(checkpoint)
        geometry = checkpoint.geometry
        shape = (geometry.kv_groups, geometry.pairs)
        theta = torch.stack([start.theta(layer).expand(shape) for layer in range(geometry.layers)])
        factors = torch.tensor([start.factor(layer) for layer in range(geometry.layers)])
        tau, gamma = start.temperatures()
        if 2 * geometry.pairs < geometry.head_dim or any(f != 1 for f in checkpoint.rotation.factors):
            tau = torch.ones_like(tau)
        else:
            factors = torch.ones_like(factors)
        metadata = {"checkpoint": checkpoint.name, "weights_sha256": checkpoint.weights_sha256}
        return cls(theta, tau, gamma, factors, reference_length or geometry.native_context, metadata)

    def theta(self, layer: int) -> Tensor:
        init, start = torch.as_tensor(self.theta_init)[layer], torch.as_tensor(self.xi_init)[layer]
        # A frequency of 0 has no logarithm and stays 0.
        return init * torch.where(start.isfinite(), self.xi[layer] - start, 0.0).exp()

    def factor(self, layer: int) -> float:
        return float(torch.as_tensor(self.rotary_factor)[layer])

    def query_scale(self, layer: int, visible: Tensor) -> Tensor:
        """lambda(n) for every head: n [B, Lq] -> [B, H, Lq]; `by_sequence` takes the longest n for every query."""
        if self.by_sequence:
            visible = visible.amax(-1, keepdim=True).expand_as(visible)
        grown = torch.log1p(visible.to(self.tau.dtype).clamp(min=self.reference_length) / self.reference_length)
        tau, gamma = (t[layer].to(visible.device)[None, :, None] for t in (self.tau, self.gamma))
        return torch.as_tensor(grown[:, None] ** gamma / tau)

    def log_theta_init(self, layer: int) -> Tensor:
        return torch.as_tensor(self.xi_init)[layer]

    def temperatures(self) -> tuple[Tensor, Tensor]:
        return self.tau.detach(), self.gamma.detach()

    def initial(self) -> "AdaRoPE":
        """The same adapter as it was before learning."""
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for name in LEARNED:
                getattr(twin, name).copy_(getattr(twin, f"{name}_init"))
        return twin

    @property
    def step(self) -> int | None:
        """Optimiser steps that made it, if known."""
        return self.metadata.get("step")

    @property
    def sha256(self) -> str:
        """Digest of the parameters, and of the LoRA beside them if there is one."""
        tensors = self.tensors()
        digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
        if self.lora is not None:
            digest.update(lora.sha256(self.lora).encode())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """What an adapter file holds: the learned parameters as they now are, and what they started from."""
        stored = {name: tensor for name, tensor in self.named_buffers() if "." not in name}
        stored |= {name: torch.as_tensor(getattr(self, name)) for name in LEARNED}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}

    def save(self, path: Path | str, **metadata: Any) -> Path:
        """Write the adapter file; keyword arguments join its json metadata."""
        path = Path(path)
        notes = {"format": FORMAT, "reference_length": self.reference_length, **self.metadata, **metadata}
        # One entry: safetensors writes several in no fixed order, and the same adapter should be the same bytes.
        save_file(self.tensors(), path, {METADATA: json.dumps(notes)})
        return path

    @classmethod
    def load(cls, path: Path | str, checkpoint: LoadedModel, any_weights: bool = False) -> "AdaRoPE":
        """Read an adapter file for `checkpoint`, with the LoRA beside it if it was learned with one.

        Raises Missing if there is none, BadInput if it is no readable adapter, was made for another geometry or, unless
        `any_weights`, learned on other weights.
        """
        path = adapter_file(path)
        refuse_without_rotation(checkpoint, "adarope")
        refuse_shared_keys(checkpoint)
        try:
            with safe_open(path, "pt") as file:
                notes = adapter_validation.metadata((file.metadata() or {}).get(METADATA, "{}"), path, FORMAT)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"'{path}' is not a readable safetensors file ({error})") from error
        geometry = checkpoint.geometry
        by_pair = (geometry.layers, geometry.kv_groups, geometry.pairs)
        by_head = (geometry.layers, geometry.heads)
        expected: dict[str, tuple[int, ...]] = {"xi": by_pair, "tau": by_head, "gamma": by_head}
        expected |= {f"{name}_init": shape for name, shape in expected.items()}
        expected |= {"theta_init": by_pair, "rotary_factor": (geometry.layers,)}
        lacking = expected.keys() - tensors.keys()
        if lacking:
            raise BadInput(f"adapter '{path}' lacks {', '.join(sorted(lacking))}: it is damaged, so learn it again")
        if others := sorted(tensors.keys() - expected.keys()):
            raise BadInput(f"adapter '{path}' holds {', '.join(others)}, which no adapter has: is it another's?")
        for name, shape in expected.items():
            if tuple(tensors[name].shape) != shape:
                raise BadInput(
                    f"adapter '{path}' does not fit '{checkpoint.name}': its {name} is {tuple(tensors[name].shape)}, "
                    f"the model needs {shape}; use an adapter learned on this checkpoint"
                )
        for name in expected:
            adapter_validation.refuse_unsound(tensors[name], name, f"adapter '{path}'", tensors["theta_init"])
        adapter_validation.refuse_odd(notes, f"adapter '{path}'")
        learned_on = notes.get("weights_sha256")
        if learned_on not in (None, checkpoint.weights_sha256) and not any_weights:
            raise BadInput(
                f"adapter '{path}' was learned on other weights ('{notes.get('checkpoint')}', sha256 "
                f"{learned_on[:12]}) than those of '{checkpoint.name}' ({checkpoint.weights_sha256[:12]}): learn one "
                "on these, or use it all the same with adarope:adapter=PATH,weights=any"
            )
        start = (tensors["theta_init"], tensors["tau"], tensors["gamma"], tensors["rotary_factor"])
        adarope = cls(*start, notes.pop("reference_length"), notes)
        adarope.load_state_dict(tensors)
        adarope.lora = lora.beside(path) if "lora" in notes else None
        return adarope.to(checkpoint.device)

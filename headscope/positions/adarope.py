"""AdaRoPE's parameters (log-frequencies per KV group, temperature and growth exponent per head) and adapter files.

(ICML 2026, equations AdaFreq and AdaScale.)

theta_f = exp(xi_f). The query is multiplied by lambda(n) = (1/tau) ln(1 + max(n, L_ref) / L_ref)^gamma, where n is the
number of keys that the query sees, so cached decoding and a full pass agree. Parameters are float32 for every dtype of
the model. An adapter file is a safetensors file with the parameters, their initial values and JSON metadata.
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

from headscope.attention.geometry import Geometry
from headscope.base import user_input
from headscope.base.model_identity import WeightDigests
from headscope.base.output_files import Output
from headscope.base.public_functions import checked_methods
from headscope.errors import BadInput, ResourceMissing
from headscope.models.checkpoint import LoadedModel
from headscope.models.lora import WEIGHTS_FILE
from headscope.positions.adapter_validation import parse_metadata, validate_metadata, validate_parameter
from headscope.positions.schedule import Schedule, require_own_keys, require_rotation

FORMAT = "headscope-adarope/1"
ADAPTER = Output("an AdaRoPE adapter", b"headscope-adarope/", "path")
METADATA_KEY = "headscope"
"""The only entry of an adapter file's metadata: a JSON object."""
LEARNED_PARAMETERS = ("xi", "tau", "gamma")
SHIPPED_ADAPTERS = Path(__file__).parents[1] / "adapters"
"""The folder of packaged adapters, named after the alias of their checkpoint."""


def find_adapter_file(path: Path | str) -> Path:
    """The file of an adapter, from its path or a packaged name. Raises ResourceMissing if it does not exist."""
    file = user_input.expand_path(path, "adapter")
    packaged = SHIPPED_ADAPTERS / f"{path}.safetensors"
    if not file.is_file() and not packaged.is_file():
        names = ", ".join(sorted(packaged.stem for packaged in SHIPPED_ADAPTERS.glob("*.safetensors")))
        raise ResourceMissing(f"no adapter at '{path}'. Check adapter=PATH, or use a packaged adapter: {names}")
    return file if file.is_file() else packaged


def lora_folder_of(adapter_file: Path) -> Path:
    """The folder of the LoRA that was trained with an adapter: step-0010.safetensors -> step-0010.lora."""
    return adapter_file.with_suffix(".lora")


@checked_methods
class AdaRoPE(nn.Module):
    """AdaRoPE parameters as a trainable position schedule.

    Parameters have one row for each of T layers; G, P and H are the largest numbers of KV groups, rotary pairs and
    heads in any layer. A layer with fewer of them (`geometry`) does not use the rest, which keeps a frequency of 0.
    xi [T, G, P] log rad/token; tau, gamma [T, H]. The `*_init` buffers hold the initial values, and `theta_init` the
    initial frequencies themselves, so that an untrained adapter rotates by exactly those. `rotary_factor` [T]
    multiplies cos and sin: 1 if every dimension rotates (tau then includes YaRN's temperature), otherwise YaRN's
    factor, which tau cannot express because it would also scale the unrotated dimensions.
    """

    replaces_rotation = True
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
        initial_values = (theta.float().log(), tau, gamma)
        self.xi, self.tau, self.gamma = (nn.Parameter(t.detach().float().clone()) for t in initial_values)
        self.register_buffer("theta_init", theta.detach().float().clone())
        for name in LEARNED_PARAMETERS:
            self.register_buffer(f"{name}_init", getattr(self, name).detach().clone())
        self.register_buffer("rotary_factor", rotary_factor.detach().float().clone())
        self.reference_length = reference_length
        self.uses_sequence_length = False
        self.lora_folder: Path | None = None
        self.geometry: Geometry | None = None
        self.metadata = dict(metadata or {})

    @classmethod
    def from_schedule(cls, checkpoint: LoadedModel, start: Schedule, reference_length: int | None = None) -> "AdaRoPE":
        """Initial parameters under which the model behaves exactly as under `start` (usually YaRN).

        1/tau is the constant factor on all logits under `start` (m^2 with the attention factor m of YaRN, unless it
        stays in `rotary_factor`), gamma = 0, L_ref the native context (paper, context extension). Raises
        UnsupportedModel for a checkpoint without rotation or with layers that share keys.
        """
        require_rotation(checkpoint, "adarope")
        require_own_keys(checkpoint)
        geometry = checkpoint.geometry
        theta = torch.zeros(geometry.layers, geometry.kv_groups, geometry.pairs)
        for layer, groups in enumerate(geometry.layer_kv_groups):
            theta[layer, :groups, : geometry.layer_pairs[layer]] = start.theta(layer)
        factors = torch.tensor([start.attention_factor(layer) for layer in range(geometry.layers)])
        tau, gamma = start.tau_and_gamma()
        is_partial = any(2 * n < dim for n, dim in zip(geometry.layer_pairs, geometry.layer_head_dims, strict=True))
        if is_partial or any(f != 1 for f in checkpoint.rotation.factors):
            ratios = torch.tensor([start.softmax_ratio(layer) for layer in range(geometry.layers)])
            tau = (1 / ratios)[:, None].expand_as(tau)
        else:
            factors = torch.ones_like(factors)
        weights = checkpoint.identity.weights
        metadata = {"checkpoint": checkpoint.name, **weights.to_record()}
        adarope = cls(theta, tau, gamma, factors, reference_length or geometry.native_context, metadata)
        adarope.geometry = geometry
        return adarope

    def theta(self, layer: int) -> Tensor:
        theta_init, xi_init = self._at("theta_init", layer), self._at("xi_init", layer)
        # A frequency of 0 has no finite logarithm and stays 0.
        theta = theta_init * torch.where(xi_init.isfinite(), self.xi[layer] - xi_init, 0.0).exp()
        return self._of_layer(theta, layer)

    def _at(self, name: str, layer: int) -> Tensor:
        return torch.as_tensor(getattr(self, name))[user_input.check_index(layer, len(self.xi), "layer")]

    def _of_layer(self, by_group_and_pair: Tensor, layer: int) -> Tensor:
        """The KV groups and pairs that a layer has, of [G, P]."""
        if self.geometry is None:
            return by_group_and_pair
        return by_group_and_pair[: self.geometry.layer_kv_groups[layer], : self.geometry.layer_pairs[layer]]

    def attention_factor(self, layer: int) -> float:
        return float(self._at("rotary_factor", layer))

    def softmax_ratio(self, layer: int) -> float:
        user_input.check_index(layer, len(self.xi), "layer")
        return 1.0  # tau includes it

    def query_scale(self, layer: int, visible: Tensor) -> Tensor:
        """lambda(n) by head: n [B, Lq] -> [B, H, Lq]; with `uses_sequence_length` n is the longest of the sequence."""
        if self.uses_sequence_length:
            visible = visible.amax(-1, keepdim=True).expand_as(visible)
        growth = torch.log1p(visible.to(self.tau.dtype).clamp(min=self.reference_length) / self.reference_length)
        of_layer = [self._at(name, layer).to(visible.device) for name in ("tau", "gamma")]
        heads = slice(None if self.geometry is None else self.geometry.layer_heads[layer])
        tau, gamma = (t[None, heads, None] for t in of_layer)
        return torch.as_tensor(growth[:, None] ** gamma / tau)

    def log_theta_init(self, layer: int) -> Tensor:
        return self._of_layer(self._at("xi_init", layer), layer)

    def tau_and_gamma(self) -> tuple[Tensor, Tensor]:
        return self.tau.detach(), self.gamma.detach()

    def untrained_copy(self) -> "AdaRoPE":
        """A copy with the initial parameters."""
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for name in LEARNED_PARAMETERS:
                getattr(twin, name).copy_(getattr(twin, f"{name}_init"))
        return twin

    @property
    def step(self) -> int | None:
        """Number of optimiser steps of its training, or None if unknown."""
        return self.metadata.get("step")

    @property
    def sha256(self) -> str:
        """Digest of the parameters and of the LoRA that was trained with them, if any."""
        tensors = self.tensors()
        digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
        if self.lora_folder is not None:
            digest.update(hashlib.sha256((self.lora_folder / WEIGHTS_FILE).read_bytes()).hexdigest().encode())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of an adapter file: current parameters, their initial values and the rotary factors."""
        tensors = {name: tensor for name, tensor in self.named_buffers() if "." not in name}
        tensors |= {name: torch.as_tensor(getattr(self, name)) for name in LEARNED_PARAMETERS}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def save(self, path: Path | str, **metadata: Any) -> Path:
        """Write the adapter file; keyword arguments are added to its JSON metadata. An older adapter is replaced.

        Raises CannotWrite if there is another file, or if the file cannot be written.
        """
        all_metadata = {"format": FORMAT, "reference_length": self.reference_length, **self.metadata, **metadata}
        # One entry: safetensors writes several in no fixed order, and equal adapters should have equal bytes.
        metadata_text = {METADATA_KEY: json.dumps(all_metadata)}
        return ADAPTER.write(path, lambda draft: save_file(self.tensors(), draft, metadata_text))

    @classmethod
    def load(cls, path: Path | str, checkpoint: LoadedModel, any_weights: bool = False) -> "AdaRoPE":
        """Load an adapter file for `checkpoint`, with the LoRA that was trained with it, if any.

        Raises ResourceMissing if the file does not exist, BadInput if it is not a readable adapter, belongs to another
        geometry or, unless `any_weights`, was trained on other weights.
        """
        path = find_adapter_file(path)
        source = f"adapter '{path}'"
        require_rotation(checkpoint, "adarope")
        require_own_keys(checkpoint)
        try:
            with safe_open(path, "pt") as file:
                metadata = parse_metadata((file.metadata() or {}).get(METADATA_KEY, "{}"), path, FORMAT)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"'{path}' is not a readable safetensors file. Check adapter=PATH") from error
        geometry = checkpoint.geometry
        by_pair = (geometry.layers, geometry.kv_groups, geometry.pairs)
        by_head = (geometry.layers, geometry.heads)
        expected: dict[str, tuple[int, ...]] = {"xi": by_pair, "tau": by_head, "gamma": by_head}
        expected |= {f"{name}_init": shape for name, shape in expected.items()}
        expected |= {"theta_init": by_pair, "rotary_factor": (geometry.layers,)}
        if missing := sorted(expected.keys() - tensors.keys()):
            raise BadInput(f"{source} is damaged: it lacks {', '.join(missing)}. Download it again, or retrain it")
        if unknown := sorted(tensors.keys() - expected.keys()):
            raise BadInput(f"{source} holds unknown tensors: {', '.join(unknown)}. Check adapter=PATH")
        for name, shape in expected.items():
            if tuple(tensors[name].shape) != shape:
                raise BadInput(
                    f"{source} does not fit '{checkpoint.name}': its {name} has shape {tuple(tensors[name].shape)}, "
                    f"the model needs {shape}. Use an adapter trained on this checkpoint"
                )
        for name in expected:
            validate_parameter(tensors[name], name, source, tensors["theta_init"])
        validate_metadata(metadata, source)
        own = checkpoint.identity.weights
        trained = WeightDigests.from_record(metadata.get("weights"), metadata.get("weights_sha256"))
        if not trained.matches(own) and not any_weights:
            raise BadInput(
                f"{source} was trained on other weights ('{metadata.get('checkpoint')}', sha256 "
                f"{trained.label[:12]}) than those of '{checkpoint.name}' ({own.label[:12]}). Train "
                "one on these weights, or use it anyway with adarope:adapter=PATH,weights=any"
            )
        initial_values = (tensors["theta_init"], tensors["tau"], tensors["gamma"], tensors["rotary_factor"])
        adarope = cls(*initial_values, metadata.pop("reference_length"), metadata)
        adarope.load_state_dict(tensors)
        adarope.geometry = geometry
        adarope.lora_folder = lora_folder_of(path) if "lora" in metadata else None
        return adarope.to(checkpoint.device)

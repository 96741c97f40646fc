"""Placement of weights: size estimates before weights are read, and models with layers on two devices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from support import families, missing_kernel
from support.refusals import refuses
from support.simulated_devices import FIRST, SECOND, enforcing_devices, spread
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.accelerate import _get_device_map

import headscope as hs
from headscope import api
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.logits import token_losses
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.interventions.edits import edit_units, edited
from headscope.interventions.heads import Unit
from headscope.interventions.kinds import DocumentMean, Noise, Uniform, Zero
from headscope.interventions.position_kinds import KVQuantization, PositionReset
from headscope.interventions.replay import Replay
from headscope.models import device_map
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve_schedule
from headscope.positions.model import Model
from headscope.training.adapter_trainer import AdapterTrainer, frozen_weights
from probes.measure.run import measure_tokens

IDS = torch.arange(40) * 7 % 119 + 3
FAMILIES = ["llama-gqa", "gemma3"]
LAYERS_ON_FIRST = 2
"""The other two of four layers are on the second device."""
DEVICES = {layer: FIRST if layer < LAYERS_ON_FIRST else SECOND for layer in range(4)}


# Before weights are loaded -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("device_map") / "tiny")


@pytest.mark.parametrize("shards", [1, 3])
def test_weight_bytes_are_read_from_file_headers(folder: Path, tmp_path: Path, shards: int) -> None:
    module = hs.load(str(folder), device="cpu").module
    size = sum(p.numel() * 4 for p in module.parameters())
    module.save_pretrained(tmp_path, max_shard_size=size // shards + 20_000)
    (tmp_path / "other.safetensors").write_bytes(b"not read")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    assert device_map.weight_bytes(tmp_path, torch.float32) == device_map.weight_bytes(tmp_path, None) == size
    assert device_map.weight_bytes(tmp_path, torch.bfloat16) == size / 2


@pytest.mark.parametrize(("dtype", "smaller"), [("fp32", ("--dtype bf16", "0.3 MB")), ("bf16", ())])
def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, smaller: tuple[str, ...]
) -> None:
    monkeypatch.setattr(device_map, "free_bytes", lambda device: 100_000)
    loads: list[bool] = []
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(lambda *_, **__: loads.append(True)))
    with refuses(BadInput, f"'{folder}'", "0.1 MB", "cpu", "--device", *smaller) as raised:
        hs.load(str(folder), device="cpu", dtype=dtype)
    assert not loads
    error = str(raised.value)
    assert "\n" not in error
    assert ("--dtype" in error) == bool(smaller)


@pytest.mark.parametrize(("limits", "free"), [(("max", "max"), None), (("max", "5000"), 4300), (("900", "5000"), 200)])
def test_free_bytes_respect_control_group_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[str, str], free: int | None
) -> None:
    """A job in two nested control groups with 1,000 bytes used, 300 of them by reclaimable cached files."""
    monkeypatch.setattr(device_map, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(device_map, "CGROUP_MEMBERSHIP", tmp_path / "cgroup")
    cpu = torch.device("cpu")
    machine = device_map.free_bytes(cpu)
    assert machine is not None
    for limit, group in zip(limits, ("slurm/job_1", "slurm"), strict=True):
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / group / "memory.current").write_text("1000\n")
        (tmp_path / group / "memory.stat").write_text("anon 700\ninactive_file 300\n")
    (tmp_path / "cgroup").write_text("1:name=systemd:/other\n0::/slurm/job_1\n")
    available = device_map.free_bytes(cpu)
    assert available == free if free is not None else available is not None and available > machine / 2


def test_weights_are_placed_on_one_gpu_on_all_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = device_map.weight_bytes(folder, torch.float32)
    gpu = torch.device("cuda")

    def placement(*free: float, spread: bool = True, quantized: bool = False) -> dict[str, Any]:
        sizes = [int(share * needed) for share in free]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda gpu: (sizes[gpu if isinstance(gpu, int) else gpu.index or 0], 0)
        )
        return device_map.placement_options("tiny", folder, gpu, torch.float32, spread, quantized)

    assert placement(1.2, 1.2) == {}
    assert placement(1.2, quantized=True) == {"device_map": {"": gpu}}
    two = placement(0.8, 0.7)
    assert two["device_map"] == "auto"
    assert two["max_memory"] == {
        gpu: int(device_map.MAX_FILL * int(share * needed)) for gpu, share in enumerate((0.8, 0.7))
    }
    for refused in (lambda: placement(0.8), lambda: placement(0.4, 0.4), lambda: placement(0.8, 0.8, spread=False)):
        with refuses(BadInput, "'tiny'", "--dtype bf16"):
            refused()


def test_layers_are_not_split(folder: Path) -> None:
    """With the device map that transformers computes for a model without weights and two GPUs."""
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        empty = families.SPECS["llama-gqa"].build()
    size = device_map.weight_bytes(folder, torch.float32)
    fits = _get_device_map(empty, "auto", {0: int(0.8 * size), 1: int(0.8 * size)}, None)
    assert {*fits.values()} == {0, 1}
    layers = [name for name in fits if name.startswith("model.layers.")]
    assert {name.count(".") for name in layers} == {2}
    assert len(layers) == config["num_hidden_layers"]


@pytest.mark.parametrize("place", ["disk", "cpu", "layers on disk", "nowhere"])
def test_a_model_whose_weights_are_offloaded_is_refused_with_the_first_of_them(tmp_path: Path, place: str) -> None:
    with torch.device("meta" if place == "nowhere" else "cpu"):
        module = families.SPECS["llama-gqa"].build()
    first = "model.embed_tokens.weight"
    if place == "disk":
        accelerate.disk_offload(module, tmp_path, torch.device("cpu"))
    elif place == "cpu":
        accelerate.cpu_offload(module, torch.device("cpu"))
    elif place == "layers on disk":
        parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        layers = {f"model.layers.{layer}": "cpu" if layer < LAYERS_ON_FIRST else "disk" for layer in range(4)}
        accelerate.dispatch_model(module, parts | layers, "cpu", offload_dir=tmp_path, force_hooks=True)
        first = f"model.layers.{LAYERS_ON_FIRST}.self_attn.q_proj.weight"
    with refuses(BadInput, "'in-memory llama'", f"'{first}'", "CPU", "bf16"):
        hs.load(module)


# Layers on two devices -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def loaded_models(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """A model on one device, and the same model on two."""
    if missing_kernel.IN_WHOLE_SESSION:
        pytest.skip(missing_kernel.NEEDS_NAME)
    one_device = hs.load(families.SPECS[request.param].build())
    module = spread(families.SPECS[request.param].build(), LAYERS_ON_FIRST)
    with enforcing_devices():
        return one_device, hs.load(module)


@pytest.fixture
def models(loaded_models: tuple[Model, Model]) -> Iterator[tuple[Model, Model]]:
    with enforcing_devices():
        yield loaded_models


def test_simulated_devices_refuse_to_mix_tensors() -> None:
    with enforcing_devices():
        a, b = torch.ones(3, device=FIRST), torch.ones(3).to(SECOND)
        assert (a.device, b.device, (a + 1).device) == (FIRST, SECOND, FIRST)
        assert (a.to(SECOND) + b).sum().item() == 6
        for other in (b, torch.ones(3)):
            with pytest.raises(RuntimeError, match="on the same device"):
                _ = a + other


def adapter(model: Model) -> AdaRoPE:
    """An adapter whose parameters differ by layer, group and head."""
    adarope = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=2"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adarope.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adarope.to(model.device)


def test_checkpoint_on_two_devices_has_equal_geometry_and_digest(models: tuple[Model, Model]) -> None:
    one_device, two = models
    assert two.device == FIRST
    assert two.geometry == one_device.geometry
    assert torch.equal(two.rotation.theta, one_device.rotation.theta)
    assert two.weights_sha256 == one_device.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["yarn:factor=2", "logn:length=32"])
def test_measured_tables_are_bit_identical_on_two_devices(models: tuple[Model, Model], scheme: str) -> None:
    tables = ["attention", "pairs", "distance", "nll"]
    expected, actual = (measure_tokens(model.with_scheme(scheme), IDS, tables, 20) for model in models)
    assert actual.keys() == expected.keys()
    for table, columns in expected.items():
        for name, column in columns.items():
            np.testing.assert_array_equal(actual[table][name], column, err_msg=f"{table}.{name}")


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.module(IDS.to(model.device)[None], use_cache=False).logits
    return output.cpu()


def test_listeners_and_edits_get_tensors_on_the_device_of_their_layer(models: tuple[Model, Model]) -> None:
    devices: dict[int, set[torch.device]] = {}

    def listen(record: AttentionRecord) -> None:
        tensors = (record.q, record.k, record.v, record.z, record.lse, record.visible_counts)
        devices[record.layer] = {tensor.device for tensor in tensors}

    outputs = []
    for model in models:
        reset = PositionReset("joint", adapter(model), resolve_schedule(model, "yarn:factor=2"), model.geometry)
        kinds = {
            (0, 0): (reset,),
            (0, 1): (Zero(), KVQuantization(4)),
            (1, 2): (DocumentMean(), Uniform()),
            (1, 3): (Noise(0.1),),
        }
        edits = [
            edit_units(kind, [Unit(layer, group, head) for layer in range(4)], model.geometry)
            for (group, head), members in kinds.items()
            for kind in members
        ]
        with attached(model, adapter(model)), edited(model, edits) as layers:
            layers.listen(listen)
            for layer in range(4):
                layers.edit_qkv(layer, lambda q, k, v, positions: (q * (1 + positions[:, None, :, None] % 2), k, v))
            outputs.append(logits(model))
    assert devices == {layer: {device} for layer, device in DEVICES.items()}
    assert torch.equal(*outputs)


def test_cached_keys_are_on_the_device_of_their_layer_and_answers_are_equal(models: tuple[Model, Model]) -> None:
    prompt = IDS.numpy().astype(np.int32)
    generators = [PrefixCachedGenerator(model.with_scheme("yarn:factor=2")) for model in models]
    for generator in generators:
        generator.block_size = 16
    answers = [
        [generator.generate(p, lambda _: None, 3, lambda _: False) for p in (prompt, prompt[:20])]
        for generator in generators
    ]
    assert answers[0] == answers[1]
    assert [layer.keys.device for layer in generators[1]._cache.layers] == [*DEVICES.values()]


@pytest.mark.slow
def test_replayed_losses_and_gradients_are_equal_on_two_devices(models: tuple[Model, Model]) -> None:
    """Losses with one head ablated in each layer, and the gradients of the loss with respect to each layer's heads."""

    def total_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return token_losses(logits, targets).sum()

    def replayed(model: Model) -> tuple[list[Tensor], list[Tensor]]:
        replay = Replay(model, adapter(model), IDS.to(model.device)[None], memory_bytes=1e9)
        gradients: dict[int, Tensor] = {}
        with replay.capturing():
            replay.record_streams()
            runs = [[edit_units(Zero(), [Unit(layer, 0, 1)], model.geometry)] for layer in range(4)]
            losses = [of_run for _, of_run in replay.losses(runs)]
            replay.backpropagate([total_loss], lambda layer, z, call, grads: gradients.update({layer: grads[0]}))
        return losses, [gradients[layer] for layer in range(4)]

    (losses, gradients), (spread_losses, spread_gradients) = map(replayed, models)
    assert [gradient.device for gradient in spread_gradients] == [*DEVICES.values()]
    for expected, actual in zip([*losses, *gradients], [*spread_losses, *spread_gradients], strict=True):
        assert torch.equal(expected, actual.cpu())


def test_trained_adapters_are_equal_on_two_devices(models: tuple[Model, Model]) -> None:
    trained = []
    for model in models:
        with frozen_weights(model):
            adarope = adapter(model)
            AdapterTrainer(model, adarope, (0.03, 0.003, 0.0)).step([IDS], 1.0)
        trained.append([parameter.detach().cpu() for parameter in adarope.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*trained, strict=True))


PROBES: dict[str, dict[str, Any]] = {
    "patterns": {"lengths": [40], "rows": 8, "docs": 1},
    "detectors": {"periods": [12], "sequences": 1},
    "influence": {
        "lengths": [40],
        "components": ["zero"],
        "estimate_order": 1,
        "verify_top": 1,
        "memory": 0,
        "docs": 1,
    },
    "attribution": {"lengths": [40], "docs": 1},
    "needle": {"lengths": [160], "depths": 1, "needles": 1, "template": "plain", "attribution": False},
    "patching": {"pairs": ["induction"], "count": 1, "length": 16, "verify_top": 1, "verify_random": 1},
    "paths": {"pairs": ["induction"], "count": 1, "length": 16, "verify_top": 1, "verify_random": 1},
}


@pytest.mark.exhaustive(sample=2)
@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES)
def test_probes_store_equal_tables_on_two_devices(probe: str, tmp_path: Path) -> None:
    options = {**PROBES[probe], "quiet": True}
    if probe != "detectors":
        options["text"] = save_texts(tmp_path / "texts", 200)
    one_device = hs.load(families.SPECS["llama-gqa"].build(), tokenizer=tokenizer())
    expected = api.probe_function(probe)(one_device, out=tmp_path / "one", **options)
    with enforcing_devices():
        two = hs.load(spread(families.SPECS["llama-gqa"].build(), LAYERS_ON_FIRST), tokenizer=tokenizer())
        actual = api.probe_function(probe)(two, out=tmp_path / "two", **options)
    tables = [file.stem for file in expected.path.glob("*.parquet")]
    assert len(tables) > 2  # two of them describe positions
    assert all(actual.table(table).equals(expected.table(table)) for table in tables)

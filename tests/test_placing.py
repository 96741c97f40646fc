"""Checkpoints larger than a device: what they need is known before they are read, and layers may lie on two devices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import families
from support.simulated_devices import FIRST, SECOND, enforced, spread
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.accelerate import _get_device_map

import headscope as hs
from headscope import api
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.interventions import ABLATIONS, PositionReset, Unit, layer_output_edit, zero_ablation
from headscope.forward.logits import token_losses
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.forward.replay import Replay
from headscope.models import device_map as placing
from headscope.models import memory
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.model import Model
from headscope.training.adapter_trainer import AdapterTrainer, frozen_weights
from probes.measure.run import measure_tokens

IDS = torch.arange(40) * 7 % 119 + 3
FAMILIES = ["llama-gqa", "gemma3"]
ON_FIRST = 2
"""Layers of four."""
PLACES = {layer: FIRST if layer < ON_FIRST else SECOND for layer in range(4)}


# Before weights are read ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("placing") / "tiny")


def parameters(folder: Path) -> int:
    return sum(p.numel() for p in hs.load(str(folder), device="cpu").module.parameters())


@pytest.mark.parametrize("shards", [1, 3])
def test_what_weights_need_is_told_by_their_files(folder: Path, tmp_path: Path, shards: int) -> None:
    module = hs.load(str(folder), device="cpu").module
    size = sum(p.numel() * 4 for p in module.parameters())
    module.save_pretrained(tmp_path, max_shard_size=size // shards + 20_000)
    (tmp_path / "other.safetensors").write_bytes(b"not read")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    assert placing.weight_bytes(tmp_path, torch.float32) == placing.weight_bytes(tmp_path, None) == size
    assert placing.weight_bytes(tmp_path, torch.bfloat16) == size / 2


@pytest.mark.parametrize(("dtype", "advice"), [("fp32", "--dtype bf16 (0.3 MB)"), ("bf16", "use another --device")])
def test_weights_that_do_not_fit_are_refused_in_one_line_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, advice: str
) -> None:
    monkeypatch.setattr(placing, "free_bytes", lambda device: 100_000)
    read: list[bool] = []
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(lambda *_, **__: read.append(True)))
    with pytest.raises(BadInput) as told:
        hs.load(str(folder), device="cpu", dtype=dtype)
    assert not read
    said = str(told.value)
    assert "\n" not in said
    assert said.startswith(f"cannot open '{folder}': its weights take ")
    assert "the 0.1 MB that cpu has free" in said
    assert advice in said


@pytest.mark.parametrize(("limits", "free"), [(("max", "max"), None), (("max", "5000"), 4300), (("900", "5000"), 200)])
def test_a_container_or_a_job_leaves_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[str, str], free: int | None
) -> None:
    """A job in a group in a group, 1,000 bytes used, 300 of them by files that could be read again."""
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "cgroup")
    cpu = torch.device("cpu")
    machine = memory.free_bytes(cpu)
    assert machine is not None
    for limit, group in zip(limits, ("slurm/job_1", "slurm"), strict=True):
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / group / "memory.current").write_text("1000\n")
        (tmp_path / group / "memory.stat").write_text("anon 700\ninactive_file 300\n")
    (tmp_path / "cgroup").write_text("1:name=systemd:/other\n0::/slurm/job_1\n")
    found = memory.free_bytes(cpu)
    assert found == free if free is not None else found is not None and found > machine / 2


def test_weights_go_to_one_gpu_to_all_or_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = placing.weight_bytes(folder, torch.float32)
    gpu = torch.device("cuda")

    def placed(*free: float, spread: bool = True, quantised: bool = False) -> dict[str, Any]:
        sizes = [int(share * needed) for share in free]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda at: (sizes[at if isinstance(at, int) else at.index or 0], 0)
        )
        return placing.placement_options("tiny", folder, gpu, torch.float32, spread, quantised)

    assert placed(1.2, 1.2) == {}
    assert placed(1.2, quantised=True) == {"device_map": {"": gpu}}
    two = placed(0.8, 0.7)
    assert two["device_map"] == "auto"
    assert two["max_memory"] == {at: int(placing.MAX_FILL * int(share * needed)) for at, share in enumerate((0.8, 0.7))}
    for refused in (lambda: placed(0.8), lambda: placed(0.4, 0.4), lambda: placed(0.8, 0.8, spread=False)):
        with pytest.raises(BadInput, match="use --dtype bf16"):
            refused()


def test_layers_stay_whole_and_one_that_finds_no_room_is_told(folder: Path) -> None:
    """By transformers' own map of a model without weights over two GPUs."""
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        empty = families.SPECS["llama-gqa"].build()
    each = placing.weight_bytes(folder, torch.float32)
    fits = _get_device_map(empty, "auto", {0: int(0.8 * each), 1: int(0.8 * each)}, None)
    assert {*fits.values()} == {0, 1}
    layers = [name for name in fits if name.startswith("model.layers.")]
    assert {name.count(".") for name in layers} == {2}
    assert len(layers) == config["num_hidden_layers"]
    empty.hf_device_map = _get_device_map(empty, "auto", {0: int(0.3 * each), 1: int(0.3 * each)}, None)
    with pytest.raises(BadInput, match="its layers, which stay whole"):
        placing.refuse_offloaded(empty, "tiny")


# Layers on two devices -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """A model on one device, and the same on two."""
    whole = hs.load(families.SPECS[request.param].build())
    module = spread(families.SPECS[request.param].build(), ON_FIRST)
    with enforced():
        return whole, hs.load(module)


@pytest.fixture
def both(opened: tuple[Model, Model]) -> Iterator[tuple[Model, Model]]:
    with enforced():
        yield opened


def test_tensors_of_two_devices_do_not_mix_here_either() -> None:
    with enforced():
        here, there = torch.ones(3, device=FIRST), torch.ones(3).to(SECOND)
        assert (here.device, there.device, (here + 1).device) == (FIRST, SECOND, FIRST)
        assert (here.to(SECOND) + there).sum().item() == 6
        for one, other in ((here, there), (here, torch.ones(3))):
            with pytest.raises(RuntimeError, match="on the same device"):
                _ = one + other


def adapter(model: Model) -> AdaRoPE:
    """Learned positions that differ by layer, group and head."""
    adarope = AdaRoPE.untrained(model, resolve(model, "yarn:factor=2"))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adarope.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=chance))
    return adarope.to(model.device)


def test_a_checkpoint_on_two_devices_is_the_same_checkpoint(both: tuple[Model, Model]) -> None:
    whole, two = both
    assert two.device == FIRST
    assert two.geometry == whole.geometry
    assert torch.equal(two.rotation.theta, whole.rotation.theta)
    assert two.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("scheme", ["yarn:factor=2", "logn:length=32"])
def test_tables_measured_on_two_devices_are_the_same_to_the_bit(both: tuple[Model, Model], scheme: str) -> None:
    tables = ["attention", "pairs", "distance", "nll"]
    expected, found = (measure_tokens(model.with_scheme(scheme), IDS, tables, 20) for model in both)
    assert found.keys() == expected.keys()
    for table, columns in expected.items():
        for name, column in columns.items():
            np.testing.assert_array_equal(found[table][name], column, err_msg=f"{table}.{name}")


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.module(IDS.to(model.device)[None], use_cache=False).logits
    return found.cpu()


def test_listeners_edits_and_changes_follow_the_layers_device(both: tuple[Model, Model]) -> None:
    heard: dict[int, set[torch.device]] = {}

    def listen(layer: AttentionRecord) -> None:
        heard[layer.layer] = {t.device for t in (layer.q, layer.k, layer.v, layer.z, layer.lse, layer.visible_counts)}

    found = []
    for model in both:
        reset = PositionReset("joint", adapter(model), resolve(model, "yarn:factor=2"), model.geometry)
        with attached(model, adapter(model)), capturing(model) as layers:
            layers.listen(listen)
            for layer in range(4):
                layers.edit_qkv(layer, lambda q, k, v, positions: (q * (1 + positions[:, None, :, None] % 2), k, v))
                for intervention in (*ABLATIONS.values(), reset):
                    layers.edit_output(
                        layer, layer_output_edit(intervention, [Unit(layer, 0, 1), Unit(layer, 1)], model.geometry)
                    )
            found.append(logits(model))
    assert heard == {layer: {device} for layer, device in PLACES.items()}
    assert torch.equal(*found)


def test_a_cache_lies_where_its_layer_does_and_answers_are_the_same(both: tuple[Model, Model]) -> None:
    prompt = IDS.numpy().astype(np.int32)
    readers = [PrefixCachedGenerator(model.with_scheme("yarn:factor=2")) for model in both]
    for reader in readers:
        reader.block_size = 16
    answers = [
        [reader.generate(p, lambda _: None, 3, lambda _: False) for p in (prompt, prompt[:20])] for reader in readers
    ]
    assert answers[0] == answers[1]
    assert [layer.keys.device for layer in readers[1]._cache.layers] == [*PLACES.values()]


def test_a_replay_goes_on_from_any_layer_and_back_through_all_of_them(both: tuple[Model, Model]) -> None:
    """Losses with a head silenced on either device, and the gradients of the loss by each layer's heads."""

    def total(given: Tensor, predicted: Tensor) -> Tensor:
        return token_losses(given, predicted).sum()

    def replayed(model: Model) -> tuple[list[Tensor], list[Tensor]]:
        replay = Replay(model, adapter(model), IDS.to(model.device)[None], memory_bytes=1e9)
        gradients: dict[int, Tensor] = {}
        with replay.running():
            replay.record_streams()
            silenced = [layer_output_edit(zero_ablation, [Unit(layer, 0, 1)], model.geometry) for layer in range(4)]
            losses = [replay.losses({layer: change}) for layer, change in enumerate(silenced)]
            replay.backpropagate([total], lambda layer, z, call, found: gradients.update({layer: found[0]}))
        return losses, [gradients[layer] for layer in range(4)]

    (losses, gradients), (spread_losses, spread_gradients) = map(replayed, both)
    assert [gradient.device for gradient in spread_gradients] == [*PLACES.values()]
    for one, other in zip([*losses, *gradients], [*spread_losses, *spread_gradients], strict=True):
        assert torch.equal(one, other.cpu())


def test_an_adapter_learns_the_same_on_two_devices(both: tuple[Model, Model]) -> None:
    learned = []
    for model in both:
        with frozen_weights(model):
            adarope = adapter(model)
            AdapterTrainer(model, adarope, (0.03, 0.003, 0.0)).step([IDS], 1.0)
        learned.append([parameter.detach().cpu() for parameter in adarope.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*learned, strict=True))


SECTIONS: dict[str, dict[str, Any]] = {
    "patterns": {"lengths": [40], "rows": 8, "docs": 1},
    "detectors": {"periods": [12], "sequences": 1},
    "influence": {"lengths": [40], "components": ["zero"], "estimate_order": 1, "top": 1, "memory": 0, "docs": 1},
    "attribution": {"lengths": [40], "docs": 1},
    "needle": {"lengths": [160], "depths": 1, "needles": 1, "template": "plain", "attribution": False},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_what_sections_store_of_two_devices_is_what_they_store_of_one(section: str, tmp_path: Path) -> None:
    options = {**SECTIONS[section], "quiet": True}
    if section != "detectors":
        options["text"] = save_texts(tmp_path / "texts", 200)
    whole = hs.load(families.SPECS["llama-gqa"].build(), tokenizer=tokenizer())
    expected = api.probe_function(section)(whole, out=tmp_path / "one", **options)
    with enforced():
        two = hs.load(spread(families.SPECS["llama-gqa"].build(), ON_FIRST), tokenizer=tokenizer())
        found = api.probe_function(section)(two, out=tmp_path / "two", **options)
    tables = [file.stem for file in expected.path.glob("*.parquet")]
    assert len(tables) > 2  # two are of positions
    assert all(found.table(table).equals(expected.table(table)) for table in tables)

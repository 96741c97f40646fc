"""LoRA adapters of peft: measured as merged weights, part of the weights digest, refused if they do not fit."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from support import families
from support.refusals import refuses
from support.tiny_studies import StopsAfter, content, save_checkpoint, save_texts
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.base.model_spec import ModelSpec
from headscope.errors import BadInput, InputChanged, Interrupted, ResourceMissing, UnsupportedModel
from headscope.models.lora import apply_lora
from headscope.runs.run import Run
from headscope.study import runner
from headscope.study.checkpoint_glob import expand_checkpoints
from headscope.study.config import build_study
from headscope.training.adapter_trainer import adding_lora

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "k_proj"]},
    "everywhere": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 5},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
}


def write_lora(tiny: Path, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Save a LoRA with non-zero weights, as after training."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2, **settings))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    peft_model.save_pretrained(folder)
    return folder


def eager_losses(tiny: Path, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Loss of every token with weights merged by peft and attention of transformers."""
    plain = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager", dtype=torch.float32)
    merged = PeftModel.from_pretrained(plain, folder).merge_and_unload().eval()
    with torch.no_grad():
        logits = merged(ids).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `tiny`, texts, and LoRAs of every kind in `loras`, `run/checkpoint-2` and `run/checkpoint-10`."""
    model_folder = tmp_path_factory.mktemp("lora")
    tiny = save_checkpoint(model_folder / "tiny")
    save_texts(model_folder / "texts")
    for name, settings in SETTINGS.items():
        write_lora(tiny, model_folder / "loras" / name, **settings)
    for step in (10, 2):
        write_lora(tiny, model_folder / "run" / f"checkpoint-{step}", step, **SETTINGS["plain"])
    return model_folder


def measure_losses(model_folder: Path, out: Path, models: dict[str, str]) -> Run:
    return runner.run_study(
        build_study(content(model_folder, models=models, measure={"lengths": [24], "tables": ["nll"]})), out / "runs"
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_under_lora_match_merged_weights(model_folder: Path, name: str) -> None:
    model = hs.load(f"{model_folder}/tiny+{model_folder}/loras/{name}", device="cpu")
    assert model.name == f"{model_folder}/tiny+{model_folder}/loras/{name}"
    ids = torch.arange(3, 43)[None] % families.VOCAB
    with hs.attached(model, "base"), torch.no_grad():
        logits = model.module(ids).logits
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(
        losses, eager_losses(model_folder / "tiny", model_folder / "loras" / name, ids), atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_digest_identifies_a_lora_from_folder_and_in_memory(model_folder: Path) -> None:
    plain = hs.load(str(model_folder / "tiny"), device="cpu")
    digests = {plain.weights_sha256}
    for name in SETTINGS:
        folder = model_folder / "loras" / name
        stored = hs.load(f"{model_folder}/tiny+{folder}", device="cpu")
        module = AutoModelForCausalLM.from_pretrained(model_folder / "tiny", dtype=torch.float32)
        wrapped = PeftModel.from_pretrained(module, folder)
        assert hs.load(wrapped).weights_sha256 == stored.weights_sha256
        with wrapped.disable_adapter():
            assert hs.load(wrapped).weights_sha256 == plain.weights_sha256
        digests.add(stored.weights_sha256)
    assert len(digests) == 1 + len(SETTINGS)


def test_small_change_of_a_lora_changes_the_digest(model_folder: Path) -> None:
    model = hs.load(f"{model_folder}/tiny+{model_folder}/loras/plain", device="cpu")
    before = model.weights_sha256
    with torch.no_grad():
        next(p for name, p in model.module.named_parameters() if "lora_A" in name)[0, 0] *= 1 + 1e-6
    assert hs.load(model.module).weights_sha256 != before


def test_lora_checkpoints_are_measured_in_order_of_step(model_folder: Path, tmp_path: Path) -> None:
    models = expand_checkpoints(f"{model_folder}/tiny+{model_folder}/run/checkpoint-*@yarn:factor=4")
    assert list(models) == ["checkpoint-2", "checkpoint-10"]
    run = measure_losses(model_folder, tmp_path, models)
    assert [(model["step"], model["scheme"]) for model in run.manifest["models"]] == [
        (2, "yarn:factor=4"),
        (10, "yarn:factor=4"),
    ]
    assert len({model["weights_sha256"] for model in run.manifest["models"]}) == 2
    losses = run.nll.groupby("model", observed=True)["nll"].mean()
    assert losses["checkpoint-2"] != losses["checkpoint-10"]


def test_run_resumes_only_with_an_unchanged_lora(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder / "loras" / "plain", tmp_path / "lora"))
    plan = build_study(content(model_folder, models={"tuned": f"{model_folder}/tiny+{folder}"}))
    with pytest.raises(Interrupted):
        runner.run_study(plan, tmp_path / "runs", progress=StopsAfter(1))
    write_lora(model_folder / "tiny", folder, seed=1, **SETTINGS["plain"])
    with refuses(InputChanged, "LoRA", "'tuned'"):
        runner.run_study(plan, tmp_path / "runs", resume=True)


def test_a_lora_of_another_base_model_needs_weights_any(model_folder: Path, tmp_path: Path) -> None:
    folder = write_lora(model_folder / "tiny", tmp_path / "other", **SETTINGS["plain"])
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace(str(model_folder / "tiny"), "lab/other-model"))
    with refuses(BadInput, "'lab/other-model'", f"+{folder},weights=any"):
        hs.load(f"{model_folder}/tiny+{folder}", device="cpu")
    accepted = hs.load(f"{model_folder}/tiny+{folder},weights=any@yarn:factor=4", device="cpu")
    assert (accepted.name, accepted.scheme) == (f"{model_folder}/tiny+{folder}", "yarn:factor=4")
    assert [*expand_checkpoints(f"{model_folder}/tiny+{tmp_path}/oth*,weights=any@nope").values()] == [
        f"{model_folder}/tiny+{folder},weights=any@nope"
    ]
    moved = write_lora(model_folder / "tiny", tmp_path / "moved", **SETTINGS["plain"])
    text = (moved / "adapter_config.json").read_text()
    (moved / "adapter_config.json").write_text(text.replace(str(model_folder / "tiny"), "/elsewhere/tiny"))
    assert hs.load(f"{model_folder}/tiny+{moved}", device="cpu").name.endswith("moved")


def test_second_lora_is_refused(model_folder: Path) -> None:
    model = hs.load(f"{model_folder}/tiny+{model_folder}/loras/plain", device="cpu")
    before = model.weights_sha256
    with refuses(BadInput, f"'{model.name}'", "merge_and_unload"):
        apply_lora(model.module, model_folder / "loras" / "dora", model.name)
    with (
        refuses(UnsupportedModel, f"'{model.name}'", "q_proj", "k_proj", "--strategy adarope"),
        adding_lora(model, 2, 4, 0),
    ):
        pass
    assert hs.load(model.module).weights_sha256 == before


def test_failed_lora_leaves_the_model_unchanged(model_folder: Path, tmp_path: Path) -> None:
    other = families.SPECS["llama"].build()
    other.save_pretrained(tmp_path / "other")
    folder = write_lora(tmp_path / "other", tmp_path / "lora", **SETTINGS["plain"])
    model = hs.load(str(model_folder / "tiny"), device="cpu")
    before = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
    with refuses(BadInput, f"'{folder}'", f"'{model.name}'"):
        apply_lora(model.module, folder, model.name)
    assert before == {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}


def test_prompt_learning_is_refused(model_folder: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_folder / "tiny")
    wrapped = get_peft_model(module, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with refuses(BadInput, "PREFIX_TUNING"):
        hs.load(wrapped)


def test_folder_names_may_contain_a_plus(tmp_path: Path) -> None:
    for name in ("a+b", "c+d"):
        (tmp_path / name).mkdir()
    assert ModelSpec.parse(f"{tmp_path}/a+b") == ModelSpec(f"{tmp_path}/a+b", None)
    assert ModelSpec.parse(f"{tmp_path}/a+b+{tmp_path}/c+d") == ModelSpec(f"{tmp_path}/a+b", f"{tmp_path}/c+d")
    assert ModelSpec.parse("smollm2-135m+org/lora") == ModelSpec("smollm2-135m", "org/lora")
    assert ModelSpec.parse("org/name:step1") == ModelSpec("org/name:step1", None)


def test_missing_peft_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with refuses(ResourceMissing, "peft", "pip install 'headscope[lora]'"):
        apply_lora(torch.nn.Linear(1, 1), tmp_path, "tiny")

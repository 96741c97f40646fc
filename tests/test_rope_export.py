"""The export of positions: transformers reads it back and computes the same logits, or it is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, tiny_studies
from support.refusals import refuses
from torch import Tensor
from transformers import PreTrainedModel

import headscope as hs
from headscope.errors import BadInput
from headscope.positions.attach import attached
from headscope.positions.model import load

EXAMPLES = Path(hs.__file__).parent / "examples"
Builder = Callable[[], PreTrainedModel]
FAMILIES = families.SPECS | families.OTHERS
PROMPT = " ".join(f"w{n % 100}" for n in range(100))
IDS = torch.randint(3, families.VOCAB, (1, 40), generator=torch.Generator().manual_seed(5))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def rebuilt(module: PreTrainedModel, rope: dict[str, Any]) -> PreTrainedModel:
    """The same weights with other rope settings in the config."""
    config = type(module.config).from_dict({**module.config.to_dict(), "rope_parameters": rope})
    reference = type(module)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    reference.load_state_dict(module.state_dict())
    return reference


@torch.no_grad()
def logits(module: PreTrainedModel) -> Tensor:
    return module(IDS, use_cache=False).logits


def with_rope(family: str, rope: dict[str, Any]) -> Builder:
    spec = FAMILIES[family]
    return lambda: families.build(spec.model_type, spec.options | {"rope_parameters": rope})


def export(build: Builder, scheme: str, folder: Path) -> tuple[PreTrainedModel, Tensor, dict[str, Any]]:
    """The model, its logits under the scheme, and the rope parameters that were exported from a run."""
    model = load(build(), tokenizer=tiny_studies.tokenizer()).with_scheme(scheme)
    run = hs.measure({"m": model}, prompt=PROMPT, tables=["nll"], out=folder / "runs", quiet=True)
    with attached(model):
        expected = logits(model.module)
    parameters = json.loads(run.export("longrope", folder / "rope.json").read_text())["rope_parameters"]
    return model.module, expected, parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "scheme"),
    [
        (FAMILIES["llama-gqa"].build, "base"),
        (FAMILIES["llama-gqa"].build, "yarn:factor=4"),
        (FAMILIES["cohere"].build, "linear:factor=4"),
        (FAMILIES["gpt_neox"].build, "yarn:factor=4"),
        (FAMILIES["glm"].build, "llama3:factor=8"),
        (FAMILIES["olmo3"].build, "base"),
        (FAMILIES["nanochat"].build, "yarn:factor=4"),
        (FAMILIES["qwen3_next"].build, "abf:theta=5e6"),
        (FAMILIES["deepseek_v3"].build, "yarn:factor=4"),
        (families.DYNAMIC["phi3-longrope"], "yarn:factor=4"),
        (families.DYNAMIC["llama-dynamic"], "ntk:factor=4"),
        (with_rope("qwen2", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}), "base"),
        (with_rope("llama-gqa", YARN), "base"),
        (with_rope("llama-gqa", YARN), "yarn:factor=8"),
        (with_rope("llama-gqa", YARN), "unscaled"),
    ],
)
def test_transformers_reads_an_exported_longrope_back(build: Builder, scheme: str, tmp_path: Path) -> None:
    module, expected, parameters = export(build, scheme, tmp_path)
    read_back = logits(rebuilt(module, parameters))
    assert (read_back - expected).abs().max() <= 1e-5 * expected.abs().max()
    if scheme != "base" and "nanochat" not in module.config.model_type:
        assert (logits(module) - expected).abs().max() > 1e-3


MSCALE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("build", "scheme", "named"),
    [
        (families.DYNAMIC["phi3-longrope"], "base", ("frequencies", "length", "config.json")),
        (families.DYNAMIC["llama-dynamic"], "base", ("frequencies", "length", "config.json")),
        (with_rope("deepseek_v3", MSCALE), "base", ("temperature", "dimensions")),
        (FAMILIES["llama-gqa"].build, "logn:length=16", ("temperature", "length")),
        (FAMILIES["llama-gqa"].build, "nope", ("pairs",)),
        (FAMILIES["olmo3"].build, "yarn:factor=4", ("heads", "frequencies")),
        (FAMILIES["gemma3"].build, "base", ("heads", "frequencies")),
        (FAMILIES["smollm3"].build, "base", ("heads", "frequencies")),
    ],
)
def test_positions_that_longrope_cannot_hold_are_refused(
    build: Builder, scheme: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    with refuses(BadInput, *named):
        export(build, scheme, tmp_path)


def test_runs_without_absolute_factors_open_and_are_not_exported(tmp_path: Path) -> None:
    """Runs up to format 3 hold factors relative to the checkpoint's own."""
    run = hs.Run.open(next(EXAMPLES.glob("*Z-patching-787bc064")))
    assert set(run.positions["context_length"]) == set(run.scales["context_length"]) == {0}
    assert set(run.scales["attention_factor"]) == set(run.scales["softmax_factor"]) == {0}
    with refuses(BadInput, "base", "cos", "sin"):
        run.export("longrope", tmp_path / "rope.json", model="base")

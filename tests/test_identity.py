"""The identity of a model: what differs is named, and what has changed is noticed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.refusals import assert_names, refuses
from support.tiny_studies import PAIRS, save_checkpoint, save_texts, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import headscope as hs
from headscope.base.model_identity import ModelIdentity, WeightDigests
from headscope.errors import BadInput, UnsupportedModel
from headscope.results.model_notes import model_notes
from headscope.results.result import Result
from headscope.runs.run import Run, combine_runs
from headscope.runs.summary import equal_models
from probes.influence.run import head_influence


def tiny(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **settings})).eval()


def zero_output(module: Any, args: Any, output: Any) -> Any:
    return output * 0


def scaled(factor: float) -> LlamaForCausalLM:
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= factor
    return model


def hooked() -> LlamaForCausalLM:
    model = tiny()
    model.model.layers[1].mlp.register_forward_hook(zero_output)
    return model


def replaced() -> LlamaForCausalLM:
    model = tiny()
    model.model.layers[1].mlp.forward = lambda x: x * 0
    return model


def retempered() -> LlamaForCausalLM:
    model = tiny()
    model.model.layers[0].self_attn.scaling *= 2
    return model


OTHER_MODELS: dict[str, tuple[Callable[[], LlamaForCausalLM], list[str]]] = {
    "theta": (
        lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        ["rope_theta", "10000.0", "500000.0"],
    ),
    "linear scaling": (
        lambda: tiny(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        ["rope_type", "default", "linear"],
    ),
    "eps": (lambda: tiny(rms_norm_eps=1e-3), ["rms_norm_eps", "1e-06", "0.001"]),
    "rounding": (lambda: scaled(1.0009), ["weights"]),
    "hook": (hooked, ["hooks"]),
    "replaced forward": (replaced, ["hooks"]),
    "temperature": (retempered, ["modules", "scaling"]),
    "dtype": (lambda: tiny().double(), ["dtype", "float32", "float64"]),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_comparison_names_what_differs(name: str) -> None:
    build, named = OTHER_MODELS[name]
    comparison = hs.load(tiny()).identity.compare(hs.load(build()).identity)
    assert comparison.has_equal_weights or name == "rounding"
    assert_names("; ".join(comparison.differences), *named)
    assert not comparison.unknown
    assert not hs.load(build()).identity.compare(hs.load(build()).identity).differences


@pytest.fixture
def text(tmp_path: Path) -> str:
    return save_texts(tmp_path / "texts")


def measure(model: Any, text: str, tmp_path: Path, **options: Any) -> Run:
    return hs.measure(model, text=text, docs=1, lengths=[40], rows=8, out=tmp_path / "runs", quiet=True, **options)


def note(run: Run, question: str, model: str = "") -> Result:
    """The one note of a run on its models that answers the question, about this model if it is given."""
    (result,) = [one for one in model_notes(run) if one.question == question and model in ("", one.model)]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["yarn:factor=8", "logn", "base"])
def test_run_inside_an_attached_context_is_stored_as_that_scheme(scheme: str, text: str, tmp_path: Path) -> None:
    plain = hs.load(tiny(), tokenizer=tokenizer())
    model = plain.with_scheme("linear:factor=2")
    expected = measure(plain.with_scheme(scheme), text, tmp_path)
    with hs.attached(model, scheme):
        run = measure(model, text, tmp_path)
        assert measure({"own": plain}, text, tmp_path).manifest["models"][0]["scheme"] == "base"
    (entry,) = run.manifest["models"]
    assert entry["scheme"] == scheme
    assert entry["label"] == f"base in hs.attached({scheme})"
    assert entry["identity"]["positions"] == expected.manifest["models"][0]["identity"]["positions"]
    for name in ("attention", "positions", "scales"):
        pd.testing.assert_frame_equal(
            run.table(name).drop(columns="model"), expected.table(name).drop(columns="model"), check_categorical=False
        )
    assert measure(model, text, tmp_path).manifest["models"][0]["scheme"] == "linear:factor=2"


def test_run_with_ablated_heads_says_so(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, context = hs.load(tiny(), tokenizer=tokenizer()), "hs.ablated(L0H1: zero)"
    plain = measure(model, text, tmp_path)
    with hs.ablated(model, "L0H1"):
        run = measure(model, text, tmp_path, resume=True)
        with refuses(BadInput, context):
            hs.load(model.module)
        checkpoint = str(save_checkpoint(tmp_path / "tiny"))
        measure(checkpoint, text, tmp_path)
    assert_names(caplog.text, context, "'base'", f"'{checkpoint}'")
    (entry,) = run.manifest["models"]
    assert (entry["label"], entry["identity"]["contexts"]) == (f"base in {context}", [context])
    assert note(run, "models.contexts").details["contexts"] == [context]
    (difference,) = note(combine_runs([plain, run]), "models.equal_weights").details["differences"]
    assert_names(difference, "contexts", context)
    with hs.capturing(model) as layers:
        layers.edit_output(0, lambda z, call: z)
        assert model.identity.contexts == ("hs.capturing(...) with edits",)
    assert model.identity.contexts == ()


def _train(model: LlamaForCausalLM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    optimizer.step()


def _edit_data(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data[:, :8] = 0  # torch does not count this write


def _merge_lora(model: LlamaForCausalLM) -> None:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).merge_and_unload()


def _add_lora(model: LlamaForCausalLM) -> None:
    import peft

    torch.manual_seed(1)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


CHANGES: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "optimiser step": _train,
    "write through .data": _edit_data,
    "replaced data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight * 1.001),
    "load_state_dict": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}),
    "numpy view": lambda model: model.lm_head.weight.detach().numpy().__setitem__((3, 5), 1.0),
    "merged LoRA": _merge_lora,
    "active LoRA": _add_lora,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_noticed(name: str) -> None:
    model = hs.load(tiny())
    before = model.identity
    assert model.identity == before
    CHANGES[name](model.module)
    assert model.identity.weights.exact != before.weights.exact
    assert model.weights_sha256 != before.weights.bfloat16
    assert model.identity.compare(before).differences[0] == "weights"
    assert model.identity.weights == hs.load(model.module).identity.weights


def test_changed_frequencies_are_refused() -> None:
    model = hs.load(tiny())
    model.module.model.rotary_emb.inv_freq /= 4
    with refuses(BadInput, "rotary", f"'{model.name}'"):
        _ = model.identity


def test_resumed_measurement_of_a_trained_model_measures_it_again(text: str, tmp_path: Path) -> None:
    model = hs.load(tiny(), tokenizer=tokenizer())
    first = measure(model, text, tmp_path, resume=True)
    assert measure(model, text, tmp_path, resume=True).path == first.path
    _train(model.module)
    second = measure(model, text, tmp_path, resume=True)
    expected = measure(hs.load(model.module, tokenizer=tokenizer()), text, tmp_path / "fresh")
    assert second.path != first.path
    pd.testing.assert_frame_equal(second.table("nll"), expected.table("nll"))
    assert not second.table("nll").equals(first.table("nll"))
    with torch.no_grad():
        model.module.model.layers[1].mlp.up_proj.weight[0, 0] *= 1 + 2**-12  # disappears in bfloat16
    assert measure(model, text, tmp_path, resume=True).path not in (first.path, second.path)


def save_pairs(file: Path) -> str:
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return str(file)


@pytest.mark.parametrize("call", ["measure", "ablate", "patch", "load", "influence"])
def test_autocast_is_refused_everywhere_in_the_same_words(call: str, text: str, tmp_path: Path) -> None:
    model, options = hs.load(tiny(), tokenizer=tokenizer()), {"out": tmp_path / "runs", "quiet": True}
    pairs = save_pairs(tmp_path / "pairs.jsonl")
    calls: dict[str, Callable[[], Any]] = {
        "measure": lambda: measure(model, text, tmp_path),
        "ablate": lambda: hs.ablate(model, prompt="w1 w2", answer=" w3", **options),
        "patch": lambda: hs.patch(model, pairs=[pairs], metric="logprob", **options),
        "load": lambda: hs.load(model.module),
        "influence": lambda: head_influence(model, text, docs=1, length=24, components=["zero"], method="exact"),
    }
    with torch.autocast("cpu", torch.bfloat16), refuses(BadInput, "torch.autocast", "cpu", "bfloat16") as refusal:
        calls[call]()
    with torch.autocast("cpu", torch.bfloat16), refuses(BadInput, str(refusal.value)):
        hs.load(tiny())
    assert not [*(tmp_path / "runs").glob("*")]


def rounded_copy(dtype: torch.dtype) -> LlamaForCausalLM:
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def test_copies_in_other_dtypes_are_equal_after_rounding() -> None:
    model = hs.load(tiny()).identity
    half, brain = (hs.load(rounded_copy(dtype)).identity for dtype in (torch.float16, torch.bfloat16))
    assert model.weights.compare(half.weights) == "equal after rounding to float16"
    assert model.weights.compare(brain.weights) == "equal after rounding to bfloat16"
    assert half.weights.compare(brain.weights) == "different"
    assert brain.weights.exact == hs.load(tiny().bfloat16()).identity.weights.exact
    assert half.weights.exact == hs.load(tiny().half()).identity.weights.exact
    assert model.compare(half).differences == ("weights (equal after rounding to float16)",)


def test_contradicting_digests_are_those_of_other_weights() -> None:
    own = WeightDigests("b", "f", "e")
    assert own.compare(replace(own, bfloat16="x")) == own.compare(replace(own, float16="x")) == "different"
    assert own.compare(WeightDigests(exact="e")) == "equal"
    assert WeightDigests.from_record({"bfloat16": "x", "exact": "e"}, "b") == WeightDigests("b", exact="e")
    assert WeightDigests.from_record({"bfloat16": "x"}, None) == WeightDigests("x")
    entry = {"weights_sha256": "x", "identity": {"weights": own.to_dict()}}
    assert "weights" in ModelIdentity(own).compare(ModelIdentity.from_manifest(entry)).differences


def test_finding_of_equal_weights_names_what_else_differs(text: str, tmp_path: Path) -> None:
    for name, theta in (("a", 1e4), ("copy", 1e4), ("b", 5e5)):
        tiny(rope_parameters={"rope_type": "default", "rope_theta": theta}).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    run = measure({name: str(tmp_path / name) for name in ("a", "copy", "b")}, text, tmp_path)
    equal, different = note(run, "models.equal", "a"), note(run, "models.equal_weights", "a")
    assert (equal.baseline, different.baseline) == ("copy", "b")
    assert_names("; ".join(different.details["differences"]), "rope_parameters.rope_theta", "10000.0", "500000.0")
    one, other = (measure({"m": str(tmp_path / name)}, text, tmp_path) for name in "ab")
    assert len(combine_runs([one, other]).models) == 2
    for entry in run.manifest["models"]:  # which a run need not record
        del entry["identity"]
    old = equal_models(run)
    assert [(*pair[:2], pair[2].differences) for pair in old] == [("a", "copy", ()), ("a", "b", ())]
    assert {"weights beyond bfloat16", "configuration"} <= {*old[0][2].unknown} & {*old[1][2].unknown}


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("yarn:factor=4", "yarn:factor=4.0", True),
        ("yarn:factor=8,attention_factor=1", "yarn:attention_factor=1.0,factor=8", True),
        ("linear:factor=0.50", "linear:factor=5e-1", True),
        ("adarope:adapter=runs/lr=1.0", "adarope:adapter=runs/lr=1", False),
        ("yarn:factor=4", "yarn:factor=4.01", False),
        ("yarn:factor=4", "yarn:factor=4.00000000000001", False),
        ("yarn:factor=4", "yarn:factor=40", False),
        ("adarope:adapter=a/step-1.00", "adarope:adapter=a/step-1", False),
        ("base", "yarn:factor=4", False),
    ],
)
def test_a_scheme_written_in_two_ways_is_one_scheme(first: str, second: str, is_same: bool) -> None:
    identities = [ModelIdentity.from_manifest({"scheme": text}) for text in (first, second)]
    assert (not identities[0].compare(identities[1]).differences) == is_same


def test_a_checkpoint_loads_inside_inference_mode_and_weights_made_there_are_refused(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with torch.inference_mode():
        assert not next(hs.load(str(tmp_path)).module.parameters()).is_inference()
        with refuses(UnsupportedModel, "inference_mode"):
            hs.load(tiny())

"""Kinds of ablation have one syntax in all commands, and means have one source: each equals its eager mean."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refuses
from support.tiny_studies import PAIRS, save_checkpoint, save_texts, tokenizer
from torch import Tensor

import headscope as hs
from headscope.base.ablation_names import (
    KINDS,
    MEAN_OF_DOCUMENT,
    MEAN_OF_TEXT,
    NOT_IN_GENERATION,
    NOT_OF_DOCUMENTS,
    ablation_in_generation,
    ablation_name,
    describe_ablation,
    kinds_help,
)
from headscope.errors import BadInput, BadOption
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.interventions.ablation import parse_ablation
from headscope.interventions.kinds import Noise, Scale
from headscope.playground.model_session import ModelSession
from headscope.playground.tasks import predict_prompt
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.influence.run import head_influence
from probes.needle import ablation as needle_ablation

WORDS = 600
REFERENCE = 256
"""Tokens of the reference text: the native context of the model."""
LENGTH = 40
LAYER, HEAD = 1, 2
PROMPT, ANSWER = "w5 w9 w13 w2 w7", " w6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("means")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts", WORDS)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """Shared: leave it as you found it."""
    return hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu")


def texts(folder: Path) -> str:
    return f"file:{folder}/texts/*.txt"


def run_study(folder: Path, out: Path, **blocks: Any) -> Run:
    content = {
        "models": {"base": f"{folder}/tiny@yarn:factor=4"},
        "texts": {"source": texts(folder), "docs": 1},
        "device": "cpu",
        **blocks,
    }
    return runner.run_study(build_study(content), out, progress=NoProgress())


# Independent reference: eager passes in which the columns of the head at the input of o_proj are set by hand ---------


@torch.no_grad()
def eager_logits(model: Model, ids: Any, new: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits [L, V] of a text, and the head's output [L, d] before it is replaced by `new` [d]."""
    seen: list[Tensor] = []

    def replace(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        z = args[0].clone()
        seen.append(z[0, :, 16 * HEAD : 16 * (HEAD + 1)].clone())
        if new is not None:
            z[..., 16 * HEAD : 16 * (HEAD + 1)] = new
        return (z,)

    hook = model.module.model.layers[LAYER].self_attn.o_proj.register_forward_pre_hook(replace)
    implementation = model.module.config._attn_implementation
    try:
        with hs.attached(model):
            model.module.set_attn_implementation("eager")
            logits = model.module(torch.tensor([[*map(int, ids)]]), use_cache=False).logits[0]
    finally:
        hook.remove()
        model.module.set_attn_implementation(implementation)
    return logits, seen[0]


def eager_mean(model: Model, ids: Any) -> Tensor:
    return eager_logits(model, ids)[1].mean(0)


def document(folder: Path, model: Model, length: int) -> Any:
    return load_token_documents(texts(folder), model.tokenizer, 1, length)[0].ids


def eager_loss(model: Model, ids: Any, new: Tensor | None = None) -> float:
    logits = eager_logits(model, ids, new)[0][:-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor([*map(int, ids)])[1:]))


def ablated_loss(model: Model, ids: Any, kind: str, text: str) -> float:
    with torch.no_grad(), hs.attached(model), hs.ablated(model, [(LAYER, HEAD)], kind, text=text):
        logits = model.module(torch.tensor([[*map(int, ids)]]), use_cache=False).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor([*map(int, ids)])[1:]))


def answer_log_probability(logits: Tensor) -> float:
    return float(logits.log_softmax(-1)[tokenizer()(ANSWER)["input_ids"][0]])


@pytest.fixture(scope="module")
def influence(folder: Path, model: Model) -> Any:
    """The change of the loss by component, of one head on one document."""
    kinds = ["mean", MEAN_OF_DOCUMENT, "zero", "scale:0.5", "noise:0.5", "uniform", "streaming:2+4", "top:2"]
    options = {"components": kinds, "unit": "head", "heads": {"set": [f"L{LAYER}H{HEAD}"]}, "method": "exact"}
    rows = head_influence(model, texts(folder), 1, LENGTH, **options)
    return rows.set_index("component")["delta_nll"]


@pytest.mark.parametrize("kind", [MEAN_OF_TEXT, MEAN_OF_DOCUMENT])
def test_a_mean_in_influence_equals_the_eager_mean_of_its_source(
    folder: Path, model: Model, influence: Any, kind: str
) -> None:
    ids = document(folder, model, LENGTH)
    source = document(folder, model, REFERENCE) if kind == MEAN_OF_TEXT else ids
    assert len(source) == (REFERENCE if kind == MEAN_OF_TEXT else LENGTH)
    expected = eager_loss(model, ids, eager_mean(model, source)) - eager_loss(model, ids)
    assert influence[kind] == pytest.approx(expected, abs=1e-5)
    assert abs(influence[MEAN_OF_TEXT] - influence[MEAN_OF_DOCUMENT]) > 1e-3


def test_every_kind_in_influence_is_that_of_ablated(folder: Path, model: Model, influence: Any) -> None:
    ids = document(folder, model, LENGTH)
    for kind, change in influence.items():
        expected = ablated_loss(model, ids, kind, texts(folder)) - eager_loss(model, ids)
        assert change == pytest.approx(expected, abs=1e-5), kind
        assert abs(change) > 1e-5, kind


def test_one_head_and_prompt_have_one_number_in_influence_ablate_and_ablated(
    folder: Path, model: Model, tmp_path: Path
) -> None:
    """The prompt is the beginning of a document, and its answer the last token: the loss of one token is compared."""
    kinds = ["mean", MEAN_OF_DOCUMENT, "scale:0.5", "uniform", "streaming:0+1", "top:1"]
    block = {"prompt": PROMPT, "answer": ANSWER, "heads": [f"L{LAYER}H{HEAD}"], "kinds": kinds, "random_sets": 0}
    run = run_study(folder, tmp_path, ablation=block)
    assert validate(run) == []
    rows = run.table("ablation").astype({"kind": "str"}).set_index("kind")["metric_after"]
    assert {*rows.index} == {MEAN_OF_TEXT, *kinds[1:]}
    ids = tokenizer()(PROMPT + ANSWER)["input_ids"]
    for kind, value in rows.items():
        with torch.no_grad(), hs.attached(model), hs.ablated(model, [(LAYER, HEAD)], kind, text=texts(folder)):
            logits = model.module(torch.tensor([ids]), use_cache=False).logits[0, -2]
        assert value == pytest.approx(answer_log_probability(logits), abs=1e-5), kind
    for kind, source in ((MEAN_OF_TEXT, document(folder, model, REFERENCE)), (MEAN_OF_DOCUMENT, ids)):
        expected = answer_log_probability(eager_logits(model, ids, eager_mean(model, source))[0][-2])
        assert rows[kind] == pytest.approx(expected, abs=1e-5)
    assert {"ablation_mean_text", "ablation_mean_document", "ablation_streaming"} <= {*run.heads}


def test_a_study_of_influence_stores_the_source_of_the_mean(
    folder: Path, model: Model, influence: Any, tmp_path: Path
) -> None:
    heads = {"set": [f"L{LAYER}H{HEAD}"]}
    block = {"lengths": [LENGTH], "components": ["mean", "mean:text", "mean:document"], "heads": heads, "unit": "head"}
    run = run_study(folder, tmp_path, influence={**block, "method": "exact"})
    assert validate(run) == []
    for table in ("influence", "influence_sets"):
        rows = run.table(table).astype({"component": "str"}).set_index("component")["delta_nll"]
        assert [*rows.index] == [MEAN_OF_TEXT, MEAN_OF_DOCUMENT]
        for kind, change in rows.items():
            assert change == pytest.approx(influence[kind], abs=1e-6)
    assert {"influence_mean_text", "influence_mean_document"} <= {*run.heads}
    assert "influence_mean" not in run.heads


def test_estimates_of_a_small_change_are_its_effects(folder: Path, model: Model) -> None:
    """Half of the difference of both signs has no second order. A mean, noise and a rule have estimates, too."""
    kinds = ["scale:0.999", "scale:1.001", "noise:0.01", "streaming:0+30", "mean", "top:2"]
    options = {"components": kinds, "method": "verify", "verify_top": 16, "unit": "head"}
    rows = head_influence(model, texts(folder), 1, LENGTH, **options).astype({"component": "str"})
    changes = rows.pivot_table(index=["method", "component"], columns=["layer", "head"], values="delta_nll")
    assert changes.loc[["exact", "estimate"], :].notna().to_numpy().all()
    assert len(changes.loc["exact"]) == len(changes.loc["estimate"]) == len(kinds)
    exact, estimate = (
        (changes.loc[method, kinds[0]] - changes.loc[method, kinds[1]]) / 2 for method in ("exact", "estimate")
    )
    assert np.abs(exact - estimate).max() <= 0.02 * np.abs(exact).max() + 2e-6


def test_the_needle_probe_takes_the_mean_of_the_reference_text(
    folder: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    ablate = needle_ablation.heads_ablated
    monkeypatch.setattr(
        needle_ablation, "heads_ablated", lambda model, units, kind: used.append(kind) or ablate(model, units, kind)
    )
    scores = tmp_path / "scores.csv"
    rows = [f"{layer},{head},{int((layer, head) == (LAYER, HEAD))}" for layer in range(4) for head in range(4)]
    scores.write_text("\n".join(["layer,head,score", *rows]))
    needles = {"name": "w1", "question": "w11 w12", "opening": "w21", "fact": "w31 w32 w33"}
    (tmp_path / "needles.jsonl").write_text(json.dumps(needles))
    block = {
        "lengths": [60],
        "depths": [0.5],
        "needles": 1,
        "file": f"{tmp_path}/needles.jsonl",
        "heads": f"{scores}",
        "ablate_top": [1],
        "draws": 1,
        "ablation": ["mean"],
    }
    run = run_study(folder, tmp_path / "runs", needle=block)
    assert validate(run) == []
    assert {*run.table("needle_ablation")["ablation"]} == {MEAN_OF_TEXT}
    assert {kind.name for kind in used} == {MEAN_OF_TEXT}
    mean = used[0].values[LAYER][HEAD, 0]
    torch.testing.assert_close(mean, eager_mean(model, document(folder, model, REFERENCE)), atol=1e-5, rtol=1e-5)


def test_a_circuit_has_means_over_prompts_and_refuses_a_bare_mean(folder: Path, tmp_path: Path) -> None:
    block = {"pairs": [f"{folder}/pairs.jsonl"], "heads": ["L0H1", "L1H2"], "random_subsets": 1, "greedy": 0}
    run = run_study(folder, tmp_path, circuit=block)
    assert {*run.table("circuit")["complement"]} == {"mean:prompts"}
    assert "circuit_mean_prompts" in run.heads
    for kind in ("mean", MEAN_OF_TEXT, MEAN_OF_DOCUMENT):
        with refuses(BadOption, "complement", f"'{kind}'", "mean:prompts"):
            run_study(folder, tmp_path, circuit={**block, "complement": kind})


def test_the_playground_takes_the_mean_of_ablated(folder: Path, model: Model) -> None:
    session = ModelSession({"base": f"{folder}/tiny@yarn:factor=4"})
    ids = torch.tensor([tokenizer()(PROMPT)["input_ids"]])
    for kind in ("mean", MEAN_OF_TEXT, "top:1", "uniform"):
        (prediction,) = [one for one in predict_prompt(session, PROMPT, [(LAYER, HEAD)], kind) if one.is_ablated]
        with torch.no_grad(), hs.attached(model), hs.ablated(model, [(LAYER, HEAD)], kind):
            expected = model.module(ids, use_cache=False).logits[0, -1].softmax(-1)
        for token, probability in prediction.next_tokens.items():
            assert probability == pytest.approx(float(expected[model.tokenizer.convert_tokens_to_ids(token)]), abs=1e-5)


# Syntax --------------------------------------------------------------------------------------------------------------


def with_size(kind: str) -> str:
    return kind.replace("S+R", "4+16").replace(":F", ":0.5").replace(":S", ":0.5")


@pytest.mark.parametrize("kind", [*map(with_size, KINDS), "top:64", "streaming:4:60"])
def test_the_name_of_a_kind_is_its_own_name_and_that_of_its_edit(kind: str) -> None:
    assert ablation_name(kind) == kind
    edit = parse_ablation(kind)
    assert (edit is None) == (kind in (MEAN_OF_TEXT, "resample"))
    if edit is not None:
        assert edit.name == kind
    assert describe_ablation(kind)


def test_equal_kinds_have_one_name() -> None:
    assert ablation_name("mean") == MEAN_OF_TEXT
    assert ablation_name("streaming:004+16") == "streaming:4+16"
    for text in ("scale:0.5", "scale:.5", "scale:5e-1", "scale:+0.50"):
        assert ablation_name(text) == "scale:0.5"
    assert ablation_name("scale:-0.1234567891") == "scale:-0.1234567891"
    assert parse_ablation("scale:-0.1234567891") == Scale(-0.1234567891)
    assert parse_ablation("noise:.1", 7) == Noise(0.1, 7)


@pytest.mark.parametrize(
    "text",
    [
        *("", "men", "Zero", " zero", "zero:1", "mean:", "mean:haystack", "uniform:2", "resample:text"),
        *("scale", "scale:x", "scale:inf", "noise:nan", "streaming", "streaming:4", "streaming:0+0"),
        *("top", "top:0", "tip:4"),
    ],
)
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_ablation(text)
    assert "\n" not in str(refusal.value)


BLOCKS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "influence": ("components", {}, NOT_OF_DOCUMENTS),
    "ablation": ("kinds", {"pairs": ["ioi"]}, {}),
    "needle": ("ablation", {"ablate_top": [2]}, NOT_IN_GENERATION),
}


@pytest.mark.parametrize("command", [*BLOCKS])
def test_options_take_the_same_kinds_and_refuse_those_that_need_more(command: str) -> None:
    option, block, left_out = BLOCKS[command]

    def parsed(kinds: list[str]) -> list[str]:
        study = build_study({"models": {"m": "smollm2-135m"}, command: {**block, option: kinds}})
        values: list[str] = getattr(study.probe_options[command], option)
        return values

    accepted = [with_size(kind) for kind in KINDS if kind not in left_out] + ["top:64"]
    assert parsed([*accepted, "mean"]) == accepted
    for kind in left_out:
        with refuses(BadOption, option, f"'{with_size(kind)}'", "zero", MEAN_OF_TEXT):
            parsed([with_size(kind)])
    for kind in ("mean:haystack", "zer"):
        with refuses(BadOption, option, f"'{kind}'", MEAN_OF_TEXT):
            parsed([kind])
    with refuses(BadOption, option, "mean:prompts", MEAN_OF_TEXT):
        parsed(["mean:prompts"])


def test_help_names_every_kind_that_an_option_takes() -> None:
    for left_out in ({}, NOT_OF_DOCUMENTS, NOT_IN_GENERATION):
        text = kinds_help(left_out)
        assert [kind for kind in KINDS if f"{kind}: " in text or f"{kind}, " in text] == [
            kind for kind in KINDS if kind not in left_out
        ]
    with pytest.raises(ValueError, match="whole text"):
        ablation_in_generation("noise:0.1")


def test_a_rule_that_needs_later_queries_is_refused_before_the_needle_probe_reads_a_prompt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCachedGenerator, "__init__", lambda *_: pytest.fail("a prompt was read"))
    block = {"lengths": [60], "depths": [0.5], "needles": 2, "ablate_top": [1], "ablation": ["vertical-slash:4:4"]}
    with refuses(BadInput, "'vertical-slash:4:4'"):
        run_study(folder, tmp_path, needle=block)

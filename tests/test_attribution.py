"""Direct logit attribution: every head's term equals an explicit sum, and all terms add up to the model's own logit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support import families
from support.naive_attribution import head_contributions
from support.refusals import refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import direct_logit_attribution
from transformers import AutoModelForCausalLM
from zoo.build import tiny

import headscope
from headscope.decomposition.head_circuits import TokenEmbeddings
from headscope.decomposition.head_weights import inspect_head_weights
from headscope.decomposition.logit_attribution import attribute_logits
from headscope.decomposition.residual_decomposition import DecompositionError, Norm
from headscope.errors import BadOption, UnsupportedModel
from headscope.measures.logit_attribution import AttributionByPosition
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.rendering import assembly
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study.config import build_study
from probes.attribution import PROBE, view
from probes.attribution.declaration import SCORES
from probes.weights.run import circuit_rows

IDS = torch.randint(3, families.VOCAB, (48,), generator=torch.Generator().manual_seed(0))
GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.37, "logits_scaling": 3.0, "embedding_multiplier": 2.0}
MANY = {
    **{name: families.MEASURABLE[name] for name in ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3")},
    **{name: families.MEASURABLE[name] for name in ("gpt_neox", "olmo2", "olmo", "glm", "qwen2")},
    "granite": lambda: families.build("granite", GRANITE),
    "cohere": lambda: families.build("cohere", {"logit_scale": 0.3}),
}


def centred(model: Model, ids: Tensor) -> Tensor:
    """The logit of each next token less its mean over the vocabulary, by the model's own forward: [L - 1], float64."""
    with torch.no_grad():
        logits = model.module(ids[None]).logits[0, :-1].double()
    return (logits.gather(1, ids[1:, None]) - logits.mean(-1, keepdim=True))[:, 0]


# Against an explicit sum -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3", "olmo2", "gpt_neox"])
def test_the_term_of_every_head_equals_an_explicit_sum(family: str) -> None:
    model = headscope.load(MANY[family](), device="cpu")
    terms = attribute_logits(model, IDS).head_terms.double()
    explicit = head_contributions(model, IDS, families.HEADS)
    assert float((terms - explicit).abs().max() / centred(model, IDS).abs().max()) <= 1e-4


@pytest.mark.parametrize("family", MANY)
def test_all_terms_add_up_to_the_logit_of_the_model(family: str) -> None:
    model = headscope.load(MANY[family](), device="cpu")
    terms = attribute_logits(model, IDS)
    parts = {name: part for name, part in terms.part_terms.items() if name[0] != "logit"}
    logit = centred(model, IDS)
    scale = float(logit.abs().max())
    assert float((sum(parts.values()) - logit).abs().max()) <= 1e-4 * scale
    assert float((terms.part_terms["logit", 0] - logit).abs().max()) <= 1e-4 * scale
    assert {name for name, _ in parts} == {"embedding", "heads", "other", "bias"}
    together = torch.stack([terms.part_terms["heads", layer] for layer in range(families.LAYERS)])
    torch.testing.assert_close(terms.head_terms.sum(1), together, rtol=1e-4, atol=1e-5 * scale)


def test_bfloat16_gives_nearly_the_same_terms() -> None:
    exact = attribute_logits(headscope.load(MANY["gemma3"](), device="cpu"), IDS)
    coarse = attribute_logits(headscope.load(MANY["gemma3"]().bfloat16(), device="cpu"), IDS)
    assert coarse.decomposition.logit_factor == 1
    assert {part.factor for layer in coarse.decomposition.layers for part in layer.other_branches} == {1.0}
    scale = float(exact.part_terms["logit", 0].abs().max())
    assert float((coarse.head_terms - exact.head_terms).abs().max()) <= 0.1 * scale
    assert float((coarse.head_terms - exact.head_terms).square().mean().sqrt()) <= 0.01 * scale


def test_a_position_scheme_changes_the_terms() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    yarn = attribute_logits(model.with_scheme("yarn:factor=4"), IDS)
    assert float((yarn.head_terms - attribute_logits(model, IDS).head_terms).abs().max()) > 1e-3
    assert yarn.relative_error <= 1e-5


@pytest.mark.model
def test_terms_of_smollm2_equal_an_explicit_sum_and_add_up(smollm2: Model, tokens: Tensor) -> None:
    ids = tokens[0, :128]
    terms = attribute_logits(smollm2, ids)
    logit = centred(smollm2, ids)
    scale = float(logit.abs().max())
    parts = [part for name, part in terms.part_terms.items() if name[0] != "logit"]
    assert float((sum(parts) - logit).abs().max()) <= 1e-4 * scale
    assert float((terms.head_terms.double() - head_contributions(smollm2, ids, 9)).abs().max()) <= 1e-4 * scale


@pytest.mark.model
def test_terms_of_smollm2_equal_those_of_transformer_lens(smollm2: Model, tokens: Tensor) -> None:
    """TransformerLens folds the final norm's gain into a centred unembedding, which is the same direction."""
    ids = tokens[0, :64]
    fresh = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=fresh, tokenizer=smollm2.tokenizer)
    lens.enable_compatibility_mode()
    with torch.no_grad():
        theirs = direct_logit_attribution(lens, ids[None, :-1], answer_tokens=ids[-1:], unit="head", pos=-1)
    ours = attribute_logits(smollm2, ids)
    values = dict(zip(theirs.labels, theirs.attribution.flatten().tolist(), strict=True))
    scale = abs(float(ours.part_terms["logit", 0][-1]))
    for layer in range(30):
        for head in range(9):
            assert values[f"L{layer}H{head}"] == pytest.approx(
                float(ours.head_terms[layer, head, -1]), abs=1e-3 * scale
            )
    # headscope on the bridge itself: a block of a bridge contains the layer that it wraps.
    through_bridge = attribute_logits(headscope.load(lens), ids)
    assert float((through_bridge.head_terms - ours.head_terms).abs().max()) <= 1e-4 * scale
    of_both = [
        circuit_rows(TokenEmbeddings(model, inspect_head_weights(model)))["copying"]
        for model in (smollm2, headscope.load(lens))
    ]
    assert of_both[1] == pytest.approx(of_both[0], abs=1e-5)


# Models whose logits are not a sum ---------------------------------------------------------------------------------


class Squared(nn.Module):
    """Not a norm: every feature has its own divisor."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.square())


def test_logits_that_are_not_linear_in_the_residual_stream_are_refused() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    handle = model.module.lm_head.register_forward_hook(lambda _, args, out: out + 0.1 * out.square())
    with refuses(UnsupportedModel, "attribution", model.name, "logits", "linear"):
        attribute_logits(model, IDS)
    handle.remove()


@pytest.mark.parametrize("cap", [30.0, 3.0])
def test_a_final_soft_cap_is_linearised_at_the_logits_of_the_run(cap: float) -> None:
    """Head terms are what torch's gradient of the capped logit says of each head's contribution to the stream."""
    module = families.build("gemma3_text", {"head_dim": 16, "layer_types": families.ALTERNATING})
    module.config.final_logit_softcapping = cap
    model = headscope.load(module, device="cpu")
    terms, logit = attribute_logits(model, IDS), centred(model, IDS)
    scale = float(logit.abs().max())
    parts = [part for name, part in terms.part_terms.items() if name[0] != "logit"]
    assert float((sum(parts) - logit).abs().max()) <= 1e-4 * scale
    assert float(terms.part_terms["cap", 0].abs().max()) > 1e-3 * scale
    explicit = head_contributions(model, IDS, families.HEADS)
    assert float((terms.head_terms.double() - explicit).abs().max()) <= 1e-5 * scale
    module.config.final_logit_softcapping = None
    uncapped = head_contributions(model, IDS, families.HEADS)
    assert float((terms.head_terms.double() - uncapped).abs().max()) > 1e-3 * scale


def test_a_layer_that_adds_more_than_its_parts_is_refused() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    layer = model.module.model.layers[2]
    handle = layer.register_forward_hook(lambda _, args, out: out + 0.1 * args[0].square())
    with refuses(UnsupportedModel, "LlamaDecoderLayer", "more"):
        attribute_logits(model, IDS)
    handle.remove()


def test_head_outputs_changed_before_the_projection_are_refused() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    attention = model.module.model.layers[1].self_attn
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: (args[0].flip(-1),))
    with refuses(UnsupportedModel, "attention", "projection", "gate"):
        attribute_logits(model, IDS)
    handle.remove()


def test_a_module_that_is_not_a_norm_is_refused() -> None:
    x = torch.randn(5, 16)
    norm = Norm.from_module(Squared(), x)
    with refuses(DecompositionError, "Squared", "RMSNorm", "LayerNorm"):
        norm.scales(x, Squared()(x))


# A run -------------------------------------------------------------------------------------------------------------


def test_bins_hold_means_over_positions() -> None:
    bins = AttributionByPosition(40)
    terms = torch.randn(3, 39)
    columns = bins.table_columns(terms, head=np.arange(3))
    assert int(bins.token_counts.sum()) == 39
    assert columns["position"].max() == 39
    start = 0
    for at, end in enumerate(bins.edges.tolist()):
        np.testing.assert_allclose(
            columns["contribution"].reshape(3, -1)[:, at], terms[:, start:end].mean(1), rtol=1e-5, atol=1e-6
        )
        start = end


def test_stored_terms_add_up(tmp_path: Path) -> None:
    tiny, text = save_checkpoint(tmp_path / "tiny"), save_texts(tmp_path / "texts")
    models = {"base": str(tiny), "yarn": f"{tiny}@yarn:factor=4"}
    run = headscope.attribution(models, text=text, docs=2, lengths=[24, 40], out=tmp_path / "runs", quiet=True)
    assert validate(run) == []
    parts = run.attribution_parts.astype({"contribution": "float64"})
    keys = ["model", "context_length", "doc", "position"]
    logit = parts[parts["part"] == "logit"].set_index(keys)["contribution"].sort_index()
    total = parts[parts["part"] != "logit"].groupby(keys, observed=True)["contribution"].sum().sort_index()
    np.testing.assert_allclose(total, logit, rtol=1e-4, atol=1e-5)
    by_head = run.attribution.astype({"contribution": "float64"})
    by_layer = by_head.groupby([*keys, "layer"], observed=True)["contribution"].sum().sort_index()
    stored = parts[parts["part"] == "heads"].set_index([*keys, "layer"])["contribution"].sort_index()
    np.testing.assert_allclose(by_layer, stored, rtol=1e-4, atol=1e-6)
    rows = run.attribution[(run.attribution["context_length"] == 40) & (run.attribution["model"] == "yarn")]
    rows = rows[(rows["layer"] == 2) & (rows["head"] == 1)]
    by_document = rows.groupby("doc", observed=True)
    means = [np.average(block["contribution"], weights=block["tokens"]) for _, block in by_document]
    row = run.heads[(run.heads["model"] == "yarn") & (run.heads["layer"] == 2) & (run.heads["head"] == 1)]
    assert row["next_token_attribution"].item() == pytest.approx(np.mean(means), rel=1e-5)


@pytest.mark.slow
def test_findings_and_charts_show_the_numbers(tmp_path: Path) -> None:
    run: Run = synthetic_run(tmp_path, layers=3)
    base = run.heads[run.heads["model"] == "base"]
    best = base.loc[base["next_token_attribution"].idxmax()]
    by_question = {(r.question, r.where.get("which")): r for r in PROBE.results(run) if r.model == "base"}
    highest = by_question["attribution.extreme", "highest"]
    assert (highest.layer, highest.head) == (best["layer"], best["head"])
    assert highest.value == best["next_token_attribution"]
    assert highest.low < best["next_token_attribution_low"], "it is the largest of all heads"
    assert by_question["attribution.extreme", "lowest"].value == base["next_token_attribution"].min()
    assert by_question["attribution.raising_heads", None].value == (base["next_token_attribution"] > 0).sum()
    logit = by_question["attribution.logit", None]
    assert logit.value == pytest.approx(sum(logit.details.values()), rel=1e-5)
    assert np.mean([*logit.by_sample.values()]) == pytest.approx(logit.value)
    titles = {chart.figure.layout.title.text for chart in view.head_charts(run, "base", 2, 3)}
    assert "Direct logit attribution of layer 2, head 3" in titles
    ranks, ranks_of_answer = PROBE.head_results(run, "base", 2, 3)
    labels = [score.statistic.label for score in SCORES]
    assert [result.where["statistic"] for result in (ranks, ranks_of_answer)] == labels
    assert {ranks.question, ranks_of_answer.question} == {"heads.ranks"}
    counts = {group.heading: len([*group.charts]) for group in PROBE.charts(assembly.render_context(run))}
    assert counts == {
        "Contribution of each head to the next token's logit": 2,
        "Terms of the logit by layer": 1,
        "What each layer adds to the answer": 5,
        "What each head adds to the answer": 2,
    }


def test_bad_options_give_one_line() -> None:
    with refuses(BadOption, "attribution.lengths", 1):
        build_study({"attribution": {"lengths": [1]}})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["opt", "llama4_text"])
def test_attribution_counts_modules_that_return_states_without_a_batch_axis(model_type: str) -> None:
    model = headscope.load(tiny(model_type))
    terms = attribute_logits(model, torch.randint(3, 120, (20,), generator=torch.Generator().manual_seed(0)))
    assert terms.relative_error < 1e-5
    assert float(terms.head_terms.abs().mean(-1).min()) > 1e-3


@pytest.mark.slow
def test_attribution_of_layers_that_end_in_a_norm_is_refused_with_the_reason() -> None:
    with refuses(UnsupportedModel, "BartDecoderLayer", "LayerNorm"):
        attribute_logits(headscope.load(tiny("bart")), torch.arange(3, 20))

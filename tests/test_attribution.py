"""Writes: every head's part of a logit is what an explicit sum gives, and all parts add up to the model's own logit."""

from pathlib import Path

import families
import numpy as np
import pytest
import torch
from naive_writes import expected
from test_study import save_checkpoint, save_texts
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import direct_logit_attribution
from transformers import AutoModelForCausalLM

import headscope
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.residual_decomposition import Norm
from headscope.measures.logit_attribution import WritesByPosition
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.report import assembly
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from headscope.runs.validate import validate
from headscope.study.config import build_study
from probes.attribution import findings
from probes.attribution import report as charts
from probes.attribution.run import attribute_logits

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
def test_every_head_s_part_is_that_of_an_explicit_sum(family: str) -> None:
    model = headscope.load(MANY[family](), device="cpu")
    found = attribute_logits(model, IDS).head_terms.double()
    wanted = expected(model, IDS, families.HEADS)
    assert float((found - wanted).abs().max() / centred(model, IDS).abs().max()) <= 1e-4


@pytest.mark.parametrize("family", MANY)
def test_all_parts_add_up_to_the_model_s_own_logit(family: str) -> None:
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


def test_coarse_numbers_give_nearly_the_same_parts() -> None:
    exact = attribute_logits(headscope.load(MANY["gemma3"](), device="cpu"), IDS)
    coarse = attribute_logits(headscope.load(MANY["gemma3"]().bfloat16(), device="cpu"), IDS)
    assert coarse.stream.factor == 1
    assert {part.factor for layer in coarse.stream.layers for part in layer.others} == {1.0}
    scale = float(exact.part_terms["logit", 0].abs().max())
    assert float((coarse.head_terms - exact.head_terms).abs().max()) <= 0.1 * scale
    assert float((coarse.head_terms - exact.head_terms).square().mean().sqrt()) <= 0.01 * scale


def test_a_scheme_changes_what_is_written() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    yarn = attribute_logits(model.with_scheme("yarn:factor=4"), IDS)
    assert float((yarn.head_terms - attribute_logits(model, IDS).head_terms).abs().max()) > 1e-3
    assert yarn.relative_error <= 1e-5


@pytest.mark.model
def test_smollm2_s_parts_are_those_of_an_explicit_sum_and_add_up(smollm2: Model, tokens: Tensor) -> None:
    ids = tokens[0, :512]
    terms = attribute_logits(smollm2, ids)
    logit = centred(smollm2, ids)
    scale = float(logit.abs().max())
    parts = [part for name, part in terms.part_terms.items() if name[0] != "logit"]
    assert float((sum(parts) - logit).abs().max()) <= 1e-4 * scale
    assert float((terms.head_terms.double() - expected(smollm2, ids, 9)).abs().max()) <= 1e-4 * scale


@pytest.mark.model
def test_smollm2_s_parts_are_those_of_transformer_lens(smollm2: Model, tokens: Tensor) -> None:
    """It folds the final norm's gain into a centred unembedding, which is the same direction."""
    ids = tokens[0, :256]
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
            assert values[f"L{layer}H{head}"] == pytest.approx(float(ours.head_terms[layer, head, -1]), abs=1e-3 * scale)


# What is no such sum -----------------------------------------------------------------------------------------------


class Squared(nn.Module):
    """No norm: every feature has its own divisor."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.square())


def test_logits_that_are_not_linear_in_the_stream_are_refused_by_name() -> None:
    capped = families.build("gemma3_text", {"head_dim": 16, "layer_types": families.ALTERNATING})
    capped.config.final_logit_softcapping = 3.0
    with pytest.raises(UnsupportedModel, match=r"cannot tell what the heads of .* write: its logits are not linear"):
        attribute_logits(headscope.load(capped, device="cpu"), IDS)


def test_a_layer_that_adds_more_than_its_parts_is_refused_by_name() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    layer = model.module.model.layers[2]
    handle = layer.register_forward_hook(lambda _, args, out: out + 0.1 * args[0].square())
    with pytest.raises(UnsupportedModel, match="LlamaDecoderLayer returns more than its stream"):
        attribute_logits(model, IDS)
    handle.remove()


def test_heads_that_are_changed_before_they_are_projected_are_refused_by_name() -> None:
    model = headscope.load(MANY["llama-gqa"](), device="cpu")
    attention = model.module.model.layers[1].self_attn
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(UnsupportedModel, match="changes what heads put out before"):
        attribute_logits(model, IDS)
    handle.remove()


def test_what_is_no_norm_is_told() -> None:
    x = torch.randn(5, 16)
    norm = Norm.seen(Squared(), x)
    with pytest.raises(Exception, match="Squared is neither RMSNorm nor LayerNorm"):
        norm.scales(x, Squared()(x))


# A run -------------------------------------------------------------------------------------------------------------


def test_bins_hold_the_means_of_their_positions() -> None:
    bins = WritesByPosition(40)
    terms = torch.randn(3, 39)
    columns = bins.columns(terms, head=np.arange(3))
    assert int(bins.tokens.sum()) == 39
    assert columns["position"].max() == 39
    start = 0
    for at, end in enumerate(bins.edges.tolist()):
        np.testing.assert_allclose(
            columns["write"].reshape(3, -1)[:, at], terms[:, start:end].mean(1), rtol=1e-5, atol=1e-6
        )
        start = end


def test_a_study_stores_what_adds_up(tmp_path: Path) -> None:
    tiny, text = save_checkpoint(tmp_path / "tiny"), save_texts(tmp_path / "texts")
    models = {"base": str(tiny), "yarn": f"{tiny}@yarn:factor=4"}
    run = headscope.writes(models, text=text, docs=2, lengths=[24, 40], out=tmp_path / "runs", quiet=True)
    assert validate(run) == []
    parts = run.attribution_parts.astype({"write": "float64"})
    keys = ["model", "context_length", "doc", "position"]
    logit = parts[parts["part"] == "logit"].set_index(keys)["write"].sort_index()
    added = parts[parts["part"] != "logit"].groupby(keys, observed=True)["write"].sum().sort_index()
    np.testing.assert_allclose(added, logit, rtol=1e-4, atol=1e-5)
    heads = run.writes.astype({"write": "float64"}).groupby([*keys, "layer"], observed=True)["write"].sum().sort_index()
    whole = parts[parts["part"] == "heads"].set_index([*keys, "layer"])["write"].sort_index()
    np.testing.assert_allclose(heads, whole, rtol=1e-4, atol=1e-6)
    rows = run.writes[(run.writes["context_length"] == 40) & (run.writes["model"] == "yarn")]
    rows = rows[(rows["layer"] == 2) & (rows["head"] == 1)]
    means = [np.average(block["write"], weights=block["tokens"]) for _, block in rows.groupby("doc", observed=True)]
    here = run.heads[(run.heads["model"] == "yarn") & (run.heads["layer"] == 2) & (run.heads["head"] == 1)]
    assert here["next_token_write"].item() == pytest.approx(np.mean(means), rel=1e-5)


def test_words_and_charts_carry_the_numbers(tmp_path: Path) -> None:
    run: Run = synthetic_run(tmp_path, layers=3)
    base = run.heads[run.heads["model"] == "base"]
    best = base.loc[base["next_token_write"].idxmax()]
    told = [each.text for each in findings.findings(run) if each.model == "base"]
    assert f"layer {best['layer']}, head {best['head']} adds most ({best['next_token_write']:+.3f} logits" in told[1]
    assert "from the embedding" in told[0]
    titles = {chart.figure.layout.title.text for chart in charts.head_charts(run, "base", 2, 3)}
    assert "What layer 2, head 3 adds to the next token's logit" in titles
    (told,) = findings.head_findings(run, "base", 2, 3)
    assert told.startswith("Rank by part of the next token's logit")
    drawn = {group.heading: len([*group.charts]) for group in charts.charts(assembly.render_context(run))}
    assert drawn == {"What each head adds to the next token's logit": 2, "What the logit is made of": 2}


def test_bad_options_are_one_line() -> None:
    with pytest.raises(BadInput, match="context length 1 is too short"):
        build_study({"writes": {"lengths": [1]}})

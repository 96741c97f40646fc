"""Pretrain probe: steps against a plain implementation, checkpoints, resuming, and the paper's claims."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.refusals import assert_names, refuses
from torch import Tensor, nn

from headscope.errors import BadInput, BadOption, Interrupted
from headscope.positions import attached
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model, load
from headscope.positions.schedule import Schedule
from headscope.prompts.texts import TokenDocument, first_tokens
from headscope.rendering.blocks import RenderContext
from headscope.rendering.text import statistics_table
from headscope.results import words
from headscope.results.result import Bound
from headscope.results.verdicts import deciding_part, undecided_parts
from headscope.runs.run import Run
from headscope.study.checkpoint_glob import expand_checkpoints
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from headscope.study.runner import run_study
from headscope.training.adapter_trainer import validation_loss
from probes.pretrain import view
from probes.pretrain.declaration import PretrainOptions, TrainingKey
from probes.pretrain.results import Statistic, _judged_over_seeds, final_checkpoint_labels, results, variant_table
from probes.pretrain.run import PretrainRunner
from probes.pretrain.trainer import PretrainTrainer, initial_positions, random_model

VARIANTS = ["rope", "prope", "alibi", "nope", "adarope", "no-freq", "no-scale", "shared-freq", "fixed-log"]
TINY: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_groups": 2,
    "feed_forward": 48,
    "vocabulary": 300,
    "length": 80,
    "batch": 2,
    "steps": 4,
    "warmup": 0,
}
IDS = torch.randint(0, 300, (2, 80), generator=torch.Generator().manual_seed(1))


# One step against a reference -----------------------------------------------------------------------------------


def tiny(variant: str, **options: Any) -> tuple[PretrainOptions, Model, Schedule]:
    """A float64 model whose attention is far from uniform, and its positions, away from their initial values."""
    options = PretrainOptions(**{**TINY, **options})
    module = random_model(options, 300, 0).double()
    module.set_experts_implementation("eager")  # the grouped matrix product has no float64
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model = load(module)
    positions = initial_positions(variant, model)
    if isinstance(positions, AdaRoPE):
        positions.double()
        with torch.no_grad():
            for _, parameter in positions.named_parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return options, model, positions


def reference_loss(model: Model, variant: str, positions: Schedule, ids: Tensor) -> Tensor:
    """The mean next-token loss, computed from the weights with L x L products, head by head."""
    weights = dict(model.module.named_parameters())
    config = model.module.config
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    length, pairs = ids.shape[1], dim // 2
    rope = 10_000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    visible = torch.arange(1, length + 1, dtype=torch.float64)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]

    def theta(layer: int, group: int) -> Tensor:
        if variant in ("nope", "alibi"):
            return torch.zeros(pairs, dtype=torch.float64)
        if variant == "prope":
            return rope * (torch.arange(pairs) < 0.75 * pairs)
        return positions.xi[layer, group].exp() if isinstance(positions, AdaRoPE) else rope

    def query_scale(layer: int, head: int) -> Tensor:
        if not isinstance(positions, AdaRoPE):
            return torch.ones(length, dtype=torch.float64)
        polylog = (1 + visible.clamp(min=64) / 64).log()
        return polylog ** positions.gamma[layer, head] / positions.tau[layer, head]

    def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        first, second = x[..., :pairs], x[..., pairs:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        layer_weights = {
            name.split(f"layers.{layer}.")[1]: w for name, w in weights.items() if f"layers.{layer}." in name
        }
        h = rms_norm(x, layer_weights["input_layernorm.weight"])
        q, k, v = (h @ layer_weights[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        head_outputs = []
        for head in range(heads):
            group = head * groups // heads
            query_dims, key_dims = slice(head * dim, (head + 1) * dim), slice(group * dim, (group + 1) * dim)
            logits = rotate(q[..., query_dims], theta(layer, group)) @ rotate(k[..., key_dims], theta(layer, group)).mT
            logits = logits * query_scale(layer, head)[:, None] / math.sqrt(dim)
            if variant == "alibi":
                logits = logits - 2.0 ** (-8 * (head + 1) / heads) * (i - j)
            head_outputs.append(logits.masked_fill(j > i, -torch.inf).softmax(-1) @ v[..., key_dims])
        x = x + torch.cat(head_outputs, -1) @ layer_weights["self_attn.o_proj.weight"].T
        h = rms_norm(x, layer_weights["post_attention_layernorm.weight"])
        gate, up = (h @ layer_weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (nn.functional.silu(gate) * up) @ layer_weights["mlp.down_proj.weight"].T
    logits = rms_norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_step_equals_that_of_a_plain_implementation(variant: str) -> None:
    options, model, positions = tiny(variant)
    trainer = PretrainTrainer(model, positions, options)
    expected = reference_loss(model, variant, positions, IDS)
    gradients = torch.autograd.grad(expected, trainer.trainable_parameters)
    before = [parameter.detach().clone() for parameter in trainer.trainable_parameters]
    with attached(model, positions):
        loss = trainer.step(IDS, 1.0)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for parameter, gradient in zip(trainer.trainable_parameters, gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-6
    # AdamW's first step depends on the sign of the gradient only.
    weights = {id(parameter) for parameter in model.module.parameters()}
    for parameter, initial, gradient in zip(trainer.trainable_parameters, before, gradients, strict=True):
        decay = options.weight_decay if id(parameter) in weights else 0.0
        position_rate = options.frequency_learning_rate if parameter.dim() == 3 else options.scale_learning_rate
        rate = options.learning_rate if id(parameter) in weights else position_rate
        expected_value = initial * (1 - rate * decay) - rate * gradient / (gradient.abs() + 1e-8)
        is_large = gradient.abs() > 1e-5
        assert (parameter.detach() - expected_value).abs()[is_large].max() < 1e-6


def test_adarope_starts_as_rope() -> None:
    _, model, _ = tiny("rope")
    adarope = initial_positions("adarope", model)
    assert isinstance(adarope, AdaRoPE)
    with torch.no_grad():
        expected = model.module(IDS).logits
        with attached(model, adarope.double()):
            assert (model.module(IDS).logits - expected).abs().max() < 1e-6
    assert adarope.reference_length == 64


@pytest.mark.parametrize("architecture", ["qwen3", "olmoe"])
def test_one_step_of_other_architectures_equals_that_of_transformers(architecture: str) -> None:
    options, model, rope = tiny("rope", architecture=architecture)
    router_options = {"output_router_logits": True} if architecture == "olmoe" else {}
    expected = model.module(IDS, labels=IDS, **router_options).loss
    gradients = torch.autograd.grad(expected, list(model.module.parameters()))
    trainer = PretrainTrainer(model, rope, options)
    loss, balance = trainer.compute_losses(IDS)
    assert (loss + balance).item() == pytest.approx(expected.item(), abs=1e-6)
    (loss + balance).backward()
    for parameter, gradient in zip(trainer.trainable_parameters, gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-6
    for variant in ("adarope", "alibi"):
        with attached(model, initial_positions(variant, model).double() if variant == "adarope" else variant):
            assert torch.isfinite(trainer.compute_losses(IDS)[0])


# Whole trainings --------------------------------------------------------------------------------------------------

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "an", "old", "tree", "sleeps")
SMALL = {**TINY, "vocabulary": 300, "width": 16, "heads": 2, "kv_groups": 1, "length": 32, "steps": 4, "save_every": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, seed in (("a", 1), ("b", 2), ("held", 3)):
        words = torch.randint(len(WORDS), (400,), generator=torch.Generator().manual_seed(seed))
        (folder / f"{name}.txt").write_text(" ".join(WORDS[n] for n in words))
    return folder


def small_study(texts: Path, **options: Any) -> Any:
    held_out = {"source": f"file:{texts}/held.txt", "docs": 1}
    options = {**SMALL, "training_texts": [f"file:{texts}/*.txt"], "validation_length": 64, **options}
    return build_study({"name": "small", "texts": held_out, "pretrain": options})


def file_bytes(run: Run) -> dict[str, bytes]:
    return {str(f.relative_to(run.path)): f.read_bytes() for f in run.path.rglob("*") if f.is_file()} | {
        "run.json": b""
    }


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = small_study(texts, trainings=["rope", "alibi", "adarope", "shared-freq", "rope:1"])
    return run_study(plan, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_a_training_interrupted_three_times_ends_with_the_same_bytes(
    trained: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_study(texts, trainings=["rope", "alibi", "adarope", "shared-freq", "rope:1"])
    step, steps_left = PretrainTrainer.step, 0

    def interrupted_step(self: PretrainTrainer, *args: Any) -> float:
        nonlocal steps_left
        steps_left -= 1
        if steps_left < 0:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(PretrainTrainer, "step", interrupted_step)
    for steps_left in (3, 5, 6):  # noqa: B007 (counted down in interrupted_step)
        with pytest.raises(Interrupted):
            run_study(plan, tmp_path, resume=True)
    steps_left = 1000
    again = run_study(plan, tmp_path, resume=True)
    assert file_bytes(again) == file_bytes(trained)


@pytest.mark.slow
def test_every_checkpoint_loads_with_its_training_positions(trained: Run, texts: Path) -> None:
    rows = trained.validation.astype({"adapter": "str"})
    schemes = {"rope-s0": "base", "alibi-s0": "alibi", "adarope-s0": "adarope:adapter=", "shared-freq-s0": "adarope:"}
    for training, scheme in schemes.items():
        for step in (0, 1, 4):
            folder = trained.path / "checkpoints" / training / f"step-{step:06d}"
            model = load(str(folder))
            assert model.scheme.startswith(scheme)
            ids = first_tokens((texts / "held.txt").read_text(), model.tokenizer, 64)
            losses = validation_loss(model, model.schedule, [TokenDocument("held", ids)])
            stored = rows[(rows["adapter"] == training) & (rows["step"] == step)]["nll"].to_numpy()
            assert losses["nll"] == pytest.approx(stored, abs=1e-6)
    assert expand_checkpoints(f"{trained.path}/checkpoints/rope-s0/step-*").keys() >= {"step-000000", "step-000004"}


@pytest.mark.slow
def test_variants_share_initial_weights_and_batches_but_seeds_do_not(trained: Run) -> None:
    def weights(training: str) -> bytes:
        return (trained.path / "checkpoints" / training / "step-000000" / "model.safetensors").read_bytes()

    assert weights("rope-s0") == weights("alibi-s0") == weights("adarope-s0")
    assert weights("rope-s0") != weights("rope-s1")
    first = trained.training[trained.training["step"] == 1].set_index("adapter")["loss"]
    assert first["rope-s0"] == pytest.approx(first["adarope-s0"], abs=1e-6)
    assert first["rope-s0"] != pytest.approx(first["rope-s1"], abs=1e-6)


def test_monitoring_measures_each_checkpoint_and_leaves_the_weights_unchanged(
    trained: Run, texts: Path, tmp_path: Path
) -> None:
    options = {"checkpoints": [0, 4], "measure_checkpoints": True}
    monitored = run_study(small_study(texts, trainings=["adarope"], **options), tmp_path)
    last = "checkpoints/adarope-s0/step-000004"
    for file in ("model.safetensors", "adarope.safetensors"):
        assert (monitored.path / last / file).read_bytes() == (trained.path / last / file).read_bytes()
    (heads_run,) = (Run.open(path) for path in tmp_path.glob("[!.]*-adarope-s0-*"))
    assert [model["step"] for model in heads_run.manifest["models"]] == [0, 4]
    nll = heads_run.nll[heads_run.nll["model"] == "step-4"]
    model = load(str(monitored.path / last))
    losses = validation_loss(
        model,
        model.schedule,
        [TokenDocument("held", first_tokens((texts / "held.txt").read_text(), model.tokenizer, 32))],
    )
    assert nll["nll"].to_numpy() == pytest.approx(losses["nll"], abs=1e-6)


def test_losses_are_plotted_relative_to_the_first_training(trained: Run) -> None:
    figure = view.plot_loss_against_first(trained.validation)
    line = next(trace for trace in figure.data if trace.name == "alibi-s0")
    rows = trained.validation.astype({"adapter": "str", "nll": "float64"})
    rows = rows.assign(nll=rows["nll"] * rows["tokens"]).groupby(["adapter", "step"])[["nll", "tokens"]].sum()
    losses = rows["nll"] / rows["tokens"]
    assert list(line.y) == pytest.approx(list(losses["alibi-s0"] - losses["rope-s0"]))


def test_validation_texts_are_not_trained_on(texts: Path) -> None:
    runner = PretrainRunner(small_study(texts).pretrain, StudyContext(small_study(texts)))
    held_out = (texts / "held.txt").read_text()
    assert runner.sampler.documents.keys() == {f"{texts.name}/a.txt", f"{texts.name}/b.txt"}
    assert held_out not in [document.text for document in runner._training_texts()]


# Options ------------------------------------------------------------------------------------------------


def test_checkpoints_are_log_spaced() -> None:
    assert PretrainOptions(steps=200).checkpoint_steps == [0, 1, 2, 4, 8, 16, 32, 64, 91, 128, 181, 200]
    assert PretrainOptions(steps=200, save_every=100).segment_bounds == sorted(
        {*PretrainOptions(steps=200).checkpoint_steps, 100}
    )
    assert PretrainOptions(trainings=["rope:1", "nope", "rope"]).parsed_trainings == [
        ("nope", 0),
        ("rope", 0),
        ("rope", 1),
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"trainings": ["rop"]}, ("pretrain.trainings", "'rop'", "rope")),
        ({"trainings": ["rope:x"]}, ("pretrain.trainings", "'rope:x'", "VARIANT:SEED")),
        ({"trainings": ["rope", "rope:0"]}, ("pretrain.trainings", "'rope:0'")),
        ({"heads": 3}, ("pretrain", "width", "heads (3)", "kv_groups")),
        ({"checkpoints": [7]}, ("pretrain", "checkpoint 7", 0, 4)),
    ],
)
def test_bad_options_are_refused(options: Any, named: tuple[str | int, ...], texts: Path) -> None:
    with refuses(BadOption, *named):
        small_study(texts, **options)


def test_too_few_long_texts_are_refused(texts: Path, tmp_path: Path) -> None:
    with refuses(BadInput, 1, 0, "--docs", "--validation-length", "--text"):
        run_study(small_study(texts, validation_length=4096), tmp_path)


# The paper's claims -----------------------------------------------------------------------------------------------


def pretraining_entry(name: str) -> dict[str, Any]:
    variant, _, seed = name.rpartition("-s")
    return {"variant": variant, "seed": int(seed)}


class FakeRun:
    """The part of a run that claims use: final models of some trainings, with synthetic heads and losses."""

    def __init__(self, trainings: dict[str, dict[str, Any]], losses: dict[str, float]):
        geometry = {"native_context": 512}
        self.manifest = {
            "models": [
                {"label": name, "step": 100, "pretraining": pretraining_entry(name), "geometry": geometry}
                for name in trainings
            ]
        }
        units = pd.DataFrame([(layer, head) for layer in range(4) for head in range(8)], columns=["layer", "head"])
        units["kv_group"] = units["head"] // 2
        self.heads = pd.concat([units.assign(model=name, **head_columns) for name, head_columns in trainings.items()])
        rows = [(name, f"d{doc}", loss + 0.01 * doc) for name, loss in losses.items() for doc in range(5)]
        nll = pd.DataFrame(rows, columns=["model", "doc", "nll"])
        self.nll = nll.assign(context_length=512, position=512, tokens=511)
        self.tables = ["nll"]


def head_columns(adarope: bool, paper: bool = True) -> dict[str, Any]:
    """Statistics of 32 heads that agree with the paper's claims, or contradict them."""
    ramp = np.linspace(0, 1, 32)
    noise = np.random.default_rng(1).normal(0, 0.02, 32)
    if not adarope:
        return {
            "cov": 1.0 + noise,
            "effective_base": 1e4,
            "gamma": 0.0,
            "ess2_512": np.exp(3 + ramp),
            "mean_log_theta": -4.0,
            "weighted_log_theta": -4 + 0.3 * ramp,
        }
    sign = 1 if paper else -1
    return {
        "cov": 1.0 - 0.2 * sign + noise,
        "effective_base": np.exp(9 + sign * ramp),
        "gamma": np.where(ramp < 0.25, 0.3 if paper else -0.3, 0.1 - 0.1 * ramp * sign),
        "ess2_512": np.exp(3 + (3 if paper else 0.3) * ramp),
        "mean_log_theta": -4 + ramp,
        "weighted_log_theta": -4 + ramp if paper else -4 - 0.2 * ramp,
    }


LOSSES = {"adarope": 4.0, "rope": 4.1, "prope": 4.1, "alibi": 4.2, "nope": 4.3, "shared-freq": 4.1, "no-scale": 4.15}


@pytest.mark.parametrize(("paper", "verdict"), [(True, "supported"), (False, "not supported")])
def test_claims_are_judged_by_their_thresholds(paper: bool, verdict: str) -> None:
    names = [f"{variant}-s{seed}" for variant in LOSSES for seed in (0, 1, 2)]
    losses = {name: (1 if paper else -1) * LOSSES[name[:-3]] + 0.001 * int(name[-1]) for name in names}
    run = FakeRun({name: head_columns(name.startswith("adarope"), paper) for name in names}, losses)
    claims = list(results(run))  # type: ignore[arg-type]
    assert [claim.verdict for claim in claims] == [verdict] * 7
    for part in (part for claim in claims for part in claim.parts):
        assert [*part.by_sample] == ["seed 0", "seed 1", "seed 2"]
        assert part.n == 3
    ablations = claims[-2]
    assert ablations.question == "pretrain.claim.ablations"
    assert [part.where["other"] for part in ablations.parts] == ["shared-freq", "no-scale"]
    for name, tested in zip(("shared-freq", "no-scale"), ablations.details["tested"], strict=True):
        assert_names(tested, name)
    assert [part.bound for part in ablations.parts] == [Bound("above", pytest.approx(0.004))] * 2
    assert_names(words.criterion(ablations), "0.004 nats/token")
    assert "from-scratch-seeds" not in words.criterion(ablations), "the range is that of this run's seeds"


@pytest.mark.parametrize("flat", ["adarope", "rope"])
def test_a_ratio_of_spreads_with_a_spread_of_zero_is_left_out(flat: str) -> None:
    names = [f"{variant}-s{seed}" for variant in LOSSES for seed in (0, 1, 2)]
    heads = {name: head_columns(name.startswith("adarope")) for name in names}
    heads[f"{flat}-s1"]["weighted_log_theta"] = -4.0
    if flat == "adarope":
        heads["adarope-s1"]["mean_log_theta"] = -4.0
    losses = {name: LOSSES[name[:-3]] for name in names}
    claims = {claim.question: claim for claim in results(FakeRun(heads, losses))}  # type: ignore[arg-type]
    claim = claims["pretrain.claim.used_frequencies"]
    assert [part.question for part in claim.parts] == ["pretrain.used_by_learned"]
    assert (claim.verdict, claim.reason) == ("inconclusive", "unmeasured")
    assert_names(claim.details["unmeasured"], "spread")


def test_correlations_over_seeds_end_at_one() -> None:
    correlations = {
        seed: Statistic("pretrain.used_by_learned", Bound("above", 0.8), value)
        for seed, value in enumerate((1.0, 0.9, 0.99))
    }
    assert _judged_over_seeds(correlations).high == 1


def test_one_or_two_seeds_decide_nothing() -> None:
    names = [f"{variant}-s{seed}" for variant in LOSSES for seed in (0, 1)]
    run = FakeRun(
        {name: head_columns(name.startswith("adarope")) for name in names}, {n: LOSSES[n[:-3]] for n in names}
    )
    claims = list(results(run))  # type: ignore[arg-type]
    assert {claim.verdict for claim in claims} == {"inconclusive"}
    assert {part.reason for claim in claims for part in undecided_parts(claim)} == {"few"}
    for claim in claims:
        assert_names(words.evidence(claim), "3 seeds")


def test_the_claim_about_ablations_says_that_it_leaves_out_fixed_frequencies() -> None:
    losses = {"adarope-s0": 4.0, "no-freq-s0": 3.8, "shared-freq-s0": 4.2}
    run = FakeRun({name: head_columns(True) for name in losses}, losses)
    claim = list(results(run))[-1]  # type: ignore[arg-type]
    assert claim.details["untested"] == ["no-freq"]
    assert_names(words.evidence(claim), "no-freq")
    assert words.criterion(claim).endswith("from-scratch-seeds")
    assert [part.value for part in claim.parts] == pytest.approx([0.2])


def test_the_variant_table_compares_every_variant_with_rope_and_lists_its_seeds() -> None:
    losses = {"rope-s0": 4.0, "rope-s1": 4.01, "adarope-s0": 3.9, "adarope-s1": 3.95, "nope-s0": 4.2}
    run = FakeRun({name: head_columns(name.startswith("adarope")) for name in losses}, losses)
    table = variant_table(run, final_checkpoint_labels(run))  # type: ignore[arg-type]
    listing = statistics_table("", table)
    loss_heading, difference_heading = "loss at 512 (nats/token)", "loss against the first model at 512 (nats/token)"
    assert listing.column_names == ["variant", "seeds", loss_heading, difference_heading, "seeds apart"]
    half_width = 2.776 * 0.01 * np.sqrt(2.5 / 5)  # Student's t for five documents with losses 0.01 apart
    intervals = [f"{mean:.3f} ({mean - half_width:.3f} to {mean + half_width:.3f})" for mean in (4.025, 3.945, 4.22)]
    assert listing.rows == [
        ["rope", "0, 1", intervals[0], "–", "0.010"],
        ["adarope", "0, 1", intervals[1], "-0.080 (-0.080 to -0.080)", "0.050"],
        ["nope", "0", intervals[2], "0.200", "–"],
    ]
    by_variant = table.set_index("variant")
    assert by_variant.loc["adarope", "nll_512_diff_low"] == pytest.approx(-0.08)


def test_a_single_variant_has_no_comparison() -> None:
    for names in (["rope-s0"], ["rope-s0", "rope-s1"]):
        run = FakeRun({name: head_columns(False) for name in names}, dict.fromkeys(names, 4.0))
        assert not list(view.charts(RenderContext(run, names, run.heads, names[0], {})))  # type: ignore[arg-type]


def test_losses_at_other_lengths_give_no_claim_about_loss() -> None:
    run = FakeRun({name: head_columns(name == "adarope-s0") for name in ("adarope-s0", "rope-s0")}, {"adarope-s0": 4.0})
    run.nll = run.nll.assign(context_length=4096)
    assert len([*results(run)]) == 4  # type: ignore[arg-type]


def test_claims_with_disagreeing_seeds_are_inconclusive() -> None:
    run = FakeRun({f"adarope-s{seed}": head_columns(True, paper=seed > 1) for seed in range(4)}, {})
    claims = list(results(run))  # type: ignore[arg-type]
    assert {claim.verdict for claim in claims} == {"inconclusive"}
    for claim in claims:
        needed = deciding_part(claim)
        assert needed is not None
        assert needed[1] > 4
        assert_names(words.evidence(claim), f"{needed[1]:,} seeds")


@pytest.mark.parametrize(("step", "chosen", "left_out"), [(100, "rope-s0", "other"), (200, "other", "rope-s0")])
def test_of_two_trainings_of_one_variant_and_seed_the_claims_are_about_the_longest(
    step: int, chosen: str, left_out: str
) -> None:
    run = FakeRun({name: head_columns(name.startswith("adarope")) for name in ("adarope-s0", "rope-s0")}, {})
    run.manifest["models"][0]["step"] = step
    elsewhere = {"label": "other", "checkpoint": "elsewhere/rope-s0/step-1", "step": step}
    run.manifest["models"].append({**run.manifest["models"][1], **elsewhere})
    assert final_checkpoint_labels(run)[TrainingKey("rope", 0)] == chosen  # type: ignore[arg-type]
    warning, *claims = results(run)  # type: ignore[arg-type]
    assert warning.question == "pretrain.repeated"
    assert (warning.model, warning.details["chosen"]) == (left_out, chosen)
    assert claims


def test_claims_use_only_the_last_checkpoints() -> None:
    run = FakeRun({name: head_columns(name.startswith("adarope")) for name in ("adarope-s0", "rope-s0")}, {})
    run.manifest["models"] += [
        {**run.manifest["models"][1], "label": "later", "step": 200},
        {**run.manifest["models"][1], "label": "other", "pretraining": None},
    ]
    assert final_checkpoint_labels(run) == {TrainingKey("rope", 0): "later"}  # type: ignore[arg-type]
    assert not list(results(run))  # type: ignore[arg-type]


def test_claims_leave_out_checkpoints_under_another_scheme_than_their_own() -> None:
    run = FakeRun({"rope-s0": head_columns(True)}, {})
    own = run.manifest["models"][0]
    run.manifest["models"] = [
        {**own, "spec": "rope-s0/step-1", "scheme": "base"},
        {**own, "spec": "rope-s0/step-1@yarn:factor=8", "scheme": "yarn:factor=8", "label": "yarn"},
    ]
    assert final_checkpoint_labels(run) == {TrainingKey("rope", 0): own["label"]}  # type: ignore[arg-type]

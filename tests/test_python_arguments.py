"""Python functions given arguments of the wrong kind: each call succeeds, or one line of headscope names the fault."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts
from torch import nn

import headscope as hs
from headscope import errors, rendering
from headscope.attention.edits import LayerEdit, TokenSet
from headscope.attention.record import AttentionRecord
from headscope.base import plugins
from headscope.base.head_set import HeadSet
from headscope.base.user_input import quote
from headscope.errors import BadInput, BadOption, HeadscopeError
from headscope.forward.capture import CapturedLayers
from headscope.interventions.kinds import Zero
from headscope.runs import hub
from headscope.streaming import StreamingWindow
from headscope.study import runner

VALUES: list[Any] = [
    *(None, 3, 99, -1, 1.5, float("nan"), True, 10**30, 10**400, np.float32(1.5), object(), int, len),
    *("x", "", " ", "\ud800", "a\0b", b"x", "/dev/null/file", Path("\ud800")),
    *(torch.zeros(2, 3), torch.tensor(1), nn.Linear(1, 1), range(10**9), slice(0, 10**30)),
    *([], ["\ud800"], [None], [[1]], [True], {}, {3: 3}, {"x": None}),
]
SPAN = {"span": "a", "prompt": "w1 [[a]]w2[[/a]] w3"}
SCORE = {"score": "ess2_256", "model": "base"}
TENSORS = ("theta", "tau", "gamma", "rotary_factor")
CHECK = {"statistic": "ess2_256", "median": True, "model": "base", "at_least": 0}

CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "check": lambda o: {"run": o.run, "checks": [CHECK]},
    "compare": lambda o: {"before": o.run, "after": o.run},
    "run_study": lambda o: {"content": {"models": {"base": o.tiny}, "measure": {"lengths": [24]}}},
    "ablated": lambda o: {"model": o.model, "heads": "L0H1"},
    "ablated-mean": lambda o: {"model": o.model, "heads": "L0H1", "kind": "mean", "text": o.texts},
    "ablated-noise": lambda o: {"model": o.model, "heads": {0: [1]}, "kind": "noise:1"},
    "capturing": lambda o: {"model": o.model},
    "steered": lambda o: {"model": o.model, "heads": [(0, 1)], "span": [1, 2]},
    "steered-name": lambda o: {"model": o.model, "heads": "L0H1", **SPAN},
    "attached": lambda o: {"model": o.model, "scheme": "yarn:factor=8"},
    "load": lambda o: {"spec": o.tiny, "device": "cpu"},
    "head_matrices": lambda o: {"model": o.model, "layer": 0, "head": 1},
    "token_pair_logits": lambda o: {"model": o.model, "query_tokens": [3], "key_tokens": [4], "distances": [0, 2]},
    "AdaRoPE": lambda o: dict(zip(TENSORS, torch.ones(4, 2, 4, 8), strict=True)) | {"reference_length": 8},
    "HeadMatrices": lambda o: vars(o.selves["HeadMatrices"]),
    "Model": lambda o: {"checkpoint": o.model.checkpoint},
    "rendering.render_report": lambda o: {"runs": [o.run]},
    "rendering.write_report": lambda o: {"runs": [o.run], "out": o.new_file()},
    "HeadMatrices.copying_accuracy": lambda o: {"tokens": 8},
    "HeadMatrices.copying_score": lambda o: {},
    "HeadMatrices.qk": lambda o: {},
    "HeadMatrices.singular_directions": lambda o: {},
    "HeadMatrices.token_logits": lambda o: {"sources": [3, 4], "targets": [5]},
    "HeadMatrices.top_tokens": lambda o: {},
    "AdaRoPE.attention_factor": lambda o: {"layer": 0},
    "AdaRoPE.from_schedule": lambda o: {"checkpoint": o.model, "start": o.model.schedule},
    "AdaRoPE.load": lambda o: {"path": o.folder / "adapter.safetensors", "checkpoint": o.model},
    "AdaRoPE.log_theta_init": lambda o: {"layer": 0},
    "AdaRoPE.query_scale": lambda o: {"layer": 0, "visible": torch.tensor([[3]])},
    "AdaRoPE.save": lambda o: {"path": o.folder / "saved.safetensors"},
    "AdaRoPE.softmax_ratio": lambda o: {"layer": 0},
    "AdaRoPE.tau_and_gamma": lambda o: {},
    "AdaRoPE.tensors": lambda o: {},
    "AdaRoPE.theta": lambda o: {"layer": 0},
    "AdaRoPE.untrained_copy": lambda o: {},
    "Model.in_open_context": lambda o: {},
    "Model.with_schedule": lambda o: {"schedule": o.model.schedule, "name": "own"},
    "Model.with_scheme": lambda o: {"scheme": "yarn:factor=8"},
    "Run.array": lambda o: {"table": "attention", "column": "ess2", "model": "base"},
    "Run.arrow_table": lambda o: {"name": "nll", "values": {"model": ["base"]}, "columns": ["nll"]},
    "Run.blocks_of_layers": lambda o: {"name": "attention"},
    "Run.charts": lambda o: {"topic": "loss"},
    "Run.check": lambda o: {},
    "Run.check_footers": lambda o: {},
    "Run.derived": lambda o: {"compute": lambda run: 1},
    "Run.distinct": lambda o: {"name": "attention", "columns": ["layer"]},
    "Run.export": lambda o: {"file_format": "csv", "out": o.new_file(), **SCORE},
    "Run.export-duo": lambda o: {"file_format": "duo", "out": o.new_file(), **SCORE, "sink": 3, "reduction": "max"},
    "Run.findings": lambda o: {},
    "Run.from_hub": lambda o: {"repository": "a/b"},
    "Run.head": lambda o: {"layer": 0, "head": 1},
    "Run.open": lambda o: {"path": o.run.path},
    "Run.push_to_hub": lambda o: {"repository": "a/b"},
    "Run.rows": lambda o: {"name": "attention", "layer": 0, "ess2": 1.5, "model": "base"},
    "Run.table": lambda o: {"name": "attention"},
    "Run.to_latex": lambda o: {"statistics": "ess2_256", "model": "base"},
    "Run.top_heads": lambda o: {"statistic": "ess2_256", "count": 3, "model": "base"},
    "Run.unreadable_files": lambda o: {},
    "Run.with_all_models": lambda o: {},
    "CapturedLayers.edit": lambda o: {"edit": LayerEdit(Zero(), "z", (1,), TokenSet(), "zero", layer=0)},
    "CapturedLayers.edit_output": lambda o: {"layer": 0, "edit": print},
    "CapturedLayers.edit_qkv": lambda o: {"layer": 0, "edit": print},
    "CapturedLayers.hook": lambda o: {"module": o.model.module, "function": print},
    "CapturedLayers.hook_inputs": lambda o: {"module": o.model.module, "function": print},
    "CapturedLayers.listen": lambda o: {"listener": print},
    "CapturedLayers.stream": lambda o: {"layer": 0, "kv_groups": [0], "window": StreamingWindow(1, 2)},
    "AttentionRecord.is_chosen": lambda o: {"rows": torch.tensor([0])},
    "AttentionRecord.logits_at": lambda o: {"rows": torch.tensor([0]), "keys": torch.tensor([[1, 2]])},
    "AttentionRecord.masked_logits": lambda o: {"rows": torch.tensor([0]), "keys": torch.tensor([1])},
    "AttentionRecord.own_logits": lambda o: {"rows": torch.tensor([0]), "keys": slice(0, 2)},
    "AttentionRecord.soft_cap": lambda o: {"logits": torch.zeros(2)},
    "AttentionRecord.visible_columns": lambda o: {"rows": torch.tensor([0])},
    "AttentionRecord.weights": lambda o: {"rows": [0, -1]},
    "AttentionRecord.without_patterns": lambda o: {},
    "HeadSet.mask": lambda o: {"layers": [0, 1], "heads": 4},
    "HeadSet.parse": lambda o: {"text": "L0H1"},
    "HeadSet.read": lambda o: {"file": o.folder / "heads.yaml"},
    "HeadSet.to_dict": lambda o: {},
    "HeadSet.top": lambda o: {"table": o.run.heads, "statistic": "ess2_256", "count": 3, "model": "base"},
    "HeadSet.write": lambda o: {"file": o.folder / "written.yaml"},
}
"""A valid call of every public function and method, from the fixture `objects`; -NAME is a second call of one."""

PROBE_KEYWORDS: dict[str, dict[str, Any]] = {
    "ablate": {"prompt": "w1 w2", "answer": " w3"},
    "circuit": {"heads": ["L0H1"]},
    "import_scores": {"file": "scores.csv"},
    "spans": {"prompt": SPAN["prompt"]},
}
"""What the functions of probes need beside a model."""


class Accepted(Exception):
    """All arguments of a study were accepted."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("arguments")
    tiny = str(save_checkpoint(folder / "tiny"))
    model = hs.load(tiny, device="cpu")
    run = hs.Run.open(synthetic_run(folder / "runs", probes=["measure"], layers=2, heads=2, groups=2).path)
    adarope = hs.AdaRoPE.from_schedule(model, model.schedule)
    adarope.save(folder / "adapter.safetensors")
    heads = HeadSet.parse("L0H1,L1H0")
    heads.write(folder / "heads.yaml")
    selves = {"rendering": rendering, "Model": model, "Run": run, "AdaRoPE": adarope, "HeadSet": heads}
    records: list[Any] = []
    with hs.capturing(model) as layers:
        layers.listen(records.append)
        model.module(torch.tensor([[3, 4, 5]]))
    selves |= {"AttentionRecord": records[0], "HeadMatrices": hs.head_matrices(model, 0, 1)}
    numbers = itertools.count()

    def new_file() -> Path:
        return folder / f"file-{next(numbers)}"

    texts = save_texts(folder / "texts", 300)
    facts = {"folder": folder, "tiny": tiny, "model": model, "run": run, "texts": texts, "selves": selves}
    return SimpleNamespace(**facts, new_file=new_file)


def public_functions() -> list[str]:
    """The names of the public functions, and of the public methods that headscope defines, as in CALLS."""
    names = [f"rendering.{name}" for name in rendering.__all__]
    exported = {name: getattr(hs, name) for name in hs.__all__} | {"HeadSet": HeadSet}
    names += ["AdaRoPE", "HeadMatrices", "Model"]  # constructors; runs are opened, and a HeadSet checks its own
    exported |= {"AttentionRecord": AttentionRecord, "CapturedLayers": CapturedLayers}
    for name, item in exported.items():
        if not isinstance(item, type):
            names.append(name)
            continue
        for member in dir(item):
            function = getattr(item, member)
            is_own = inspect.isroutine(function) and str(getattr(function, "__module__", "")).startswith("headscope.")
            names += [f"{name}.{member}"] * (is_own and not member.startswith("_"))
    return names + [name for name in CALLS if "-" in name]


def fault(call: Callable[[], Any], name: str, value: Any) -> str:
    """ "" if the call succeeds or raises an error of headscope, in one line that names the argument or the value."""
    try:
        result = call()
        if isinstance(result, AbstractContextManager):
            with result:
                pass
        elif isinstance(result, Iterator):
            list(result)
    except Accepted:
        return ""
    except HeadscopeError as error:
        message = str(error)
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        named = [word.removesuffix("s") for word in name.split("_")]
        named += [quote(value).strip("'")[:30], *(quote(item).strip("'") for item in items)]
        is_line = message.isprintable() and len(message) < 1500
        return "" if is_line and any(text in message for text in named) else f"does not say it in a line: {message!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def invoke(function: Any, arguments: dict[str, Any]) -> Any:
    kinds = {name: item.kind for name, item in inspect.signature(function).parameters.items()}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    positional = [name for name in arguments if kinds.get(name) in by_position]
    keywords = {name: value for name, value in arguments.items() if name not in positional}
    return function(*(arguments[name] for name in positional), **keywords)


@pytest.fixture(autouse=True)
def without_work(objects: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no study, use no network, and write relative paths into a folder of the test."""

    def raise_accepted(*arguments: Any) -> None:
        raise Accepted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "push", lambda *arguments: "url")
    monkeypatch.setattr(hub, "fetch", lambda *arguments: objects.run.path)
    monkeypatch.setattr(runner, "StudyContext", raise_accepted)


@pytest.mark.parametrize("name", public_functions())
def test_a_public_function_takes_an_argument_or_names_it(name: str, objects: Any) -> None:
    owner, _, member = name.partition("-")[0].rpartition(".")
    valid = CALLS[name](objects)
    place = objects.selves.get(owner, CapturedLayers) if owner else hs

    def call(arguments: dict[str, Any]) -> Any:
        if place is not CapturedLayers:
            return invoke(getattr(place, member), arguments)
        with hs.capturing(objects.model) as layers:
            return invoke(getattr(layers, member), arguments)

    if name != "run_study":
        call(valid)
    parameters = inspect.signature(getattr(place, member)).parameters.values()
    names = {item.name for item in parameters if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)}
    faults = {}
    for argument in {*valid, *names} - {"self"}:
        for value in VALUES:
            if (name == "Run.derived" and callable(value)) or all(
                isinstance(item, torch.Tensor) for item in (value, valid.get(argument))
            ):
                continue  # a value of the right kind: the function of a user may raise anything
            problem = fault(partial(call, {**CALLS[name](objects), argument: value}), argument, value)
            if problem and not (name == "HeadSet.parse" and problem.startswith("ValueError")):  # as its docstring says
                faults[f"{argument}={quote(value)}"] = problem[:300]
    assert not faults


@pytest.mark.parametrize("name", plugins.probe_functions())
def test_the_function_of_a_probe_takes_a_keyword_or_names_it(name: str, objects: Any) -> None:
    function = getattr(hs, name)
    parameters = inspect.signature(function).parameters
    valid = {"model": objects.model, **PROBE_KEYWORDS.get(name, {})} if "model" in parameters else {}
    faults = {}
    for argument in parameters:
        for value in VALUES:
            problem = fault(partial(function, **{**valid, "quiet": True, argument: value}), argument, value)
            if problem:
                faults[f"{argument}={quote(value)}"] = problem[:300]
    assert not faults


@pytest.mark.parametrize("label", [3, " ", "", "../a", "<b>", "a\nb", None])
def test_a_label_that_the_command_line_refuses_is_refused(label: Any, objects: Any) -> None:
    with refuses(BadInput, f"model name {quote(label)}"):
        hs.measure({label: objects.model})


@pytest.mark.parametrize("name", ["seed", "docs", "rows", "lengths", "count"])
@pytest.mark.parametrize("value", [True, [True]])
def test_a_boolean_is_no_number(name: str, value: Any, objects: Any) -> None:
    function = hs.ablate if name == "count" else hs.measure
    with refuses(BadOption, name, True):
        function(objects.model, **{name: value})


def test_a_context_may_be_entered_again_and_while_it_is_open(objects: Any) -> None:
    ids = torch.tensor([[3, 4, 5]])

    def logits() -> torch.Tensor:
        return objects.model.module(ids).logits.detach()

    before, half = logits(), hs.ablated(objects.model, "L0H1", "scale:0.5")
    with half:
        once = logits()
    for _ in range(2):
        with half:
            assert torch.equal(logits(), once)
    attached = hs.attached(objects.model, "yarn:factor=8")
    with attached as outer, attached as inner:
        assert torch.equal(outer.theta(0), inner.theta(0))
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("index", [[99], [-99], [True], [0.5], [0j]])
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("AttentionRecord.")])
def test_a_record_refuses_indices_that_it_does_not_have(name: str, index: list[Any], objects: Any) -> None:
    record, valid = objects.selves["AttentionRecord"], CALLS[name](objects)
    for argument in valid.keys() & {"rows", "keys"}:
        wrong = torch.tensor([index] if argument == "keys" and "logits_at" in name else index)
        with refuses(BadInput, argument):
            getattr(record, name.split(".")[1])(**{**valid, argument: wrong})


def test_negative_keys_of_a_record_count_from_the_end(objects: Any) -> None:
    record, rows = objects.selves["AttentionRecord"], torch.tensor([2, -1])
    by_number = record.logits_at(torch.tensor([2, 2]), torch.tensor([[1], [2]]))
    assert torch.equal(record.logits_at(rows, torch.tensor([[-2], [-1]])), by_number)
    assert torch.equal(record.masked_logits(rows, slice(-2, 99)), record.masked_logits(rows, torch.tensor([1, 2])))


@pytest.mark.parametrize("layer", [-1, 4, 99])
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("AdaRoPE.")])
def test_every_schedule_refuses_a_layer_that_the_model_does_not_have(name: str, layer: int, objects: Any) -> None:
    valid = CALLS[name](objects)
    for schedule in (objects.selves["AdaRoPE"], objects.model.schedule) if "layer" in valid else ():
        with refuses(BadInput, f"no layer {layer}", "0 to 3"):
            getattr(schedule, name.split(".")[1])(**{**valid, "layer": layer})


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("CapturedLayers.")])
def test_layers_of_a_capture_that_has_ended_are_refused(name: str, objects: Any) -> None:
    with hs.capturing(objects.model) as layers:
        pass
    with refuses(BadInput, "has ended"):
        getattr(layers, name.split(".")[1])(**CALLS[name](objects))


def test_a_capture_refuses_layers_heads_and_groups_that_would_do_nothing_or_act_twice(objects: Any) -> None:
    with hs.capturing(objects.model) as layers:
        for numbers in ([], [0, 0]):
            with refuses(BadInput, f"layers={numbers}"):
                layers.listen(print, numbers)
        for number in (99, -1):
            with refuses(BadInput, f"no KV group {number} in layer 0"):
                layers.stream(0, [number], StreamingWindow(1, 2))
            with refuses(BadInput, f"no head {number} in layer 0"):
                layers.edit(LayerEdit(Zero(), "z", (number,), TokenSet(), "zero", layer=0))


@pytest.mark.parametrize("kind", ["scale:1e308", "scale:-1e38", "noise:1e7"])
def test_an_edit_that_gives_logits_that_are_not_finite_is_refused(kind: str, objects: Any) -> None:
    with refuses(BadInput, kind, "1,000,000"), hs.ablated(objects.model, "L0H1", kind):
        pass


@pytest.mark.parametrize("kind", [item for item in vars(errors).values() if isinstance(item, type)])
def test_a_message_is_one_line_and_shows_control_characters_escaped(kind: type) -> None:
    if issubclass(kind, HeadscopeError):
        text = "no '\n\x1b[31m\u2028\x7f'. Check it"
        message = str(kind("", (), text) if kind is BadOption else kind(text))
        assert message == r"no '\n\x1b[31m\u2028\x7f'. Check it"


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\u2028b"])
def test_a_name_of_a_check_is_one_line(name: str, objects: Any) -> None:
    with refuses(BadInput, "check 1", "'name'", ascii(name)):
        hs.check(objects.run, [{**CHECK, "name": name}])


def test_a_message_about_a_form_names_the_form(objects: Any) -> None:
    with refuses(BadOption, "'a' is not a pair of words. Write QUERY>KEY"):
        hs.weights(objects.model, pairs=["a"])
    with refuses(BadInput, "'1e3' is not an integer", "logn:length=1e3"):
        hs.load(f"{objects.tiny}@logn:length=1e3")

"""Models that torch.compile compiled, in whole or in parts: measured and changed as if they were not compiled."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import compile_regions
from support import families, tiny_studies
from support.refusals import refuses
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, default_data_collator

import headscope as hs
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.runs.run import Run, list_runs
from headscope.study.config import build_study
from headscope.study.runner import run_study
from headscope.training.callback import HeadscopeCallback

IDS = torch.arange(3, 27)[None]
EDITS: dict[str, Callable[[hs.Model], Any]] = {
    "zero ablation": lambda model: hs.ablated(model, "L1H2", "zero"),
    "fewer keys": lambda model: hs.ablated(model, "L1H2,L2H0", "streaming:1:4"),
    "steering": lambda model: hs.steered(model, ["L2H1"], range(2, 6), alpha=0.1),
    "another scheme": lambda model: hs.attached(model, "linear:factor=4"),
}
"""Contexts that change a model through its attention function, and one through a function that its attention calls."""


def compile_function(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def compile_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def compile_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")
    return model


def compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def replace_forward(model: Any) -> Any:
    model.forward = compile_function(model.forward)
    return model


def replace_forward_of_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = compile_function(layer.forward)
    return model


def replace_forward_of_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.forward = compile_function(layer.self_attn.forward)
    return model


def replace_layers(model: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = compile_function(layer)
    return model


def replace_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn = compile_function(layer.self_attn)
    return model


def replace_backbone(model: Any) -> Any:
    model.model = compile_function(model.model)
    return model


def wrap(model: Any) -> Any:
    return compile_function(model)


def wrap_regions(model: Any) -> Any:
    return compile_regions(model, backend="eager")


WAYS = (
    compile_layers,
    compile_attention,
    compile_in_place,
    replace_forward,
    replace_forward_of_layers,
    replace_forward_of_attention,
    replace_layers,
    replace_attention,
    replace_backbone,
    wrap,
    wrap_regions,
)
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build() -> Any:
    return families.SPECS["llama-gqa"].build()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    output: Tensor = model(IDS).logits
    return output


def numbers(model: hs.Model, run: Any) -> dict[str, Tensor]:
    """Head outputs by layer as listeners get them, and the logits of `run` in every context that changes the model."""
    values: dict[str, Tensor] = {}
    with capturing(model) as layers:
        layers.listen(lambda record: values.update({f"z of layer {record.layer}": record.z.clone()}))
        values["captured"] = logits(run)
    for name, context in EDITS.items():
        with context(model):
            values[name] = logits(run)
    return values


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """The numbers of the model without torch.compile."""
    plain = build()
    values = numbers(hs.load(plain), plain)
    assert all((values[name] - logits(plain)).abs().max() > 0.1 for name in EDITS)
    return values


def assert_equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    differences = {name: float((values[name] - expected[name]).abs().max()) for name in expected}
    assert max(differences.values()) == 0, differences


@pytest.mark.exhaustive(sample=3)
@pytest.mark.slow
@each_way
def test_graphs_compiled_before_loading_are_not_used_in_contexts(
    way: Callable[[Any], Any], expected: dict[str, Tensor]
) -> None:
    compiled = way(build())
    before = logits(compiled)
    model = hs.load(compiled)
    assert_equal(numbers(model, compiled), expected)
    assert_equal(numbers(model, model.module), expected)
    assert torch.equal(logits(compiled), before)
    assert model.identity == hs.load(build()).identity


@pytest.mark.exhaustive(sample=3)
@pytest.mark.slow
@each_way
def test_graphs_compiled_between_and_inside_contexts_are_not_used_in_others(
    way: Callable[[Any], Any], expected: dict[str, Tensor]
) -> None:
    plain = build()
    model = hs.load(plain)
    unchanged = logits(plain)
    with EDITS["zero ablation"](model):
        compiled = way(plain)
        assert torch.equal(logits(compiled), expected["zero ablation"])
    assert torch.equal(logits(compiled), unchanged)
    assert_equal(numbers(model, compiled), expected)


@pytest.mark.slow
def test_a_compiled_function_that_calls_the_model_sees_its_contexts(expected: dict[str, Tensor]) -> None:
    plain = build()
    model = hs.load(plain)
    run = compile_function(lambda ids: plain(ids))
    logits(run)
    assert_equal(numbers(model, run), expected)


@pytest.mark.slow
def test_graphs_are_used_again_after_contexts_that_end_in_any_order() -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        return lambda *args: graphs.append(graph) or graph(*args)

    plain = build()
    model, other = hs.load(plain), hs.load(build())
    plain.model.layers[1].mlp.compile(backend=count)
    logits(plain)
    assert len(graphs) == 1
    first, second = EDITS["zero ablation"](model), EDITS["another scheme"](other)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    logits(plain)
    assert len(graphs) == 1  # `other` is still in a context, and a stance of torch holds for the process
    second.__exit__(None, None, None)
    logits(plain)
    assert len(graphs) == 2


@pytest.mark.slow
def test_compiled_code_cannot_enter_a_context(expected: dict[str, Tensor]) -> None:
    model = hs.load(build())

    @compile_function
    def ablate(ids: Tensor) -> Tensor:
        with EDITS["zero ablation"](model):
            output: Tensor = model.module(ids).logits
            return output

    with refuses(BadInput, "torch.compile"):
        ablate(IDS)
    assert_equal(numbers(model, model.module), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", [compile_layers, replace_layers], ids=lambda way: way.__name__)
def test_probes_measure_a_compiled_model_as_the_plain_one(way: Callable[[Any], Any], tmp_path: Path) -> None:
    texts = tiny_studies.save_texts(tmp_path / "texts")
    content = {
        "models": {"m": "m"},
        "texts": {"source": texts, "docs": 2},
        "measure": {"lengths": [24], "rows": 8},
        "influence": {"lengths": [24], "components": ["zero"], "models": ["m"], "method": "verify"},
    }

    def tables(module: Any, folder: Path) -> dict[str, Any]:
        model = hs.load(module, tokenizer=tiny_studies.tokenizer())
        run = run_study(build_study(content), folder, in_memory_models={"m": model})
        return {name: run.table(name) for name in run.tables}

    expected = tables(build(), tmp_path / "plain")
    compiled = way(build())
    logits(compiled)
    values = tables(compiled, tmp_path / "compiled")
    assert values.keys() == expected.keys() > {"influence"}
    for name, table in expected.items():
        assert values[name].equals(table), name


def train(model: nn.Module, folder: Path, **arguments: Any) -> Run:
    """The run of a HeadscopeCallback in a training of two steps."""
    text = tiny_studies.save_texts(folder / "texts")
    ids = tiny_studies.tokenizer()(" ".join(tiny_studies.WORDS[:64]))["input_ids"]
    rows = [{"input_ids": ids[n : n + 16], "labels": ids[n : n + 16]} for n in range(0, 64, 16)]
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": []}
    options |= {"save_strategy": "no", "remove_unused_columns": False}
    settings = TrainingArguments(str(folder / "trainer"), use_cpu=True, seed=3, **options, **arguments)
    trainer = Trainer(model, settings, default_data_collator, rows, processing_class=tiny_studies.tokenizer())
    probes = {"measure": {"lengths": [24], "rows": 8}}
    trainer.add_callback(HeadscopeCallback(every=1, probes=probes, text=text, out=folder / "runs"))
    trainer.train()
    ((_, run),) = list_runs(folder / "runs")
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="module")
def plain_training(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(build(), tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrapped", "in place", "by the Trainer"])
def test_the_training_callback_measures_a_compiled_model_as_the_plain_one(
    way: str, tmp_path: Path, plain_training: Run
) -> None:
    arguments = {"torch_compile": True, "torch_compile_backend": "eager"} if way == "by the Trainer" else {}
    model = {"wrapped": wrap, "in place": compile_layers}.get(way, lambda plain: plain)(build())
    run = train(model, tmp_path, **arguments)
    assert [model["step"] for model in run.manifest["models"]] == [0, 1, 2]
    for name in ("attention", "nll"):
        assert run.table(name).equals(plain_training.table(name)), name
    weights, expected = (each.manifest["models"][2]["weights_sha256"] for each in (run, plain_training))
    assert weights == expected

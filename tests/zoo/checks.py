"""One model against its own eager attention: is everything that headscope measures of it right?

Errors are relative, in the units of `reference`.
"""

import math
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import headscope as hs
from headscope.errors import HeadscopeError, UnsupportedModel
from headscope.measures.attention_rows import ROW_STATISTICS
from headscope.positions.model import Model
from probes.measure.run import measure_tokens

from . import sizes
from .eager import Call, Truth, binned, eager, statistics, tokens
from .yarn import FACTOR, yarn_by_hand

MAX_EAGER_ERROR = 1e-4
"""What float32 may differ from the family's own eager attention, relative."""
MAX_UNIFORMITY = 0.9
"""Mean effective length over all rows, as a share of the visible keys, above which attention tells nothing."""
SHIFT = 5
YARN = f"yarn:factor={FACTOR:g}"

Kind = Literal["right", "right without pairs", "refused", "cannot be built", "WRONG", "TRACEBACK"]


@dataclass
class Verdict:
    """`reason` says why a model is refused, or what is wrong by how much; `errors` the largest of each check.

    `refused` are the measures that refuse the model, with their reasons; only layouts are checked for them.
    """

    kind: Kind
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


Opened = tuple[Model, Tensor, Truth]
"""A model, the text that it was checked with, and what the family itself computes for that text."""


def check_model(make: Callable[[], PreTrainedModel]) -> Verdict:
    """Build a model, open it and hold all that is measured of it against its own eager attention."""
    opened = open_model(make)
    return opened if isinstance(opened, Verdict) else check_opened(*opened)


def open_model(make: Callable[[], PreTrainedModel]) -> Opened | Verdict:
    """Build a model and open it; a verdict if that fails."""
    try:
        module = make()
    except Exception as error:
        return Verdict("cannot be built", _line(error))
    ids = tokens(module)
    try:
        truth = eager(module, ids)
    except Exception as error:
        return Verdict("cannot be built", f"its own forward fails: {_line(error)}")
    if not truth.logits.isfinite().all():
        return Verdict("cannot be built", "its own logits are not finite")
    try:
        return hs.load(module), ids, truth
    except UnsupportedModel as error:
        return _refused(module, error)
    except Exception as error:
        return Verdict("TRACEBACK", f"load: {_error_location(error)}")


def check_opened(model: Model, ids: Tensor, truth: Truth) -> Verdict:
    """The verdict on all that is measured of a model, against its own eager attention."""
    errors: dict[str, float] = {}
    check_name = "logits"
    try:
        if not truth.calls:
            return Verdict("WRONG", "opened, but its own attention was not seen by the zoo")
        for name, check in CHECKS.items():
            check_name = name
            errors |= check(model, ids, truth)
    except HeadscopeError as error:
        return Verdict("WRONG", f"{check_name}: refused only when measured: {error}", errors)
    except Exception as error:
        return Verdict("TRACEBACK", f"{check_name}: {_error_location(error)}", errors)
    wrong = {name: error for name, error in errors.items() if not error <= MAX_EAGER_ERROR}
    if wrong:
        return Verdict("WRONG", ", ".join(f"{name} {error:.1e}" for name, error in wrong.items()), errors)
    return Verdict("right" if model.geometry.pairs else "right without pairs", "", errors)


# Checks ------------------------------------------------------------------------------------------------------------


def _check_nonuniform(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    """Does a wrong kernel show? Not where a row's weights are all alike."""
    shares = [(statistics(call)["ess2"] / call.visible[0].sum(-1))[:, sizes.WINDOW :].mean() for call in truth.calls]
    return {"attention of the zoo's model is even": math.inf} if sum(shares) / len(shares) > MAX_UNIFORMITY else {}


def _logits(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    with hs.capturing(model), torch.no_grad():
        measured = model.module(input_ids=ids, use_cache=False).logits.float()
    return {"logits": relative(measured, truth.logits)}


def _attention(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    return attention_errors(_measured(model, ids)["attention"], model, truth)


@lru_cache(maxsize=1)
def _measured(model: Model, ids: Tensor) -> dict[str, dict[str, np.ndarray]]:
    """The tables of one pass, which the checks share."""
    return measure_tokens(model, ids[0], ["attention", "nll", "pairs"], None)


def attention_errors(measured: dict[str, np.ndarray], model: Model, truth: Truth) -> dict[str, float]:
    """Largest relative error of the statistics of attention rows, over layers, heads and bins."""
    calls = by_layer(model, truth)
    if calls is None:
        return {"attention layers": math.inf}
    worst: dict[str, float] = {}
    for number, call in calls.items():
        of_layer = measured["layer"] == number
        expected = binned(call)
        for edge, values in expected.items():
            rows = of_layer & (measured["visible"] == edge)
            heads = len(call.q)
            if (
                measured["head"][rows].tolist() != list(range(heads))
                or (measured["rows"][rows] != values["rows"]).any()
            ):
                return {"visible keys": math.inf}
            for name in ROW_STATISTICS:
                error = statistic_error(name, measured[name][rows], values[name].numpy())
                worst[name] = max(worst.get(name, 0.0), error)
        if sorted(set(measured["visible"][of_layer].tolist())) != sorted(expected):
            return {"visible keys": math.inf}
    return worst


def by_layer(model: Model, truth: Truth) -> dict[int, Call] | None:
    """The call of each layer that headscope measures, by the layer's true number; None where they do not match."""
    modules = {id(call.module): call for call in truth.calls}
    if len(modules) != len(truth.calls) or {id(m) for m in model.attention_modules} != set(modules):
        return None
    return {
        number: modules[id(m)] for number, m in zip(model.geometry.layer_numbers, model.attention_modules, strict=True)
    }


def _loss(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    measured = _measured(model, ids)["nll"]
    losses = -truth.logits[0, :-1].double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    starts = [0, *measured["position"][:-1]]
    ends = zip(starts, measured["position"], measured["nll"], strict=True)
    return {"loss": max(abs(nll - losses[a:b].mean()) / max(1.0, losses[a:b].mean()) for a, b, nll in ends)}


def _planes(model: Model, layer: int) -> list[tuple[int, int]]:
    """The two dimensions of each pair, rotary pairs first."""
    geometry = model.geometry.at_layer(layer)
    dims, start = 2 * geometry.pairs, geometry.rotary_start
    head_dim = geometry.head_dim
    rotary = list(range(start, start + dims))
    other_dims = [d for d in range(head_dim) if d not in rotary]
    pairs: list[tuple[int, int]] = []
    for part in (rotary, other_dims):
        half = len(part) // 2
        sides = (part[:half], part[half:]) if geometry.rotary_layout == "half" else (part[::2], part[1::2])
        pairs += list(zip(*sides, strict=True))
    return pairs


def _pairs(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    if not model.geometry.pairs:
        return {}
    measured = _measured(model, ids)["pairs"]
    calls = by_layer(model, truth)
    if calls is None:
        return {"attention layers": math.inf}
    worst: dict[str, float] = {}
    for layer, (number, call) in enumerate(calls.items()):
        of_layer = measured["layer"] == number
        planes = _planes(model, layer)
        if measured["head"][of_layer].tolist() != [head for head in range(len(call.q)) for _ in planes]:
            return {"pairs of a layer": math.inf}
        expected = _pair_statistics(call, planes)
        rms = expected["rms"].square().sum(-1, keepdim=True).sqrt()
        for name, values in expected.items():
            difference = torch.from_numpy(measured[name][of_layer]).view(values.shape) - values
            worst[f"pair {name}"] = max(worst.get(f"pair {name}", 0.0), _finite((difference.abs() / rms).max()))
    return worst


def _pair_statistics(call: Call, planes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """As `reference.pair_statistics`, for these pairs and the visible keys of the call: each [H, P]."""
    index, visible = torch.tensor(planes), call.visible[0].double()
    q, k = call.q.double(), call.k.double().repeat_interleave(len(call.q) // len(call.k), 0)
    qf, kf = (t[..., index].transpose(1, 2) for t in (q, k))  # [H, P, L, 2]
    c = call.scaling * qf @ kf.mT * visible
    norms = abs(call.scaling) * (qf.norm(dim=-1)[..., None] * kf.norm(dim=-1)[..., None, :]) * visible
    count = visible.sum()
    return {
        "mean_abs": c.abs().sum((-2, -1)) / count,
        "mean_signed": c.sum((-2, -1)) / count,
        "rms": (c.square().sum((-2, -1)) / count).sqrt(),
        "norm_product": norms.sum((-2, -1)) / count,
    }


def _check_shift_rotation(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    """Moving a text by SHIFT positions turns each pair of q and k by SHIFT times its frequency, and nothing else."""
    if not model.geometry.pairs:
        return {}
    measured = _measured(model, ids)["pairs"]
    if (getattr(model.module.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
        eager(model.module, ids)  # leaves the frequencies of this length; a text that stands elsewhere has others
        inverse_frequencies = next(
            buffer for name, buffer in model.module.named_buffers() if name.endswith(".inv_freq")
        )
        return {"theta": relative(torch.from_numpy(measured["theta"][: len(inverse_frequencies)]), inverse_frequencies)}
    positions = torch.arange(SHIFT, SHIFT + ids.shape[1])[None]
    try:
        runs = [_with_inputs(model, ids, **inputs) for inputs in ({}, {"position_ids": positions})]
    except (TypeError, IndexError, ValueError, RuntimeError):
        return {}  # it takes no positions
    if relative(runs[1][0][1], runs[0][0][1]) > MAX_EAGER_ERROR:
        return {}  # it tells positions to the first layer
    worst = [0.0, 0.0]
    for layer in range(model.geometry.layers):
        index = torch.tensor(_planes(model, layer))
        first = (measured["layer"] == model.geometry.layer_numbers[layer]) & (measured["head"] == 0)
        angles = torch.from_numpy(measured["theta"][first]).double() * SHIFT
        (call, hidden), (moved, hidden_moved) = (run[layer] for run in runs)
        if relative(hidden_moved, hidden) > MAX_EAGER_ERROR:
            break  # where the text stands changed what this layer reads
        for direction, moved_direction in zip(_directions(call), _directions(moved), strict=True):
            before, after = (torch.view_as_complex(t[..., index].contiguous()) for t in (direction, moved_direction))
            for at, sign in enumerate((1, -1)):
                rotated = before * torch.polar(torch.ones_like(angles), sign * angles)
                worst[at] = max(worst[at], relative(after, rotated))
    return {"theta": min(worst)}


def _with_inputs(model: Model, ids: Tensor, **inputs: Any) -> list[tuple[Call, Tensor]]:
    """Each attention layer's call, and the hidden states that it was given."""
    hidden: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden[module] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    with ExitStack() as stack:
        for module in model.attention_modules:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        calls = by_layer(model, eager(model.module, ids, **inputs))
    assert calls is not None
    return [(call, hidden[call.module]) for call in calls.values()]


def _directions(call: Call) -> tuple[Tensor, Tensor]:
    """q and k at length 1: some families scale them by position. Weights of norms after the rotation are taken out."""
    q, k = call.q.double(), call.k.double()
    if hasattr(call.module, "query_layernorm"):
        q, k = q / call.module.query_layernorm.weight, k / call.module.key_layernorm.weight
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)


def _yarn(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    """The model under our YaRN against the same model whose own inverse frequencies were edited by hand."""
    kinds = zip(model.rotation.layer_types, model.geometry.layer_rotates, strict=True)
    if not any(turns and kind != "sliding_attention" for kind, turns in kinds):
        try:
            model.with_scheme(YARN).schedule  # noqa: B018
        except UnsupportedModel as error:
            return (
                {} if _names_model_type(model.module, error) else {"a refusal that does not name the model": math.inf}
            )
        return {"a scheme that changes nothing": math.inf}
    with yarn_by_hand(model.module):
        expected = eager(model.module, ids)
    with hs.attached(model, YARN), hs.capturing(model), torch.no_grad():
        measured = model.module(input_ids=ids, use_cache=False).logits.float()
    attention = attention_errors(
        measure_tokens(model.with_scheme(YARN), ids[0], ["attention"], None)["attention"],
        model,
        expected,
    )
    is_visible = relative(expected.logits, truth.logits) > 10 * MAX_EAGER_ERROR or _has_this_yarn(model)
    missing_effect = {} if is_visible else {"yarn without effect": math.inf}
    return {
        "yarn logits": relative(measured, expected.logits),
        "yarn attention": max(attention.values()),
    } | missing_effect


def _has_this_yarn(model: Model) -> bool:
    """Whether the checkpoint itself has YaRN with this factor."""
    ropes = getattr(model.module.config.get_text_config(), "rope_parameters", None) or {}
    return ropes.get("rope_type") == "yarn" and ropes.get("factor") == FACTOR


CHECKS: dict[str, Callable[[Model, Tensor, Truth], dict[str, float]]] = {
    "weights": _check_nonuniform,
    "logits": _logits,
    "attention": _attention,
    "loss": _loss,
    "pairs": _pairs,
    "theta": _check_shift_rotation,
    "yarn": _yarn,
}


def statistic_error(name: str, measured: np.ndarray, expected: np.ndarray) -> float:
    """Largest relative error; absolute where a mean distance or ln ESS is below 1."""
    floor = {"mean_distance": 1.0, "log_ess2": 1.0}.get(name, 1e-3)
    return _finite((np.abs(measured - expected) / np.maximum(np.abs(expected), floor)).max())


def relative(measured: Tensor, expected: Tensor) -> float:
    """Largest error against the largest value."""
    measured, expected = measured.detach(), expected.detach()
    return _finite((measured - expected).abs().max() / expected.abs().max())


def _finite(error: Any) -> float:
    """What is no number is as wrong as can be."""
    return float(error) if math.isfinite(error) else math.inf


def short_reason(error: UnsupportedModel) -> str:
    """The reason of a refusal without the name of the model and the advice after it."""
    return str(error).partition(": ")[2].partition(". ")[0]


def _refused(module: PreTrainedModel, error: UnsupportedModel) -> Verdict:
    line = str(error)
    if not _names_model_type(module, error):
        return Verdict("WRONG", f"a refusal that is not one line with the model's name: {line!r}")
    return Verdict("refused", short_reason(error) or line)


def _names_model_type(module: PreTrainedModel, error: UnsupportedModel) -> bool:
    """Is it one line that names the type of the model?"""
    model_types = {module.config.model_type, module.config.get_text_config().model_type}
    return "\n" not in str(error) and any(name in str(error) for name in model_types)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return f"{type(error).__name__}: {' '.join(lines)[:160]}"


def _error_location(error: BaseException) -> str:
    """The error and the line of headscope, or else the last one, where it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    headscope_frames = [frame for frame in frames if "/headscope/" in frame.filename] or frames
    last = frames[-1]
    location = f"{headscope_frames[-1].filename.rpartition('/headscope/')[2]}:{headscope_frames[-1].lineno}"
    return f"{_line(error)} ({location}; {last.filename.rpartition('/')[2]}:{last.lineno})"

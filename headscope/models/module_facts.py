"""Facts beside the weights that determine what a model computes: settings, constants, hooks, replaced forwards."""

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headscope.compat.accelerate import own_forward
from headscope.compat.torch import global_hooks, module_hooks
from headscope.compat.transformers import ATTENTION_IMPLEMENTATION, ATTENTION_SETTING, COMMIT_HASH, NAME_OR_PATH
from headscope.models.weight_digests import plain_modules

IRRELEVANT_SETTINGS = frozenset(
    {NAME_OR_PATH.attribute, COMMIT_HASH, ATTENTION_SETTING.attribute, ATTENTION_IMPLEMENTATION.attribute}
    | {"architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "attn_implementation", "use_cache"}
    | {"initializer_range", "output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing"}
)
"""Settings of a config that change no forward pass, or that the identity holds elsewhere."""
OWN_PACKAGES = ("headscope", "probes", "dashboards", "transformers", "transformer_lens", "accelerate", "torch")
"""Packages whose hooks belong to headscope, which records its contexts, or to the library that runs the model."""


def configuration(module: PreTrainedModel) -> dict[str, Any]:
    """The resolved config as plain data, without settings that change no forward pass."""
    return _relevant(json.loads(json.dumps(module.config.to_dict(), default=str)))


def _relevant(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _relevant(value) if isinstance(value, dict) else _finite(value)
        for name, value in settings.items()
        if name not in IRRELEVANT_SETTINGS and value is not None
    }


def constants(module: nn.Module) -> dict[str, Any]:
    """Numbers that modules keep as attributes, such as temperatures and epsilons: one number, or one per module.

    Dropout rates do not count, nor do factors of a rotation, which belong to its resolved frequencies.
    """
    values: dict[str, list[Any]] = {}
    for _, part in plain_modules(module):
        for name, value in vars(part).items():
            if type(value) is float and "dropout" not in name and name != "p" and "attention_scaling" not in name:
                values.setdefault(name, []).append(_finite(value))
    return {name: numbers[0] if len({*numbers}) == 1 else numbers for name, numbers in sorted(values.items())}


def _finite(value: Any) -> Any:
    """The value as JSON has it: infinite numbers are texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def foreign_hooks(module: nn.Module) -> tuple[str, ...]:
    """Hooks and replaced forwards of a module's parts, one entry per function: kind, name, first part, and a digest.

    The digest covers the function's code, the plain values that it refers to, and the names of all parts that have it.
    It cannot cover tensors or objects that the function uses.
    """
    places: dict[tuple[str, str, str], list[str]] = {}
    for kind, function, place in _functions(module):
        places.setdefault((kind, _function_name(function), repr(_code(function))), []).append(place)
    entries = []
    for (kind, name, code), parts in places.items():
        digest = hashlib.sha256(repr((code, parts)).encode()).hexdigest()[:8]
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        entries.append(f"{kind} {name} on {parts[0]}{more} [{digest}]")
    return tuple(entries)


def _functions(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(kind, function, part) of every hook and replaced forward that is not headscope's or a library's own."""
    yield from ((kind, hook, "all modules") for kind, hook in global_hooks() if _is_foreign(hook))
    for path, part in module.named_modules():
        place = path or "the model"
        yield from ((kind, hook, place) for kind, hook in module_hooks(part) if _is_foreign(hook))
        forward = own_forward(part)
        if forward is not None and not _is_own_forward(forward, part) and _is_foreign(forward):
            yield "replaced forward", forward, place
    for cls in dict.fromkeys(type(part) for part in module.modules()):
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        if vars(owner)["forward"].__module__.partition(".")[0] != owner.__module__.partition(".")[0]:
            yield "replaced forward", vars(owner)["forward"], f"class {owner.__name__}"


def _is_own_forward(forward: Any, part: nn.Module) -> bool:
    """Whether an instance's forward is the one of its class, as accelerate keeps it."""
    return getattr(forward, "__func__", None) is type(part).forward


def _is_foreign(function: Any) -> bool:
    function = _inner(function)
    return str(getattr(function, "__module__", "")).partition(".")[0] not in OWN_PACKAGES


def _inner(function: Any) -> Any:
    """The function in a partial application."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _function_name(function: Any) -> str:
    function = _inner(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}".removeprefix("__main__.")


def _code(function: Any) -> list[Any]:
    """The code of a function and the plain values of its arguments and closure; [] of a callable object."""
    values = [*function.args, *function.keywords.items()] if isinstance(function, functools.partial) else []
    function = _inner(function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return [*filter(_is_plain, values)]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values += [*code.co_consts, *cells, *(getattr(function, "__defaults__", None) or ())]
    return [code.co_code, code.co_names, *filter(_is_plain, values)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bytes | int | float | bool | None)

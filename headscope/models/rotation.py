"""A family's own rotation function: met where its attention calls it, run on what is asked, and what it does to a head.

Families differ in the function's name and shape: q and k together or one tensor a call, heads before or after the
positions, cos and sin doubled over both dimensions of a pair, undoubled, or one complex table.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope.attention.geometry import RotaryLayout

FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")
VECTORS = ("q", "k", "x", "xq", "xk")
"""What a rotation function calls the tensors that it turns."""

Table = Literal["half", "interleaved", "single", "complex"]
"""How the entries for P pairs lie in cos and sin: twice, one half after the other or each beside its twin; once; or
once in one complex table."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One call of a rotation function, its arguments by name. Vectors are [B, heads, L, d], or [B, L, heads, d]."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def vectors(self) -> dict[str, Tensor]:
        return {name: self.arguments[name] for name in VECTORS if isinstance(self.arguments.get(name), Tensor)}

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """(cos, sin), each [B, L, entries], or one complex table."""
        named = (self.arguments.get(name) for name in ("cos", "sin", "freqs_cis"))
        return tuple(table for table in named if table is not None)

    @property
    def heads_axis(self) -> int:
        """The axis of the vectors' heads: where the function lets the tables broadcast, 1 or 2."""
        if len(self.tables) == 1:
            return _complex_axis(self.function)
        return int(self.arguments.get("unsqueeze_dim", 1))

    def run(self, tables: tuple[Tensor, ...] | None = None, **vectors: Tensor) -> Any:
        """The function's result with other tables or vectors."""
        named = zip(("freqs_cis",) if len(self.tables) == 1 else ("cos", "sin"), tables or self.tables, strict=True)
        return self.function(**{**self.arguments, **dict(named), **vectors})

    def grouped(self, tables: tuple[Tensor, ...]) -> Any:
        """The result under tables [B, G, L, entries], one for every group of heads.

        Groups are folded into the batch, so that partial and interleaved rotation stay the family's own code.
        """
        axis, groups = self.heads_axis, tables[0].shape[1]
        folded = {}
        for name, vector in self.vectors.items():
            each = vector if axis == 1 else vector.transpose(1, 2)
            # Latent attention shares one rotary key among all heads: every group turns its own copy.
            each = each.expand(-1, max(groups, each.shape[1]), -1, -1)
            each = each.reshape(each.shape[0] * groups, each.shape[1] // groups, *each.shape[2:])
            folded[name] = each if axis == 1 else each.transpose(1, 2)
        batch = next(iter(self.vectors.values())).shape[0]
        flat = tuple(table.expand(batch, -1, -1, -1).reshape(batch * groups, *table.shape[2:]) for table in tables)
        turned = self.run(flat, **folded)

        def unfolded(each: Tensor) -> Tensor:
            each = each if axis == 1 else each.transpose(1, 2)
            each = each.reshape(batch, groups * each.shape[1], *each.shape[2:])
            return each if axis == 1 else each.transpose(1, 2)

        return unfolded(turned) if isinstance(turned, Tensor) else tuple(map(unfolded, turned))


@cache
def _complex_axis(function: Callable[..., Any]) -> int:
    """The heads' axis of a function of complex tables, told by which of two shapes it takes."""
    vector, turns = torch.zeros(1, 2, 3, 2), torch.ones(1, 3, 1, dtype=torch.complex64)
    try:
        function(vector, vector, turns)
    except RuntimeError:
        return 2
    return 1


@contextmanager
def intercepted(modules: Iterable[nn.Module], instead: Callable[[Turn], Any]) -> Iterator[None]:
    """Let `instead` make the result of every rotation by a function of these modules' families, or leave it (None).

    Leaving the `with` restores them. Of several that are nested, the innermost is asked first.
    """
    homes: dict[str, ModuleType] = {}
    for module in modules:
        home = type(module).__module__
        homes.setdefault(home, sys.modules[home])
    with ExitStack() as stack:
        for namespace in homes.values():
            for name in FUNCTIONS:
                if hasattr(namespace, name):
                    original = getattr(namespace, name)
                    stack.callback(setattr, namespace, name, original)
                    setattr(namespace, name, _met(original, instead))
        yield


def _met(original: Callable[..., Any], instead: Callable[[Turn], Any]) -> Callable[..., Any]:
    own = inspect.unwrap(original)
    names = _parameters(own)

    @wraps(own)
    def met(*args: Any, **kwargs: Any) -> Any:
        result = instead(Turn(own, dict(zip(names, args, strict=False)) | kwargs))
        return original(*args, **kwargs) if result is None else result

    return met


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@dataclass(frozen=True, eq=False)
class Planes:
    """What one rotation does to a head at one position.

    It turns the first 2 x pairs dimensions of what it is given, in the planes of `layout` as they lie in its result;
    cos and sin [pairs], float32 on cpu, are what it turns each plane by, its factor included, in `direction`.
    """

    pairs: int
    layout: RotaryLayout
    table: Table
    cos: Tensor
    sin: Tensor
    direction: Literal[1, -1]


def seen(turn: Turn) -> Planes | None:
    """The planes of a rotation at its last position; None where it turns in no such planes."""
    tables = tuple(table[:1, -1:] for table in turn.tables)
    pairs, table = _entries(tables)
    dims = next(iter(turn.vectors.values())).shape[-1]
    dtype = next(iter(turn.vectors.values())).dtype
    # Every unit vector, each as a head of its own.
    units = torch.eye(dims, dtype=dtype, device=tables[0].device)
    units = units[None, :, None] if turn.heads_axis == 1 else units[None, None]
    turned = turn.run(tables, **dict.fromkeys(turn.vectors, units))
    images = (turned if isinstance(turned, Tensor) else turned[0]).reshape(dims, dims).float().cpu()
    rotary = 2 * pairs
    if rotary > dims or not torch.equal(images[rotary:], torch.eye(dims)[rotary:]):
        return None
    layouts: tuple[RotaryLayout, ...] = ("half", "interleaved")
    for layout in layouts:
        first = torch.arange(pairs) if layout == "half" else torch.arange(0, rotary, 2)
        second = first + (pairs if layout == "half" else 1)
        # Each plane is reached from two dimensions; from the lower of them by (cos, sin), the other by (-sin, cos).
        reached = (images[:, first] != 0) | (images[:, second] != 0)
        if (reached.sum(0) == 2).all() and (reached[:rotary].sum(1) == 1).all():
            lower = reached.int().argmax(0)
            cos, sin = images[lower, first], images[lower, second]
            # The fastest pair is told apart best; angles stay below pi at two tokens from the first.
            direction: Literal[1, -1] = 1 if sin[0] >= 0 else -1
            return Planes(pairs, layout, table, cos, direction * sin, direction)
    return None


def _entries(tables: tuple[Tensor, ...]) -> tuple[int, Table]:
    """How many pairs the tables speak of, and how."""
    (first, *_), entries = tables, tables[0].shape[-1]
    if first.is_complex():
        return entries, "complex"
    both = torch.stack([table.flatten() for table in tables])
    if entries % 2 == 0 and torch.equal(both[:, : entries // 2], both[:, entries // 2 :]):
        return entries // 2, "half"
    if entries % 2 == 0 and torch.equal(both[:, ::2], both[:, 1::2]):
        return entries // 2, "interleaved"
    return entries, "single"


@contextmanager
def unmoved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leaving restores the frequencies that the modules hold: some keep those of the longest text that they turned."""
    before = [
        (module, name, value, value.clone() if isinstance(value, Tensor) else value)
        for module in modules
        for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]
        if name.endswith(("inv_freq", "max_seq_len_cached"))
    ]
    try:
        yield
    finally:
        for module, name, value, kept in before:
            # Some put others in its place, some write into it.
            setattr(module, name, value.copy_(kept) if isinstance(value, Tensor) else kept)


def tables(positions: Tensor, theta: Tensor, factor: float, table: Table, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos and sin for positions [B, L] and theta [1|G, P]: [B, L, entries], or [B, G, L, entries] where groups differ.

    Angles are products in theta's float32, as transformers computes them. "complex" is one table, cos + i sin.
    """
    angles = positions[:, None, :, None].to(theta.dtype) * theta.to(positions.device)[None, :, None, :]
    if table == "complex":
        made: tuple[Tensor, ...] = (torch.polar(torch.ones_like(angles), angles) * factor,)
    else:
        if table == "half":
            angles = torch.cat((angles, angles), -1)
        elif table == "interleaved":
            angles = angles.repeat_interleave(2, -1)
        made = tuple((t * factor).to(dtype) for t in (angles.cos(), angles.sin()))
    return tuple(each[:, 0] for each in made) if theta.shape[0] == 1 else made


def rope_kinds(module: nn.Module) -> set[Any]:
    """The rope types by which a module computes its frequencies."""
    told: Any = getattr(module, "rope_type", None)
    return set(told.values()) if isinstance(told, dict) else {told}

"""The rotation function of a model family: rerun its calls on other tables, measure what it does.

Families differ in the name and signature of this function. It takes q and k together or one tensor per call. Heads come
before or after positions. cos and sin hold one entry per dimension, one per pair, or are one complex table.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope.attention.contexts import undoing
from headscope.attention.geometry import RotaryLayout

VECTOR_ARGUMENTS = ("q", "k", "x", "xq", "xk", "tensor")
"""Argument names of the tensors that a rotation function rotates."""

TableLayout = Literal["half", "interleaved", "single", "complex"]
"""Order of the entries for P pairs in cos and sin.

"half": P entries, then the same P again. "interleaved": each entry twice in a row. "single": each entry once.
"complex": one table of P complex entries.
"""


@dataclass(frozen=True, eq=False)
class RotationCall:
    """One call of a rotation function, with its arguments by name. Vectors are [B, H, L, d] or [B, L, H, d]."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def vectors(self) -> dict[str, Tensor]:
        return {name: self.arguments[name] for name in VECTOR_ARGUMENTS if isinstance(self.arguments.get(name), Tensor)}

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """(cos, sin), each [B, L, entries], or one complex table."""
        candidates = (self.arguments.get(name) for name in ("cos", "sin", "freqs_cis"))
        return tuple(table for table in candidates if table is not None)

    @property
    def heads_axis(self) -> int:
        """Axis of the heads in the vectors, 1 or 2: the axis along which the function broadcasts the tables."""
        if len(self.tables) == 1:
            return _complex_heads_axis(self.function)
        if "tensor" in self.arguments:  # GPT-J and CodeGen
            return 2
        return int(self.arguments.get("unsqueeze_dim", 1))

    def run(self, tables: tuple[Tensor, ...] | None = None, **vectors: Tensor) -> Any:
        """Run the function with these tables and vectors in place of those of the call."""
        names = ("freqs_cis",) if len(self.tables) == 1 else ("cos", "sin")
        return self.function(**{**self.arguments, **dict(zip(names, tables or self.tables, strict=True)), **vectors})

    def run_per_group(self, tables: tuple[Tensor, ...]) -> Any:
        """Run the function with tables [B, G, L, entries], one per group of heads.

        Groups are folded into the batch, so the family's own code does partial and interleaved rotation.
        """
        axis, groups = self.heads_axis, tables[0].shape[1]
        folded = {}
        for name, vector in self.vectors.items():
            heads_first = vector if axis == 1 else vector.transpose(1, 2)
            # Latent attention shares one rotary key among all heads: every group rotates its own copy.
            heads_first = heads_first.expand(-1, max(groups, heads_first.shape[1]), -1, -1)
            batch, heads, *rest = heads_first.shape
            heads_first = heads_first.reshape(batch * groups, heads // groups, *rest)
            folded[name] = heads_first if axis == 1 else heads_first.transpose(1, 2)
        batch = next(iter(self.vectors.values())).shape[0]
        flat = tuple(table.expand(batch, -1, -1, -1).reshape(batch * groups, *table.shape[2:]) for table in tables)
        rotated = self.run(flat, **folded)

        def unfold(vector: Tensor) -> Tensor:
            heads_first = vector if axis == 1 else vector.transpose(1, 2)
            heads_first = heads_first.reshape(batch, groups * heads_first.shape[1], *heads_first.shape[2:])
            return heads_first if axis == 1 else heads_first.transpose(1, 2)

        return unfold(rotated) if isinstance(rotated, Tensor) else tuple(map(unfold, rotated))


@cache
def _complex_heads_axis(function: Callable[..., Any]) -> int:
    """The heads axis of a function of complex tables: 1 if it accepts vectors [B, H, L, d], else 2."""
    vector, table = torch.zeros(1, 2, 3, 2), torch.ones(1, 3, 1, dtype=torch.complex64)
    try:
        function(vector, vector, table)
    except RuntimeError:
        return 2
    return 1


@dataclass(frozen=True, eq=False)
class MeasuredRotation:
    """The rotation that one call applies to a head at one position.

    It rotates the first 2 x `pairs` dimensions of its input; `layout` says which two dimensions of its result form a
    pair. cos and sin [pairs], float32 on CPU, include the call's factor; `direction` is the sense of rotation.
    """

    pairs: int
    layout: RotaryLayout
    table: TableLayout
    cos: Tensor
    sin: Tensor
    direction: Literal[1, -1]


def measure_rotation(call: RotationCall) -> MeasuredRotation | None:
    """Measure the rotation at the call's last position; None if it does not rotate pairs in a known layout."""
    tables = tuple(table[:1, -1:] for table in call.tables)
    pairs, table_layout = _table_layout(tables)
    dims = next(iter(call.vectors.values())).shape[-1]
    dtype = next(iter(call.vectors.values())).dtype
    # All unit vectors, each as one head.
    units = torch.eye(dims, dtype=dtype, device=tables[0].device)
    units = units[None, :, None] if call.heads_axis == 1 else units[None, None]
    rotated = call.run(tables, **dict.fromkeys(call.vectors, units))
    images = (rotated if isinstance(rotated, Tensor) else rotated[0]).reshape(dims, dims).float().cpu()
    rotary_dims = 2 * pairs
    if rotary_dims > dims or not torch.equal(images[rotary_dims:], torch.eye(dims)[rotary_dims:]):
        return None
    layouts: tuple[RotaryLayout, ...] = ("half", "interleaved")
    for layout in layouts:
        first = torch.arange(pairs) if layout == "half" else torch.arange(0, rotary_dims, 2)
        second = first + (pairs if layout == "half" else 1)
        # Two input dimensions map into each plane: the lower one to (cos, sin), the other one to (-sin, cos).
        in_plane = (images[:, first] != 0) | (images[:, second] != 0)
        if (in_plane.sum(0) == 2).all() and (in_plane[:rotary_dims].sum(1) == 1).all():
            lower = in_plane.int().argmax(0)
            cos, sin = images[lower, first], images[lower, second]
            # The fastest pair has the largest angle, which stays below pi two tokens after the first.
            direction: Literal[1, -1] = 1 if sin[0] >= 0 else -1
            return MeasuredRotation(pairs, layout, table_layout, cos, direction * sin, direction)
    return None


def _table_layout(tables: tuple[Tensor, ...]) -> tuple[int, TableLayout]:
    """The number of pairs in the tables, and the order of their entries."""
    entries = tables[0].shape[-1]
    if tables[0].is_complex():
        return entries, "complex"
    rows = torch.stack([table.flatten() for table in tables])
    if entries % 2 == 0 and torch.equal(rows[:, : entries // 2], rows[:, entries // 2 :]):
        return entries // 2, "half"
    if entries % 2 == 0 and torch.equal(rows[:, ::2], rows[:, 1::2]):
        return entries // 2, "interleaved"
    return entries, "single"


@contextmanager
def preserving_frequencies(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' frequencies on leaving: some modules keep those of the longest text so far."""
    with ExitStack() as stack:
        for module in modules:
            if any(_is_frequency(name) for name in (*dict(module.named_buffers(recurse=False)), *vars(module))):
                stack.enter_context(undoing((id(module), "frequencies"), partial(_frequency_restorer, module)))
        yield


def _is_frequency(name: str) -> bool:
    return name.endswith(("inv_freq", "max_seq_len_cached"))


def _frequency_restorer(module: nn.Module) -> Callable[[], None]:
    """A function that restores the frequencies that a module has now."""
    saved = [
        (name, value, value.clone() if isinstance(value, Tensor) else value)
        for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]
        if _is_frequency(name)
    ]

    def restore() -> None:
        for name, value, copy in saved:
            if isinstance(value, Tensor):  # some modules replace the tensor, others write into it
                value[...] = copy
            setattr(module, name, value if isinstance(value, Tensor) else copy)
        names = {name for name, _, _ in saved}
        for name in [name for name in vars(module) if name.endswith("inv_freq") and name not in names]:
            delattr(module, name)

    return restore


def cos_sin_tables(
    positions: Tensor, theta: Tensor, factor: float, layout: TableLayout, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """cos and sin for positions [B, L] and frequencies theta [1|G, P], each multiplied by `factor`.

    Each is [B, L, entries], or [B, G, L, entries] if theta has a row per group. Angles are float32 products, as in
    transformers. "complex" gives one table, cos + i sin.
    """
    angles = positions[:, None, :, None].to(theta.dtype) * theta.to(positions.device)[None, :, None, :]
    if layout == "complex":
        tables: tuple[Tensor, ...] = (torch.polar(torch.ones_like(angles), angles) * factor,)
    else:
        if layout == "half":
            angles = torch.cat((angles, angles), -1)
        elif layout == "interleaved":
            angles = angles.repeat_interleave(2, -1)
        tables = tuple((values * factor).to(dtype) for values in (angles.cos(), angles.sin()))
    return tuple(table[:, 0] for table in tables) if theta.shape[0] == 1 else tables


def rope_types(module: nn.Module) -> set[Any]:
    """The rope types by which a rotary module computes its frequencies; {None} if it declares none."""
    declared: Any = getattr(module, "rope_type", None)
    return set(declared.values()) if isinstance(declared, dict) else {declared}

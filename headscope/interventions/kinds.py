"""What an edit does: kinds for z, q, k, v and parts of layers, and kinds for logits.

`targets` of a kind are the tensors that it changes unless an edit names another one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.cuda import without_waiting
from headscope.attention.edited_attention import outputs_of_record
from headscope.attention.edits import InputsKind, Place, TensorKind, TokenSet
from headscope.attention.record import (
    AttentionRecord,
    BiasKind,
    ChoiceKind,
    LogitEdit,
    PatternKind,
    UniformKind,
    log_sum,
    shared_cache,
)
from headscope.errors import BadInput
from headscope.measures.row_sampling import query_range
from headscope.measures.row_tile import RowTile
from headscope.measures.sparse_rules import Rule

Targets = tuple[str, ...]


@dataclass(frozen=True)
class Zero(TensorKind):
    """Zero ablation."""

    name: ClassVar[str] = "zero"
    targets: ClassVar[Targets] = ("z",)

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        return torch.zeros_like(t)


@dataclass(frozen=True)
class Scale(TensorKind):
    """Multiplies by a factor, which may be negative."""

    factor: float
    targets: ClassVar[Targets] = ("z",)

    @property
    def name(self) -> str:
        return f"scale:{self.factor:g}"

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        return t * self.factor


@dataclass(frozen=True)
class DocumentMean(TensorKind):
    """Mean ablation by the head's mean over the positions of the same document."""

    name: ClassVar[str] = "mean:document"
    needs_whole_text: ClassVar[bool] = True
    targets: ClassVar[Targets] = ("z",)

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        return t.float().mean(-2, keepdim=True).to(t.dtype).expand_as(t)


@dataclass(frozen=True)
class Noise(TensorKind):
    """Adds Gaussian noise of `factor` times the head's standard deviation over the text; each head has its own draw."""

    factor: float
    seed: int = 0
    needs_whole_text: ClassVar[bool] = True
    targets: ClassVar[Targets] = ("z",)

    @property
    def name(self) -> str:
        return f"noise:{self.factor:g}"

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        draws = [
            np.random.default_rng([self.seed, place.layer, head]).standard_normal(t.shape[1:], np.float32)
            for head in place.heads.tolist()
        ]
        spread = t.float().std(-2, keepdim=True, correction=0)
        noise = without_waiting(t.device, torch.from_numpy(np.stack(draws)))
        return (t.float() + self.factor * spread * noise).to(t.dtype)


@dataclass(frozen=True, eq=False)
class Replace(TensorKind):
    """Takes values of other runs: patched activations, resampled ones, a mean with a named source.

    `values` by layer are [H or G, length, d]. Token i takes that of i + shift; tokens without one keep their values.
    Without `length` they are [H or G, 1, d], for every token.
    """

    name: str  # type: ignore[misc]
    values: Mapping[int, Tensor]
    targets: Targets = ("z",)
    shift: int = 0
    length: int | None = None

    def has_values_for(self, tokens: Tensor) -> Tensor:
        if self.length is None:
            return super().has_values_for(tokens)
        return (tokens + self.shift >= 0) & (tokens + self.shift < self.length)

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        values = place.rows_of(self.values[place.layer])
        if self.length is not None:
            at = (place.tokens + self.shift).clamp(0, values.shape[1] - 1)
            values = values[:, without_waiting(values.device, at)]
        return values[..., : t.shape[-1]].to(t).expand_as(t)


@dataclass(frozen=True, eq=False)
class Resample(TensorKind):
    """Resample ablation: every token takes the value of a random token of a reference text.

    `values` by layer are [H, L, d]. A token has the same draw in every pass and head, and another one in every
    sequence of a batch.
    """

    values: Mapping[int, Tensor]
    seed: int
    name: ClassVar[str] = "resample"
    targets: ClassVar[Targets] = ("z",)

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        values = self.values[place.layer]
        length, tokens = values.shape[1], place.tokens.numpy()
        draws = {
            sequence: np.random.default_rng([self.seed, place.layer, sequence]).random(int(tokens.max()) + 1)[tokens]
            for sequence in set(place.sequences.tolist())
        }
        drawn = np.stack([(draws[sequence] * length).astype(np.int64) for sequence in place.sequences.tolist()])
        at = without_waiting(values.device, torch.from_numpy(drawn))[..., None].expand(-1, -1, values.shape[-1])
        return place.rows_of(values).gather(1, at).to(t)


@dataclass(frozen=True, eq=False)
class OutputFunction(TensorKind):
    """A function of the user on single heads' vectors, t [n, L, d] -> the same shape."""

    function: Callable[[Tensor], Tensor]
    targets: ClassVar[Targets] = ("z",)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        return backend.check_edited(self.function, place.layer, (t,), (self.function(t),), (place.target,))[0]


@dataclass(frozen=True, eq=False)
class InputsFunction(InputsKind):
    """A function (q, k, v, layer) -> (q, k, v) of the user on one unit, with the shapes of `InputsKind`."""

    function: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
    targets: ClassVar[Targets] = ("qkv",)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, ...]:
        return backend.check_edited(self.function, layer, (q, k, v), self.function(q, k, v, layer))


@dataclass(frozen=True)
class Uniform(UniformKind):
    """Uniform attention over the visible keys."""

    name: ClassVar[str] = "uniform"
    targets: ClassVar[Targets] = ("logits",)


@dataclass(frozen=True, eq=False)
class Steer(BiasKind):
    """Multiplies the weights of all keys outside a span by alpha and renormalises (PASTA, Zhang et al. 2024).

    This adds ln(alpha) to their logits.
    """

    span: TokenSet
    alpha: float
    targets: ClassVar[Targets] = ("logits",)

    @property
    def name(self) -> str:
        return f"steer:{self.alpha:g} to {self.span}"

    def bias(self, tokens: Tensor, prompt_length: int | None) -> Tensor:
        return (~self.span.contains(tokens, prompt_length)).float() * math.log(self.alpha)


@dataclass(frozen=True, eq=False)
class Suppress(ChoiceKind):
    """Takes the weight of a span's keys away and renormalises; the output of a row that sees no other key is 0."""

    span: TokenSet
    targets: ClassVar[Targets] = ("logits",)

    @property
    def name(self) -> str:
        return f"suppress:{self.span}"

    def choose(self, record: AttentionRecord, rows: Tensor, keys: slice, logits: Tensor, edit: LogitEdit) -> Tensor:
        tokens = record.first_key + torch.arange(keys.start, keys.stop, device=rows.device)
        return ~self.span.contains(tokens, edit.prompt_length)[None, None]


@dataclass(eq=False)
class KeyCount:
    """Number of keys that rows kept, and of rows, over heads and passes."""

    kept: dict[torch.device, Tensor] = field(default_factory=dict)
    rows: int = 0

    def add(self, kept: Tensor, rows: int) -> None:
        """Add a sum of kept keys, a scalar, on its device: a GPU is not waited for."""
        self.kept[kept.device] = self.kept.get(kept.device, 0) + kept
        self.rows += rows

    @property
    def mean(self) -> float:
        """Mean number of kept keys of a row."""
        return sum(map(float, self.kept.values())) / self.rows


@dataclass(frozen=True, eq=False)
class RuleChoice(ChoiceKind):
    """Lets heads attend to the keys that a rule chooses among all keys, such as top:64.

    `count` gets the number of keys that every row keeps in a pass.
    """

    rule: Rule
    count: KeyCount | None = None
    replaces_indexer: ClassVar[bool] = True
    targets: ClassVar[Targets] = ("logits",)

    @property
    def name(self) -> str:
        return str(self.rule)

    @property
    def for_listeners(self) -> "RuleChoice":
        return replace(self, count=None)

    @property
    def needs_whole_text(self) -> bool:
        return self.rule.depends_on_later_queries

    @property
    def is_layer_wide(self) -> bool:
        return self.rule.is_layer_wide

    def choose(self, record: AttentionRecord, rows: Tensor, keys: slice, logits: Tensor, edit: LogitEdit) -> Tensor:
        if self.rule.needs_whole_text and record.first_key > 0:
            raise BadInput(
                f"rule '{self.rule}' chooses keys by the whole text, and the cache of this pass has dropped its first "
                f"{record.first_key:,} tokens. Pass use_cache=False, or use another rule"
            )
        order = rows.argsort()
        if not torch.equal(order, torch.arange(len(rows), device=rows.device)):
            in_order = self.choose(record, rows[order], keys, logits[:, order], edit)
            return in_order[:, order.argsort()]
        cache = shared_cache(record)
        if self.rule.needs_log_sums and "with log sums" not in cache:
            cache["with log sums"] = with_log_sums(record)
        of_record = cache.get("with log sums", record)
        weights = (logits - log_sum(logits, record.sink)[..., None]).exp()
        tokens = rows.cpu().numpy() + query_range(record).start
        tile = RowTile(of_record, tokens, record.first_key + keys.start, weights, cache)
        chosen: Tensor = self.rule.select(tile) & tile.is_visible
        if self.count is not None:
            mask = edit.mask[:, rows.cpu()]
            self.count.add((chosen & mask.to(chosen.device)[..., None]).sum().double(), int(mask.sum()))
        return chosen


def with_log_sums(record: AttentionRecord) -> AttentionRecord:
    """The record with the log-sum-exp of all its rows under its own edits."""
    return replace(record, lse=outputs_of_record(record)[1])


@dataclass(frozen=True, eq=False)
class RunPattern(PatternKind):
    """Takes attention weights of another run: whole rows, or the weights on one key.

    `records` by layer are those of the other run. Token i takes row i + shift, and key j column j + shift. With `key`,
    a token of the edited run, only the weights on it are taken, and rows are not normalised again.
    """

    records: Mapping[int, AttentionRecord]
    shift: int = 0
    key: int | None = None
    name: ClassVar[str] = "pattern"
    targets: ClassVar[Targets] = ("logits",)

    def log_weights(self, record: AttentionRecord, rows: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        source, first_key = self.records[record.layer], record.first_key
        own = rows + query_range(record).start + self.shift - query_range(source).start
        stop = first_key + keys.stop
        tokens = torch.arange(first_key + keys.start, stop, device=rows.device)
        if self.key is not None:
            tokens = torch.tensor([min(self.key, stop - 1)], device=rows.device)
        own_keys = tokens + self.shift - source.first_key
        exists = (own >= 0) & (own < source.q.shape[1])
        has_key = (own_keys >= 0) & (own_keys < source.k.shape[1])
        at, at_keys = own.clamp(0, source.q.shape[1] - 1), own_keys.clamp(0, source.k.shape[1] - 1)
        logits = source.masked_logits(at, at_keys).masked_fill(~has_key, -torch.inf)
        new = logits - source.lse[:, at, None]
        if record.head_numbers is not None:
            new = new[record.head_numbers.to(new.device)]
        is_replaced = exists[:, None].expand(-1, keys.stop - keys.start)
        if self.key is not None:
            is_key = torch.arange(first_key + keys.start, stop, device=rows.device) == self.key
            is_replaced, new = is_replaced & is_key, new.expand(-1, -1, keys.stop - keys.start)
        return new, is_replaced[None]


def targets_of(kind: object) -> Targets:
    """The tensors that a kind changes by default."""
    targets: Targets = getattr(kind, "targets", ("logits",))
    return targets


def mean_over_tokens(outputs: Mapping[int, Tensor], name: str, targets: Sequence[str] = ("z",)) -> Replace:
    """Mean ablation by the means over the tokens of outputs [H, L, d] by layer; `name` has its source."""
    means = {layer: z.float().mean(1, keepdim=True).to(z.dtype) for layer, z in outputs.items()}
    return Replace(name, means, tuple(targets))

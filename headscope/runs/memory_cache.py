"""Tables of opened runs, and what was computed from them, in memory: the least recently used is dropped first."""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import is_dataclass
from itertools import chain, islice
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import pandas as pd

T = TypeVar("T")

MAX_CACHED_BYTES = 2**29
"""Bytes that all opened runs of a process keep in memory together."""
SAMPLED_ITEMS = 100
"""Items of a container whose size is measured; the others are taken to be as large."""


class CachedValues(dict[Hashable, Any]):
    """The values that are kept for one run, by key. They leave memory with the run."""


class MemoryCache:
    """Keeps values of several owners, up to `max_bytes` in total. A larger value is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._sizes: OrderedDict[tuple[int, Hashable], tuple[weakref.ref[CachedValues], int]] = OrderedDict()
        self._lock = RLock()  # an owner may be collected while the lock is held

    def get(self, owner: CachedValues, key: Hashable, compute: Callable[[], T]) -> T:
        """The value that `owner` has for the key, computed if it has none."""
        with self._lock:
            if key in owner:
                if (id(owner), key) in self._sizes:
                    self._sizes.move_to_end((id(owner), key))
                kept: T = owner[key]
                return kept
        value = compute()
        size = memory_size(value)
        if size <= self.max_bytes:
            with self._lock:
                self._add(owner, key, value, size)
        return value

    def _add(self, owner: CachedValues, key: Hashable, value: Any, size: int) -> None:
        if key in owner:  # another thread was faster
            return
        if not owner:
            weakref.finalize(owner, self._forget, id(owner))
        owner[key] = value
        self.bytes += size - self._sizes.pop((id(owner), key), (None, 0))[1]
        self._sizes[id(owner), key] = weakref.ref(owner), size
        while self.bytes > self.max_bytes:
            (_, oldest_key), (reference, dropped) = self._sizes.popitem(last=False)
            self.bytes -= dropped
            if (other := reference()) is not None:
                other.pop(oldest_key, None)

    def _forget(self, owner_id: int) -> None:
        with self._lock:
            for entry in [entry for entry in self._sizes if entry[0] == owner_id]:
                self.bytes -= self._sizes.pop(entry)[1]


def memory_size(value: Any) -> int:
    """Bytes of tables, arrays, figures, and containers of them; of any other object, without what it refers to."""
    if isinstance(value, pd.DataFrame):
        return int(value.memory_usage(deep=True).sum())
    if isinstance(value, pd.Series | pd.Index):
        return int(value.memory_usage(deep=True))
    if isinstance(value, np.ndarray):
        return value.nbytes
    items: Any = ()
    if hasattr(value, "to_plotly_json"):  # plotly is not imported to read runs
        items = [value.to_plotly_json()]
    elif is_dataclass(value) and not isinstance(value, type):
        items = vars(value).values() if hasattr(value, "__dict__") else ()
    elif isinstance(value, Mapping):
        items = chain(*islice(value.items(), SAMPLED_ITEMS))
    elif isinstance(value, list | tuple | set | frozenset):
        items = islice(value, SAMPLED_ITEMS)
    sizes = [memory_size(item) for item in items]
    share = max(1.0, len(value) / SAMPLED_ITEMS) if hasattr(value, "__len__") else 1.0
    return sys.getsizeof(value) + int(sum(sizes) * share)


CACHE = MemoryCache(MAX_CACHED_BYTES)
"""The cache of all opened runs."""

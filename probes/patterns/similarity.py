"""Heads with the most similar attention, by the total variation between their stored rows.

A stored row is a distribution over its top keys and one class for the rest of its weight [ours]. The distance of two
heads is the mean, over the rows that both have, of half the sum of absolute differences: 0 to 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.rendering.blocks import Link, Links, TextTable
from headscope.rendering.similar_heads import head_link
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import default_models_with

KEYS = ["model", "layer", "head"]
NEAREST = 5
"""Heads that are listed per model."""


@dataclass(frozen=True)
class StoredRows:
    """The top keys of the longest stored rows as arrays with one entry per key: its head, its row, and its weight.

    `heads` are (model, layer, head) by number. A row is a query of a text in one tokenization; `row_docs` holds the
    number of its document. `row_key_index` numbers the (row, key) that occur: entries of the same number are compared.
    """

    heads: pd.MultiIndex
    head: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    row_key_index: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]
    row_docs: npt.NDArray[np.int64]

    @cached_property
    def row_key_count(self) -> int:
        return int(self.row_key_index.max()) + 1

    @cached_property
    def listed_weight(self) -> npt.NDArray[np.float64]:
        """The weight [heads, rows] on all top keys, NaN for a row that is missing."""
        listed = self.sum_by_row(self.weight)
        listed[self.sum_by_row(np.ones(len(self.row_key_index))) == 0] = np.nan
        return listed

    def sum_by_row(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums [heads, rows] of one value per entry."""
        shape = len(self.heads), len(self.row_docs)
        sums = np.bincount(self.head * shape[1] + self.row, values, minlength=shape[0] * shape[1])
        return sums.astype(np.float64).reshape(shape)


def row_distances(run: RunTables, model: str, layer: int, head: int) -> pd.DataFrame:
    """Distance of every head from one head by their stored rows, nearest first, without the head itself.

    Indexed by (model, layer, head): `distance`, the mean over documents, and `spread`, the largest minus the smallest
    mean of one document (NaN with one document). Heads without a common row, as in other tokens, are left out.
    """
    stored = run.derived(_stored_rows)
    number = -1 if stored is None else int(stored.heads.get_indexer(pd.Index([(model, layer, head)]))[0])
    if stored is None or number < 0:
        return pd.DataFrame({"distance": [], "spread": []})
    is_own, own_weight = stored.head == number, np.zeros(stored.row_key_count)
    own_weight[stored.row_key_index[is_own]] = stored.weight[is_own]
    shared = stored.sum_by_row(np.minimum(own_weight[stored.row_key_index], stored.weight))
    rest = 1 - stored.listed_weight
    distance = (1 - shared - np.minimum(rest, rest[number])).clip(0, 1)
    by_doc = pd.DataFrame(distance.T).groupby(stored.row_docs).mean().T.set_index(stored.heads)
    spread = (by_doc.max(axis=1) - by_doc.min(axis=1)).where(by_doc.notna().sum(axis=1) > 1)
    distances = pd.DataFrame({"distance": by_doc.mean(axis=1), "spread": spread}).drop(index=[(model, layer, head)])
    return distances.dropna(subset=["distance"]).sort_values("distance", kind="stable")


def _stored_rows(run: RunTables) -> StoredRows | None:
    if "top_keys" not in run.tables:
        return None
    rows = rows_at_longest_length(run.table("top_keys"))
    models, docs = rows["model"].cat, rows["doc"].cat
    # Integers throughout: there are millions of entries.
    layer, head, query = (rows[name].to_numpy(np.int64) for name in ("layer", "head", "query"))
    model_numbers = models.codes.to_numpy(np.int64)
    head_codes, heads = np.unique((model_numbers << 32) + (layer << 16) + head, return_inverse=True)
    text = _text_numbers(run, models.categories, docs.categories)[model_numbers, docs.codes.to_numpy()]
    row_codes, row_numbers = np.unique((text << 32) + query, return_inverse=True)
    names: list[Any] = [
        models.categories[head_codes >> 32].astype(str),
        (head_codes >> 16) & 0xFFFF,
        head_codes & 0xFFFF,
    ]
    index, key = pd.MultiIndex.from_arrays(names, names=KEYS), rows["key"].to_numpy(np.int64)
    row_key_index = np.unique((row_numbers << 32) + key, return_inverse=True)[1]
    return StoredRows(index, heads, row_numbers, row_key_index, rows["weight"].to_numpy(np.float64), row_codes >> 32)


def _text_numbers(run: RunTables, models: pd.Index, docs: pd.Index) -> npt.NDArray[np.int64]:
    """A number [models, docs] for each document with stored rows in one tokenization."""
    texts = run.table("pattern_texts").query("rows > 0")[["model", "doc", "tokenizer"]].astype(str)
    numbers = np.zeros((len(models), len(docs)), np.int64)
    index = models.get_indexer(pd.Index(texts["model"])), docs.get_indexer(pd.Index(texts["doc"]))
    numbers[index] = pd.factorize(texts["tokenizer"] + " " + texts["doc"])[0]
    return numbers


def similar_heads(run: Run, model: str, layer: int, head: int) -> Iterator[TextTable]:
    """The nearest heads of each model by attention, those of `model` first."""
    distances = row_distances(run, model, layer, head)
    if distances.empty:
        return
    rows: list[list[str | Link | Links]] = []
    for label in dict.fromkeys((model, *default_models_with(run, model))):
        nearest = distances[distances.index.get_level_values("model") == label][:NEAREST]
        if len(nearest):
            limit = nearest["distance"].iloc[0] + nearest["spread"].iloc[0]
            records: list[Any] = [*nearest.reset_index().itertuples()]
            marks = ["≈" if row.Index and row.distance <= limit else "" for row in records]
            links = [
                head_link(row.model, row.layer, row.head, row.distance, mark)
                for row, mark in zip(records, marks, strict=True)
            ]
            rows.append([label, Links(links)])
    spread = distances["spread"].median()
    caution = (
        f"A distance differs by {format_number(spread)} between documents (median); ≈: as near as the first head, "
        "within that head's difference between documents"
        if np.isfinite(spread)
        else "From one document: another one may give another order"
    )
    yield TextTable(
        f"By attention: total variation between the weights in the same query rows, 0 to 1. {caution}.",
        ("model", "nearest heads and their distance"),
        rows,
    )

"""Queries on stored attention patterns: one row of one head, a head's top far rows, and the tokens of a document.

Each table is sorted once per run, so a query costs as much as its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from headscope.rendering.token_spans import TokenizedText
from headscope.runs.run_tables import RunTables

MAX_FAR_ROWS = 8
"""Top far rows of a head and document."""
MIN_ROW_DISTANCE = 8
"""Least distance in tokens between two top far rows of a document; closer rows show the same pattern."""

PatternKey = tuple[str, int, str, int, int]
"""Model, context length, document, layer and head."""


@dataclass(frozen=True)
class StoredPatterns:
    """What is stored for a model: the context lengths of each document, and the heads of each layer."""

    lengths_by_document: dict[str, list[int]]
    heads_by_layer: dict[int, list[int]]


def stored_patterns(run: RunTables) -> dict[str, StoredPatterns]:
    """The stored documents, lengths and heads, by model."""
    return run.derived(_collect_stored_patterns)


def _collect_stored_patterns(run: RunTables) -> dict[str, StoredPatterns]:
    patterns: dict[str, StoredPatterns] = {}
    for model, length, doc, layer, head in run.derived(_sorted_top_keys)[1]:
        stored = patterns.setdefault(model, StoredPatterns({}, {}))
        for values, value in (
            (stored.lengths_by_document.setdefault(doc, []), length),
            (stored.heads_by_layer.setdefault(layer, []), head),
        ):
            if value not in values:
                values.append(value)
    return patterns


def have_same_tokens(run: RunTables, doc: str, length: int, model: str, other_model: str) -> bool:
    """Whether two models split a document of that context length into the same tokens."""
    tokenizers = run.derived(_load_texts)[0]
    return tokenizers.get((other_model, doc), {}).get(length) == tokenizers[model, doc][length]


def document_text(run: RunTables, model: str, doc: str) -> TokenizedText:
    """The tokens of a document under a model, up to its longest stored context length."""
    tokenizers, texts = run.derived(_load_texts)
    tokenizer_by_length = tokenizers[model, doc]
    return texts[tokenizer_by_length[max(tokenizer_by_length)], doc]


def top_keys(run: RunTables, pattern_key: PatternKey, query: int) -> pd.DataFrame:
    """The top keys of one row of one head: `rank`, `key`, `weight`, `distance`; empty if the row is not stored."""
    frame, ranges = run.derived(_sorted_top_keys)
    start, stop = ranges.get(pattern_key, (0, 0))
    first, last = np.searchsorted(frame["query"].to_numpy()[start:stop], [query, query + 1]) + start
    rows = frame.iloc[first:last][["rank", "key", "weight"]]
    return rows.assign(distance=query - rows["key"]).reset_index(drop=True)


def stored_queries(run: RunTables, pattern_key: PatternKey) -> list[int]:
    """The stored query positions; the same for all heads and models of that document and length."""
    frame, ranges = run.derived(_sorted_top_keys)
    start, stop = ranges.get(pattern_key, (0, 0))
    return [int(query) for query in np.unique(frame["query"].to_numpy()[start:stop])]


def top_far_rows(
    run: RunTables, model: str, layer: int, head: int, max_per_document: int = MAX_FAR_ROWS
) -> pd.DataFrame:
    """The rows of a head with the largest weight on one far token, at its longest length.

    Columns `doc`, `query`, `key`, `weight`, `distance`, largest weight first; at most `max_per_document` rows of a
    document, at least 8 tokens apart.
    """
    frame, ranges = run.derived(_sorted_far_keys)
    pattern_keys = run.derived(_far_patterns_by_head).get((model, layer, head), [])
    longest = max((length for _, length, *_ in pattern_keys), default=0)
    selected = [
        _select_spaced_rows(frame.iloc[slice(*ranges[key])], max_per_document).assign(doc=key[2])
        for key in pattern_keys
        if key[1] == longest
    ]
    if not selected:
        return pd.DataFrame(columns=["doc", "query", "key", "weight", "distance"])
    rows = pd.concat(selected, ignore_index=True)
    rows["distance"] = rows["query"] - rows["key"]
    rows = rows[["doc", "query", "key", "weight", "distance"]]
    return rows.sort_values("weight", ascending=False, kind="stable", ignore_index=True)


def _select_spaced_rows(rows: pd.DataFrame, max_count: int) -> pd.DataFrame:
    ordered = rows.sort_values("weight", ascending=False, kind="stable")
    selected: list[int] = []
    for query in ordered["query"].tolist():
        if len(selected) < max_count and all(abs(query - other) >= MIN_ROW_DISTANCE for other in selected):
            selected.append(query)
    return ordered[ordered["query"].isin(selected)]


RowRanges = dict[PatternKey, tuple[int, int]]


def _sorted_top_keys(run: RunTables) -> tuple[pd.DataFrame, RowRanges]:
    return _sort_by_pattern(run, "top_keys", ["query", "rank"])


def _sorted_far_keys(run: RunTables) -> tuple[pd.DataFrame, RowRanges]:
    return _sort_by_pattern(run, "far_keys", ["query"])


def _far_patterns_by_head(run: RunTables) -> dict[tuple[str, int, int], list[PatternKey]]:
    """The patterns of each (model, layer, head) with far keys."""
    patterns: dict[tuple[str, int, int], list[PatternKey]] = {}
    for model, length, doc, layer, head in run.derived(_sorted_far_keys)[1]:
        patterns.setdefault((model, layer, head), []).append((model, length, doc, layer, head))
    return patterns


def _sort_by_pattern(run: RunTables, table_name: str, sort_columns: Sequence[str]) -> tuple[pd.DataFrame, RowRanges]:
    """The table sorted by pattern, and the range of rows of each pattern."""
    if table_name not in run.tables:
        return pd.DataFrame(), {}
    frame = run.table(table_name)
    columns = ["model", "context_length", "doc", "layer", "head"]
    frame = frame.sort_values([*columns, *sort_columns], ignore_index=True)
    groups = frame.groupby(columns, observed=True, sort=False).ngroup().to_numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    pattern_keys = frame.iloc[starts][columns].itertuples(index=False, name=None)
    ends = [*starts[1:], len(frame)]
    return frame, {
        (str(model), int(length), str(doc), int(layer), int(head)): (int(start), int(end))
        for (model, length, doc, layer, head), start, end in zip(pattern_keys, starts, ends, strict=True)
    }


def _load_texts(
    run: RunTables,
) -> tuple[dict[tuple[str, str], dict[int, str]], dict[tuple[str, str], TokenizedText]]:
    """The tokenizer of each (model, document) by context length, and the tokens of each (tokenizer, document)."""
    rows = run.table("pattern_texts")[["model", "doc", "context_length", "tokenizer"]]
    tokenizers: dict[tuple[str, str], dict[int, str]] = {}
    for model, doc, length, tokenizer in rows.itertuples(index=False, name=None):
        tokenizers.setdefault((str(model), str(doc)), {})[int(length)] = str(tokenizer)
    texts = {}
    for (tokenizer, doc), block in run.table("token_text").groupby(["tokenizer", "doc"], observed=True):
        block = block.sort_values("position")
        special = block["special"].to_numpy(dtype=bool)
        texts[str(tokenizer), str(doc)] = TokenizedText(block["text"].to_numpy(dtype=object), special)
    return tokenizers, texts


def mapped_models(run: RunTables) -> list[str]:
    """The models with stored maps, in the order of the run."""
    if "attention_maps" not in run.tables:
        return []
    measured = {*run.table("attention_maps")["model"].astype(str).unique()}
    return [label for label in run.models if label in measured]


def count_maps(run: RunTables) -> dict[str, int]:
    """The number of heads with a stored map, by model."""
    if not (labels := mapped_models(run)):
        return {}
    counts = run.table("attention_maps").drop_duplicates(["model", "layer", "head"])["model"].value_counts()
    return {label: int(counts[label]) for label in labels}


def layers_and_heads(rows: pd.DataFrame) -> list[tuple[int, int]]:
    return [(int(layer), int(head)) for layer, head in rows[["layer", "head"]].itertuples(index=False, name=None)]

"""Results of attention patterns: examples of rows, and the number of stored maps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.rendering.blocks import Overview
from headscope.rendering.text import head_mask, heads_by_model
from headscope.rendering.token_spans import TokenizedText, mark_token, text_with_weights, to_display_line
from headscope.results.result import Result
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import default_models
from probes.patterns import PROBE

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


MAX_HEADS = 5
"""Heads per model in the overview."""


def results(run: Run) -> Iterator[Result]:
    """The strongest attention in a prompt; an example of the head of each model with the largest top far weight; the
    number of stored maps."""
    for label in default_models(run):
        yield from _prompt_results(run, label)
    for label in default_models(run):
        for _, heads in heads_by_model(run.heads[run.heads["model"] == label], "far_weight"):
            for at in layers_and_heads(heads.nlargest(1, "far_weight")):
                yield from _example(run, label, *at)
    for label, count in count_maps(run).items():
        yield Result(question="patterns.maps", value=count, model=label)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's top far row in words."""
    if "far_weight" in run.heads and run.heads[head_mask(run.heads, layer, head)]["far_weight"].notna().any():
        yield from _example(run, model, layer, head)


def _example(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's top far row, if it has one."""
    for row in top_far_rows(run, model, layer, head)[:1].to_dict("records"):
        text = document_text(run, model, row["doc"])
        yield Result(
            question="patterns.example",
            value=float(row["weight"]),
            model=model,
            layer=layer,
            head=head,
            details={
                "doc": row["doc"],
                "query": mark_token(text, row["query"], 6, 0),
                "key": mark_token(text, row["key"]),
                "distance": row["distance"],
            },
        )


def overview(run: Run) -> Overview | None:
    """The top far row of each of the leading heads of every model; without rows, the number of stored maps."""
    if "top_keys" in run.tables:
        records = [record for label in run.models for record in _overview_records(run, label)]
    else:
        records = [{"model": label, "attention maps": count} for label, count in count_maps(run).items()]
    if not records:
        return None
    return Overview(PROBE.name, pd.DataFrame(records))


def _overview_records(run: Run, label: str) -> Iterator[dict[str, object]]:
    heads = run.heads[run.heads["model"] == label]
    ordered = heads.dropna(subset=["far_weight"]) if "far_weight" in heads else heads[:0]
    leading = ordered.sort_values("far_weight", ascending=False)[:MAX_HEADS] if len(ordered) else ordered
    for layer, head in layers_and_heads(leading):
        for row in top_far_rows(run, label, layer, head)[:1].to_dict("records"):
            text = document_text(run, label, row["doc"])
            yield {
                "model": label,
                "head": format_head(layer, head),
                "weight": row["weight"],
                "attended token": mark_token(text, row["key"], 4, 2),
                "query token": mark_token(text, row["query"], 4, 0),
                "distance": row["distance"],
            }


MAX_ROWS = 5
"""Heads of a model that are listed."""


@dataclass(frozen=True)
class PromptRow:
    """The largest weight of a head within a prompt: from token `query` to token `key`."""

    doc: str
    length: int
    layer: int
    head: int
    query: int
    key: int
    weight: float


def find_token(texts: Sequence[str], token: str) -> int | None:
    """The last position of the token with this text, with or without the white space around it; None without one."""
    return max((position for position, text in enumerate(texts) if token in (text, text.strip())), default=None)


def prompt_rows(run: RunTables, model: str) -> list[PromptRow]:
    """The heads with the largest weights, each with its largest: from the last token of the prompt, or from or to the
    tokens that the options `query` and `key` name. The first token counts only if `key` names it.

    Empty for a model that read no prompt.
    """
    if "top_keys" not in run.tables:
        return []
    read = run.table("pattern_texts")
    read = read[(read["model"] == model) & (read["rows"] == read["context_length"])]
    names = read["doc"].astype(str)
    prompts = read[(names == "prompt") | names.str.startswith("prompt/")]
    return [
        row
        for doc, length in prompts[["doc", "context_length"]].itertuples(index=False, name=None)
        for row in _largest_weights(run, model, str(doc), int(length))
    ]


def _largest_weights(run: RunTables, model: str, doc: str, length: int) -> Iterator[PromptRow]:
    rows = run.table("top_keys")
    rows = rows[(rows["model"] == model) & (rows["doc"] == doc) & (rows["context_length"] == length)]
    texts = list(document_text(run, model, doc).token_texts)
    options: Mapping[str, Any] = run.manifest.get("config", {}).get("patterns") or {}
    query, key = (_position(texts, options.get(name)) for name in ("query", "key"))
    if query is None and key is None:
        query = length - 1
    rows = rows[rows["key"] > 0] if key is None else rows[rows["key"] == key]
    rows = rows if query is None else rows[rows["query"] == query]
    rows = rows.sort_values("weight", ascending=False, kind="stable").drop_duplicates(["layer", "head"])[:MAX_ROWS]
    columns = ["layer", "head", "query", "key", "weight"]
    for layer, head, query_position, key_position, weight in rows[columns].itertuples(index=False, name=None):
        yield PromptRow(doc, length, int(layer), int(head), int(query_position), int(key_position), float(weight))


def _position(texts: Sequence[str], token: str | None) -> int | None:
    return None if token is None else find_token(texts, token)


def _prompt_results(run: Run, model: str) -> Iterator[Result]:
    """The listed heads with the prompt in which they attend, strongest first; a warning if a named key is in no row."""
    listed_rows = prompt_rows(run, model)
    options: Mapping[str, Any] = run.manifest.get("config", {}).get("patterns") or {}
    if options.get("key") is not None and "top_keys" in run.tables and not listed_rows:
        yield Result(question="patterns.unlisted", model=model, details={"keys": options.get("keys")})
    for rank, row in enumerate(listed_rows, start=1):
        text = document_text(run, model, row.doc)
        weights = top_keys(run, (model, row.length, row.doc, row.layer, row.head), row.query)
        yield Result(
            question="patterns.prompt",
            value=row.weight,
            model=model,
            layer=row.layer,
            head=row.head,
            where={"doc": row.doc, "rank": rank},
            details={
                "query": to_display_line(text.token_texts[row.query]),
                "key": to_display_line(text.token_texts[row.key]),
                "weights": text_with_weights(
                    text, row.query, dict(zip(weights["key"], weights["weight"], strict=True))
                ),
            },
        )

"""The strongest attention within a prompt: heads, the tokens they attend from and to, and the prompt with weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headscope.rendering.token_spans import text_with_weights, to_display_line
from headscope.results.result import Result
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.patterns.analysis import document_text, top_keys

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


def results(run: Run, model: str) -> Iterator[Result]:
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

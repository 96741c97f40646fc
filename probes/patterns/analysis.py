"""What was read, ready to be shown: one row of one head, a head's most telling rows, and tokens in their context.

Every answer costs as much as what it tells: tables are put in order once a run, and looked up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.run_tables import Stored

MAX_FAR_ROWS = 8
"""Telling rows of a head and document."""
MIN_ROW_DISTANCE = 8
"""Tokens between telling rows of one document; closer ones tell the same."""
CONTEXT_TOKENS = 6
"""Tokens on either side of one that is shown in its context."""

PatternKey = tuple[str, int, str, int, int]
"""Model, context length, document, layer and head."""


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of one document: what each adds, and whether it is a special one."""

    token_texts: npt.NDArray[np.object_]
    is_special: npt.NDArray[np.bool_]

    def split_at(
        self, position: int, before: int = CONTEXT_TOKENS, after: int = CONTEXT_TOKENS
    ) -> tuple[str, str, str]:
        """The text before a token, the token, and the text after it. One that is part of a character takes the tokens
        along that the character ends with."""
        end = position + 1
        while end < len(self.token_texts) and not self.token_texts[position:end].sum():
            end += 1
        left, right = self.token_texts[max(0, position - before) : position], self.token_texts[end : end + after]
        return "".join(left), "".join(self.token_texts[position:end]), "".join(right)

    def context_range(self, position: int, before: int, after: int) -> range:
        """A token and what stands around it."""
        return range(max(0, position - before), min(len(self.token_texts), position + after + 1))


@dataclass(frozen=True)
class StoredPatterns:
    """What was read under a model: the lengths of each document, and the heads of each layer."""

    lengths_by_document: dict[str, list[int]]
    heads_by_layer: dict[int, list[int]]


def stored_patterns(run: Stored) -> dict[str, StoredPatterns]:
    """What was read, by model."""
    return run.derived(_collect_stored_patterns)


def _collect_stored_patterns(run: Stored) -> dict[str, StoredPatterns]:
    known: dict[str, StoredPatterns] = {}
    for model, length, doc, layer, head in run.derived(_sorted_top_keys)[1]:
        of_model = known.setdefault(model, StoredPatterns({}, {}))
        for there, one in (
            (of_model.lengths_by_document.setdefault(doc, []), length),
            (of_model.heads_by_layer.setdefault(layer, []), head),
        ):
            if one not in there:
                there.append(one)
    return known


def have_same_tokens(run: Stored, doc: str, model: str, other_model: str) -> bool:
    """Whether two models read a document in the same tokens."""
    tokenizers, _ = run.derived(_load_texts)
    return tokenizers.get((other_model, doc)) == tokenizers[model, doc]


def document_text(run: Stored, model: str, doc: str) -> TokenizedText:
    """A document in the tokens of a model."""
    tokenizers, texts = run.derived(_load_texts)
    return texts[tokenizers[model, doc], doc]


def top_keys(run: Stored, pattern_key: PatternKey, query: int) -> pd.DataFrame:
    """The top keys of one row of one head: `rank`, `key`, `weight`, `distance`; without rows where it was not kept."""
    frame, blocks = run.derived(_sorted_top_keys)
    start, stop = blocks.get(pattern_key, (0, 0))
    first, last = np.searchsorted(frame["query"].to_numpy()[start:stop], [query, query + 1]) + start
    kept = frame.iloc[first:last][["rank", "key", "weight"]]
    return kept.assign(distance=query - kept["key"]).reset_index(drop=True)


def stored_queries(run: Stored, pattern_key: PatternKey) -> list[int]:
    """The rows that were kept, which are the same for all heads and models of that document and length."""
    frame, blocks = run.derived(_sorted_top_keys)
    start, stop = blocks.get(pattern_key, (0, 0))
    return [int(query) for query in np.unique(frame["query"].to_numpy()[start:stop])]


def top_far_rows(run: Stored, model: str, layer: int, head: int, max_per_document: int = MAX_FAR_ROWS) -> pd.DataFrame:
    """A head's most telling rows at its longest length: `doc`, `query`, `key`, `weight`, `distance`, largest weight
    first; at most `most` a document, none within 8 tokens of another."""
    frame, blocks = run.derived(_sorted_far_keys)
    places = [place for place in blocks if (place[0], *place[3:]) == (model, layer, head)]
    longest = max((place[1] for place in places), default=0)
    found = [
        _select_spaced_rows(frame.iloc[slice(*blocks[place])], max_per_document).assign(doc=place[2])
        for place in places
        if place[1] == longest
    ]
    if not found:
        return pd.DataFrame(columns=["doc", "query", "key", "weight", "distance"])
    rows = pd.concat(found, ignore_index=True)
    rows["distance"] = rows["query"] - rows["key"]
    rows = rows[["doc", "query", "key", "weight", "distance"]]
    return rows.sort_values("weight", ascending=False, kind="stable", ignore_index=True)


def _select_spaced_rows(rows: pd.DataFrame, max_count: int) -> pd.DataFrame:
    order = rows.sort_values("weight", ascending=False, kind="stable")
    taken: list[int] = []
    for query in order["query"].tolist():
        if len(taken) < max_count and all(abs(query - other) >= MIN_ROW_DISTANCE for other in taken):
            taken.append(query)
    return order[order["query"].isin(taken)]


RowRanges = dict[PatternKey, tuple[int, int]]


def _sorted_top_keys(run: Stored) -> tuple[pd.DataFrame, RowRanges]:
    return _sort_by_pattern(run, "reads", ["query", "rank"])


def _sorted_far_keys(run: Stored) -> tuple[pd.DataFrame, RowRanges]:
    return _sort_by_pattern(run, "far_reads", ["query"])


def _sort_by_pattern(run: Stored, table_name: str, sort_columns: Sequence[str]) -> tuple[pd.DataFrame, RowRanges]:
    """The table with the rows of each head together, and where each head's begin and end."""
    if table_name not in run.tables:
        return pd.DataFrame(), {}
    frame = run.table(table_name)
    place = ["model", "context_length", "doc", "layer", "head"]
    frame = frame.sort_values([*place, *sort_columns], ignore_index=True)
    groups = frame.groupby(place, observed=True, sort=False).ngroup().to_numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    named = frame.iloc[starts][place].itertuples(index=False, name=None)
    ends = [*starts[1:], len(frame)]
    return frame, {
        (str(model), int(length), str(doc), int(layer), int(head)): (int(start), int(end))
        for (model, length, doc, layer, head), start, end in zip(named, starts, ends, strict=True)
    }


def _load_texts(run: Stored) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], TokenizedText]]:
    """Which tokenizer (model, document) has, and the text of each (tokenizer, document)."""
    named = run.table("passages")[["model", "doc", "tokenizer"]].astype("str").itertuples(index=False, name=None)
    tokenizers = {(model, doc): tokenizer for model, doc, tokenizer in named}
    texts = {}
    for (tokenizer, doc), block in run.table("pieces").groupby(["tokenizer", "doc"], observed=True):
        block = block.sort_values("position")
        special = block["special"].to_numpy(dtype=bool)
        texts[str(tokenizer), str(doc)] = TokenizedText(block["piece"].to_numpy(dtype=object), special)
    return tokenizers, texts

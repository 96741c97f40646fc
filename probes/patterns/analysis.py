"""What was read, ready to be shown: one row of one head, a head's most telling rows, and tokens in their context.

Every answer costs as much as what it tells: tables are put in order once a run, and looked up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.run_tables import Stored

TELLING = 8
"""Telling rows of a head and document."""
APART = 8
"""Tokens between telling rows of one document; closer ones tell the same."""
AROUND = 6
"""Tokens on either side of one that is shown in its context."""

Place = tuple[str, int, str, int, int]
"""Model, context length, document, layer and head."""


@dataclass(frozen=True)
class Text:
    """The tokens of one document: what each adds, and whether it is a special one."""

    pieces: npt.NDArray[np.object_]
    special: npt.NDArray[np.bool_]

    def around(self, position: int, before: int = AROUND, after: int = AROUND) -> tuple[str, str, str]:
        """The text before a token, the token, and the text after it. One that is part of a character takes the tokens
        along that the character ends with."""
        end = position + 1
        while end < len(self.pieces) and not self.pieces[position:end].sum():
            end += 1
        left, right = self.pieces[max(0, position - before) : position], self.pieces[end : end + after]
        return "".join(left), "".join(self.pieces[position:end]), "".join(right)

    def about(self, position: int, before: int, after: int) -> range:
        """A token and what stands around it."""
        return range(max(0, position - before), min(len(self.pieces), position + after + 1))


@dataclass(frozen=True)
class Known:
    """What was read under a model: the lengths of each document, and the heads of each layer."""

    texts: dict[str, list[int]]
    heads: dict[int, list[int]]


def places(run: Stored) -> dict[str, Known]:
    """What was read, by model."""
    return run.derived(_places)


def _places(run: Stored) -> dict[str, Known]:
    known: dict[str, Known] = {}
    for model, length, doc, layer, head in run.derived(_reads)[1]:
        of_model = known.setdefault(model, Known({}, {}))
        for there, one in (of_model.texts.setdefault(doc, []), length), (of_model.heads.setdefault(layer, []), head):
            if one not in there:
                there.append(one)
    return known


def same_tokens(run: Stored, doc: str, model: str, other: str) -> bool:
    """Whether two models read a document in the same tokens."""
    tokenizers, _ = run.derived(_texts)
    return tokenizers.get((other, doc)) == tokenizers[model, doc]


def text(run: Stored, model: str, doc: str) -> Text:
    """A document in the tokens of a model."""
    tokenizers, texts = run.derived(_texts)
    return texts[tokenizers[model, doc], doc]


def row(run: Stored, place: Place, query: int) -> pd.DataFrame:
    """The top keys of one row of one head: `rank`, `key`, `weight`, `distance`; without rows where it was not kept."""
    frame, blocks = run.derived(_reads)
    start, stop = blocks.get(place, (0, 0))
    first, last = np.searchsorted(frame["query"].to_numpy()[start:stop], [query, query + 1]) + start
    kept = frame.iloc[first:last][["rank", "key", "weight"]]
    return kept.assign(distance=query - kept["key"]).reset_index(drop=True)


def queries(run: Stored, place: Place) -> list[int]:
    """The rows that were kept, which are the same for all heads and models of that document and length."""
    frame, blocks = run.derived(_reads)
    start, stop = blocks.get(place, (0, 0))
    return [int(query) for query in np.unique(frame["query"].to_numpy()[start:stop])]


def telling(run: Stored, model: str, layer: int, head: int, most: int = TELLING) -> pd.DataFrame:
    """A head's most telling rows at its longest length: `doc`, `query`, `key`, `weight`, `distance`, largest weight
    first; at most `most` a document, none within 8 tokens of another."""
    frame, blocks = run.derived(_far)
    places = [place for place in blocks if (place[0], *place[3:]) == (model, layer, head)]
    longest = max((place[1] for place in places), default=0)
    found = [
        _apart(frame.iloc[slice(*blocks[place])], most).assign(doc=place[2]) for place in places if place[1] == longest
    ]
    if not found:
        return pd.DataFrame(columns=["doc", "query", "key", "weight", "distance"])
    rows = pd.concat(found, ignore_index=True)
    rows["distance"] = rows["query"] - rows["key"]
    rows = rows[["doc", "query", "key", "weight", "distance"]]
    return rows.sort_values("weight", ascending=False, kind="stable", ignore_index=True)


def _apart(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    order = rows.sort_values("weight", ascending=False, kind="stable")
    taken: list[int] = []
    for query in order["query"].tolist():
        if len(taken) < most and all(abs(query - other) >= APART for other in taken):
            taken.append(query)
    return order[order["query"].isin(taken)]


Blocks = dict[Place, tuple[int, int]]


def _reads(run: Stored) -> tuple[pd.DataFrame, Blocks]:
    return _in_order(run, "reads", ["query", "rank"])


def _far(run: Stored) -> tuple[pd.DataFrame, Blocks]:
    return _in_order(run, "far_reads", ["query"])


def _in_order(run: Stored, name: str, within: Sequence[str]) -> tuple[pd.DataFrame, Blocks]:
    """The table with the rows of each head together, and where each head's begin and end."""
    if name not in run.tables:
        return pd.DataFrame(), {}
    frame = run.table(name)
    place = ["model", "context_length", "doc", "layer", "head"]
    frame = frame.sort_values([*place, *within], ignore_index=True)
    groups = frame.groupby(place, observed=True, sort=False).ngroup().to_numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    named = frame.iloc[starts][place].itertuples(index=False, name=None)
    ends = [*starts[1:], len(frame)]
    return frame, {
        (str(model), int(length), str(doc), int(layer), int(head)): (int(start), int(end))
        for (model, length, doc, layer, head), start, end in zip(named, starts, ends, strict=True)
    }


def _texts(run: Stored) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], Text]]:
    """Which tokenizer (model, document) has, and the text of each (tokenizer, document)."""
    named = run.table("passages")[["model", "doc", "tokenizer"]].astype("str").itertuples(index=False, name=None)
    tokenizers = {(model, doc): tokenizer for model, doc, tokenizer in named}
    texts = {}
    for (tokenizer, doc), block in run.table("pieces").groupby(["tokenizer", "doc"], observed=True):
        block = block.sort_values("position")
        special = block["special"].to_numpy(dtype=bool)
        texts[str(tokenizer), str(doc)] = Text(block["piece"].to_numpy(dtype=object), special)
    return tokenizers, texts

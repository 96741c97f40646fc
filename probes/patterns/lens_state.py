"""Where a reader of the lens is: what the address asks for, and what takes the place of what it asks in vain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headscope.report.explorer_blocks import choice_or_default
from headscope.runs.run import Run
from probes.patterns.analysis import PatternKey, stored_patterns, stored_queries, top_far_rows


@dataclass(frozen=True)
class LensState:
    """One row of one head, and what had to be left out of what was asked."""

    pattern_key: PatternKey
    query_position: int
    notes: Sequence[str]

    @property
    def model(self) -> str:
        return self.pattern_key[0]

    @property
    def length(self) -> int:
        return self.pattern_key[1]

    @property
    def doc(self) -> str:
        return self.pattern_key[2]

    @property
    def layer(self) -> int:
        return self.pattern_key[3]

    @property
    def head(self) -> int:
        return self.pattern_key[4]


def resolve_state(run: Run, model: str, url_query: Mapping[str, str]) -> LensState:
    """The row that is asked for. By default the most telling one of the head, which is the one of most far weight."""
    known, notes = stored_patterns(run)[model], list[str]()

    best = _default_head(run, model)
    layer = int(choice_or_default("layer", known.heads_by_layer, url_query, notes, best[0]))
    heads = known.heads_by_layer[layer]
    head = int(choice_or_default("head", heads, url_query, notes, best[1] if layer == best[0] else None))
    far = top_far_rows(run, model, layer, head)
    doc = choice_or_default("doc", known.lengths_by_document, url_query, notes, next(iter(far["doc"]), None))
    length = int(
        choice_or_default(
            "length", known.lengths_by_document[doc], url_query, notes, known.lengths_by_document[doc][-1]
        )
    )
    place = (model, length, doc, layer, head)
    rows = stored_queries(run, place)
    most = next((query for query in far[far["doc"] == doc]["query"] if query in rows), rows[-1])
    return LensState(place, int(choice_or_default("row", rows, url_query, notes, most)), notes)


def _default_head(run: Run, model: str) -> tuple[int, int]:
    """The head of the model that picks out far tokens most, else its first one."""
    heads = run.heads[run.heads["model"] == model]
    if "far_weight" in heads and heads["far_weight"].notna().any():
        best = heads.sort_values("far_weight", ascending=False).iloc[0]
        return int(best["layer"]), int(best["head"])
    first = next(iter(stored_patterns(run)[model].heads_by_layer.items()))
    return first[0], first[1][0]

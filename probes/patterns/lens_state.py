"""Where a reader of the lens is: what the address asks for, and what takes the place of what it asks in vain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headscope.report.explorer_blocks import choice_or_default
from headscope.runs.run import Run
from probes.patterns.analysis import Place, places, queries, telling


@dataclass(frozen=True)
class At:
    """One row of one head, and what had to be left out of what was asked."""

    place: Place
    row: int
    notes: Sequence[str]

    @property
    def model(self) -> str:
        return self.place[0]

    @property
    def length(self) -> int:
        return self.place[1]

    @property
    def doc(self) -> str:
        return self.place[2]

    @property
    def layer(self) -> int:
        return self.place[3]

    @property
    def head(self) -> int:
        return self.place[4]


def where(run: Run, model: str, asked: Mapping[str, str]) -> At:
    """The row that is asked for. By default the most telling one of the head, which is the one of most far weight."""
    known, notes = places(run)[model], list[str]()

    best = _best(run, model)
    layer = int(choice_or_default("layer", known.heads, asked, notes, best[0]))
    heads = known.heads[layer]
    head = int(choice_or_default("head", heads, asked, notes, best[1] if layer == best[0] else None))
    far = telling(run, model, layer, head)
    doc = choice_or_default("doc", known.texts, asked, notes, next(iter(far["doc"]), None))
    length = int(choice_or_default("length", known.texts[doc], asked, notes, known.texts[doc][-1]))
    place = (model, length, doc, layer, head)
    rows = queries(run, place)
    most = next((query for query in far[far["doc"] == doc]["query"] if query in rows), rows[-1])
    return At(place, int(choice_or_default("row", rows, asked, notes, most)), notes)


def _best(run: Run, model: str) -> tuple[int, int]:
    """The head of the model that picks out far tokens most, else its first one."""
    heads = run.heads[run.heads["model"] == model]
    if "far_weight" in heads and heads["far_weight"].notna().any():
        best = heads.sort_values("far_weight", ascending=False).iloc[0]
        return int(best["layer"]), int(best["head"])
    first = next(iter(places(run)[model].heads.items()))
    return first[0], first[1][0]

"""Units of work of a study: cells, and the runners of probes that turn cells into table rows."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np
from typing_extensions import TypeVar  # with a default, which Python 3.13 has itself

from headscope.runs.arrow import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.forward.observe import Observer
    from headscope.positions.model import Model
    from headscope.prompts.texts import TokenDocument
    from headscope.study.context import StudyContext


@dataclass(frozen=True)
class TextPass:
    """A forward pass over the first `length` tokens of a document.

    Cells of one model with equal passes share one forward pass, whichever probes they belong to. `tokens` is a digest
    of the token ids; `document` is the index of the document among those of its probe, and orders the passes.
    """

    length: int
    tokens: str
    document: int = field(compare=False)

    @classmethod
    def over(cls, ids: Sequence[int], document: int) -> "TextPass":
        """The pass over all of these token ids."""
        return cls(len(ids), hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:16], document)


Work = TypeVar("Work", default=Any)
"""What tells a runner what to do for a cell: a type of the probe."""


@dataclass(frozen=True)
class Cell(Generic[Work]):
    """The unit of work of one probe, which is run, stored and resumed as a whole.

    `id` names it within its probe; `model` is a label, or "" if it needs none; `cost` is its share of the work in units
    of `pass_cost`, for the time estimate; `work` tells its runner what to do.
    """

    id: str
    model: str = ""
    cost: float = 1.0
    work: Work = None  # type: ignore[assignment]  # None: the runner needs no further data

    @property
    def prerequisites(self) -> tuple[str, ...]:
        """Ids of cells of the same probe that must be stored first; `work.prerequisites`, where there are some."""
        return getattr(self.work, "prerequisites", ())

    @property
    def length(self) -> int:
        """Tokens of the longest text that it reads: `work.length`, where there is one, else 0."""
        return getattr(self.work, "length", 0)


@dataclass(frozen=True)
class PassCell(Cell[Work]):
    """A cell that only observes a forward pass over a text, which it shares with the cells of other probes."""

    text_pass: TextPass = field(kw_only=True)

    @property
    def length(self) -> int:
        """Tokens of its pass."""
        return self.text_pass.length


def document_of(cell: PassCell, documents: Callable[[str], "Sequence[TokenDocument]"]) -> "tuple[TokenDocument, int]":
    """The document that a cell's shared pass reads, and the length of the pass; `documents(label)` are the probe's."""
    return documents(cell.model)[cell.text_pass.document], cell.text_pass.length


class ProbeRunner(Protocol):
    """Executes one probe of a study. Cells come in the order of the stored rows."""

    def __init__(self, options: Any, context: "StudyContext") -> None: ...

    def cells(self) -> Sequence[Cell]:
        """The work items, in the order of the stored rows."""

    def compute_rows(self, cell: Cell, model: Any) -> Mapping[str, Rows]:
        """Run the cell and return its rows, by table; `model` is None for a cell without one."""


class ObservingRunner(Protocol):
    """Executes a probe that observes forward passes over texts: every cell is a `PassCell`."""

    def __init__(self, options: Any, context: "StudyContext") -> None: ...

    def cells(self) -> Sequence[Cell]:
        """The work items, in the order of the stored rows."""

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        """The token ids of the cell's pass."""

    def observer(self, cell: PassCell, model: "Model", ids: "Tensor") -> "Observer":
        """A new observer of the pass over ids [1, L]; the position scheme is attached when this is called."""


class RunnerParts:
    """The contract of the part of a probe that runs models, and may import torch."""

    def runner(self) -> "Callable[[Any, StudyContext], ProbeRunner | ObservingRunner]":
        """The class that executes it, called with its options and the study."""
        raise NotImplementedError("the probe has no runner")


@dataclass(frozen=True)
class Job:
    """Cells that are run and stored together: one cell, or all cells that observe the same forward pass."""

    parts: tuple[tuple[str, Cell], ...]
    """(probe name, cell), in the order of the probes."""
    shared_jobs: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Ids of the jobs of shared passes, by the ids (probe/cell) of those of their cells that this job needs."""

    @property
    def probe(self) -> str:
        """The names of its probes, joined by "+"."""
        return "+".join(name for name, _ in self.parts)

    @property
    def cell(self) -> Cell:
        """Its first cell, which names it."""
        return self.parts[0][1]

    @property
    def id(self) -> str:
        return f"{self.probe}/{self.cell.id}"

    @property
    def model(self) -> str:
        """The label of its model, "" if it needs none."""
        return self.cell.model

    @property
    def cost(self) -> float:
        """A shared pass costs about as much as the most expensive of its cells."""
        return max(cell.cost for _, cell in self.parts)

    @property
    def length(self) -> int:
        """Tokens of the longest text that its cells read; 0 if they do not say so."""
        return max(cell.length for _, cell in self.parts)

    @property
    def prerequisites(self) -> frozenset[str]:
        """Ids of jobs that must be stored first."""
        return frozenset(self.shared_jobs.get(cell, cell) for cell in self.needed_cells)

    @property
    def needed_cells(self) -> frozenset[str]:
        """Ids (probe/cell) of the cells that must be stored first."""
        return frozenset(f"{name}/{prerequisite}" for name, cell in self.parts for prerequisite in cell.prerequisites)


def group_by_pass(cells: Iterable[tuple[str, Cell]], labels: Sequence[str]) -> list[Job]:
    """Jobs of (probe name, cell): cells with an equal text pass become one job.

    Shared passes come first, by model in the order of `labels`, length and document, which is also the order of each
    probe's rows; all other cells keep their order.
    """
    shared: dict[tuple[str, TextPass], list[tuple[str, PassCell]]] = {}
    single: list[Job] = []
    for name, cell in cells:
        if isinstance(cell, PassCell):
            shared.setdefault((cell.model, cell.text_pass), []).append((name, cell))
        else:
            single.append(Job(((name, cell),)))
    rank = {label: number for number, label in enumerate(labels)}
    ordered = sorted(shared, key=lambda key: (rank[key[0]], key[1].length, shared[key][0][1].text_pass.document))
    jobs = [Job(tuple(shared[key])) for key in ordered]
    shared_jobs = {f"{name}/{cell.id}": job.id for job in jobs for name, cell in job.parts}
    needing = [
        replace(job, shared_jobs={cell: shared_jobs[cell] for cell in job.needed_cells & {*shared_jobs}})
        for job in single
    ]
    return jobs + needing


def pass_cost(length: int) -> float:
    """Work of one forward pass over `length` tokens: a linear and a quadratic part, equal at 4,096 tokens.

    A pass over fewer than 256 tokens takes about as long as one over 256.
    """
    tokens = max(length, 256)
    return tokens * (1 + tokens / 4096)

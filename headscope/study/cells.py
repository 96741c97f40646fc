"""What a section of a study is: cells in, table rows out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headscope.runs.arrow import Rows

if TYPE_CHECKING:
    from headscope.study.context import Materials


@dataclass(frozen=True)
class Cell:
    """The smallest unit of work that is stored and resumed: what to do, and with which model (by label) if any.

    `id` names it within its section; `cost` is its share of the work in passes over tokens (`pass_cost`), for the time
    estimate. A task that reads the rows of other cells of its section names them `before`.
    """

    id: str
    model: str | None
    cost: float = 1.0
    task: Any = None

    @property
    def before(self) -> tuple[str, ...]:
        """Cells of its section that are stored before it is made."""
        return getattr(self.task, "before", ())


class Section(Protocol):
    """One section of a study: `config` are its options, `materials` the models and documents that the study names.

    Cells come in the order of the stored rows; one without a model gets None.
    """

    def __init__(self, config: Any, materials: "Materials") -> None: ...

    def cells(self) -> list[Cell]: ...

    def rows(self, cell: Cell, model: Any) -> Mapping[str, Rows]: ...


def pass_cost(length: int) -> float:
    """Work of one forward pass over `length` tokens: a part a token and a part a pair of them, equal at 4k tokens."""
    return length * (1 + length / 4096)

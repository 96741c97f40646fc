"""Positions of a pair that are patched together, with their columns in the stored tables."""

from dataclasses import dataclass
from typing import Any

from probes.patching.schema import ALL_POSITIONS


@dataclass(frozen=True)
class PatchedSpan:
    """Positions that are patched together, counted from the first aligned one, which is token `first_aligned`.

    None is all positions. A named span has a name.
    """

    positions: range | None
    first_aligned: int
    name: str = ""

    @property
    def columns(self) -> dict[str, Any]:
        """The span in the columns of both tables of heads."""
        if self.positions is None:
            return {"position": ALL_POSITIONS, "span": "", "first": 0, "last": 0}
        first, last = (self.first_aligned + self.positions[end] for end in (0, -1))
        return {"position": first, "span": self.name, "first": first, "last": last}

    @property
    def layer_columns(self) -> dict[str, Any]:
        """The span in the columns of the table of layers."""
        columns = self.columns
        last = ALL_POSITIONS if self.positions is None else columns["last"]
        return {"position": columns["position"], "span": self.name, "last": last}

"""Position parameters of every model: rotary frequencies per KV group, temperatures per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headscope.runs.columns import Table
    from probes.positions.run import PositionsRunner


class Positions(Probe):
    """The declaration of the probe `positions`."""

    name = "positions"
    title = "Position parameters"
    tab = None
    summary = "Rotary frequencies and logit temperatures of every model, read without a forward pass."
    order = 0
    takes = ("models",)
    runs_always = True

    def runner(self) -> type[PositionsRunner]:
        from probes.positions.run import PositionsRunner

        return PositionsRunner

    def tables(self) -> Sequence[Table]:
        from probes.positions.schema import TABLES

        return TABLES


PROBE = Positions()

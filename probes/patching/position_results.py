"""Results about maps by position: the units and tokens of the largest effects of both signs."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.effects.units import unit_fields
from headscope.estimates import EXACT
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.patching.position_maps import LABELS, PositionMap, entry_maps, layer_maps, unit_maps

TOP_TOKENS = 2
"""Texts of tokens that a result names for either sign."""
CANDIDATES = 200
"""Largest effects among which they are chosen."""
SMALLEST = 0.005
"""A smaller effect is not named, because it would be written as 0.00."""


def position_results(run: Run) -> Iterator[Result]:
    """One result for each map of heads, layers and pattern entries."""
    for maps in (unit_maps, layer_maps, entry_maps):
        yield from map(map_result, run.derived(maps))


def map_result(position_map: PositionMap) -> Result:
    """The positions of the largest effects over all pairs, each with its unit, and those of the most negative effects.

    They are ordered by the change of the metric, so that a pair whose metric hardly differs between its prompts does
    not lead. Cells at the same token text count once, and so do those at tokens that differ between the prompts.
    """
    positive, negative = (_largest_cells(position_map, sign) for sign in (1, -1))
    largest = position_map.rows["effect"].abs().argmax()
    ranked = positive or negative or [position_map.rows.iloc[int(largest)]]
    first, *others = ranked
    where = {name: position_map.key[name] for name in ("prompts", "metric", "intervention", "direction")}
    kinds = (positive, "the largest effect"), (negative, "no effect is positive: the most negative one")
    details = {
        "activation": LABELS[where["intervention"]],
        "leads": next((text for cells, text in kinds if cells), "the effect of largest size"),
        "place": _describe_cell(position_map, first),
        "next": {_describe_cell(position_map, cell): float(cell["effect"]) for cell in others},
        "lowest": {_describe_cell(position_map, cell): float(cell["effect"]) for cell in negative if positive},
        "pair": str(first["pair"]),
        **{column: int(first[column]) for column in position_map.place_columns},
    }
    is_layer = "head" not in first
    return Result(
        question="patching.position",
        model=position_map.key["model"],
        value=float(first["effect"]),
        is_exact=first["method"] == EXACT,
        where=where,
        details=details | ({"patched_layer": int(first["layer"])} if is_layer else {}),
        **({} if is_layer else unit_fields(first)),
    )


def _largest_cells(position_map: PositionMap, sign: int) -> list[pd.Series]:
    """Up to `TOP_TOKENS` cells of effects of this sign, largest first, each at another token text."""
    rows = position_map.rows
    change = sign * rows["effect"] * (rows["metric_clean"] - rows["metric_corrupted"]).abs()
    largest = change[sign * rows["effect"] >= SMALLEST].nlargest(CANDIDATES)
    cells: dict[Any, pd.Series] = {}
    for _, cell in rows.loc[largest.index].iterrows():
        cells.setdefault(position_map.token_kind(cell), cell)
    return [*cells.values()][:TOP_TOKENS]


def _describe_cell(position_map: PositionMap, cell: pd.Series) -> str:
    pair = f" of {cell['pair']}" if len(position_map.pairs) > 1 else ""
    return f"{position_map.describe_place(cell)}{pair}"

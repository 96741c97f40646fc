"""Maps of patches at single positions, and of single entries of attention patterns, for every pair of a set."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from headscope.base.heads import EXACT, format_head
from headscope.rendering.token_spans import token_labels
from headscope.results.effects.sweep import rows_of_sweep
from headscope.results.effects.units import unit_name
from headscope.runs.aggregation import plain_types
from headscope.runs.run_tables import RunTables
from probes.patching.analysis import counted_rows
from probes.patching.declaration import (
    ACTIVATION_LABELS,
    ALL_POSITIONS,
    LAYER_ACTIVATION_LABELS,
    PATCHING,
    PATCHING_ENTRIES,
    PATCHING_LAYERS,
    PATCHING_TOKENS,
)

ENTRIES = "pattern entries"
"""The intervention of a map of pattern entries."""
LABELS = {**ACTIVATION_LABELS, **LAYER_ACTIVATION_LABELS, ENTRIES: "entries of the attention pattern"}
MAP_KEYS = ("model", "prompts", "metric", "intervention", "direction")


@dataclass(frozen=True)
class PositionMap:
    """Effects of one activation, by unit and position, or by head, destination and source, in every pair of a set.

    `rows` are those of the table of patches: of a pair that was patched exactly the exact ones, else its estimates.
    `tokens` are those of `patching_tokens`.
    """

    key: dict[str, str]
    rows: pd.DataFrame
    tokens: pd.DataFrame

    @property
    def place_columns(self) -> list[str]:
        """The columns that name a position or an entry."""
        return ["destination", "source"] if self.key["intervention"] == ENTRIES else ["position"]

    @property
    def title(self) -> str:
        """Text naming what is patched: "Denoising of the head output z"."""
        return f"{self.key['direction'].capitalize()} of the {LABELS[self.key['intervention']]}"

    @cached_property
    def pairs(self) -> dict[str, pd.DataFrame]:
        """The rows of each pair by its name, in the order of the set."""
        groups: Any = self.rows.groupby("pair", sort=False)
        return dict(iter(groups))

    @cached_property
    def tokens_by_pair(self) -> dict[str, pd.DataFrame]:
        """The tokens of each pair by position: columns clean, corrupted, label, kind."""
        groups: Any = self.tokens.groupby("pair", sort=False)
        return {pair: block.set_index("position") for pair, block in groups}

    def describe_place(self, cell: pd.Series) -> str:
        """Text naming the unit and position of a row: 'layer 3 at "4: France | Italy"'."""
        labels = [f'"{label}"' for label in self._of_tokens(cell, "label")]
        if len(labels) > 1:
            return f"{format_head(cell['layer'], cell['head'])} from {labels[0]} to {labels[1]}"
        unit = unit_name(cell) if "head" in cell else f"layer {cell['layer']}"
        return f"{unit} at {labels[0]}"

    def token_kind(self, cell: pd.Series) -> tuple[str, ...]:
        """The text of the tokens of a row, "" for one that differs between the prompts."""
        return self._of_tokens(cell, "kind")

    def _of_tokens(self, cell: pd.Series, column: str) -> tuple[str, ...]:
        tokens = self.tokens_by_pair[cell["pair"]]
        return tuple(str(tokens.at[cell[place], column]) for place in self.place_columns)


def layer_maps(run: RunTables) -> list[PositionMap]:
    """The maps of layer x position."""
    return _maps_of_table(run, PATCHING_LAYERS.name)


def unit_maps(run: RunTables) -> list[PositionMap]:
    """The maps of head, or KV group, x position."""
    return _maps_of_table(run, PATCHING.name)


def entry_maps(run: RunTables) -> list[PositionMap]:
    """The maps of destination x source of every head."""
    if PATCHING_ENTRIES.name not in run.tables:
        return []
    rows = counted_rows(run, run.table(PATCHING_ENTRIES.name))
    return _maps(run, rows.assign(intervention=ENTRIES))


def _maps_of_table(run: RunTables, name: str) -> list[PositionMap]:
    if name not in run.tables:
        return []
    rows = run.table(name)
    rows = rows[rows["position"] != ALL_POSITIONS]
    if "span" in rows:
        rows = rows[rows["span"] == ""]
    return _maps(run, counted_rows(run, rows))


def _maps(run: RunTables, rows: pd.DataFrame) -> list[PositionMap]:
    if rows.empty or PATCHING_TOKENS.name not in run.tables:
        return []
    rows = rows[rows["is_normalised"]]
    has_exact = (rows["method"] == EXACT).groupby([rows[name] for name in (*MAP_KEYS, "pair")]).transform("any")
    rows = rows[(rows["method"] == EXACT) | ~has_exact]
    tokens = plain_types(run.table(PATCHING_TOKENS.name))
    tokens = tokens.assign(
        label=token_labels(tokens["position"], tokens["clean"], tokens["corrupted"]),
        kind=tokens["clean"].where(tokens["clean"] == tokens["corrupted"], ""),
    )
    maps = []
    groups: Any = rows.groupby([*MAP_KEYS], sort=False)
    for values, block in groups:
        key = dict(zip(MAP_KEYS, values, strict=True))
        own_tokens = rows_of_sweep(tokens, {name: key[name] for name in ("model", "prompts")})
        if len(block := block[block["pair"].isin(own_tokens["pair"])]):
            maps.append(PositionMap(key, block, own_tokens))
    return maps

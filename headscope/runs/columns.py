"""Declarations of stored tables and columns, the key columns that tables share, and all declared tables.

Schemas, the column reference in the docs and `headscope validate` are derived from `all_tables`. Choices made where the
paper is silent are marked "[ours]".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Literal

import pyarrow as pa

from headscope.base import plugins

FORMAT_VERSION = 4
"""Major version of the run directory. Readers refuse any other one by name."""

Kind = Literal["label", "index16", "index32", "count", "value", "flag", "text", "bytes"]

ARROW_TYPES: Mapping[Kind, pa.DataType] = MappingProxyType(
    {
        "label": pa.dictionary(pa.int32(), pa.string()),
        "index16": pa.int16(),
        "index32": pa.int32(),
        "count": pa.int64(),
        "value": pa.float32(),
        "flag": pa.bool_(),
        "text": pa.string(),
        "bytes": pa.binary(),
    }
)


@dataclass(frozen=True)
class Column:
    """One stored column. `low` and `high` are inclusive bounds; None means unbounded."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    key: bool = False


@dataclass(frozen=True)
class Table:
    """One stored table: key columns first, then values.

    `mean_over_cells` names the count column that weights the value columns when several cells
    (documents) contribute rows with the same key; None means that keys are unique as written. A table that
    `describes_inputs` (texts, tokens) may be the same in several runs that measured different things.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    mean_over_cells: str | None = None
    describes_inputs: bool = False

    @property
    def keys(self) -> list[str]:
        """Names of the key columns."""
        return [column.name for column in self.columns if column.key]

    @property
    def values(self) -> list[str]:
        """Names of the value columns."""
        return [column.name for column in self.columns if not column.key]

    @cached_property
    def arrow(self) -> pa.Schema:
        """The table's pyarrow schema; units and meanings travel as field metadata."""
        return pa.schema(
            [
                pa.field(c.name, ARROW_TYPES[c.kind], nullable=False, metadata={"unit": c.unit, "meaning": c.meaning})
                for c in self.columns
            ],
            metadata={"headscope": f"{self.name}/{FORMAT_VERSION}"},
        )


def key(name: str, kind: Kind, unit: str, meaning: str, low: float | None = 0, high: float | None = None) -> Column:
    """A key column: the key columns together identify a row."""
    return Column(name, kind, unit, meaning, low, high, key=True)


MODEL = key("model", "label", "", "label of the model: a checkpoint under a position scheme", None)
LENGTH = key("context_length", "index32", "tokens", "length of the context that was measured", 1)
DOC = key("doc", "label", "", "document, as source/name", None)
LOSS_BY_POSITION = (
    key("position", "index32", "tokens", "bin of predicted tokens by position, named by its last position", 1),
    Column("nll", "value", "nats/token", "mean loss of the bin's tokens", 0),
    Column("tokens", "count", "tokens", "predicted tokens in the bin", 1),
)
"""Loss of a text in a changed model."""
ANSWER_COLUMNS = (
    Column("nll", "value", "nats/token", "mean loss of the right answer's tokens", 0),
    Column("success", "flag", "", "whether greedy decoding gives exactly the right answer's tokens"),
)
"""Answer of a changed model to a prompt."""
IS_COUNTED = Column(
    "is_counted",
    "flag",
    "",
    "whether means include the prompt: the unchanged model gives its answer, or the option keep_failing is set",
)
ANSWER_METRIC = key(
    "metric", "label", "", "logit_diff, logprob, kl, nll, prob_diff or rank; own:NAME: a function of the user", None
)
LAYER = key("layer", "index16", "", "decoder layer, from 0")
HEAD = key("head", "index16", "", "query head within the layer, from 0")
GROUP = key("kv_group", "index16", "", "query heads that share one key head; head // (heads / groups)")
PAIR = key(
    "pair", "index16", "", "rotary 2-D plane f; dimensions that are not rotated follow as pairs with theta 0 [ours]"
)
VISIBLE = key(
    "visible",
    "index32",
    "keys",
    "bin of query rows by the number of keys they see (i+1, at most the window), named by its upper edge; "
    "4 bins per octave from 16 [ours]",
    16,
)
ROW_COUNTS = (
    Column("rows", "count", "rows", "query rows that were averaged", 1),
    Column(
        "population",
        "count",
        "rows",
        "query rows of the document in the bin; means over several bins weight a bin with it",
        1,
    ),
)
SINK_COUNTS = (
    Column(
        "sink_rows",
        "count",
        "rows",
        "averaged query rows that see key 0, over which its weight is averaged",
        1,
    ),
    Column("sink_population", "count", "rows", "query rows of the document in the bin that see key 0", 1),
)
TASK = key("task", "label", "", "name of the task in the harness", None)
METRIC = key(
    "metric",
    "label",
    "",
    "name of the metric in the harness; match, for tasks generated to a context length: fraction of the expected "
    "strings in the answer, ignoring case",
    None,
)
FILTER = key("filter", "label", "", "filter that the harness applied to an answer before scoring it", None)
DISTANCE = key("distance", "index32", "tokens", "D = i - j; 0 and log-spaced, 4 per octave [ours]")


class TableParts:
    """Contract of the part of a probe with its tables."""

    def tables(self) -> Sequence[Table]:
        """The tables it stores."""
        return ()


@cache
def all_tables() -> Mapping[str, Table]:
    """Every table that a run may hold, by name."""
    return {table.name: table for _, tables in plugins.call_parts(TableParts.tables) for table in tables}


@cache
def shareable_table_names() -> frozenset[str]:
    """Names of the tables whose rows several runs of one model can share.

    They come from probes that always run, belong to no model, or describe inputs.
    """
    return frozenset(
        table.name
        for probe, tables in plugins.call_parts(TableParts.tables)
        for table in tables
        if probe.runs_always or table.describes_inputs or "model" not in table.keys
    )

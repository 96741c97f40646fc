"""Every stored table, as data: those that the installed probes declare.

Schemas, the column reference in the docs and `headscope validate` are all derived from `all_tables`. Choices made
where the
paper is silent are marked "[ours]".
"""

from collections.abc import Mapping
from functools import cache

from headscope import plugins
from headscope.runs.columns import Table


@cache
def all_tables() -> Mapping[str, Table]:
    """Every table that a run may hold, by name."""
    return {table.name: table for _, tables in plugins.load_parts("tables") for table in tables}


@cache
def tables_of_every_run() -> frozenset[str]:
    """Names of the tables that every run of models holds, from probes that always run."""
    parts = plugins.load_parts("tables")
    return frozenset(table.name for probe, tables in parts if probe.runs_always for table in tables)

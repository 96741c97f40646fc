"""The names that a probe from another package imports from headscope. Nothing else is stable across versions.

    from headscope.plugin_api import Column, HEAD, LAYER, MODEL, Options, Probe, Table

Names are imported on first use: importing this module loads neither torch nor pandas. Only the names of the groups
"models and listeners" and `StudyContext` need torch, so a probe should use them in the module of its `runner` only.

- Declaration: `Probe` and `API_VERSION`, which increases when a name here is removed or changes its meaning.
- Options: `Options` is the base class of a probe's options, `Lengths` the type of a list of context lengths, `BadInput`
  the error for a value that cannot be used.
- Tables: `Table`, `Column` and `key` declare stored tables; MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, PAIR, VISIBLE and
  DISTANCE are the key columns that tables share; `Rows` is the type of table rows.
- Runners: a `ProbeRunner` turns each `Cell` into rows; an `ObservingRunner` gives each cell a `TextPass` and an
  `Observer`, and shares the forward pass with other probes; `pass_cost` is the cost of a pass; `StudyContext` opens the
  models and documents of the study, a `TokenDocument` each.
- Models and listeners: `Model`; `Observer`, `CapturedLayers`, `FinishedPass` and `AttentionRecord` for observed passes;
  `attached`, `capturing` and `evaluating` for passes that a runner makes itself.
- Statistics: `Statistic` and `Role` describe columns of the per-head table, HEAD_KEYS are its index; `plain_types`,
  `rows_at_longest_length`, `mean_with_interval`, `confidence_interval` and `mean_losses` aggregate table rows.
- Stored runs: `Run`, and `RunTables`, its tables without the derived ones.
- Report and app: `Chart`, `ChartGroup`, `Term`, `Overview` and `PageContent`; every `Block` is a Chart,
  `TextBlock`, `TextTable`, `HeadTable`, `RecordTable` or `Links` of `Link`; charts are drawn from a `RenderContext`.
- Results: a `Result` answers a declared `Question` and is worded by its template; `judge` adds the verdict on a claim,
  that the value is on one side of a `Bound`.
- Plots: `plot_matrix`, `plot_small_matrices`, `plot_change` and `plot_distribution` of a statistic of all heads.
- Text: `describe_extremes`, `describe_ranks`, `format_head_count`, `format_number`, `head_mask`, `head_name`,
  `heads_by_model` and `join_words`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headscope.probe import Probe

if TYPE_CHECKING:
    from headscope.attention.record import AttentionRecord
    from headscope.errors import BadInput
    from headscope.forward.capture import CapturedLayers, capturing
    from headscope.forward.observe import FinishedPass, Observer
    from headscope.models.checkpoint import evaluating
    from headscope.plots.heads import plot_change, plot_distribution, plot_matrix, plot_small_matrices
    from headscope.positions.attach import attached
    from headscope.positions.model import Model
    from headscope.prompts.texts import TokenDocument
    from headscope.report.blocks import (
        Block,
        Chart,
        ChartGroup,
        HeadTable,
        Link,
        Links,
        Overview,
        PageContent,
        RecordTable,
        RenderContext,
        Term,
        TextBlock,
        TextTable,
    )
    from headscope.report.text import (
        describe_extremes,
        describe_ranks,
        format_head_count,
        head_mask,
        head_name,
        heads_by_model,
    )
    from headscope.results.questions import Question
    from headscope.results.result import Bound, Result
    from headscope.results.verdicts import judge
    from headscope.results.words import join_words
    from headscope.runs.aggregation import (
        HEAD_KEYS,
        confidence_interval,
        mean_losses,
        mean_with_interval,
        plain_types,
        rows_at_longest_length,
    )
    from headscope.runs.arrow import Rows
    from headscope.runs.column_metadata import Role, Statistic, format_number
    from headscope.runs.columns import (
        DISTANCE,
        DOC,
        GROUP,
        HEAD,
        LAYER,
        LENGTH,
        MODEL,
        PAIR,
        VISIBLE,
        Column,
        Table,
        key,
    )
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from headscope.study.cells import Cell, ObservingRunner, ProbeRunner, TextPass, pass_cost
    from headscope.study.config import Lengths, Options
    from headscope.study.context import StudyContext

API_VERSION = 3

_NAMES_BY_MODULE = {
    "attention.record": "AttentionRecord",
    "errors": "BadInput",
    "forward.capture": "CapturedLayers capturing",
    "forward.observe": "FinishedPass Observer",
    "models.checkpoint": "evaluating",
    "plots.heads": "plot_change plot_distribution plot_matrix plot_small_matrices",
    "positions.attach": "attached",
    "positions.model": "Model",
    "prompts.texts": "TokenDocument",
    "report.blocks": "Block Chart ChartGroup HeadTable Link Links Overview PageContent RecordTable "
    "RenderContext Term TextBlock TextTable",
    "report.text": "describe_extremes describe_ranks format_head_count head_mask head_name heads_by_model",
    "results.questions": "Question",
    "results.result": "Bound Result",
    "results.verdicts": "judge",
    "results.words": "join_words",
    "runs.aggregation": "HEAD_KEYS confidence_interval mean_losses mean_with_interval plain_types "
    "rows_at_longest_length",
    "runs.arrow": "Rows",
    "runs.column_metadata": "Role Statistic format_number",
    "runs.columns": "DISTANCE DOC GROUP HEAD LAYER LENGTH MODEL PAIR VISIBLE Column Table key",
    "runs.run": "Run",
    "runs.run_tables": "RunTables",
    "study.cells": "Cell ObservingRunner ProbeRunner TextPass pass_cost",
    "study.config": "Lengths Options",
    "study.context": "StudyContext",
}
_MODULES = {name: f"headscope.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headscope.plugin_api' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


__all__ = [
    "API_VERSION",
    "DISTANCE",
    "DOC",
    "GROUP",
    "HEAD",
    "HEAD_KEYS",
    "LAYER",
    "LENGTH",
    "MODEL",
    "PAIR",
    "VISIBLE",
    "AttentionRecord",
    "BadInput",
    "Block",
    "Bound",
    "CapturedLayers",
    "Cell",
    "Chart",
    "ChartGroup",
    "Column",
    "FinishedPass",
    "HeadTable",
    "Lengths",
    "Link",
    "Links",
    "Model",
    "Observer",
    "ObservingRunner",
    "Options",
    "Overview",
    "PageContent",
    "Probe",
    "ProbeRunner",
    "Question",
    "RecordTable",
    "RenderContext",
    "Result",
    "Role",
    "Rows",
    "Run",
    "RunTables",
    "Statistic",
    "StudyContext",
    "Table",
    "Term",
    "TextBlock",
    "TextPass",
    "TextTable",
    "TokenDocument",
    "attached",
    "capturing",
    "confidence_interval",
    "describe_extremes",
    "describe_ranks",
    "evaluating",
    "format_head_count",
    "format_number",
    "head_mask",
    "head_name",
    "heads_by_model",
    "join_words",
    "judge",
    "key",
    "mean_losses",
    "mean_with_interval",
    "pass_cost",
    "plain_types",
    "plot_change",
    "plot_distribution",
    "plot_matrix",
    "plot_small_matrices",
    "rows_at_longest_length",
]

"""The names that a probe from another package imports from headscope. Nothing else is stable across versions.

    from headscope.plugin_api import Column, HEAD, LAYER, MODEL, Options, Probe, Table

Names are imported on first use: importing this module loads neither torch nor pandas. Only the names of the groups
"models and listeners" and `StudyContext` need torch, so a probe should use them in the module of its `runner` only.

- Declaration: `Probe` and `API_VERSION`, which increases when a name here is removed or changes its meaning;
  `AttentionScoreProbe` is a probe of one score, a function of what a layer attends.
- Scores: a `Score` declares a number of every head; its rows are `TableRows`, and heads above a threshold have its
  `ScoreRole`. Statistics, columns, questions, results and charts follow.
- Options: `Options` is the base class of a probe's options, `Lengths` the type of a list of context lengths, `BadInput`
  the error for a value that cannot be used; validators of options raise ValueError, or `OptionError` with `OptionName`
  to name an option as a flag or as a key. `Needs` and `Excludes` are rules about options that depend on each other.
- Tables: `Table`, `Column` and `key` declare stored tables; MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, PAIR, VISIBLE and
  DISTANCE are the key columns that tables share; `Rows` is the type of table rows.
- Runners: a `ProbeRunner` turns each `Cell` into rows; an `ObservingRunner` gives each `PassCell` a `TextPass` and an
  `Observer`, and shares the forward pass with other probes; `pass_cost` is the cost of a pass; `StudyContext` opens the
  models and documents of the study, a `TokenDocument` each.
- Models and listeners: `Model`; `Observer`, `CapturedLayers`, `FinishedPass` and `AttentionRecord` for observed passes;
  `attached`, `capturing` and `evaluating` for passes that a runner makes itself.
- Statistics: `Statistic` and `Role` describe columns of the per-head table, HEAD_KEYS are its index; `plain_types`,
  `rows_at_longest_length`, `mean_with_interval`, `confidence_interval` and `mean_losses` aggregate table rows.
- Stored runs: `Run`, and `RunTables`, its tables without the derived ones.
- Report and app: `Chart`, `ChartGroup`, `Card`, `Term`, `Overview` and `PageContent`; every `Block` is a Chart,
  `TextBlock`, `TextTable`, `HeadTable`, `RecordTable` or `Links` of `Link`; charts are drawn from a `RenderContext`.
- Results: a `Result` answers a declared `Question` and is worded by its template; `judge` adds the verdict on a claim,
  that the value is on one side of a `Bound`.
- Plots: `plot_matrix`, `plot_small_matrices`, `plot_change` and `plot_distribution` of a statistic of all heads.
- Text: `describe_extremes`, `describe_ranks`, `format_head_count`, `format_number`, `head_mask`, `head_name`,
  `heads_by_model` and `join_words`.
"""

from typing import Any

from headscope.base.lazy_names import LazyNames

API_VERSION = 3
_names = LazyNames(__file__)
__all__ = ["API_VERSION", *_names.modules]  # strings all


def __getattr__(name: str) -> Any:
    if name in _names.modules:
        return _names.load(name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

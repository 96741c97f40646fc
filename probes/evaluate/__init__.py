"""Probe `evaluate`: scores of each model on tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.rendering.blocks import ChartGroup, Overview, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.evaluate.run import EvaluateRunner
    from probes.evaluate.schema import EvaluateOptions


class Evaluate(Probe):
    """The declaration of the probe `evaluate`."""

    name = "evaluate"
    title = "Tasks"
    tab = "Benchmarks"
    summary = "Score each model on tasks of the lm-evaluation-harness: RULER, common benchmarks, your own task files."
    group = "Tasks"
    order = 35
    takes = ("models",)
    example = "headscope evaluate --model base=smollm2-135m --tasks niah_single_1,ruler_vt --length 4096 --limit 50"

    def options(self) -> type[EvaluateOptions]:
        from probes.evaluate.schema import EvaluateOptions

        return EvaluateOptions

    def runner(self) -> type[EvaluateRunner]:
        from probes.evaluate.run import EvaluateRunner

        return EvaluateRunner

    def tables(self) -> Sequence[Table]:
        from probes.evaluate.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.evaluate.analysis import STATISTICS

        return STATISTICS

    def model_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.evaluate.analysis import model_statistics

        return model_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.evaluate.results import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.evaluate.results import results

        return results(run)

    def overview(self, run: Run) -> Overview | None:
        from probes.evaluate.results import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.evaluate.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.evaluate.report import charts

        return charts(context)


PROBE = Evaluate()

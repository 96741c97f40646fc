"""All results of a run: notes on its models, then those of every probe; computed once per run."""

from itertools import chain

from headscope import plugins
from headscope.results.model_notes import model_notes
from headscope.results.result import Result
from headscope.runs.run import Run


def all_results(run: Run) -> list[Result]:
    """All results of a run: notes on its models, then those of every probe in order."""
    return [*run.derived(_model_notes), *chain.from_iterable(results_by_probe(run).values())]


def results_by_probe(run: Run) -> dict[str, list[Result]]:
    """Results by probe name, in the order of the probes."""
    return run.derived(_compute_results)


def _model_notes(run: Run) -> list[Result]:
    return [*model_notes(run)]


def _compute_results(run: Run) -> dict[str, list[Result]]:
    return {probe.name: [*results] for probe, results in plugins.call_parts("results", run)}

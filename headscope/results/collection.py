"""All results of a run: notes on its models, then those of every probe; computed once per run."""

from collections.abc import Iterable, Iterator
from itertools import chain

from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.errors import BrokenProbe
from headscope.results import words
from headscope.results.model_notes import model_notes
from headscope.results.result import Result
from headscope.runs.run import Run
from headscope.runs.summary import default_models


class ResultParts:
    """Contracts of the parts of a probe that answer its questions."""

    def results(self, run: Run) -> Iterable[Result]:
        """Its results of a run."""
        return ()

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        """Its results about one head."""
        return ()


def all_results(run: Run) -> list[Result]:
    """All results of a run: notes on its models, then those of every probe in order."""
    return [*run.derived(_model_notes), *chain.from_iterable(results_by_probe(run).values())]


def results_of_all_models(run: Run) -> list[Result]:
    """As `all_results`, but for every model: data, checks and comparisons leave none out; sentences show a few."""
    return run.derived(_compute_for_all_models)


def results_with_parts(run: Run) -> Iterator[Result]:
    """As `results_of_all_models`, each followed by its parts."""
    return with_parts(results_of_all_models(run))


def with_parts(results: Iterable[Result]) -> Iterator[Result]:
    """The results, each followed by its parts."""
    for result in results:
        yield result
        yield from with_parts(result.parts)


def _compute_for_all_models(run: Run) -> list[Result]:
    return all_results(run if run.models == default_models(run) else run.with_all_models())


def results_by_probe(run: Run) -> dict[str, list[Result]]:
    """Results by probe name, in the order of the probes."""
    return run.derived(_compute_results)


def _model_notes(run: Run) -> list[Result]:
    return [*model_notes(run)]


def _compute_results(run: Run) -> dict[str, list[Result]]:
    return {probe.name: [*_usable(probe, results)] for probe, results in plugins.call_parts(ResultParts.results, run)}


def _usable(probe: Declaration, results: Iterable[Result]) -> Iterator[Result]:
    """The results that can be worded and have keys of their own; the others are reported and left out."""
    keys: set[tuple[str, ...]] = set()
    for result in results:
        try:
            plugins.call_guarded(probe, "questions", words.sentence, result)
            if result.key in keys:
                raise BrokenProbe(
                    f"probe '{probe.name}' has two results with the key {', '.join(filter(None, result.key))}. Give "
                    "them different conditions in `where`"
                )
        except BrokenProbe as error:
            plugins.report_broken(error)
            continue
        keys.add(result.key)
        yield result

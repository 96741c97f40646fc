"""Results of a run as texts that the terminal, the report and the app share: warnings, headlines and claims."""

from collections.abc import Iterable
from typing import get_args

from headscope.base.heads import ESTIMATE_MARK
from headscope.rendering import assembly
from headscope.rendering.blocks import Claim, ClaimTable, TextBlock
from headscope.results import ranking, words
from headscope.results.collection import all_results, results_by_probe
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.runs.aggregation import Verdict
from headscope.runs.run import Run

LEGEND = f"In brackets: values, or {words.INTERVAL}s (low to high); {ESTIMATE_MARK} marks an estimate."
"""What the brackets of headlines and tables are."""
MAX_ROWS = 24
"""Lines of a kind that the terminal lists unless all are requested."""


def warning_lines(run: Run) -> list[str]:
    """The results that limit what the run shows, one sentence each."""
    return [words.sentence(result) for result in all_results(run) if questions()[result.question].level == "warning"]


def headline_lines(run: Run) -> list[str]:
    """The results to read first, one line each."""
    return headlines(all_results(run))


def headlines(results: Iterable[Result]) -> list[str]:
    """The results to read first among these, one line each."""
    return [*map(_line, ranking.headlines([*results]))]


def row_lines(run: Run) -> list[str]:
    """The results of level row, such as one per prompt pair, one line each.

    A run of several probes has none: its summary is the headlines of all.
    """
    rows = [result for result in all_results(run) if questions()[result.question].level == "row"]
    if not rows:
        return []
    levels = [{questions()[one.question].level for one in of_probe} for of_probe in results_by_probe(run).values()]
    is_only_probe = sum(bool(shown_levels & {"row", "headline"}) for shown_levels in levels) == 1
    return [*map(_line, rows)] if is_only_probe else []


def _line(result: Result) -> str:
    return f"{result.model}: {words.headline(result)}" if result.model else words.headline(result)


def claims(results: Iterable[Result]) -> list[Result]:
    """The verdicts on claims of papers."""
    return [result for result in results if questions()[result.question].is_claim]


def count_verdicts(results: Iterable[Result]) -> str:
    """The number of claims with each verdict: "2 supported, 4 inconclusive"; "" without claims."""
    verdicts = [result.verdict for result in claims(results)]
    return ", ".join(f"{count} {verdict}" for verdict in get_args(Verdict) if (count := verdicts.count(verdict)))


def claim_table(results: Iterable[Result]) -> ClaimTable | None:
    """The claims with verdict, evidence and criterion; None without claims."""
    rows = [
        Claim(words.statement(result), result.verdict, words.evidence(result), words.criterion(result))
        for result in claims(results)
    ]
    return ClaimTable(rows) if rows else None


def summary_blocks(run: Run) -> list[TextBlock]:
    """Warnings and headlines as blocks of a page."""
    warnings, rows = warning_lines(run), row_lines(run)
    more = [f"{len(rows) - MAX_ROWS} more rows are among the results below."] if len(rows) > MAX_ROWS else []
    headlines = [*rows[:MAX_ROWS], *more, *headline_lines(run)]
    blocks = [TextBlock(warnings, "Warnings")] if warnings else []
    return [*blocks, TextBlock([*headlines, LEGEND])] if headlines else blocks


def sentences_by_topic(results: Iterable[Result]) -> dict[str, list[str]]:
    """The sentences about the results that are not claims, by topic."""
    others = [result for result in results if not questions()[result.question].is_claim]
    return {topic: [*map(words.sentence, members)] for topic, members in assembly.group_by_topic(others).items()}

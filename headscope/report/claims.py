"""Claims of a paper as a table: statement, verdict, evidence and criterion."""

from collections.abc import Sequence

from headscope.report.blocks import TextTable
from headscope.results import words
from headscope.results.collection import all_results
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.runs.run import Run

CLAIM_COLUMNS = ("claim of the paper", "verdict", "evidence", "our criterion")


def claims(run: Run) -> list[Result]:
    """The claims of every probe that the run can test."""
    return [result for result in all_results(run) if questions()[result.question].is_claim]


def claim_row(claim: Result) -> list[str]:
    """The cells of a claim in the order of `CLAIM_COLUMNS`."""
    return [words.statement(claim), claim.verdict, words.evidence(claim), words.criterion(claim)]


def claims_table(results: Sequence[Result]) -> TextTable:
    """The claims among the results."""
    rows = [claim_row(result) for result in results if questions()[result.question].is_claim]
    caption = (
        "Claims of the paper. Supported: the whole 95 % confidence interval is on the claimed side; not supported: on "
        "the other side; else inconclusive"
    )
    return TextTable(caption, CLAIM_COLUMNS, rows)

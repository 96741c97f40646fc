"""Write the pages in tests/golden: the wording of results of the shipped runs, one page per renderer, and of options.

Run it with `python -m tests.golden_pages` after a change of wording, and read the difference. Other tests check values.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from support.broken_rules import fault, violations
from support.fake_runs import AFTER, BEFORE, QUESTIONS, fake_run, mean_of
from support.shipped_runs import open_shipped

from headscope.cli.flags import EXAMPLES
from headscope.rendering import comparison, terminal
from headscope.results import words
from headscope.results.check_file import parse_checks
from headscope.results.checks import run_checks
from headscope.results.collection import all_results
from headscope.results.comparison import compare
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.runs.run import Run

FOLDER = Path(__file__).with_name("golden")
CHECKS = [
    {"result": "loss.difference", "model": "yarn", "at_most": 0.02},
    {"result": "loss.difference", "model": "yarn", "at_least": 0.02},
    {"statistic": "induction_token", "count_above": 0.5, "at_least": 3},
    {"statistic": "retrieval", "head": "L18H6", "at_least": 0.5},
    {"statistic": "retrieval", "head": "L18H6", "at_least": 0.99},
]


def shipped_runs() -> Iterator[Run]:
    """All shipped runs, the oldest first."""
    return map(Run.open, sorted(EXAMPLES.glob("*-????????")))


def results_page() -> str:
    """Every text about the first result of each question, and about the first result of each verdict."""
    chosen: dict[tuple[str, str], Result] = {}
    for run in shipped_runs():
        for result in all_results(run):
            chosen.setdefault((result.question, result.verdict), result)
    blocks = [_texts(chosen[key]) for key in sorted(chosen, key=lambda key: ([*questions()].index(key[0]), key[1]))]
    return "\n\n".join(blocks) + "\n"


def _texts(result: Result) -> str:
    texts = {"sentence": words.sentence(result), "headline": words.headline(result)}
    if texts["headline"] == texts["sentence"].removesuffix("."):
        del texts["headline"]
    if result.verdict:
        texts |= {"claim": words.statement(result), "evidence": words.evidence(result)}
        texts |= {"criterion": words.criterion(result), "what decides": words.what_decides(result)}
    lines = [f"{name}: {text}" for name, text in texts.items() if text]
    return "\n".join([" ".join(filter(None, [result.question, result.verdict])), *lines])


def terminal_page() -> str:
    """What a command prints after it has measured the default example."""
    return _printed(terminal.print_summary, open_shipped("example"))


def comparison_page() -> str:
    """What `headscope compare` prints about two runs with a clear change, and about two with no result in common."""
    before = fake_run([mean_of(BEFORE), mean_of(BEFORE, "x.share", model="yarn")], ["base", "yarn"])
    after = fake_run([mean_of(AFTER)], ["base"])
    with (
        patch("headscope.results.collection.results_of_all_models", lambda run: run.results),
        patch("headscope.results.comparison.questions", lambda: QUESTIONS),
        patch("headscope.rendering.comparison.questions", lambda: QUESTIONS),
    ):
        return "\n".join(
            _printed(comparison.print_comparison, "monday", "tuesday", compare(before, later), True)
            for later in (after, fake_run([], ["base"]))
        )


def checks_page() -> str:
    """What `headscope check` prints: passed, failed and undecided checks."""
    outcomes = run_checks(open_shipped("example"), parse_checks(CHECKS, "checks.yaml"))
    return _printed(comparison.print_outcomes, outcomes)


def options_page() -> str:
    """The message for every rule about options that is broken."""
    cases = [case.values[:3] for case in violations()]
    return (
        "\n".join(dict.fromkeys(f"{section}: {fault(section, rule, values)}" for section, rule, values in cases)) + "\n"
    )


def _printed(show: Callable[..., None], *arguments: object) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show(*arguments)
    return text.getvalue().replace(str(EXAMPLES), "EXAMPLES").replace(os.sep, "/")


PAGES: Mapping[str, Callable[[], str]] = {
    "results.txt": results_page,
    "terminal.txt": terminal_page,
    "comparison.txt": comparison_page,
    "checks.txt": checks_page,
    "options.txt": options_page,
}
"""Each page by its file's name."""

if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")

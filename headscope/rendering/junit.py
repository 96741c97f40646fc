"""Outcomes of checks as JUnit XML, which CI systems show."""

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from headscope.base.output_files import Output
from headscope.rendering.comparison import outcome_name, outcome_text
from headscope.results.checks import CheckResult

SUITES_NAME = "headscope check"
JUNIT = Output("a JUnit file of `headscope check`", f'<testsuites name="{SUITES_NAME}"'.encode(), "--junit")


def write_junit(outcomes: Sequence[CheckResult], run_name: str, path: Path) -> None:
    """Write one test case per outcome: a failed check is a failure, an undecided one an error. Raises CannotWrite."""
    counts = {name: sum(outcome.outcome == name for outcome in outcomes) for name in ("fails", "undecided")}
    attributes = {"name": _without_control_characters(run_name), "tests": str(len(outcomes))}
    attributes |= {"failures": str(counts["fails"]), "errors": str(counts["undecided"])}
    suites = Element("testsuites", {"name": SUITES_NAME})
    suite = SubElement(suites, "testsuite", attributes)
    for outcome in outcomes:
        case = SubElement(
            suite, "testcase", {"classname": "headscope", "name": _without_control_characters(outcome_name(outcome))}
        )
        if outcome.outcome != "passes":
            SubElement(
                case,
                "failure" if outcome.outcome == "fails" else "error",
                {"type": outcome.outcome, "message": _without_control_characters(outcome_text(outcome))},
            )
    indent(suites)
    JUNIT.write(path, tostring(suites, encoding="utf-8", xml_declaration=True))


def remove_earlier_outcomes(path: Path) -> None:
    """Remove the outcomes of an earlier run at `path`, so that after an error they do not look like those of this one.

    Raises CannotWrite for anything else at `path`, which stays.
    """
    JUNIT.check(path).unlink(missing_ok=True)


def _without_control_characters(text: str) -> str:
    """The text with a question mark for every character that XML does not allow."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)

"""Outcomes of checks as JUnit XML, which CI systems show."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from headscope.errors import CannotWrite
from headscope.rendering.comparison import outcome_name, outcome_text
from headscope.results.checks import CheckResult


def write_junit(outcomes: Sequence[CheckResult], run_name: str, path: Path) -> None:
    """Write one test case per outcome: a failed check is a failure, an undecided one an error. Raises CannotWrite."""
    counts = {name: sum(outcome.outcome == name for outcome in outcomes) for name in ("fails", "undecided")}
    attributes = {"name": run_name, "tests": str(len(outcomes))}
    attributes |= {"failures": str(counts["fails"]), "errors": str(counts["undecided"])}
    suites = Element("testsuites")
    suite = SubElement(suites, "testsuite", attributes)
    for outcome in outcomes:
        case = SubElement(suite, "testcase", {"classname": "headscope", "name": outcome_name(outcome)})
        if outcome.outcome != "passes":
            SubElement(
                case,
                "failure" if outcome.outcome == "fails" else "error",
                {"type": outcome.outcome, "message": outcome_text(outcome)},
            )
    indent(suites)
    try:
        ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Choose another file with --junit") from error

"""Findings of probes that do not yet return results, as results. Removed when every probe returns results."""

from dataclasses import asdict

from headscope.report.blocks import Finding, PaperClaim
from headscope.results.questions import Question
from headscope.results.result import Result

QUESTIONS = (
    Question(name="legacy.finding", sentence="{text}"),
    Question(name="legacy.claim", sentence="{evidence}", statement="{statement}"),
)


def result_of_finding(finding: Finding) -> Result:
    """The finding as a result whose details hold its text."""
    details = {"text": finding.text.removesuffix("."), "legacy_topic": finding.topic}
    verdict = ""
    if isinstance(finding, PaperClaim):
        details |= {"statement": finding.statement, "evidence": finding.evidence}
        verdict = finding.verdict
    return Result(
        question="legacy.claim" if verdict else "legacy.finding",
        model=finding.model,
        details=details,
        verdict=verdict,  # type: ignore[arg-type]
        **asdict(finding.data),
    )

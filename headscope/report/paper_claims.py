"""A sentence of the paper against a run."""

from dataclasses import dataclass, field

from headscope.report.blocks import Finding


@dataclass(frozen=True)
class PaperClaim(Finding):
    """What the paper says, whether it holds on the run, and the figures that say so; as a finding, all in one line."""

    topic: str = field(default="Against the paper", init=False)
    text: str = field(default="", init=False)
    model: str = field(default="", kw_only=True)
    statement: str
    verdict: str
    evidence: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", f"{self.statement}: {self.verdict}. {self.evidence}.")

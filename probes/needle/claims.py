"""What Wu et al. 2024 say of silenced retrieval heads, against a run. Thresholds are ours and stand in the claim."""

from collections.abc import Iterator

from headscope.report.blocks import PaperClaim
from headscope.runs.run import Run
from probes.needle import analysis

MAX_FEW_HEADS = 16
"""Heads that may be silenced for the claim to hold."""


def claims(run: Run) -> Iterator[PaperClaim]:
    """Of each model, kind of needle and way of silencing: whether its top heads are needed more than random ones."""
    if "needle_ablation" not in run.tables:
        return
    for (label, mode, how), lines in run.derived(analysis.ablation_curve).groupby(
        ["model", "mode", "ablation"], observed=True
    ):
        size, whole = analysis.first_separated_size(lines), lines[lines["size"] == 0].iloc[0]
        trials, said = int(whole["trials"]), "indirect needles" if mode == "indirect" else "needles"
        if size is None:
            tells = analysis.can_detect_loss(whole["share"], trials)
            verdict, shown = "differs" if tells else "cannot be told", lines["size"].max()
        else:
            verdict, shown = "holds" if size <= MAX_FEW_HEADS else "holds in part", size
        top, random = (lines[(lines["top"] == which) & (lines["size"] == shown)].iloc[0] for which in (True, False))
        yield PaperClaim(
            f"Silencing the heads that retrieve ({how}) loses {said} that silencing as many random heads of the same "
            f"layers does not (Wu et al. 2024): their 95 % intervals part at {MAX_FEW_HEADS} heads or fewer, "
            "chosen on one half "
            "of the needles and tested on the other",
            verdict,
            f"{label}: of {trials} trials {whole['share']:.0%} succeed unchanged, {analysis.format_share(top)} "
            "without the "
            f"top {shown} heads, {analysis.format_share(random)} without random ones",
            model=str(label),
        )

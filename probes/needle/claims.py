"""The claim of Wu et al. 2024 about ablated retrieval heads, judged from a run. The thresholds are ours."""

from collections.abc import Iterator

from headscope.report.blocks import PaperClaim
from headscope.runs.run import Run
from probes.needle import analysis

MAX_FEW_HEADS = 16
"""Largest number of ablated heads at which the claim counts as supported."""


def claims(run: Run) -> Iterator[PaperClaim]:
    """For each model, kind of needle and ablation: whether retrieval needs the top heads more than random heads."""
    if "needle_ablation" not in run.tables:
        return
    for (label, mode, ablation), lines in run.derived(analysis.ablation_curve).groupby(
        ["model", "mode", "ablation"], observed=True
    ):
        size, unchanged = analysis.first_separated_size(lines), lines[lines["size"] == 0].iloc[0]
        trials, noun = int(unchanged["trials"]), "indirect needles" if mode == "indirect" else "needles"
        if size is None:
            detectable = analysis.can_detect_loss(unchanged["share"], trials)
            verdict, shown_size = "not supported" if detectable else "inconclusive", lines["size"].max()
        else:
            verdict, shown_size = "supported" if size <= MAX_FEW_HEADS else "partly supported", size
        top, random = (
            lines[(lines["top"] == is_top) & (lines["size"] == shown_size)].iloc[0] for is_top in (True, False)
        )
        yield PaperClaim(
            f"Ablating the top retrieval heads ({ablation} ablation) lowers the retrieval of {noun} more than "
            "ablating as "
            f"many random heads of the same layers (Wu et al. 2024): their 95 % confidence intervals separate at "
            f"{MAX_FEW_HEADS} heads or fewer, with heads ranked on one half of the needles and tested on the other",
            verdict,
            f"{label}: of {trials} trials, {unchanged['share']:.0%} succeed in the unchanged model, "
            f"{analysis.format_share(top)} without the top {shown_size} heads, and {analysis.format_share(random)} "
            f"without random heads",
            model=str(label),
        )

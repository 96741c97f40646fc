"""What writing found, in sentences with numbers, and the word that a reader needs."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Finding, Term
from headscope.report.text import default_models, describe_ranks, format_head_count, head_name, heads_by_model
from headscope.runs.aggregation import at_longest, plain
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.attribution import PROBE
from probes.attribution.analysis import mean_over_positions

STATISTIC_NAME = "next_token_write"

GLOSSARY = (
    Term(
        "Part of a logit",
        "The logit of a token is a sum: the embedding, every head and every MLP add to it. A head's part is what its "
        "output adds directly, past all later layers; what these make of it is not counted. The mean over the "
        "vocabulary is taken off, since a constant makes no token more likely, and norms are held at the scale that "
        "they had.",
        "(z_h W_h) · g ∘ (U_y − mean U) / scale of the final norm",
        ("writes",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """What the logit of each model is made of, and the heads that add and take off most."""
    for label in default_models(run) if "write_parts" in run.tables else ():
        means = _mean_parts(run, label)
        if means.empty:
            continue
        yield Finding(
            PROBE.title,
            f"In {label}, the logit of the token that comes next lies {means['logit']:.2f} above the mean of the "
            f"vocabulary: {means['heads']:+.2f} directly from heads, {means['other']:+.2f} from the rest of the "
            f"layers, {means['embedding']:+.2f} from the embedding and {means['bias']:+.2f} from biases.",
            label,
        )
        for _, block in heads_by_model(run.heads[run.heads["model"] == label], STATISTIC_NAME):
            order = block.sort_values(STATISTIC_NAME)
            low, high = order.iloc[0], order.iloc[-1]
            yield Finding(
                PROBE.title,
                f"In {label}, {format_head_count(block[STATISTIC_NAME] > 0)} add to it; {head_name(high)} adds most ({_format_contribution(high)}), and "
                f"{head_name(low)} {'takes off most' if low[STATISTIC_NAME] < 0 else 'adds least'} ({_format_contribution(low)}).",
                label,
            )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The head's rank by what it adds."""
    if STATISTIC_NAME in run.heads and (told := describe_ranks(run.heads, STATISTIC_NAME, layer, head)):
        yield f"Rank by {statistic(STATISTIC_NAME).label}: {told}."


def _mean_parts(run: Run, model: str) -> pd.Series:
    """Mean over positions and documents of each part, all layers together."""
    rows = plain(run.table("write_parts"))
    rows = rows[rows["model"] == model]
    by_layer = mean_over_positions(at_longest(rows), "part", "layer") if len(rows) else pd.Series(dtype="float64")
    return by_layer.groupby(level="part").sum() if len(rows) else by_layer


def _format_contribution(row: pd.Series) -> str:
    low, high = row[f"{STATISTIC_NAME}_low"], row[f"{STATISTIC_NAME}_high"]
    sure = "" if pd.isna(low) else f", 95 % interval {low:+.3f} to {high:+.3f}"
    return f"{row[STATISTIC_NAME]:+.3f} logits{sure}"

"""Charts, findings, glossary and terminal overview of path patching."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.prompts.answers import count_pairs
from headscope.report.blocks import Chart, ChartGroup, Finding, FindingData, Overview, RenderContext, Term, TextTable
from headscope.runs.run import Run
from probes.patching.analysis import exact_or_all, pair_metrics, questions_about_pairs
from probes.patching.labels import (
    describe_path_methods,
    describe_path_sweep,
    describe_significance,
    describe_unmeasured,
    format_effect,
    path_name,
)
from probes.patching.paths import PROBE, plots
from probes.patching.paths.analysis import SweepKey, strongest_paths, sweeps, sweeps_of_model
from probes.patching.paths.schema import LOGITS, PATH_ESTIMATES, PATHS

TABLE_ROWS = 15
"""Paths in the table of the strongest."""

GLOSSARY = (
    Term(
        "Path patching",
        "Activation patching of one path: the queries, keys or values of a receiver head change as if one sender head "
        "had its output of the other run, while all heads and MLPs between them keep their values; then the rest of "
        "the model runs. A path to the logits is the sender's direct effect. An effect of 0 changes nothing; an effect "
        "of 1 moves the metric to its value in the other run.",
        "(m(patched) - m(unpatched)) / (m(source) - m(unpatched)); source: the run that the sender's output comes from",
        (PATHS.name, PATH_ESTIMATES.name),
    ),
)
GRAPH_CAPTION = (
    "One line per path, from the sender to the receiver; wider lines have larger effects. Red: towards the run that "
    "the sender's output comes from; blue: away from it. The dash shows the receiver's input that changes."
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The graph of the strongest paths, the strongest paths as a table, and the agreement of estimates."""
    if not _has_paths(context.run):
        return
    for key, paths in context.run.derived(sweeps_of_model, context.selected_model):
        yield ChartGroup(PROBE.title, f"{describe_path_sweep(key)}, {key[1]}", _sweep_charts(key, paths))


def findings(run: Run) -> Iterator[Finding]:
    """The paths of largest effect of each sweep, and the agreement of estimates."""
    if not _has_paths(run):
        return
    for model, question in _questions(run):
        yield Finding(PROBE.title, question, model)
    for key, paths in sweeps(run):
        yield _sweep_finding(key, paths, _count_pairs(run, key, paths))
        both = _with_both(paths)
        if len(both) > 2:
            spearman = float(both["estimate"].corr(both["effect"], "spearman"))
            error = (both["estimate"] - both["effect"]).abs()
            yield Finding(
                PROBE.title,
                f"{describe_path_sweep(key)}, {key[1]}, in {key[0]}: for {len(both)} paths patched exactly, the rank "
                f"correlation of estimates with exact effects is {spearman:.2f}; the largest error of an estimate is "
                f"{error.max():.2f}.{describe_unmeasured(paths, float(error.max()), 'paths')}",
                key[0],
                data=FindingData(spearman, n=len(both)),
            )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The strongest path from a head and the strongest to it, in every sweep of a model."""
    if not _has_paths(run):
        return
    for key, paths in run.derived(sweeps_of_model, model):
        for end, direction in (("sender", "from"), ("receiver", "to")):
            own = paths[(paths[f"{end}_layer"] == layer) & (paths[f"{end}_head"] == head)]
            for _, path in strongest_paths(own, 1).iterrows():
                yield (
                    f"{describe_path_sweep(key)}, {key[1]}, in {model}: the strongest path {direction} this head is "
                    f"{path_name(path)}, {format_effect(path)}."
                )


def overview(run: Run) -> Overview | None:
    """One row per sweep: pairs, paths, and the path of largest effect."""
    if not _has_paths(run):
        return None
    records = []
    for key, paths in sweeps(run):
        strongest = strongest_paths(paths, 1).iloc[0]
        records.append(
            {
                "model": key[0],
                "prompts": key[1],
                "direction": key[3],
                "pairs": int(paths["pairs"].max()),
                "paths": describe_path_methods(paths),
                "strongest path": f"{path_name(strongest)}, {format_effect(strongest)}",
            }
        )
    warnings = [question for _, question in _questions(run)]
    if not records:
        warnings.append(
            "the metric of the two prompts differs too little in every pair, so there are no effects. Use other pairs"
        )
    return Overview(PROBE.name, PROBE.title, pd.DataFrame(records), records, warnings)


def _has_paths(run: Run) -> bool:
    return PATHS.name in run.tables or PATH_ESTIMATES.name in run.tables


def _questions(run: Run) -> list[tuple[str, str]]:
    """The questions about the pairs of a run; estimates of paths do not store the metrics of pairs."""
    return run.derived(questions_about_pairs, PATHS.name) if PATHS.name in run.tables else []


def _count_pairs(run: Run, key: SweepKey, paths: pd.DataFrame) -> str:
    """The number of pairs in the means of a sweep and, if their metrics are stored, of those without the answer."""
    if PATHS.name not in run.tables:
        return f"{int(paths['pairs'].max())} pairs"
    rows = run.derived(pair_metrics, PATHS.name)
    rows = rows[(rows["model"] == key[0]) & (rows["prompts"] == key[1]) & (rows["metric"] == key[2])]
    return count_pairs(key[2], rows.loc[rows["is_normalised"], "metric_clean"].to_numpy())


def _with_both(paths: pd.DataFrame) -> pd.DataFrame:
    """The paths that were both estimated and patched."""
    return paths[(paths["method"] == "exact") & paths["estimate"].notna()]


def _sweep_charts(key: SweepKey, paths: pd.DataFrame) -> Iterator[Chart | TextTable]:
    strongest = strongest_paths(paths, TABLE_ROWS)
    top = strongest.iloc[0]
    yield Chart(plots.plot_graph(key, paths), GRAPH_CAPTION, f"Strongest path: {path_name(top)}, {format_effect(top)}.")
    rows = [[path_name(path), format_effect(path), _format_p(path["p_adjusted"])] for _, path in strongest.iterrows()]
    yield TextTable("The paths of largest absolute effect.", ["path", "effect, mean over pairs", "adjusted p"], rows)
    if len(both := _with_both(paths)) > 2:
        spearman = both["estimate"].corr(both["effect"], "spearman")
        yield Chart(
            plots.plot_agreement(key, paths),
            "One point per path that was both estimated and patched. On the dashed line the estimate equals the exact "
            "effect.",
            f"Rank correlation {spearman:.2f} over {len(both)} paths.",
            half_width=True,
        )


def _sweep_finding(key: SweepKey, paths: pd.DataFrame, pair_count: str) -> Finding:
    """The paths of largest and lowest effect, the strongest to the logits, and how many effects differ from zero."""
    order = exact_or_all(paths).sort_values("effect", ascending=False, kind="stable")
    largest, smallest, pairs = order.iloc[0], order.iloc[-1], int(paths["pairs"].max())
    between_heads = strongest_paths(paths[paths["receiver_layer"] != LOGITS], 1)
    between = "".join(
        f" The strongest between heads is {path_name(path)}, {format_effect(path)}."
        for _, path in between_heads.iterrows()
        if largest["receiver_layer"] == LOGITS
    )
    text = (
        f"{describe_path_sweep(key)}, {key[1]}, in {key[0]} ({pair_count}; {describe_path_methods(paths)}): the "
        f"most positive effect is that of {path_name(largest)}, {format_effect(largest)}. The lowest is that of "
        f"{path_name(smallest)}, {format_effect(smallest)}.{between} {describe_significance(paths, 'paths')}."
    )
    data = FindingData(
        largest["effect"],
        largest["low"],
        largest["high"],
        pairs,
        int(largest["sender_layer"]),
        int(largest["sender_head"]),
    )
    return Finding(PROBE.title, text, key[0], data=data)


def _format_p(p: float) -> str:
    return "" if np.isnan(p) else f"{p:.3g}"

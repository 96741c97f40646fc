"""Questions and results of the probe `weights`, of a run and of one head."""

import math
from collections.abc import Iterator

import pandas as pd

from headscope.base.heads import format_head
from headscope.rendering.text import SINK_ROWS, WINDOWED, head_mask, heads_by_model, heads_by_window
from headscope.results.effects.statistics import MIN_COMPARED, rank_correlation
from headscope.results.questions import Question
from headscope.results.ranks import head_ranks
from headscope.results.result import Result
from headscope.runs.column_metadata import exceeds, roles, statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.weights.analysis import (
    COMPOSITION_COLUMNS,
    attributed_heads,
    chance_score,
    head_score_columns,
    mean_contributions,
    measured_effective_length,
    rows_of_head,
    strongest_inputs,
    strongest_paths,
)
from probes.weights.declaration import SIDES

QUESTIONS = (
    Question(
        name="weights.copying_heads",
        sentence="In {model}, the OV circuits of {value} of {n:n heads} copy (copying score above {threshold})",
        headline="The OV circuits of {value} of {n:n heads} copy (copying score above {threshold})",
        number=",.0f",
        level="headline",
    ),
    Question(
        name="weights.highest_copying",
        sentence="In {model}, the highest OV copying score is {value} ({unit}); the median of {n:n heads} is "
        "{median:+.2f}",
        number="+.3f",
    ),
    Question(
        name="weights.copying_agreement",
        sentence="In {model}, OV copying and the {score} have a rank correlation of {value} over {n:n heads}; of the "
        "{top:n heads} with the highest {score}, {copying} copy (median copying score {median:+.2f})",
        number="+.2f",
    ),
    Question(
        name="weights.composition",
        sentence="In {model}, [the strongest {input}-compositions are {listed:+.3f}][no {input}-composition exceeds "
        "chance: the largest is {largest_by_chance:+.3f}] (composition score minus the mean of random matrices of the "
        "same shapes, {random:.3f}). {above:,} of {n:,} pairs have a score above {chance:.3f}; by chance the largest "
        "score exceeds this value in one of 20 cases (null distribution: a random sign for each dimension that the "
        "earlier head writes to, which keeps all norms)",
        headline="Strongest {input}-composition: {largest:+.3f}; {above:,} of {n:,} pairs exceed chance",
        number="+.3f",
        level="headline",
    ),
    Question(
        name="weights.induction_inputs",
        sentence="In {model}, the {n:n heads} with the highest {score} K-compose most with: {listed:+.3f} (composition "
        "score minus the mean of random matrices of the same shapes)",
    ),
    Question(
        name="weights.positional_length",
        sentence="In {model}, the positional logits alone give a median effective length of {value} over {n:n heads}, "
        "and a median spread of {spread:number} logits over all distances",
        value_unit="tokens",
    ),
    Question(
        name="weights.positional_agreement",
        sentence="In {model}, the effective length from positional logits alone and the measured one (median "
        "{measured:number} tokens) have a rank correlation of {value} over {n:n heads}",
        number="+.2f",
    ),
    Question(
        name="weights.value_sinks",
        sentence="In {model}, {n} of {heads:n heads}[ of the {layers} layers] give the first key more than half of "
        "their weight[ {sink_rows}]; of these {n}, {value} still do once weights are multiplied by the norms of the "
        "values. The median weight of the first key changes from {key_mass:.3f} to {value_mass:.3f}, the median "
        "effective length from {key_length:number} to {value_length:number} tokens",
        number=".0f",
    ),
    Question(
        name="weights.logit",
        sentence="In {model}, {unit} has a mean logit of {value} in {n:n attributed rows}. The largest contributions "
        "at the key's token are those of {key:+.2f}; at the query's token, those of {query:+.2f}",
        number="+.2f",
    ),
    Question(
        name="weights.inputs_of_head",
        sentence="Strongest composition with earlier heads in {model}, minus random matrices of the same shapes: "
        "{partners:+.3f}",
    ),
)


COPYING_THRESHOLD = 0.5
"""Copying score above which a head is called OV-copying [ours]."""
SINK_SHARE = 0.5
"""Weight on the first key above which a head is called a sink head [ours]."""
LISTED_PATHS = 5
LISTED_COMPONENTS = 3


def results(run: Run) -> Iterator[Result]:
    """Copying heads, strongest compositions, and what the positional curve says of the effective length."""
    for label in default_models(run):
        heads = run.heads[run.heads["model"] == label]
        for _, block in heads_by_model(heads, "ov_copying"):
            yield from _copying_results(label, block)
        if "head_composition" in run.tables:
            yield from _composition_results(run, label)
            yield from _induction_results(run, label)
        for _, block in heads_by_model(heads, "positional_effective_length"):
            yield from _positional_results(label, block)
        for _, block in heads_by_model(heads, "value_sink_mass"):
            yield from _value_results(run, label, block)
    for model, layer, head in attributed_heads(run.table("qk_rows")) if "qk_rows" in run.tables else ():
        if model in default_models(run):
            yield _logit_result(run, model, layer, head)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's rank by copying score, and the earlier heads that it composes with most."""
    yield from head_ranks(run, "ov_copying", layer, head)
    if "head_composition" not in run.tables:
        return
    best = strongest_inputs(run)
    best = best[(best["model"] == model) & head_mask(best, layer, head)]
    partners = {
        f"{row['input'].upper()} with {format_head(row['sender_layer'], row['sender_head'])}": row["excess"]
        for row in best.to_dict("records")
    }
    if partners:
        details = {"partners": partners}
        yield Result(question="weights.inputs_of_head", model=model, layer=layer, head=head, details=details)


def _copying_results(label: str, heads: pd.DataFrame) -> Iterator[Result]:
    scores = heads["ov_copying"]
    yield Result(
        question="weights.copying_heads",
        value=int(exceeds(scores, COPYING_THRESHOLD).sum()),
        n=len(heads),
        model=label,
        details={"threshold": COPYING_THRESHOLD},
    )
    best = heads.sort_values("ov_copying").iloc[-1]
    yield Result(
        question="weights.highest_copying",
        value=float(best["ov_copying"]),
        n=len(heads),
        model=label,
        layer=int(best["layer"]),
        head=int(best["head"]),
        details={"median": float(scores.median())},
    )
    for column in head_score_columns(heads):
        scored = heads.dropna(subset=[column])
        correlation, count = rank_correlation(scored["ov_copying"], scored[column])[0], len(scored)
        if count < MIN_COMPARED or math.isnan(correlation):
            continue
        top = scored.nlargest(10, column)["ov_copying"]
        copying = int(exceeds(top, COPYING_THRESHOLD).sum())
        yield Result(
            question="weights.copying_agreement",
            value=correlation,
            n=count,
            model=label,
            where={"score": statistic(column).label},
            details={"top": len(top), "copying": copying, "median": float(top.median())},
        )


def _composition_results(run: Run, label: str) -> Iterator[Result]:
    rows = run.table("head_composition")
    rows = rows[rows["model"] == label]
    for kind in COMPOSITION_COLUMNS if len(rows) else ():
        of_kind = rows[rows["input"] == kind]
        of_kind = of_kind.assign(excess=of_kind["score"] - of_kind["baseline"])
        chance = chance_score(run, label, kind)
        largest = of_kind.nlargest(1, "excess")
        paths = _excess_by_path(strongest_paths(of_kind, LISTED_PATHS, chance))
        yield Result(
            question="weights.composition",
            value=float(largest["excess"].iloc[0]),
            n=len(of_kind),
            model=label,
            where={"input": kind.upper()},
            details={
                "listed": paths,
                "largest": _excess_by_path(largest),
                "largest_by_chance": {} if paths else _excess_by_path(largest),
                "random": float(largest["baseline"].iloc[0]),
                "chance": chance,
                "above": int((of_kind["score"] > chance).sum()),
            },
        )


def _induction_results(run: Run, label: str) -> Iterator[Result]:
    """Which earlier heads the leading induction heads read with their keys."""
    role = roles().get("induction")
    heads = run.heads[run.heads["model"] == label]
    if role is None or role.order_by not in heads or heads[role.order_by].isna().all():
        return
    best = strongest_inputs(run)
    best = best[(best["model"] == label) & (best["input"] == "k")]
    leaders = heads.nlargest(LISTED_PATHS, role.order_by)[["layer", "head"]]
    rows = leaders.merge(best, on=["layer", "head"])
    if len(rows):
        yield Result(
            question="weights.induction_inputs",
            n=len(rows),
            model=label,
            details={"score": statistic(role.order_by).label, "listed": _excess_by_path(rows)},
        )


def _positional_results(label: str, heads: pd.DataFrame) -> Iterator[Result]:
    lengths = heads["positional_effective_length"]
    yield Result(
        question="weights.positional_length",
        value=float(lengths.median()),
        n=len(heads),
        model=label,
        details={"spread": float(heads["positional_spread"].median())},
    )
    if measured := measured_effective_length(heads.columns):
        both = heads.dropna(subset=[measured])
        correlation, count = rank_correlation(lengths[both.index], both[measured])[0], len(both)
        if count >= MIN_COMPARED and math.isfinite(correlation):
            yield Result(
                question="weights.positional_agreement",
                value=correlation,
                n=count,
                model=label,
                details={"measured": float(heads[measured].median())},
            )


def _value_results(run: Run, label: str, heads: pd.DataFrame) -> Iterator[Result]:
    """Whether sinks stop counting once weights are multiplied by the norms of values."""
    bins = run.table("value_attention")
    length = int(bins["context_length"].max())
    for layers, rows in heads_by_window(run, heads, length):
        is_sink = exceeds(rows["key_sink_mass"], SINK_SHARE)
        is_windowed = layers.get("layers") == WINDOWED
        yield Result(
            question="weights.value_sinks",
            value=int((is_sink & exceeds(rows["value_sink_mass"], SINK_SHARE)).sum()),
            n=int(is_sink.sum()),
            model=label,
            where={"context_length": length, **layers},
            details={
                "heads": len(rows),
                "sink_rows": SINK_ROWS if is_windowed else "",
                "key_mass": float(rows["key_sink_mass"].median()),
                "value_mass": float(rows["value_sink_mass"].median()),
                "key_length": float(rows["key_effective_length"].median()),
                "value_length": float(rows["value_effective_length"].median()),
            },
        )


def _logit_result(run: Run, model: str, layer: int, head: int) -> Result:
    """Which components write the logits of a head's top far rows."""
    rows, components = (rows_of_head(run, name, model, layer, head) for name in ("qk_rows", "qk_components"))
    means = mean_contributions(components)
    return Result(
        question="weights.logit",
        value=float(rows["logit"].astype("float64").mean()),
        n=len(rows),
        model=model,
        layer=layer,
        head=head,
        where={"attributed_head": format_head(layer, head)},
        details={side: means[side].nlargest(LISTED_COMPONENTS).to_dict() for side in SIDES},
    )


def _excess_by_path(paths: pd.DataFrame) -> dict[str, float]:
    """Composition scores minus the mean of random matrices, by path: "L17H8 → L18H7"."""
    return {
        f"{format_head(row['sender_layer'], row['sender_head'])} → {format_head(row['layer'], row['head'])}": row[
            "excess"
        ]
        for row in paths.to_dict("records")
    }

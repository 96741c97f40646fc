"""What measuring found, in sentences with numbers, the words that a reader needs, and what the terminal shows.

Sentences state what was measured on these documents; they never guess at causes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from headscope.report.blocks import Finding, Term
from headscope.report.text import (
    default_models,
    default_models_with,
    describe_ranks,
    format_head_count,
    head_mask,
    head_name,
    heads_by_model,
    join_words,
)
from headscope.runs.column_metadata import parse_column, format_number
from headscope.runs.roles import heads_with_role
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column, log_ratio_to_first
from headscope.runs.summary import model_table as per_model
from probes.measure.analysis import AGGREGATION_GROWTH, LOCAL_LENGTH, RETRIEVAL_GROWTH, ROLES, SINK_MASS

GLOSSARY = (
    Term(
        "Head",
        "A layer of a language model holds several attention heads. For each token, a head gives every earlier token a "
        "weight; the weights of one token, αᵢⱼ, sum to one. Heads are numbered from 0 within their layer. Query heads "
        "that share one key head form a key group, and share its rotary frequencies.",
    ),
    Term(
        "Effective length, ESS₂",
        "The number of tokens that a head attends to in effect. All weight on one token gives 1; equal weight on n "
        "tokens gives n. A head's value here is typical of tokens that see more than half of the context: the "
        "exponential of the mean logarithm.",
        "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ("attention",),
    ),
    Term(
        "Growth exponent",
        "How the effective length follows the number n of visible tokens: ESS₂ grows like n to this power. Theory asks "
        "about 0 of a head that retrieves one token wherever it is, and about 1 of a head that aggregates the whole "
        "context.",
        tables=("attention",),
    ),
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding turns each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) tell near tokens apart; slow pairs hardly change with distance. The usage of a pair is the mean "
        "absolute value of what it adds to the logit, the number that the softmax turns into a weight.",
        tables=("pairs", "distance"),
    ),
    Term(
        "Coefficient of variation, CoV",
        "Standard deviation of usage over a head's pairs, divided by its mean. 0 means that all pairs are used alike; "
        "larger values mean that a few pairs do the work.",
        tables=("pairs",),
    ),
    Term(
        "Effective base",
        "The base of the plain rotary embedding whose frequencies have the same mean logarithm. A larger base means "
        "slower pairs.",
        tables=("scales",),
    ),
    Term(
        "Position schemes",
        "base is the checkpoint as it was trained. YaRN slows the slow pairs to reach longer contexts, and sharpens "
        "attention by a constant factor on the logits. YaRN without factor slows the pairs alone. AdaRoPE learns the "
        "frequencies of each key group, and for each head a temperature τ and an exponent γ by which its logits grow "
        "with the context.",
    ),
    Term(
        "Intervals",
        "An interval tells, at 95 %, how far other documents of this kind might move the number, or other trials where "
        "there are trials: by bootstrap from eight of them on, by Student's t from three on. One or two give none.",
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """What the tables of measuring say; of many models, few are told."""
    labels = default_models(run)
    heads = run.heads[run.heads["model"].isin(labels)]
    topics: Mapping[str, Callable[[], Iterator[str]]] = {
        "Effective length": lambda: _length_findings(heads),
        "Growth with context": lambda: _growth_findings(heads),
        "Change against the first model": lambda: _change_findings(heads),
        "Loss": lambda: _loss_findings(run, labels),
        "Rotary pairs": lambda: _pair_findings(heads),
        "Position parameters": lambda: _parameter_findings(heads),
    }
    for topic, tell in topics.items():
        yield from (Finding(topic, text) for text in tell())


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """What the head is in `model`, with figures, and its rank by effective length among the heads of each model."""
    name = longest_ess_column(run.heads)
    mine = run.heads[(run.heads["model"] == model) & head_mask(run.heads, layer, head)]
    if name is None or mine.empty or np.isnan(mine[name].iloc[0]):
        return
    row = mine.iloc[0]
    bearing = [role for role in ROLES if heads_with_role(mine, role).any()]
    called = f"is {join_words(bearing)}" if bearing else f"is none of {', '.join(ROLES)}"
    growth = "" if np.isnan(row["growth"]) else f" (growth exponent {row['growth']:.2f})"
    yield (
        f"In {model} it {called}: it attends in effect to {format_number(row[name])} of {parse_column(name).length:,} tokens"
        f"{growth}, with {row['sink_mass']:.0%} of its weight on the first token and "
        f"{row['local_mass']:.0%} on the last 32."
    )
    beside = run.heads[run.heads["model"].isin(default_models_with(run, model))]
    yield f"Rank by effective length: {describe_ranks(beside, name, layer, head)}."


def _length_findings(heads: pd.DataFrame) -> Iterator[str]:
    name = longest_ess_column(heads)
    if name is None:
        return
    context = f"{parse_column(name).length:,} tokens of context"
    found = list(heads_by_model(heads, name))
    label, block = found[0]
    yield (
        f"In {label}, with {context}, {format_head_count(block[name] < LOCAL_LENGTH)} attend in effect to fewer than {LOCAL_LENGTH} tokens; "
        f"the median head attends to {format_number(block[name].median())}."
    )
    for other, theirs in found[1:]:
        yield (
            f"Under {other} it is {format_head_count(theirs[name] < LOCAL_LENGTH)}, and the median head attends to "
            f"{format_number(theirs[name].median())} tokens."
        )
    order = block.sort_values(name)
    least, most = order.iloc[0], order.iloc[-1]
    yield (
        f"The largest effective length in {label} is that of {head_name(most)}, {format_number(most[name])} tokens; "
        f"the smallest is that of {head_name(least)}, {format_number(least[name])}."
    )
    yield f"In {label}, {format_head_count(block['sink_mass'] > SINK_MASS)} put more than half of their weight on the first token."


def _growth_findings(heads: pd.DataFrame) -> Iterator[str]:
    for at, (label, block) in enumerate(heads_by_model(heads, "growth")):
        low, high = (
            format_head_count(block["growth"] < RETRIEVAL_GROWTH),
            format_head_count(block["growth"] > AGGREGATION_GROWTH),
        )
        middle = f"{block['growth'].median():.2f}"
        if at == 0:
            yield (
                f"In {label}, {low} hold their effective length nearly constant as the context grows (exponent below "
                f"{RETRIEVAL_GROWTH}, as retrieval asks) and {high} widen almost in proportion (above {AGGREGATION_GROWTH}, as "
                f"aggregation asks); the median exponent is {middle}."
            )
        else:
            yield f"In {label} these are {low} and {high}; the median exponent is {middle}."


def _change_findings(heads: pd.DataFrame) -> Iterator[str]:
    name = longest_ess_column(heads)
    if name is None:
        return
    labels = [label for label, _ in heads_by_model(heads, name)]
    for label in labels[1:]:
        change = log_ratio_to_first(heads, name, label)
        if change.empty:
            continue
        top = change.reindex(change.abs().sort_values(ascending=False).index)[:3]
        named = ", ".join(
            f"layer {head[0]} head {head[1]} (× {np.exp(value):.2g})"
            for head, value in zip(top.index.tolist(), top.tolist(), strict=True)
        )
        yield (
            f"Against {labels[0]}, {label} multiplies the effective length of the median head by "
            f"{np.exp(change.median()):.2f}; {format_head_count(change > 0)} widen. "
            f"Most changed: {named}."
        )


def _loss_findings(run: Run, labels: Sequence[str]) -> Iterator[str]:
    if "nll" not in run.tables:
        return
    table = per_model(run).set_index("model").astype("float64").to_dict("index")
    length = int(run.nll["context_length"].max())
    name, first = f"nll_{length}", run.models[0]  # what `_diff` is against
    if np.isnan(table[first][name]):
        return
    longest_nll = run.nll[run.nll["context_length"] == length]
    read = {label: {*docs} for label, docs in longest_nll.groupby("model", observed=True)["doc"]}
    told = f"{table[first][name]:.3f} nats/token ({_count_documents(read[first])})"
    yield f"The loss of {first} in contexts of {length:,} tokens is {told}."
    for label in labels:
        gap, low, high = (table[label][f"{name}_diff{end}"] for end in ("", "_low", "_high"))
        if label == first or np.isnan(gap):
            continue
        side = "higher" if gap > 0 else "lower"
        both = read[label] & read[first]
        sure = (
            f"; {_count_documents(both)} give{'s' if len(both) == 1 else ''} no interval"
            if np.isnan(low)
            else f" (95 % interval {low:+.3f} to {high:+.3f})"
        )
        zero = " The interval includes zero." if low <= 0 <= high else ""
        yield f"The loss of {label} is {abs(gap):.3f} nats/token {side} than that of {first}{sure}.{zero}"


def _count_documents(names: Collection[str]) -> str:
    return f"{len(names)} document{'' if len(names) == 1 else 's'}"


def _pair_findings(heads: pd.DataFrame) -> Iterator[str]:
    medians = {label: block["cov"].median() for label, block in heads_by_model(heads, "cov")}
    if not medians:
        return
    told = ", ".join(f"{value:.2f} in {label}" for label, value in medians.items())
    best = min(medians, key=lambda label: medians[label])
    more = f" Usage is most even in {best}." if len(medians) > 1 else ""
    yield f"The median coefficient of variation of rotary-pair usage is {told}; lower is more even.{more}"


def _parameter_findings(heads: pd.DataFrame) -> Iterator[str]:
    for label, block in heads_by_model(heads, "effective_base"):
        finite = block[np.isfinite(block["effective_base"])]
        if finite.empty:
            yield f"In {label} some rotary pairs do not turn, so no head has a finite effective base."
            continue
        low, high = finite["effective_base"].min(), finite["effective_base"].max()
        if high / low < 1.001:
            yield f"Every head of {label} has the effective base {format_number(high)}."
        else:
            depth = finite["effective_base"].corr(finite["layer"], method="spearman")
            yield (
                f"The effective base of {label} ranges from {format_number(low)} to {format_number(high)} over heads; its rank "
                f"correlation with depth is {depth:+.2f}."
            )
    for label, block in heads_by_model(heads, "gamma"):
        if block["gamma"].abs().max() > 0:
            middle = f"{block['gamma'].median():.3g}"
            yield f"In {label}, gamma is positive in {format_head_count(block['gamma'] > 0)}, with median {middle}."

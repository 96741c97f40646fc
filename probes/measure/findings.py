"""Findings of the probe `measure` as sentences with numbers, and its glossary.

Sentences state what was measured on these documents; they do not guess at causes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from headscope.report.blocks import Finding, FindingData, Term
from headscope.report.text import (
    WINDOWED,
    describe_ranks,
    describe_sink_rows,
    format_head_count,
    format_percent,
    head_mask,
    head_name,
    heads_by_model,
    heads_by_window,
    join_words,
    layer_windows,
)
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.column_metadata import exceeds, falls_below, format_number, heads_with_role, parse_column
from headscope.runs.run import Run
from headscope.runs.summary import (
    default_models,
    default_models_with,
    log_ratio_to_first,
    longest_ess_column,
    models_with_same_tokens,
    same_text_mask,
)
from headscope.runs.summary import model_table as per_model
from probes.measure.analysis import AGGREGATION_GROWTH, LOCAL_LENGTH, RETRIEVAL_GROWTH, ROLES, SINK_MASS

CHANGE_TOLERANCE = 0.01
"""Smallest relative change of an effective length that counts as longer or shorter [ours]."""

GLOSSARY = (
    Term(
        "Head",
        "A layer of a language model has several attention heads. For each token, a head gives every earlier token a "
        "weight; the weights of one token, αᵢⱼ, sum to one. Heads are numbered from 0 within their layer. Query heads "
        "that share one key head form a KV group and share its rotary frequencies.",
    ),
    Term(
        "Effective length, ESS₂",
        "The effective number of tokens that a head attends to. All weight on one token gives 1; equal weight on n "
        "tokens gives n. The value of a head is the exponential of the mean logarithm over the query tokens in the "
        "last octave of visible keys, that is, in the last four bins that the head's layer fills; every token counts "
        "once. If the length of the context or window is the edge of a bin, such as 512, 1,024 or 2,048, these tokens "
        "see more than half of it.",
        "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ("attention",),
    ),
    Term(
        "Growth exponent",
        "The exponent with which the effective length grows with the number n of visible tokens. The expected value is "
        "about 0 for a head that retrieves one token wherever it is, and about 1 for a head that aggregates the whole "
        "context.",
        tables=("attention",),
    ),
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding rotates each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) distinguish nearby tokens; slow pairs hardly change with distance. The usage of a pair is the mean "
        "absolute value of its contribution to the logit, the number that the softmax turns into a weight.",
        tables=("pairs", "distance"),
    ),
    Term(
        "Coefficient of variation, CoV",
        "Standard deviation of usage over the pairs of a head, divided by the mean. 0 means that all pairs are used "
        "equally; larger values mean that a few pairs dominate.",
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
        "base is the checkpoint as it was trained. YaRN slows the slow pairs to reach longer contexts, and multiplies "
        "queries and keys by a constant, its attention factor; “YaRN without factor” omits it. AdaRoPE learns the "
        "frequencies of each KV group, and for each head a temperature τ and an exponent γ with which its logits grow "
        "with the context.",
    ),
    Term(
        "95 % confidence intervals",
        "A range that contains the true mean in about 95 % of repeated samples of documents (or trials), by Student's "
        "t. One or two documents give no interval.",
    ),
)


class Sentence(NamedTuple):
    """A finding without its topic."""

    text: str
    model: str = ""
    data: FindingData = FindingData()


def findings(run: Run) -> Iterator[Finding]:
    """Findings about the default models of the run."""
    labels = default_models(run)
    heads = run.heads[run.heads["model"].isin(labels)]
    topics: Mapping[str, Callable[[], Iterator[Sentence]]] = {
        "Effective length": lambda: _length_findings(heads, run),
        "Growth with context": lambda: _growth_findings(heads, run),
        "Change against the first model": lambda: _change_findings(heads, run),
        "Largest logits": lambda: _logit_findings(run, labels),
        "Loss": lambda: _loss_findings(run, labels),
        "Rotary pairs": lambda: _pair_findings(heads),
        "Position parameters": lambda: _parameter_findings(heads, run),
    }
    for topic, sentences in topics.items():
        yield from (Finding(topic, sentence.text, sentence.model, data=sentence.data) for sentence in sentences())


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The roles and statistics of a head in `model`, and its rank by effective length in each default model."""
    name = longest_ess_column(run.heads)
    rows = run.heads[(run.heads["model"] == model) & head_mask(run.heads, layer, head)]
    if name is None or rows.empty or np.isnan(rows[name].iloc[0]):
        return
    row = rows.iloc[0]
    head_roles = [role for role in ROLES if heads_with_role(rows, role).any()]
    role_text = f"is {join_words(head_roles)}" if head_roles else f"has none of the roles {', '.join(ROLES)}"
    growth = "" if np.isnan(row["growth"]) else f" (growth exponent {row['growth']:.2f})"
    length, window = parse_column(name).length, layer_windows(run, model)[layer]
    assert length is not None
    is_windowed = window is not None and window < length
    seeing = f" {describe_sink_rows(run.attention, rows)} (window {window:,})" if is_windowed else ""
    yield (
        f"In {model} the head {role_text}. Its effective length is {format_number(row[name])} of "
        f"{length:,} tokens{growth}, with {format_percent(row['sink_mass'])} of its weight on the first token{seeing} "
        f"and {format_percent(row['local_mass'])} on the last 32."
    )
    yield f"Rank by effective length: {describe_ranks(run, name, layer, head, default_models_with(run, model))}."


def _length_findings(heads: pd.DataFrame, run: Run) -> Iterator[Sentence]:
    name = longest_ess_column(heads)
    if name is None:
        return
    length = parse_column(name).length
    parts = [
        (label, window_label, rows)
        for label, model_rows in heads_by_model(heads, name)
        for window_label, rows in heads_by_window(run, model_rows, length)
    ]
    for index, (label, window_label, rows) in enumerate(parts):
        context = f" at a context length of {length:,} tokens" if index == 0 else ""
        yield Sentence(
            f"In {label}, the median effective length{context} is {format_number(rows[name].median())} tokens"
            f"{window_label and f' over the heads{window_label}'}; "
            f"{format_head_count(falls_below(rows[name], LOCAL_LENGTH))} are below {LOCAL_LENGTH} tokens.",
            label,
            FindingData(rows[name].median(), n=len(rows)),
        )
    label, rows = next(heads_by_model(heads, name))
    ordered = rows.sort_values(name)
    low, high = ordered.iloc[0], ordered.iloc[-1]
    yield Sentence(
        f"In {label}, the longest effective length is {format_number(high[name])} tokens ({head_name(high)}), the "
        f"shortest {format_number(low[name])} tokens ({head_name(low)}).",
        label,
        _head_data(high, name, run),
    )
    for window_label, part in heads_by_window(run, rows, length):
        is_sink = exceeds(part["sink_mass"], SINK_MASS)
        seeing = f", {describe_sink_rows(run.attention, part)}" if window_label == WINDOWED else ""
        yield Sentence(
            f"On text, {format_head_count(is_sink)}{window_label} of {label} put more than half of their weight on the "
            f"first token{seeing}.",
            label,
            FindingData(float(is_sink.mean()), n=len(part)),
        )


def _growth_findings(heads: pd.DataFrame, run: Run) -> Iterator[Sentence]:
    name = longest_ess_column(heads)
    length = None if name is None else parse_column(name).length
    parts = [
        (label, window_label, part)
        for label, rows in heads_by_model(heads, "growth")
        for window_label, part in heads_by_window(run, rows, length)
    ]
    for index, (label, window_label, rows) in enumerate(parts):
        constant = format_head_count(falls_below(rows["growth"], RETRIEVAL_GROWTH))
        widening = format_head_count(exceeds(rows["growth"], AGGREGATION_GROWTH))
        median = f"{rows['growth'].median():.2f}"
        data = FindingData(rows["growth"].median(), n=len(rows))
        if index == 0:
            yield Sentence(
                f"In {label}, the effective length stays nearly constant as the context grows in {constant}"
                f"{window_label} (exponent below {RETRIEVAL_GROWTH}, as expected of retrieval heads) and grows almost "
                f"in proportion in {widening} (above {AGGREGATION_GROWTH}, as expected of aggregation heads); the "
                f"median exponent is {median}.",
                label,
                data,
            )
        else:
            grows = ", up to the length of the window," if window_label == WINDOWED else ""
            yield Sentence(
                f"In {label}, the effective length stays nearly constant in {constant}{window_label} and grows{grows} "
                f"almost in proportion in {widening}; the median exponent is {median}.",
                label,
                data,
            )


def _change_findings(heads: pd.DataFrame, run: Run) -> Iterator[Sentence]:
    name = longest_ess_column(heads)
    if name is None:
        return
    (first, first_rows), *other_models = heads_by_model(heads, name)
    for window_label, part in heads_by_window(run, first_rows, parse_column(name).length):
        for label, _ in other_models:
            log_ratios = log_ratio_to_first(heads, name, label)
            log_ratios = log_ratios[log_ratios.index.isin([*part["layer"]], level="layer")]
            if len(log_ratios):
                yield Sentence(
                    _describe_change(first, label, window_label, log_ratios),
                    label,
                    FindingData(float(np.exp(log_ratios.median())), n=len(log_ratios)),
                )


def _describe_change(first: str, label: str, window_label: str, log_ratios: pd.Series) -> str:
    """A sentence on the change of the effective length from model `first` to `label`, over heads."""
    tolerance = np.log(1 + CHANGE_TOLERANCE)
    rises, falls = log_ratios > tolerance, log_ratios < -tolerance
    top = log_ratios.reindex(log_ratios.abs().sort_values(ascending=False).index)[:3]
    examples = ", ".join(
        f"layer {head[0]}, head {head[1]} (× {np.exp(value):.2g})"
        for head, value in zip(top.index.tolist(), top.tolist(), strict=True)
    )
    return (
        f"From {first} to {label} the median ratio of effective lengths"
        f"{window_label and f' over the heads{window_label}'} is {np.exp(log_ratios.median()):.2f}: longer in "
        f"{format_head_count(rises)}, shorter in {format_head_count(falls)}, and within "
        f"{format_percent(CHANGE_TOLERANCE)} in {format_head_count(~rises & ~falls)}. "
        f"The largest changes are those of {examples}."
    )


def _logit_findings(run: Run, labels: Sequence[str]) -> Iterator[Sentence]:
    if "max_logit" not in run.tables:
        return
    rows = rows_at_longest_length(plain_types(run.max_logit))
    for label, of_model in rows[rows["model"].isin(labels)].groupby("model", sort=False):
        largest = of_model.nlargest(1, "max_logit").iloc[0]
        yield Sentence(
            f"The largest logit in {label} is {largest['max_logit']:.1f}, in {head_name(largest)}, of query "
            f"{largest['query']:,} and key {largest['key']:,} of {largest['doc']} (all causal pairs of "
            f"{_count_documents({*of_model['doc']})} at {largest['context_length']:,} tokens).",
            str(label),
            FindingData(largest["max_logit"], n=of_model["doc"].nunique()),
        )


def _loss_findings(run: Run, labels: Sequence[str]) -> Iterator[Sentence]:
    if "nll" not in run.tables:
        return
    table = per_model(run).set_index("model").astype("float64").to_dict("index")
    length = int(run.nll["context_length"].max())
    name, first = f"nll_{length}", run.models[0]  # the baseline of `_diff`
    if np.isnan(table[first][name]):
        return
    comparable = models_with_same_tokens(run, first)
    longest_nll = run.nll[run.nll["context_length"] == length]
    documents = _documents_by_model(longest_nll)
    same_texts = _documents_by_model(longest_nll[same_text_mask(run, longest_nll, first)])
    loss = f"{table[first][name]:.3f} nats/token ({_count_documents(documents[first])})"
    yield Sentence(
        f"The loss of {first} in contexts of {length:,} tokens is {loss}.",
        first,
        FindingData(table[first][name], n=len(documents[first])),
    )
    for model in run.manifest["models"]:
        label, vocabulary, value = model["label"], model.get("vocabulary"), table[model["label"]][name]
        if label in {first, *labels} and vocabulary and value > math.log(vocabulary):
            yield Sentence(
                f"The loss of {label}, {value:.3f} nats/token, is above {math.log(vocabulary):.3f}, that of a uniform "
                f"guess among {vocabulary:,} tokens. Check weights, tokenizer, texts and position scheme.",
                label,
                FindingData(value),
            )
    for label in labels:
        if label not in comparable:
            yield Sentence(f"The loss of {label} is not compared with that of {first}: their tokenizers differ.", label)
            continue
        difference, low, high = (table[label][f"{name}_diff{end}"] for end in ("", "_low", "_high"))
        common = same_texts.get(label, set()) & documents[first]
        if label in documents and not common:
            yield Sentence(
                f"The loss of {label} is not compared with that of {first}: they were measured on different texts.",
                label,
            )
        if label == first or np.isnan(difference):
            continue
        interval = (
            f"; {_count_documents(common)} give{'s' if len(common) == 1 else ''} no confidence interval"
            if np.isnan(low)
            else f" (95 % confidence interval {low:+.3f} to {high:+.3f})"
        )
        zero = " The interval includes zero." if low <= 0 <= high else ""
        yield Sentence(
            f"In contexts of {length:,} tokens, the loss of {label} minus that of {first} is {difference:+.3f} "
            f"nats/token{interval}.{zero}",
            label,
            FindingData(difference, low, high, len(common)),
        )


def _documents_by_model(rows: pd.DataFrame) -> dict[str, set[str]]:
    return {str(label): {*names} for label, names in rows.groupby("model", observed=True)["doc"]}


def _count_documents(names: Collection[str]) -> str:
    return f"{len(names)} document{'' if len(names) == 1 else 's'}"


def _pair_findings(heads: pd.DataFrame) -> Iterator[Sentence]:
    medians = {label: rows["cov"].median() for label, rows in heads_by_model(heads, "cov")}
    if not medians:
        return
    values = ", ".join(f"{value:.2f} in {label}" for label, value in medians.items())
    lowest, *higher = sorted(medians, key=lambda label: medians[label])
    is_lower = any(f"{medians[lowest]:.2f}" != f"{medians[other]:.2f}" for other in higher[:1])
    comparison = f" Usage is most even in {lowest}." if is_lower else ""
    yield Sentence(
        f"The median coefficient of variation of rotary-pair usage is {values}; lower is more even.{comparison}"
    )


def _parameter_findings(heads: pd.DataFrame, run: Run) -> Iterator[Sentence]:
    positions = rows_at_longest_length(run.positions) if "positions" in run.tables else pd.DataFrame({"model": []})
    frequencies = {str(label): rows for label, rows in positions.groupby("model", observed=True)}
    yield from _unchanged_layer_findings(
        run, {label: frequencies[label] for label in heads["model"].unique() if label in frequencies}
    )
    for label, rows in heads_by_model(heads, "effective_base"):
        finite = rows[np.isfinite(rows["effective_base"])]
        if finite.empty:
            is_still = label in frequencies and not np.isfinite(frequencies[label]["log_theta"]).any()
            reason = "no rotary pair rotates" if is_still else "some rotary pairs do not rotate"
            yield Sentence(f"In {label}, {reason}, so no effective base is defined.", label)
            continue
        low, high = finite["effective_base"].min(), finite["effective_base"].max()
        if high / low < 1.001:
            is_plain = label in frequencies and _is_plain_rope(frequencies[label])
            verb = "use RoPE base" if is_plain else "have an effective base of"
            yield Sentence(
                f"All heads of {label} {verb} {format_number(high)}.", label, FindingData(high, n=len(finite))
            )
        else:
            depth = finite["effective_base"].corr(finite["layer"], method="spearman")
            yield Sentence(
                f"The effective base of {label} ranges from {format_number(low)} to {format_number(high)} over heads; "
                f"its rank correlation with depth is {depth:+.2f}.",
                label,
                FindingData(depth, n=len(finite)),
            )
    for label, rows in heads_by_model(heads, "gamma"):
        if rows["gamma"].abs().max() > 0:
            median = f"{rows['gamma'].median():.3g}"
            yield Sentence(
                f"In {label}, gamma is positive in {format_head_count(rows['gamma'] > 0)}, with median {median}.",
                label,
                FindingData(rows["gamma"].median(), n=len(rows)),
            )


def _unchanged_layer_findings(run: Run, frequencies: Mapping[str, pd.DataFrame]) -> Iterator[Sentence]:
    """Models whose scheme changes the frequencies of other layers, but not those of the sliding-window layers."""
    for label, rows in frequencies.items():
        is_equal = rows["log_theta"].eq(rows["log_theta_base"]).groupby(rows["layer"]).all()
        windowed = [number for number, window in layer_windows(run, label).items() if window is not None]
        windowed = [number for number in windowed if number in is_equal.index]
        if windowed and is_equal[windowed].all() and not is_equal.all():
            yield Sentence(
                f"The position scheme of {label} leaves the frequencies of its {len(windowed)} sliding-window layers "
                "unchanged: a window does not grow with the context.",
                label,
                FindingData(n=len(windowed)),
            )


def _head_data(row: pd.Series, name: str, run: Run) -> FindingData:
    """The value of one head with its interval over documents."""
    documents = run.attention[run.attention["model"] == row["model"]]["doc"].nunique()
    return FindingData.of_head(row, name, documents)


def _is_plain_rope(positions: pd.DataFrame) -> bool:
    """Whether the frequencies of a model's first layer are powers of one base, from 1 rad/token down."""
    first = positions[(positions["layer"] == positions["layer"].min()) & (positions["kv_group"] == 0)]
    log_theta = first.sort_values("pair")["log_theta"].to_numpy(dtype=np.float64)
    return bool(abs(log_theta[0]) < 1e-4 and np.allclose(np.diff(log_theta, 2), 0, atol=1e-4))

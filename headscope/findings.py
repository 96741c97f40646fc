"""What a run says, in sentences with numbers, and which heads deserve a closer look.

Reads the wide tables of `headscope.summary`, knows nothing of figures or HTML. Sentences state what was measured on
these documents; they never guess at causes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from headscope.claims import claims
from headscope.influences import ESTIMATES, TOP, agreement, curve, gini, how, shown_of, top_share, words
from headscope.influences import name as unit_name
from headscope.needles import PUBLISHED, between_models, by_group, by_seed, leading, overview, retest
from headscope.roles import AGGREGATION, LOCAL, RETRIEVAL, RETRIEVAL_HEAD, SINK
from headscope.store import Run
from headscope.summary import SWEEP, longest
from headscope.summary import models as models_table
from headscope.windows import NAMES, accuracy, mass_bounds

Head = tuple[int, int]


def notable(heads: pd.DataFrame) -> dict[Head, str]:
    """Heads (layer, head) to show, each with the reason, judged by the first model and by change against it."""
    if heads.empty:
        return {}
    name = longest(heads)
    wide = heads.set_index(["layer", "head"])
    first = wide[wide["model"] == heads["model"].iloc[0]]
    reasons: list[tuple[Head, str]] = []
    if name is not None:
        order = first[name].dropna().sort_values().index
        reasons.append((order[-1], "most global"))
        reasons.append((order[0], "most local"))
        reasons.append((order[len(order) // 2], "median effective length"))
    if "growth" in first and (growth := first["growth"].dropna()).size:
        reasons.append((growth.index[int(growth.argmax())], "highest growth exponent"))
        reasons.append((growth.index[int(growth.argmin())], "lowest growth exponent"))
    if "retrieval" in first and (retrieval := first["retrieval"].dropna()).size:
        reasons.append((retrieval.index[int(retrieval.argmax())], "highest retrieval score"))
    for label in list(heads["model"].unique())[1:]:
        if name is not None and (moved := _moved(heads, name, str(label))).size:
            reasons.append(
                (moved.index[int(moved.abs().argmax())], f"largest change of effective length under {label}")
            )
    chosen: dict[Head, str] = {}
    for head, reason in reasons:
        chosen[head] = f"{chosen[head]}; {reason}" if head in chosen else reason
    return {(int(layer), int(head)): reason for (layer, head), reason in chosen.items()}


def few(labels: Sequence[str], most: int = 6) -> list[str]:
    """At most `most` of the labels, the first and the last among them, evenly spaced."""
    at = np.unique(np.linspace(0, len(labels) - 1, min(most, len(labels))).round().astype(int))
    return [labels[i] for i in at]


def sentences(run: Run, wanted: Collection[str] = ()) -> dict[str, list[str]]:
    """The findings of a run by topic (the `wanted` ones, by default all), those that its tables allow.

    Of many models, `few` are told.
    """
    labels = few(run.models)
    heads = run.heads[run.heads["model"].isin(labels)]
    topics: dict[str, Callable[[], Iterable[str]]] = {
        "Effective length": lambda: _lengths(heads),
        "Growth with context": lambda: _growth(heads),
        "Change against the first model": lambda: _changes(heads),
        "Loss": lambda: _losses(run, labels),
        "Rotary pairs": lambda: _pairs(heads),
        "Position parameters": lambda: _parameters(heads),
        "Training": lambda: _training(run),
        "Against the paper": lambda: (f"{claim.said}: {claim.verdict}. {claim.found}." for claim in claims(run)),
        "Needle in a haystack": lambda: _needle(run),
        "Head influence": lambda: _influence(run),
        "Needle retrieval from a window": lambda: _window(run),
        "Scaling theorems": lambda: _scaling(run),
    }
    told = {topic: [*tell()] for topic, tell in topics.items() if topic in wanted or not wanted}
    return {topic: found for topic, found in told.items() if found}


def of_head(run: Run, model: str, layer: int, head: int, kv_group: int) -> list[str]:
    """What stands out about one head: its ranks among the heads of each model, and its influence in `model`."""
    told = []
    name = longest(run.heads)
    ranked = [(name, "effective length"), ("retrieval", "retrieval score")]
    if "retrieval" in run.heads and not run.heads[_here(run.heads, layer, head)]["retrieval"].any():
        ranked.pop()
        told.append("It copies no token of a needle in any successful trial.")
    for column, called in ranked:
        ranks = []
        for label, block in _by_model(run.heads, column or ""):
            values = block.set_index(["layer", "head"])[column]
            if (layer, head) in values.index:
                value = float(values.loc[(layer, head)])
                ranks.append(f"{int((values > value).sum()) + 1} of {len(values)} in {label} ({number(value)})")
        if ranks:
            told.append(f"Rank by {called}: {', '.join(ranks)}.")
    if "influence" in run.tables:
        found = run.derived(shown_of)
        for (_, _, *what), units in found[found["model"] == model].groupby(SWEEP, observed=True, sort=False):
            here = (units["layer"] == layer) & (units["kv_group"] == kv_group) & units["head"].isin([-1, head])
            for _, unit in units[here].iterrows():
                above = int((units["delta"] > unit["delta"]).sum())
                sure = "" if np.isnan(unit["low"]) else f" (95 % interval {unit['low']:+.2g} to {unit['high']:+.2g})"
                told.append(
                    f"Influence in {model}, {words(*map(str, what))}: {unit['delta']:+.2g} nats/token{sure} for "
                    f"{unit_name(unit)}, rank {above + 1} of {len(units)}."
                )
    return told


def _here(heads: pd.DataFrame, layer: int, head: int) -> pd.Series:
    return (heads["layer"] == layer) & (heads["head"] == head)


def number(value: float) -> str:
    """Three significant digits from 1 on, or all of the integer part, thousands separated; below 1, three decimals."""
    if np.isinf(value):
        return "infinite"
    decimals = next((digits for digits, limit in enumerate((100, 10, 1)) if abs(value) >= limit), 3)
    return f"{round(value, decimals) + 0.0:,.{decimals}f}".replace("-", "−")


def _by_model(heads: pd.DataFrame, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Label and heads of each model that has the statistic, those heads that lack it left out."""
    if name in heads:
        for label, block in heads.dropna(subset=[name]).groupby("model", observed=True):
            yield str(label), block


def _moved(heads: pd.DataFrame, name: str, label: str) -> pd.Series:
    """ln ratio of the statistic, `label` over the first model, by (layer, head)."""
    wide = heads.set_index(["layer", "head"])
    first = wide.loc[wide["model"] == heads["model"].iloc[0], name].astype("float64")
    second = wide.loc[wide["model"] == label, name].astype("float64")
    ratio: pd.Series = np.log(second / first).dropna()
    return ratio


def _count(true: pd.Series) -> str:
    return f"{int(true.sum())} of {len(true)} heads"


def _name(row: pd.Series) -> str:
    return f"layer {row['layer']}, head {row['head']}"


def _lengths(heads: pd.DataFrame) -> Iterator[str]:
    name = longest(heads)
    if name is None:
        return
    context = f"{int(name[5:]):,} tokens of context"
    found = list(_by_model(heads, name))
    label, block = found[0]
    yield (
        f"In {label}, with {context}, {_count(block[name] < LOCAL)} attend in effect to fewer than {LOCAL} tokens; "
        f"the median head attends to {number(block[name].median())}."
    )
    for other, theirs in found[1:]:
        yield (
            f"Under {other} it is {_count(theirs[name] < LOCAL)}, and the median head attends to "
            f"{number(theirs[name].median())} tokens."
        )
    order = block.sort_values(name)
    local, far = order.iloc[0], order.iloc[-1]
    yield (
        f"The most global head of {label} is {_name(far)}, with an effective length of {number(far[name])} tokens; "
        f"the most local is {_name(local)}, with {number(local[name])}."
    )
    yield f"In {label}, {_count(block['sink_mass'] > SINK)} put more than half of their weight on the first token."


def _growth(heads: pd.DataFrame) -> Iterator[str]:
    for at, (label, block) in enumerate(_by_model(heads, "growth")):
        low, high = _count(block["growth"] < RETRIEVAL), _count(block["growth"] > AGGREGATION)
        middle = f"{block['growth'].median():.2f}"
        if at == 0:
            yield (
                f"In {label}, {low} hold their effective length nearly constant as the context grows (exponent below "
                f"{RETRIEVAL}, as retrieval asks) and {high} widen almost in proportion (above {AGGREGATION}, as "
                f"aggregation asks); the median exponent is {middle}."
            )
        else:
            yield f"In {label} these are {low} and {high}; the median exponent is {middle}."


def _changes(heads: pd.DataFrame) -> Iterator[str]:
    name = longest(heads)
    if name is None:
        return
    labels = [label for label, _ in _by_model(heads, name)]
    for label in labels[1:]:
        moved = _moved(heads, name, label)
        if moved.empty:
            continue
        top = moved.reindex(moved.abs().sort_values(ascending=False).index)[:3]
        named = ", ".join(
            f"layer {head[0]} head {head[1]} (× {np.exp(value):.2g})"
            for head, value in zip(top.index.tolist(), top.tolist(), strict=True)
        )
        yield (
            f"Against {labels[0]}, {label} multiplies the effective length of the median head by "
            f"{np.exp(moved.median()):.2f}; {_count(moved > 0)} widen. "
            f"Most changed: {named}."
        )


def _losses(run: Run, labels: Sequence[str]) -> Iterator[str]:
    if "nll" not in run.tables:
        return
    table = models_table(run).set_index("model").astype("float64").to_dict("index")
    length = int(run.nll["context_length"].max())
    name, docs, first = f"nll_{length}", run.nll["doc"].nunique(), labels[0]
    if np.isnan(table[first][name]):
        return
    told = f"{docs} document{'s' if docs > 1 else ''}"
    yield f"The loss of {first} in contexts of {length:,} tokens is {table[first][name]:.3f} nats/token ({told})."
    for label in labels[1:]:
        gap, low, high = (table[label][f"{name}_diff{end}"] for end in ("", "_low", "_high"))
        if np.isnan(gap):
            continue
        side = "higher" if gap > 0 else "lower"
        sure = "; one document gives no interval" if np.isnan(low) else f" (95 % interval {low:+.3f} to {high:+.3f})"
        caution = f" With {told} the interval is too narrow." if 1 < docs < 4 else ""
        zero = " The interval includes zero." if low <= 0 <= high else ""
        yield f"The loss of {label} is {abs(gap):.3f} nats/token {side} than that of {first}{sure}.{zero}{caution}"


def _pairs(heads: pd.DataFrame) -> Iterator[str]:
    medians = {label: block["cov"].median() for label, block in _by_model(heads, "cov")}
    if not medians:
        return
    told = ", ".join(f"{value:.2f} in {label}" for label, value in medians.items())
    best = min(medians, key=lambda label: medians[label])
    more = f" Usage is most even in {best}." if len(medians) > 1 else ""
    yield f"The median coefficient of variation of rotary-pair usage is {told}; lower is more even.{more}"


def _parameters(heads: pd.DataFrame) -> Iterator[str]:
    for label, block in _by_model(heads, "effective_base"):
        finite = block[np.isfinite(block["effective_base"])]
        if finite.empty:
            yield f"In {label} some rotary pairs do not turn, so no head has a finite effective base."
            continue
        low, high = finite["effective_base"].min(), finite["effective_base"].max()
        if high / low < 1.001:
            yield f"Every head of {label} has the effective base {number(high)}."
        else:
            depth = finite["effective_base"].corr(finite["layer"], method="spearman")
            yield (
                f"The effective base of {label} ranges from {number(low)} to {number(high)} over heads; its rank "
                f"correlation with depth is {depth:+.2f}."
            )
    for label, block in _by_model(heads, "gamma"):
        if block["gamma"].abs().max() > 0:
            middle = f"{block['gamma'].median():.3g}"
            yield f"In {label}, gamma is positive in {_count(block['gamma'] > 0)}, with median {middle}."


def _training(run: Run) -> Iterator[str]:
    if "validation" not in run.tables:
        return
    rows = run.validation.astype({"nll": "float64"})
    sums = rows.assign(nll=rows["nll"] * rows["tokens"]).groupby(["adapter", "step"], observed=True)
    losses = sums["nll"].sum() / sums["tokens"].sum()
    for label, block in losses.rename("loss").reset_index().groupby("adapter", observed=True):
        order = block.sort_values("step")
        start, last = order.iloc[0]["loss"], order.iloc[-1]
        best = order.sort_values("loss").iloc[0]
        yield (
            f"{label}: held-out loss {start:.4f} nats/token at step 0, {last['loss']:.4f} "
            f"({last['loss'] - start:+.4f}) after {last['step']} steps; lowest at step {best['step']} with "
            f"{best['loss']:.4f}."
        )


def _needle(run: Run) -> Iterator[str]:
    """Success and retrieval heads of each model, set against published shares, and how far haystacks agree."""
    if "needles" not in run.tables:
        return
    for row in overview(run).to_dict("records"):
        model, how = row["model"], "" if row["mode"] == "strict" else f" (mode {row['mode']})"
        if not row["successes"]:
            yield f"{model} answered none of {row['trials']} trials{how}, so none of its heads has a retrieval score."
            continue
        best = ", ".join(
            f"layer {layer} head {head} ({score:.2f})" for layer, head, score in leading(run, model, row["mode"])
        )
        yield (
            f"{model} answers {row['successes']} of {row['trials']} trials{how}, {row['share']:.0%} (95 % interval "
            f"{row['low']:.0%} to {row['high']:.0%}). Its top retrieval heads are {best}; "
            f"without the needle no head scores above {row['control']:.3f}."
        )
        yield (
            f"In {model}, {row['above']:.1%} of heads score above {RETRIEVAL_HEAD} "
            f"({_published(row['above'], 'above')}) and {row['zero']:.1%} never copy "
            f"({_published(row['zero'], 'zero')})."
        )
    for label, groups in by_group(run.heads).groupby("model", observed=True) if "retrieval" in run.heads else ():
        yield f"{(groups['max'] > RETRIEVAL_HEAD).sum()} of {len(groups)} key groups of {label} hold such a head."
    for row in retest(by_seed(run)).to_dict("records"):
        yield (
            f"Haystacks {row['first']} and {row['second']} rank the heads of {row['model']} with a correlation of "
            f"{row['spearman']:.2f} and share {row['overlap']:.0%} of their top 10."
        )
    for row in between_models(run.heads).to_dict("records") if "retrieval" in run.heads else ():
        yield (
            f"{row['second']} ranks its heads as {row['first']} does with a correlation of {row['spearman']:.2f}, and "
            f"{row['overlap']:.0%} of the top 10 are the same."
        )


def _published(share: float, what: str) -> str:
    low, high = PUBLISHED[what]
    return f"{'within' if low <= share <= high else 'outside'} the {low:.0%} to {high:.0%} of published models"


def _influence(run: Run) -> Iterator[str]:
    """How the influence is spread over units, who leads, how good the estimates are, and what sets of units carry."""
    if "influence" not in run.tables:
        return
    for (label, length, *what), block in run.derived(shown_of).groupby(SWEEP, observed=True, sort=False):
        block = block.sort_values("delta", ascending=False)
        first, last = block.iloc[0], block.iloc[-1]
        sure = "" if np.isnan(first["low"]) else f" (95 % interval {first['low']:+.2g} to {first['high']:+.2g})"
        clear = int((block["p_adjusted"] < 0.05).sum())
        yield (
            f"{label}, {words(*map(str, what))} one unit at a time, {length:,} tokens, {how(block)}: most harmful at "
            f"{unit_name(first)} with {first['delta']:+.2g} nats/token{sure}, least at {unit_name(last)} with "
            f"{last['delta']:+.2g}. The top {TOP:.0%} of {len(block)} units hold {top_share(block['delta']):.0%} of "
            f"the summed |Δ| (Gini {gini(block['delta']):.2f}); {clear} differ from zero (false discovery rate 5 %)."
        )
    for key, rows in agreement(run.influence).groupby(SWEEP, sort=False):
        label, length, component, target = key
        told = ", ".join(
            f"{row['spearman']:.3f} and {row['shared']} of the top {row['top']} ({ESTIMATES[row['method']]})"
            for row in rows.to_dict("records")
        )
        yield (
            f"{label}, {component} to {target}, {length:,} tokens: rank correlation of the estimates with "
            f"{rows['compared'].iloc[0]} evaluated units, and largest units shared: {told}."
        )
    if "influence_sets" in run.tables:
        found = curve(run.influence_sets)
        for (label, length, *what, unit), block in found.groupby([*SWEEP, "unit"], observed=True, sort=False):
            top = block[block["choice"] == "top"].set_index("size")["mean"].sort_index()
            yield (
                f"{label}, {words(*map(str, what))}, {length:,} tokens: all {top.index[-1]} {unit}s together add "
                f"{top.iloc[-1]:+.2g} nats/token, the most influential one alone {top.iloc[0]:+.2g}."
            )


def _window(run: Run) -> Iterator[str]:
    """What the window probe found, scheme by scheme, and Theorem 1's constants."""
    if "window" not in run.tables:
        return
    found = accuracy(run.window)
    for scheme, mine in found.groupby("scheme", observed=True, sort=False):
        worst = mine.sort_values("accuracy").iloc[0]
        yield (
            f"With {NAMES[str(scheme)]} the mean accuracy over widths is {mine['accuracy'].mean():.3f}, lowest at "
            f"W = {worst['width']:,} with {worst['accuracy']:.3f} (95 % interval {worst['low']:.3f} to "
            f"{worst['high']:.3f}); {mine['solved'].sum()} of {mine['seeds'].sum()} models solve the task."
        )
    fixed = found[found["scheme"] == "fixed"]
    if len(fixed) > 2:
        falls = fixed["width"].rank().corr(fixed["frequency_mass"].rank())
        yield f"The frequency mass of fixed RoPE follows the width with a rank correlation of {falls:+.2f}."
    if bounds := mass_bounds(run.window):
        yield (
            f"The frequency mass of all {bounds.solved} solved models lies between C1 / (W/2 + 1) with C1 = "
            f"{number(bounds.c1)} and pi / (W + 1) + C2 with C2 = {number(bounds.c2)} rad/token (Theorem 1, r = 1)."
        )


def _scaling(run: Run) -> Iterator[str]:
    """How close the effective length comes to its target at the largest length."""
    if "scaling" not in run.tables:
        return
    far = run.scaling[run.scaling["context_length"] == run.scaling["context_length"].max()]
    for (scheme, beta, exponent), rows in far.groupby(["scheme", "beta", "exponent"], observed=True, sort=False):
        ratio = rows["ratio"].astype("float64")
        yield (
            f"{scheme} logits, ESS_{beta:g} with target L^{exponent:g} (case {rows['regime'].iloc[0]}): at "
            f"L = {rows['context_length'].iloc[0]:,} the effective length is {ratio.mean():.3f} times its target "
            f"(standard error {ratio.sem():.3f}, {len(rows)} rows)."
        )

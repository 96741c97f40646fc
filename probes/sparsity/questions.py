"""Questions that the results of the sparsity probe answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="sparsity.keys",
        sentence="In {model}, the median head needs {value} of {length:,} keys for 95 % of its attention mass; {below} "
        "of {heads:n heads} need at most {limit}, and {top} needs most: {most:.0f}",
        headline="The median head needs {value} keys for 95 % of its mass; {top} needs most: {most:.0f}",
        answer="Of {length:,} keys, the median head needs {values} for 95 % of its attention mass",
        number=".0f",
        samples="documents",
        limits=(1, float("inf")),
        level="headline",
    ),
    Question(
        name="sparsity.shared_set",
        sentence="In {model}, one set of {size} keys for all heads of a layer keeps {value} of the mass, each head's "
        "own set {own:percent1}[, one set per KV group {group:percent1}]",
        headline="One set of {size} keys per layer keeps {value} of the mass (each head's own: {own:percent1})",
        number="percent",
        samples="documents",
        limits=(0, 1),
        level="headline",
        better="higher",
    ),
    Question(
        name="sparsity.best_rule",
        sentence="At equal cost in each head, {cost:.0f} keys per row on average, {family} keeps most of the mass for "
        "{number:.0f} of {n:n heads} of {model}, among rules that need no dense weights[; next: {second} "
        "({second_heads})][; {missing:n heads} not compared: no such rule was measured at their cost]",
        headline="At {cost:.0f} keys on average, {family} keeps most for {number:.0f} of {n:n heads}",
        number=".0f",
        level="headline",
    ),
    Question(
        name="sparsity.lowest_loss",
        sentence="If every head of {model} attends by one rule, at equal cost ({cost:.0f} keys per row), {family} has "
        "the lowest loss[ of {families:n rules}] among those that need no dense weights, a change of {value}[; of "
        "those that need them, {bound} ({bound_change:+.4f})][; {missing:n rules} not compared: not measured at this "
        "cost]",
        headline="If all heads attend by {family} ({cost:.0f} keys per row), the loss changes by {value}",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        level="headline",
        better="lower",
    ),
    Question(
        name="sparsity.own_rules",
        sentence="If each head of {model} attends by its own best rule instead of all by {family}, at equal cost "
        "({cost:.0f} keys per row), the loss changes by {value}: from {one:+.4f} to {own:+.4f} against dense attention"
        "[; each document is judged with the rules that {others:n other documents} chose][; {same:n documents} chose "
        "the rules and judges them]",
        headline="With its own best rule per head instead of {family}, the loss changes by {value} ({cost:.0f} keys)",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        level="headline",
        better="lower",
    ),
    Question(
        name="sparsity.loss",
        sentence="If every head of {model} attends by {rule} ({kept:.0f} keys per row), the loss at {length:,} tokens "
        "is {sparse:.4f} instead of {dense:.4f} nats/token, a change of {value}",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        better="lower",
    ),
    Question(
        name="sparsity.answers",
        sentence="If every head of {model} attends by {rule} ({kept:.0f} keys per row), {sparse:percent} of the "
        "answers about needles are right instead of {dense:percent}, a change of {value}; their loss changes by "
        "{loss:+.4f} nats/token",
        number="points",
        value_unit="percentage points",
        samples="needles",
        better="higher",
    ),
    Question(
        name="sparsity.worst_head",
        sentence="Under {rule} ({kept:.0f} keys per row), {unit} of {model} keeps least of its mass: {value}; the "
        "mean head keeps {mean:percent1}",
        number="percent",
        samples="documents",
        limits=(0, 1),
        better="higher",
    ),
    Question(
        name="sparsity.worst_in_layer",
        sentence="In layer {in_layer} of {model}, under {rule}, {unit} keeps least of its attention mass: {value}",
        number="percent",
        samples="documents",
        limits=(0, 1),
        better="higher",
    ),
    Question(
        name="sparsity.answer_rows",
        sentence="In rows that produce the answer about a needle, the median head of {model} needs {value} keys for "
        "95 % of its mass; in rows of text {text:.0f}",
        number=".0f",
        samples="needles",
        limits=(1, float("inf")),
    ),
    Question(
        name="sparsity.patterns",
        sentence="With the given pattern file, the heads of {model} keep {value} of their mass at {kept:.0f} keys per "
        "row[; vertical-slash keeps {own:percent1} at this number of keys in every head, interpolated between sizes]",
        number="percent",
        samples="documents",
        limits=(0, 1),
    ),
    Question(
        name="sparsity.head",
        sentence="In {model}, it needs {value} keys for 95 % of its attention mass[, and {answer:.0f} in rows that "
        "produce an answer][; at {cost:.0f} keys per row {family} keeps most: {recall:percent1}]",
        number=".0f",
        samples="documents",
        limits=(1, float("inf")),
    ),
)

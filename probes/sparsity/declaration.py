"""Options, stored tables and questions of the sparsity probe."""

import re
from typing import Annotated

from pydantic import Field, field_validator

from headscope.results.questions import Question
from headscope.runs.columns import (
    ANSWER_COLUMNS,
    DOC,
    GROUP,
    HEAD,
    LAYER,
    LENGTH,
    LOSS_BY_POSITION,
    MODEL,
    Column,
    Table,
    key,
)
from headscope.study.config import Lengths, Options

TEXT, ANSWER = "text", "answer"
"""Kinds of rows: of an ordinary text, and those that produce the answer to a question about a needle."""
QUERY_BEFORE, LAYER_BELOW = "query", "layer"
PUBLISHED = "minference"
"""Name of the rule that a published pattern file gives each head."""
INDEXER = "indexer"
"""Name of the rule of a model's own indexer."""
DENSE = "dense"
"""In place of a rule where every head attends to all keys."""
BEST = "best"
"""Name of the rule by which every head attends by its own best rule, followed by the rule whose cost it has."""
ALL = "all"
"""In place of a document where none is left out."""
SHARED_SIZES = (64, 256, 1024)
DEFAULT_RULES = [
    *(f"{name}:{size}" for name in ("top", "group-top", "layer-top") for size in SHARED_SIZES),
    *(f"{name}:64:{size // 64}" for name in ("block", "block-mean", "block-bounds") for size in SHARED_SIZES),
    *(f"streaming:4:{size - 4}" for size in SHARED_SIZES),
    *(f"vertical-slash:{size // 2}:{size // 2}" for size in SHARED_SIZES),
]


class SparsityOptions(Options):
    """How few keys each head needs, and what rules that choose keys cost it."""

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")
    rules: list[Annotated[str, Field(min_length=1)]] = Field(
        DEFAULT_RULES,
        min_length=1,
        description="rules that choose keys, with their sizes: top:K, group-top:K, layer-top:K (the heaviest keys of "
        "the head, of its KV group, of the layer), block:B:K, block-mean:B:K, block-bounds:B:K (K blocks of B keys by "
        "mass, by mean key, by bounds of the keys), streaming:SINK:RECENT, vertical-slash:V:S",
    )
    rows: int = Field(
        64, ge=4, le=1_000_000, description="query rows per document, drawn evenly from the last octave of visible keys"
    )
    needles: int = Field(
        0, ge=0, le=1_000_000, description="also measure the rows that produce the answer to this number of needles"
    )
    loss: bool = Field(
        False,
        description="also measure the loss, and the answers about needles, while every head attends by a rule, and by "
        "its own best rule: a pass per rule and text",
    )
    patterns: str | None = Field(
        None, min_length=1, description="also measure a pattern file of MInference: the keys of each head's pattern"
    )

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, value: list[str]) -> list[str]:
        """The form only: the names are those of installed rules, which need torch."""
        for rule in value:
            if not re.fullmatch(r"[a-z][a-z0-9-]*(:[0-9]{1,8})+|indexer", rule):
                raise ValueError(f"'{rule[:60]}' is no rule with its sizes. Write top:256 or block:64:16")
        return value


ROWS_OF = key(
    "rows_of", "label", "", "text: rows of an ordinary text; answer: rows that produce the answer about a needle", None
)
RULE = key(
    "rule",
    "label",
    "",
    "rule that chooses the keys, with its sizes; minference: those of the given pattern file; indexer: those that the "
    "model's own indexer chose",
    None,
)

SPARSE_ROWS = Table(
    "sparse_rows",
    "what each head keeps under each rule: means over sampled query rows, against the dense rows",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        ROWS_OF,
        RULE,
        Column("recall", "value", "", "mean share of a row's weight that is on the chosen keys", 0, 1),
        Column("recall_q05", "value", "", "5 % quantile of the recall over rows", 0, 1),
        Column(
            "kl", "value", "nats", "mean of -ln recall, at most 87.3: KL divergence of the sparse from the dense row", 0
        ),
        Column("top1", "value", "", "share of rows whose heaviest key is chosen", 0, 1),
        Column("error", "value", "", "mean of |z' - z| / |z| of the head's output z after renormalisation", 0),
        Column("kept", "value", "keys", "mean number of chosen keys that the row sees", 0),
        Column("needs_dense", "flag", "", "whether the rule needs the weights of all keys: it bounds others"),
    ),
)
SPARSE_OVERLAP = Table(
    "sparse_overlap",
    "overlap of the chosen sets, shared keys over all keys of both, in a few of the query rows",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        ROWS_OF,
        RULE,
        key(
            "other",
            "label",
            "",
            "query: the set of the query before; layer: that of the head of the layer below that overlaps most",
            None,
        ),
        Column("overlap", "value", "", "mean overlap", 0, 1),
    ),
)
SPARSE_KEYS = Table(
    "sparse_keys",
    "the fewest keys that hold a share of a row's weight, per head: means over sampled query rows",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        ROWS_OF,
        *(
            Column(f"keys_{share}", "value", "keys", f"fewest keys that hold {share} % of the weight", 1)
            for share in (90, 95, 99)
        ),
    ),
)
RULE_OR_DENSE = key(
    "rule",
    "label",
    "",
    "rule that chooses the keys, with its sizes; minference: those of the given pattern file; "
    f"{BEST}:R: each head's own best rule, at the cost of rule R; {DENSE}: every head attends to all keys",
    None,
)
KEPT = Column("kept", "value", "keys", "mean number of chosen keys that a row sees, over heads and all rows", 0)
SPARSE_LOSS = Table(
    "sparse_loss",
    "next-token loss by position while every head attends by a rule",
    (
        MODEL,
        LENGTH,
        DOC,
        RULE_OR_DENSE,
        *LOSS_BY_POSITION,
        KEPT,
    ),
)
SPARSE_ANSWERS = Table(
    "sparse_answers",
    "answers about needles while every head attends by a rule",
    (
        MODEL,
        LENGTH,
        key("pair", "label", "", "name of the prompt within its set", None),
        RULE_OR_DENSE,
        *ANSWER_COLUMNS,
        KEPT,
    ),
)
SPARSE_CHOICE = Table(
    "sparse_choice",
    "the rule of each head where every head attends by its own best rule",
    (
        MODEL,
        LENGTH,
        key(
            "left_out",
            "label",
            "",
            f"document that did not choose, since it is judged; {ALL}: all documents chose",
            None,
        ),
        LAYER,
        HEAD,
        GROUP,
        key("rule", "label", "", f"{BEST}:R, where R is the measured rule whose cost the head's rule has", None),
        Column(
            "own_rule",
            "label",
            "",
            "rule of largest recall at this cost, among those that need no dense weights; sizes are interpolated over "
            "the log of the kept keys",
        ),
    ),
)
TABLES = (SPARSE_ROWS, SPARSE_OVERLAP, SPARSE_KEYS, SPARSE_CHOICE, SPARSE_LOSS, SPARSE_ANSWERS)


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

"""Options, stored tables and questions of the budget probe."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.base.user_input import MAX_DOCUMENTS
from headscope.results.questions import Question
from headscope.runs.columns import (
    ANSWER_COLUMNS,
    DOC,
    FILTER,
    GROUP,
    HEAD,
    LAYER,
    LENGTH,
    LOSS_BY_POSITION,
    METRIC,
    MODEL,
    TASK,
    Column,
    Table,
    key,
)
from headscope.streaming import StreamingWindow
from headscope.study.config import Lengths, Options
from headscope.study.option_rules import Needs

MEASURED_ORDERS = ("effective-length", "local-mass", "far-mass")
"""Orders by scores that one forward pass per document measures."""
RANDOM = "random"
EVERY_ORDER = "every"
"""Value of `order` where all orders agree: no KV group streams, or all do."""
MIN_ROWS, MAX_ROWS = 8, 1_000_000
"""Fewest and most query rows that are sampled per document."""
RUN_PATTERN = re.compile(r"run:(?P<folder>.+?):(?P<reversed>-?)(?P<column>\w+)(?::(?P<model>[^:]+))?")

Share = Annotated[float, Field(ge=0, le=1)]


class BudgetOptions(Options):
    """Loss, and answers to prompts, if the KV groups with the lowest scores keep only the first and last tokens."""

    option_rules = (
        Needs("draws", f"orders={RANDOM}"),
        Needs("count", "prompts"),
        Needs("task_limit trust_task_code", "tasks"),
    )

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")
    orders: list[str] = Field(
        [*MEASURED_ORDERS, RANDOM],
        min_length=1,
        description="scores that order the KV groups, the lowest streams first: effective-length; local-mass (weight "
        "on the last 32 tokens, the highest first); far-mass (weight on tokens that a streaming group does not see); "
        "random; run:FOLDER:COLUMN[:MODEL] (a column of run.heads; -COLUMN: the highest first); file:FILE (scores of "
        "another tool)",
    )
    shares: list[Share] = Field(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        min_length=1,
        description="shares of the KV groups that stream, from 0 to 1; 0 and 1 are always measured",
    )
    sink: int = Field(64, ge=0, le=2**24, description="first tokens that a streaming KV group keeps")
    recent: int = Field(256, ge=0, le=2**24, description="last tokens that a streaming KV group keeps")
    max_loss_increase: float = Field(
        0.01, gt=0, le=1000, description="largest acceptable increase of the loss, in nats per token"
    )
    reduction: Literal["max", "mean"] = Field(
        "max", description="how the scores of the query heads of a KV group become one"
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)
    draws: int = Field(5, ge=1, le=1000, description="number of random orders")
    rows: int | Literal["exact"] = Field(
        256,
        description="query rows per document that measure the scores, drawn evenly from the last octave of visible "
        "keys; exact: all rows of the octave",
    )
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="also score the answers to prompts: needle (a fact hidden in the documents), induction, ioi, "
        "greater-than, or a JSON lines file of prompt pairs, of which the clean prompts are used",
    )
    count: int = Field(16, ge=1, le=1_000_000, description="number of prompts of a generated set")
    tasks: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="also score tasks of the lm-evaluation-harness, by name or file (.yaml), at the longest length; "
        "needs the extra eval",
    )
    task_limit: int | None = Field(
        None, ge=2, le=MAX_DOCUMENTS, description="maximum number of documents per task; default: all"
    )
    trust_task_code: bool = Field(
        False, description="run the Python code that your own task files name, and their templates without a sandbox"
    )
    cache_lengths: Lengths = Field(
        default=[8192, 32768, 131072], description="further context lengths for the size of the KV cache"
    )

    @field_validator("orders")
    @classmethod
    def _check_orders(cls, value: list[str]) -> list[str]:
        for order in value:
            kind, _, rest = order.partition(":")
            if order in (*MEASURED_ORDERS, RANDOM) or (kind == "file" and rest) or RUN_PATTERN.fullmatch(order):
                continue
            raise ValueError(
                f"unknown order '{order[:80]}'. Use one of: {', '.join(MEASURED_ORDERS)}, {RANDOM}, "
                "run:FOLDER:COLUMN, file:FILE"
            )
        names = [order_name(order) for order in value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two orders are named '{repeated[0]}'. Name each order once, or rename the file")
        return value

    @field_validator("rows")
    @classmethod
    def _check_row_count(cls, rows: int | str) -> int | str:
        if isinstance(rows, int) and not MIN_ROWS <= rows <= MAX_ROWS:
            raise ValueError(f"{rows} rows cannot be sampled. Give {MIN_ROWS} to {MAX_ROWS}, or exact")
        return rows

    @field_validator("shares")
    @classmethod
    def _sort_shares(cls, value: list[float]) -> list[float]:
        shares = sorted({round(share, 6) for share in value})  # the digits that a stored float32 keeps
        if not any(0 < share < 1 for share in shares):
            raise ValueError("no share between 0 and 1, where orders differ. Add one, such as 0.5")
        return shares

    @model_validator(mode="after")
    def _check_window(self) -> "BudgetOptions":
        if self.sink + self.recent == 0:
            raise ValueError("sink 0 and recent 0 leave a streaming KV group no token. Use a recent of at least 1")
        _ = self.window
        return self

    @property
    def window(self) -> StreamingWindow:
        """The tokens that a streaming KV group sees."""
        return StreamingWindow(self.sink, self.recent)


def order_name(order: str) -> str:
    """The short name of an order: the column of a run, the stem of a file; after "run:" or "file:" if it is the name of
    another order."""
    if order in (*MEASURED_ORDERS, RANDOM):
        return order
    if match := RUN_PATTERN.fullmatch(order):
        name = f"{match['reversed']}{match['column']}"
    else:
        name = re.split(r"[/\\]", order.partition(":")[2].rstrip("/\\"))[-1].partition(".")[0]
    return f"{order.partition(':')[0]}:{name}" if name in (*MEASURED_ORDERS, RANDOM, EVERY_ORDER) else name


ORDER = key(
    "order",
    "label",
    "",
    "score that orders the KV groups, the lowest streams first: effective-length, local-mass (highest first), "
    "far-mass, random, a column of a run (-COLUMN: highest first) or the name of a file",
    None,
)
ORDER_OR_EVERY = key("order", "label", "", f"{ORDER.meaning}; {EVERY_ORDER} where no KV group or all stream", None)
DRAW = key("draw", "index16", "", "number of the random order, from 0; 0 for other orders")
HALF = key(
    "half",
    "index16",
    "",
    "half of the documents, 0 (even numbers) or 1, whose losses are evaluated with this order; scores measured in this "
    "run come from the other half. -1: the order uses no score measured in this run, so losses are evaluated on all "
    "documents",
    -1,
)
SHARE = key("share", "value", "", "share of the KV groups that stream, rounded to whole groups", 0, 1)

SCORES = Table(
    "budget_scores",
    "scores of heads that order the KV groups: means over query rows in the last octave of visible keys, that is, in "
    "the last four bins that the layer fills",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        Column("log_ess2", "value", "ln tokens", "mean ln ESS2", 0),
        Column("local_mass", "value", "", "mean weight on the last 32 keys", 0, 1),
        Column("far_mass", "value", "", "mean weight on keys that a streaming KV group does not see", 0, 1),
    ),
)
SCORE_ERRORS = Table(
    "budget_score_errors",
    "standard errors of the scores over the sampled query rows of a document; 0 if all rows of the octave were used",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        Column("log_ess2_se", "value", "ln tokens", "standard error of mean ln ESS2", 0),
        Column("local_mass_se", "value", "", "standard error of the mean weight on the last 32 keys", 0),
        Column("far_mass_se", "value", "", "standard error of the mean weight that streaming hides", 0),
    ),
)
STABILITY = Table(
    "budget_stability",
    "how much the streaming KV groups of a measured order depend on which query rows were sampled: 200 simulated "
    "samples, whose scores are drawn with the standard errors in budget_score_errors [ours]",
    (
        MODEL,
        ORDER,
        HALF,
        SHARE,
        Column(
            "kept", "value", "", "mean share of the streaming KV groups that stream in another sample as well", 0, 1
        ),
        Column("same_set", "value", "", "share of the samples with exactly the same streaming KV groups", 0, 1),
    ),
)
ORDERS = Table(
    "budget_orders",
    "the order in which KV groups start to stream",
    (
        MODEL,
        ORDER,
        DRAW,
        HALF,
        LAYER,
        GROUP,
        Column("score", "value", "", "score of the KV group; the lowest streams first"),
        Column("rank", "index32", "", "place in the order, from 0, which streams first", 0),
    ),
)
LOSS = Table(
    "budget",
    "next-token loss by position while a share of the KV groups streams",
    (
        MODEL,
        LENGTH,
        DOC,
        ORDER_OR_EVERY,
        DRAW,
        SHARE,
        *LOSS_BY_POSITION,
    ),
)
ANSWERS = Table(
    "budget_answers",
    "answers to prompts while a share of the KV groups streams",
    (
        MODEL,
        key("prompts", "label", "", "set of prompts: a generated set, or the name of a file", None),
        key("pair", "label", "", "name of the prompt within its set", None),
        ORDER_OR_EVERY,
        DRAW,
        SHARE,
        *ANSWER_COLUMNS,
    ),
)
TASKS = Table(
    "budget_tasks",
    "scores on tasks of the lm-evaluation-harness while a share of the KV groups streams, document by document",
    (
        MODEL,
        TASK,
        LENGTH,
        METRIC,
        FILTER,
        key("document", "index32", "", "number of the document within the task, from 0", 0),
        ORDER_OR_EVERY,
        DRAW,
        SHARE,
        Column("score", "value", "", "the metric of this document, in the unit of the metric"),
        Column("higher_is_better", "flag", "", "whether a higher score is better"),
    ),
)
CACHE = Table(
    "budget_cache",
    "size of the KV cache of one sequence, computed from geometry and dtype: 2 x head_dim x bytes per value x kept "
    "tokens, summed over KV groups",
    (
        MODEL,
        ORDER,
        DRAW,
        HALF,
        LENGTH,
        SHARE,
        Column("groups", "count", "KV groups", "KV groups that stream", 0),
        Column("cache_bytes", "count", "bytes", "size if these KV groups stream", 0),
        Column("full_bytes", "count", "bytes", "size if no KV group streams", 0),
    ),
)
SETTINGS = Table(
    "budget_settings",
    "what a streaming KV group keeps, and the loss that is acceptable",
    (
        MODEL,
        Column("sink", "count", "tokens", "first tokens that are kept", 0),
        Column("recent", "count", "tokens", "last tokens that are kept", 1),
        Column("bound", "value", "nats/token", "largest acceptable increase of the loss", 0),
        Column("groups", "count", "KV groups", "KV groups of the model", 1),
        Column("reduction", "label", "", "how the scores of the query heads of a KV group became one: max or mean"),
    ),
)
TABLES = (SCORES, SCORE_ERRORS, STABILITY, ORDERS, LOSS, ANSWERS, TASKS, CACHE, SETTINGS)


_AT_HALF = "if {share:percent} of the KV groups stream (order: {order_label})"

QUESTIONS = (
    Question(
        name="budget.largest_share",
        sentence="At {context_length:,} tokens, {value} of the {groups} KV groups of {model} can keep only the first "
        "{sink:,} and last {recent:,} tokens while the loss rises by at most {max_rise:g} nats/token (order: "
        "{order_label}[, the smallest area of {orders:n measured orders}])",
        headline="{value} of the KV groups can stream at {context_length:,} tokens",
        number="percent",
        samples="documents",
        level="headline",
        better="higher",
    ),
    Question(
        name="budget.order_gain",
        sentence="At {context_length:,} tokens, streaming in the order by {order_label} costs {model} less than in "
        "random orders: {verdict}. The areas under their curves differ by {value}",
        headline="area of the order by {order_label} minus random: {value}, {verdict}",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        level="headline",
        better="lower",
    ),
    Question(
        name="budget.area",
        sentence="At {context_length:,} tokens, the mean rise of the loss of {model} over all shares is {value} "
        "(order: {order_label})",
        number=".4f",
        value_unit="nats/token",
        samples="documents",
        better="lower",
    ),
    Question(
        name="budget.area_vs_random",
        sentence="At {context_length:,} tokens, the area of the order by {order_label} minus that of random orders is "
        "{value} in {model}",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        better="lower",
    ),
    Question(
        name="budget.share_in_order",
        sentence="At {context_length:,} tokens, {value} of the KV groups of {model} can stream (order: {order_label})",
        number="percent",
        samples="documents",
        better="higher",
    ),
    Question(
        name="budget.cache_size",
        sentence="If {share:percent} of the KV groups of {model} stream, the KV cache of {context_length:,} tokens "
        "takes {value} instead of {full:bytes} (computed)",
        number="bytes",
        better="lower",
    ),
    Question(
        name="budget.stability",
        sentence="Where {share:percent} of the KV groups of {model} stream (order: {order_label}), {value} of them "
        "would stream as well if other query rows of the same documents had been sampled, and the set would be exactly "
        "the same in {same:percent} of the samples (simulated from the errors of the scores)[. {unstable:percent} are "
        "not stable: use more --rows, or --rows exact]",
        number="percent",
        better="higher",
    ),
    Question(
        name="budget.right_answers",
        sentence=f"{{model}}, {{prompts}}: {_AT_HALF}, {{streaming:percent}} of the answers are right instead of "
        "{whole:percent}, a change of {value}",
        number="points",
        value_unit="percentage points",
        samples="prompts",
        better="higher",
    ),
    Question(
        name="budget.task_score",
        sentence=f"{{model}}, {{task}}: {_AT_HALF}, the score is {{streaming:.3f}} instead of {{whole:.3f}}, a change "
        "of {value}[; that streaming makes it worse is {verdict}]",
        number="+.3f",
        samples="documents",
    ),
)

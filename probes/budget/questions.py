"""Questions that the budget probe answers: how many KV groups can stream, in which order, at what cost."""

from headscope.results.questions import Question

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

"""Questions that the results of the probe `measure` answer."""

from headscope.results.questions import Question

LENGTHS, GROWTH, TRAINING, CHANGE, LOGITS, LOSS, PAIRS, POSITIONS = (
    "Effective length",
    "Growth with context",
    "Roles during training",
    "Change against the first model",
    "Largest logits",
    "Loss",
    "Rotary pairs",
    "Position parameters",
)

QUESTIONS = (
    Question(
        name="length.median",
        topic=LENGTHS,
        sentence="In {model}, the median effective length at {context_length:,} tokens of context is {value} over "
        "{n:n heads}[ of the {layers} layers]",
        headline="Median effective length {value} at {context_length:,} tokens of context; {local} of {n:n heads}[ of "
        "the {layers} layers] below {limit}",
        answer="The median effective length at {context_length:,} tokens of context is {values}",
        value_unit="tokens",
        level="headline",
    ),
    Question(
        name="length.local",
        topic=LENGTHS,
        sentence="In {model}, {value} of {n:n heads}[ of the {layers} layers] have an effective length below {limit} "
        "tokens",
        number=".0f",
    ),
    Question(
        name="length.extreme",
        topic=LENGTHS,
        sentence="In {model}, the {which} effective length is {value}, in {unit}",
        value_unit="tokens",
        samples="documents",
    ),
    Question(
        name="length.sinks",
        topic=LENGTHS,
        sentence="On text, {count} of {n:n heads}[ of the {layers} layers] of {model} ({value}) put more than half of "
        "their weight on the first token[, {sink_rows}]",
        headline="{count} of {n:n heads}[ of the {layers} layers] put more than half of their weight on the first "
        "token",
        number="percent1",
        level="headline",
    ),
    Question(
        name="growth.median",
        topic=GROWTH,
        sentence="In {model}, the median growth exponent of the effective length is {value} over {n:n heads}[ of the "
        "{layers} layers][, up to {growth_limit}]",
        number=".2f",
    ),
    Question(
        name="growth.constant",
        topic=GROWTH,
        sentence="In {model}, the effective length stays nearly constant as the context grows in {value} of "
        "{n:n heads}[ of the {layers} layers] (exponent below {limit}, as expected of retrieval heads)",
        number=".0f",
    ),
    Question(
        name="growth.widening",
        topic=GROWTH,
        sentence="In {model}, the effective length grows almost in proportion to the context in {value} of "
        "{n:n heads}[ of the {layers} layers] (exponent above {limit}, as expected of aggregation heads)",
        number=".0f",
    ),
    Question(
        name="roles.onset",
        topic=TRAINING,
        sentence="The role {role} in the training {training}: {n:n heads} at the last step, the first from step "
        "{first:,} on and half from step {value} on[; {later:n heads} took it on after the first measured step]",
        answer="The step from which half of the heads with the role {role} have it: {values}",
        number=",.0f",
    ),
    Question(
        name="length.ratio",
        topic=CHANGE,
        sentence="From {baseline} to {model}, the median ratio of effective lengths at {context_length:,} tokens is "
        "{value} over {n:n heads}[ of the {layers} layers]: longer in {longer}, shorter in {shorter}, and within "
        "{tolerance:percent} in {unchanged}",
        headline="Effective length × {value} against {baseline} (median); longer in {longer}, shorter in {shorter} of "
        "{n:n heads}[ of the {layers} layers]",
        number=".2f",
        level="headline",
    ),
    Question(
        name="length.changes",
        topic=CHANGE,
        sentence="From {baseline} to {model}, the ratio of effective lengths[ in the {layers} layers] is highest in "
        "{highest:number}, and lowest in {lowest:number}",
    ),
    Question(
        name="logits.largest",
        topic=LOGITS,
        sentence="The largest logit in {model} is {value}, in {unit}, of query {query:,} and key {key:,} of {doc} (all "
        "causal pairs of {n:n documents} at {context_length:,} tokens)",
        number=".1f",
    ),
    Question(
        name="loss.mean",
        topic=LOSS,
        sentence="The loss of {model} in contexts of {context_length:,} tokens is {value}",
        headline="Loss {value} at {context_length:,} tokens",
        number=".3f",
        value_unit="nats/token",
        samples="documents",
        better="lower",
    ),
    Question(
        name="loss.above_uniform",
        topic=LOSS,
        sentence="The loss of {model}, {number:.3f} nats/token, is above {uniform:.3f}, that of a uniform guess among "
        "{vocabulary:,} tokens. Check weights, tokenizer, texts and position scheme",
        number=".3f",
        value_unit="nats/token",
    ),
    Question(
        name="loss.not_compared",
        topic=LOSS,
        sentence="The loss of {model} is not compared with that of {baseline}: {reason}",
    ),
    Question(
        name="loss.difference",
        topic=LOSS,
        sentence="In contexts of {context_length:,} tokens, the loss of {model} minus that of {baseline} is {value}",
        headline="Loss {value} against {baseline} at {context_length:,} tokens",
        answer="Over {context_length:,} tokens, the mean loss minus that of {baseline} is {values}",
        number="+.3f",
        value_unit="nats/token",
        samples="documents",
        level="headline",
        better="lower",
    ),
    Question(
        name="pairs.variation",
        topic=PAIRS,
        sentence="In {model}, the median coefficient of variation of rotary-pair usage is {value} over {n:n heads}; "
        "lower is more even",
        number=".2f",
    ),
    Question(
        name="positions.windowed_layers",
        topic=POSITIONS,
        sentence="The position scheme of {model} leaves the frequencies of its {n} sliding-window layers unchanged: a "
        "window does not grow with the context",
    ),
    Question(
        name="positions.no_base",
        topic=POSITIONS,
        sentence="In {model}, {reason}, so no effective base (of the RoPE with the same mean log-frequency) is defined",
    ),
    Question(name="positions.base", topic=POSITIONS, sentence="All {n:n heads} of {model} {kind} {value}"),
    Question(
        name="positions.base_by_depth",
        topic=POSITIONS,
        sentence="The effective base of {model}, that of the RoPE with the same mean log-frequency, ranges from "
        "{smallest:number} to {largest:number} over {n:n heads}; its rank correlation with depth is {value}",
        number="+.2f",
    ),
    Question(
        name="positions.gamma",
        topic=POSITIONS,
        sentence="In {model}, gamma is positive in {positive} of {n:n heads}, with median {value}: the exponent with "
        "which a head's logits grow with the context",
        number=".3g",
    ),
    Question(
        name="length.head",
        topic=LENGTHS,
        sentence="In {model} the head[ is {roles:words}][ has none of the roles {missing_roles}]. Its effective length "
        "at {context_length:,} tokens of context is {value}[ (growth exponent {growth:.2f})], with "
        "{sink_mass:percent} of its weight on the first token[ {sink_rows}][ (window {layer_window:,})] and "
        "{local_mass:percent} on the last 32",
        value_unit="tokens",
        samples="documents",
    ),
)

"""Tables of position parameters."""

from headscope.runs.columns import GROUP, HEAD, LAYER, MODEL, PAIR, Column, Table

LENGTH = Column(
    "context_length",
    "index32",
    "tokens",
    "length of the texts that the row is about, where the checkpoint's frequencies depend on it; else 0",
    0,
    key=True,
)

POSITIONS = Table(
    "positions",
    "rotary frequencies of each model",
    (
        MODEL,
        LENGTH,
        LAYER,
        GROUP,
        PAIR,
        Column("theta", "value", "rad/token", "rotation frequency", 0),
        Column("log_theta", "value", "ln rad/token", "ln theta; -inf if theta is 0"),
        Column(
            "log_theta_init",
            "value",
            "ln rad/token",
            "ln theta at the start of learning (log_theta for schemes that learn nothing)",
        ),
        Column(
            "log_theta_base",
            "value",
            "ln rad/token",
            "ln theta of the checkpoint's own scheme; in rows with context_length 0, that of short texts",
        ),
    ),
)

SCALES = Table(
    "scales",
    "logit temperature of each head and summaries of its frequencies",
    (
        MODEL,
        LENGTH,
        LAYER,
        HEAD,
        GROUP,
        Column("tau", "value", "", "temperature; lambda(n) = (1/tau) ln(1 + max(n, L_ref)/L_ref)^gamma", 0),
        Column("gamma", "value", "", "growth exponent of lambda; 0 for schemes without one"),
        Column("reference_length", "count", "tokens", "L_ref, the length below which lambda is constant", 1),
        Column(
            "logit_scale",
            "value",
            "",
            "factor on all logits at n <= L_ref, relative to the checkpoint's own; without the factor on cos and sin "
            "where only a part of the head rotates, because that scales only the rotated part of the logits",
            0,
        ),
        Column(
            "attention_factor",
            "value",
            "",
            "factor on cos and sin: logits of the rotated dimensions are multiplied by its square",
            0,
        ),
        Column(
            "softmax_factor",
            "value",
            "",
            "factor on all logits at n <= L_ref, with the one that the checkpoint's code applies to the softmax scale",
            0,
        ),
        Column(
            "effective_base",
            "value",
            "",
            "Theta = exp(-4/(r-2) sum_f ln theta_f) over the r/2 rotary pairs; inf if a rotary pair has theta 0",
            0,
        ),
        Column("mean_log_theta", "value", "ln rad/token", "mean of ln theta over rotary pairs; -inf if one is 0"),
    ),
)

TABLES = (POSITIONS, SCALES)

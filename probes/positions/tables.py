"""Tables of position parameters."""

from headscope.runs.columns import GROUP, HEAD, LAYER, MODEL, PAIR, Column, Table

POSITIONS = Table(
    "positions",
    "the rotation frequencies of each model",
    (
        MODEL,
        LAYER,
        GROUP,
        PAIR,
        Column("theta", "value", "rad/token", "rotation frequency", 0),
        Column("log_theta", "value", "ln rad/token", "ln theta; -inf where theta is 0"),
        Column(
            "log_theta_init",
            "value",
            "ln rad/token",
            "ln theta that learning started from (log_theta where nothing is learned)",
        ),
        Column("log_theta_base", "value", "ln rad/token", "ln theta of the checkpoint's own scheme"),
    ),
)

SCALES = Table(
    "scales",
    "the logit temperature of each head and one-number summaries of its frequencies",
    (
        MODEL,
        LAYER,
        HEAD,
        GROUP,
        Column("tau", "value", "", "temperature; lambda(n) = (1/tau) ln(1 + max(n, L_ref)/L_ref)^gamma", 0),
        Column("gamma", "value", "", "growth exponent of lambda; 0 where the scheme has none"),
        Column("reference_length", "count", "tokens", "L_ref, the length below which lambda is constant", 1),
        Column(
            "logit_scale",
            "value",
            "",
            "what logits are multiplied by, beyond the checkpoint's own scaling, at n <= L_ref",
            0,
        ),
        Column(
            "effective_base",
            "value",
            "",
            "Theta = exp(-4/(r-2) sum_f ln theta_f) over the r/2 rotary pairs; inf where a rotary pair has theta 0",
            0,
        ),
        Column("mean_log_theta", "value", "ln rad/token", "mean of ln theta over rotary pairs; -inf where one is 0"),
    ),
)

TABLES = (POSITIONS, SCALES)

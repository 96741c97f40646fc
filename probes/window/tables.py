"""Tables of the window probe: accuracy of every trained model, and the logit of each of its pairs by distance."""

from headscope.runs.columns import PAIR, Column, Table, key

SCHEME = key(
    "scheme", "label", "", "position scheme of the trained model: fixed, learned or partial RoPE, or NoPE", None
)
WIDTH = key("width", "index32", "tokens", "window width W: the answer is YES within W/2 of the centre", 1)
SEED = key("seed", "index32", "", "seed of the initial weights")

WINDOW = Table(
    "window",
    "needle retrieval from a window: accuracy and frequencies of one-layer, one-head models",
    (
        SCHEME,
        WIDTH,
        key("center", "index32", "tokens", "distance c at the window's centre", 1),
        SEED,
        Column("accuracy", "value", "", "balanced accuracy over every distance, exact [ours]", 0, 1),
        Column("loss", "value", "nats", "balanced cross-entropy after training", 0),
        Column("steps", "count", "steps", "training steps", 1),
        Column("frequency_mass", "value", "rad/token", "M = sum_f a_f theta_f, a_f = |q_f||k_f| / sum (Theorem 1)", 0),
        Column("dominant_theta", "value", "rad/token", "frequency of the pair with the largest a_f", 0),
    ),
)

WINDOW_PAIRS = Table(
    "window_pairs",
    "contribution of each rotary pair of a trained model to the needle's logit, by distance",
    (
        SCHEME,
        WIDTH,
        SEED,
        PAIR,
        key("distance", "index32", "tokens", "distance D of the needle from the query", 1),
        Column("logit", "value", "logits", "A_f cos(theta_f D + phi_f), exact"),
        Column("theta", "value", "rad/token", "frequency of the pair", 0),
    ),
)

TABLES = (WINDOW, WINDOW_PAIRS)

"""The tables that probes fill: needles, head influence, and the synthetic ones."""

from headscope.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, PAIR, Column, Table, key

NEEDLE_KEYS = (
    key("needle", "label", "", "name of the needle, the fact that was hidden", None),
    LENGTH,
    key(
        "depth",
        "value",
        "",
        "where the needle was to begin, as a share of the haystack's tokens; it begins at the last sentence start "
        "that lies there or before, and span_start tells where that was",
        0,
        1,
    ),
    DOC,
    key("seed", "index32", "", "seed of the study plus the number of the haystack in its order"),
)
MODE = key(
    "mode",
    "label",
    "",
    "strict: exact span, score at most 1; wu: as the public code of Wu et al. counts; absent: the control, a strict "
    "trial without the needle, scored where it would have been [ours]",
    None,
)

NEEDLES = Table(
    "needles",
    "Needle-in-a-Haystack trials: what each model answered",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("prompt_tokens", "index32", "tokens", "length of the whole prompt", 1),
        Column("span_start", "index32", "tokens", "first token of the scored part of the needle in the prompt", 0),
        Column("span_end", "index32", "tokens", "end of the scored part (exclusive)", 0),
        Column("answer", "text", "", "what the model said, greedily, before the end token or a line break"),
        Column(
            "recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer, no stemming [ours]", 0, 1
        ),
        Column("success", "flag", "", "whether recall is above 0.5"),
        Column("steps", "index32", "tokens", "answer steps that were scored", 0),
    ),
)

RETRIEVAL = Table(
    "retrieval",
    "how much of the needle each head copied in each trial, successful or not",
    (
        MODEL,
        MODE,
        LAYER,
        HEAD,
        GROUP,
        *NEEDLE_KEYS,
        Column(
            "score",
            "value",
            "",
            "strict, absent: share of the scored part's tokens that the head copied at some step; wu: copies / tokens, "
            "which repeats can take above 1. A copy: the row that produced a token has its largest weight on a token "
            "of the scored part that is equal to it",
            0,
        ),
        Column("copies", "index32", "steps", "answer steps at which the head copied", 0),
        Column("mass", "value", "", "mean weight on the scored part over answer steps; 0 without a step [ours]", 0, 1),
    ),
)

UNIT_HEAD = key(
    "head", "index16", "", "query head within the layer, from 0; -1 where the unit is the whole KV group", -1
)
COMPONENT = key(
    "component",
    "label",
    "",
    "what was reset: freq (log-frequencies), scale (tau, gamma), joint (both); or the intervention: z-zero, z-mean, "
    "q-uniform, a user's own",
    None,
)
TARGET = key("target", "label", "", "what it was reset to: init or base; none where nothing is reset", None)

INFLUENCE = Table(
    "influence",
    "what the loss of a document becomes when the position parameters of one unit, a KV group or a head, are reset",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        UNIT_HEAD,
        GROUP,
        COMPONENT,
        TARGET,
        key(
            "method",
            "label",
            "",
            "exact: evaluated; screen: first order in the head's output; curved: with its second order [ours]",
            None,
        ),
        Column("nll_before", "value", "nats/token", "mean next-token loss with nothing reset", 0),
        Column("delta_nll", "value", "nats/token", "loss after minus loss before; positive where the reset hurts"),
    ),
)

INFLUENCE_SETS = Table(
    "influence_sets",
    "the same for sets of units that are reset together: the most influential ones against random ones",
    (
        MODEL,
        LENGTH,
        DOC,
        COMPONENT,
        TARGET,
        key("unit", "label", "", "what the set consists of: group or head", None),
        key(
            "choice",
            "label",
            "",
            "top: the units of largest influence over all documents; random: as many from the same layers [ours]",
            None,
        ),
        key("size", "index16", "units", "how many units are reset together", 1),
        key("draw", "index16", "", "number of the random draw; 0 for the top set"),
        Column("nll_before", "value", "nats/token", "mean next-token loss with nothing reset", 0),
        Column("delta_nll", "value", "nats/token", "loss after minus loss before, evaluated exactly"),
    ),
)

SCHEME = key("scheme", "label", "", "positions of the probe's model: fixed RoPE, learned, partial or none", None)
WIDTH = key("width", "index32", "tokens", "window width W: the answer is YES within W/2 of the centre", 1)
SEED = key("seed", "index32", "", "seed of the initial weights")

WINDOW = Table(
    "window",
    "needle retrieval from a window: how well a one-layer, one-head model tells whether the needle lies in it",
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
    "what each rotary pair of the trained model adds to the needle's logit at each distance",
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

SCALING = Table(
    "scaling",
    "effective length of Gaussian logits under the scale that the scaling theorems give for a target",
    (
        SCHEME,
        key(
            "regime",
            "label",
            "",
            "case of Theorems 4 and 5: i above the critical exponent, ii at it, iii target 1",
            None,
        ),
        key("exponent", "value", "", "the target is ESS*(L) = L^exponent", 0, 1),
        key("beta", "value", "", "order of ESS", 0),
        LENGTH,
        SEED,
        Column("scale", "value", "", "lambda(L), the factor on the logits", 0),
        Column("target", "value", "tokens", "ESS*(L)", 1),
        Column("ess", "value", "tokens", "ESS of one sampled row", 1),
        Column("ratio", "value", "", "ess / target; approaches 1 as L grows", 0),
    ),
)

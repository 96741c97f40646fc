"""Options and stored tables of the window probe."""

from pydantic import Field, model_validator

from headscope.runs.columns import PAIR, Column, Table, key
from headscope.study.config import Options


class WindowOptions(Options):
    """Needle retrieval from a window: one-layer, one-head models trained on synthetic sequences."""

    center: int = Field(
        512, ge=2, le=65_536, description="distance c at the window's centre; a sequence has 2 c tokens"
    )
    widths: list[int] = Field([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], description="window widths W in tokens")
    dims: int = Field(8, ge=4, le=1024, multiple_of=2, description="head dimension d")
    seeds: int = Field(12, ge=2, le=10_000, description="models (initial weights) per width and scheme")
    steps: int = Field(3000, ge=1, le=10_000_000, description="training steps")

    @model_validator(mode="after")
    def _check_widths(self) -> "WindowOptions":
        max_width = 2 * self.center - 3  # at least one distance is outside the window
        invalid = [width for width in self.widths if not 1 <= width <= max_width]
        if invalid or not self.widths:
            raise ValueError(f"invalid widths {invalid or 'none'}. Use widths between 1 and 2 center - 3 = {max_width}")
        return self


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

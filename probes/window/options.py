"""Options of the window probe: window widths, head dimension, and training of the small models."""

from pydantic import Field, model_validator

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
            raise ValueError(f"bad widths: {invalid or 'none'}. Use widths between 1 and 2 c - 3 = {max_width}")
        return self

"""Options of the probe: a text with sampled query rows, or a prompt."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from headscope.study.config import Lengths, Options

MAX_ROWS = 1024
"""Most query rows per document, and so most tokens of a prompt: every token of a prompt is a query row."""


class PatternsOptions(Options):
    """Top attended tokens of each head."""

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")
    rows: int = Field(
        64, ge=2, le=MAX_ROWS, description="query rows sampled per document, the same for all heads and models"
    )
    keys: int = Field(8, ge=1, le=64, description="keys of largest weight stored per row")
    prompt: str | None = Field(None, description="a short text to analyse instead; every token is a query row")
    prompt_file: str | None = Field(None, description="a file that holds such a text")

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """A prompt may have several lines."""
        super()._check_text(re.sub(r"[\t\n\r]", " ", value) if isinstance(value, str) else value)
        return value

    @model_validator(mode="after")
    def _check_text_options(self) -> "PatternsOptions":
        prompts = [name for name in ("prompt", "prompt_file") if getattr(self, name) is not None]
        if len(prompts) == 2:
            raise ValueError("'prompt' and 'prompt_file' cannot be combined. Give one of them")
        if prompts and (unused := {"lengths", "rows"} & self.model_fields_set):
            raise ValueError(
                f"'{min(unused)}' cannot be combined with a prompt: every token of a prompt is analysed. "
                f"Remove '{min(unused)}'"
            )
        return self

"""Which rows of which text to look at."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from headscope.study.config import Lengths, Options

MAX_ROWS = 1024
"""Rows of a document, and so tokens of a prompt, of which every one is a row."""


class PatternsOptions(Options):
    """Which tokens each head looks at."""

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")
    rows: int = Field(
        64, ge=2, le=MAX_ROWS, description="query rows sampled per document, the same for all heads and models"
    )
    keys: int = Field(8, ge=1, le=64, description="keys kept of a row, those of most weight")
    prompt: str | None = Field(None, description="a short text of your own instead, of which every row is kept")
    prompt_file: str | None = Field(None, description="a file that holds such a text")

    @field_validator("*")
    @classmethod
    def _tellable(cls, value: Any) -> Any:
        """A prompt may have several lines."""
        super()._check_text(re.sub(r"[\t\n\r]", " ", value) if isinstance(value, str) else value)
        return value

    @model_validator(mode="after")
    def _check_text_options(self) -> "PatternsOptions":
        asked = self.model_fields_set
        prompts = [name for name in ("prompt", "prompt_file") if getattr(self, name) is not None]
        if len(prompts) == 2:
            raise ValueError("give prompt or prompt_file, not both")
        if prompts and (more := {"lengths", "rows"} & asked):
            raise ValueError(f"{min(more)} says nothing of a prompt, of which every token is a row: leave it out")
        return self

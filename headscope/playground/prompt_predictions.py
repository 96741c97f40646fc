"""Results of the worker process as plain data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 2048
"""Most tokens of a prompt."""
MAX_PICTURE_TOKENS = 256
"""Largest number of tokens of a prompt whose attention patterns are shown."""


@dataclass(frozen=True, eq=False)
class PromptPrediction:
    """What a model, or the model without the ablated heads, makes of a prompt of L tokens.

    `losses` [L - 1] are those of the second token and later, in nats. `next_tokens` are probabilities of the next
    token by the name of the token, None if the model's tokenizer lacks it; the same tokens for all models.
    `next_texts` are their texts.
    """

    model: str
    is_ablated: bool
    token_texts: list[str]
    is_special: list[bool]
    losses: npt.NDArray[np.float32]
    next_tokens: dict[str, float | None]
    next_texts: dict[str, str]
    heads_by_layer: dict[int, int]
    """Number of query heads by layer number."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, mappings as pairs: a browser sorts the keys of an object that are numbers."""
        mappings = {name: [*value.items()] for name, value in vars(self).items() if isinstance(value, dict)}
        return vars(self) | mappings | {"losses": self.losses.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PromptPrediction":
        """The prediction that `to_json` wrote."""
        mappings = {name: dict(values[name]) for name in ("next_tokens", "next_texts", "heads_by_layer")}
        return cls(**values | mappings | {"losses": np.array(values["losses"], np.float32)})

    @property
    def label(self) -> str:
        """The model, and whether heads are ablated."""
        return f"{self.model}, ablated" if self.is_ablated else self.model

    @property
    def mean_loss(self) -> float:
        """Mean loss in nats per token; NaN for a prompt of one token."""
        return float(self.losses.mean()) if len(self.losses) else float("nan")

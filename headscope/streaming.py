"""The keys that a streaming head sees: the first and the most recent tokens; and what the KV cache of a layer keeps."""

import re
from dataclasses import dataclass

PREFIX = "streaming"


@dataclass(frozen=True)
class StreamingWindow:
    """Query i sees keys j < `sink` and keys with i - j < `recent`, in tokens (Xiao et al. 2024)."""

    sink: int
    recent: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 1:
            raise ValueError(f"{self} hides a head's own token. Give at least one recent token")

    @classmethod
    def parse(cls, text: str) -> "StreamingWindow":
        """Parse `streaming:S+R`, for example streaming:64+256. Raises ValueError for any other text."""
        match = re.fullmatch(rf"{PREFIX}:(\d{{1,7}})\+(\d{{1,7}})", text)
        if match is None:
            raise ValueError(
                f"'{text[:60]}' is not streaming:S+R, the first S and last R tokens. Write streaming:64+256"
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def description(self) -> str:
        """In words, as in "streaming attention to the first 64 and last 256 tokens"."""
        return f"streaming attention to the first {self.sink:,} and last {self.recent:,} tokens"

    def __str__(self) -> str:
        return f"{PREFIX}:{self.sink}+{self.recent}"


def is_streaming(component: str) -> bool:
    """Whether a component or kind of ablation is streaming attention."""
    return component.partition(":")[0] == PREFIX


@dataclass(frozen=True)
class LayerCache:
    """What the KV cache of transformers stores of one attention layer.

    `values` is the number of values of a token, keys and values of all KV groups together; 0 if the layer reads the
    keys of another one. `limit` is the largest number of tokens, of a window or chunk; None if all are stored.
    `has_groups` is False for latent attention, whose values all heads share: no KV group can drop a token of its own.
    """

    values: int
    limit: int | None
    has_groups: bool

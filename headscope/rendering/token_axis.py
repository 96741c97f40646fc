"""Axes of plots by position in a prompt, with the text of each token."""

from collections.abc import Iterable, Sequence
from typing import Any

from headscope.plots import style

MAX_TOKEN_LABELS = style.UPRIGHT_LABELS
"""Tokens of a prompt up to which the axis of a plot names each of them."""
MAX_PANEL_TOKEN_LABELS = 24
"""The same for each of several panels, and for a vertical axis."""
MAX_HOVER_TOKENS = 512
"""Tokens of a prompt up to which the hover text of a map has their texts."""


def token_axis(
    positions: Iterable[int], labels: Sequence[str], limit: int = MAX_TOKEN_LABELS, title: str = "position"
) -> dict[str, Any]:
    """Plotly settings of a horizontal axis by position: labels of all tokens, or numbers under the title if there are
    more than `limit`."""
    if len(labels) > limit:
        return {"title": {"text": title}}
    texts = [*map(escape_token_label, labels)]
    return {
        "tickvals": [int(position) for position in positions],
        "ticktext": texts,
        **style.turned_labels(texts, limit),
    }


def token_hover(labels: Sequence[str], row_count: int) -> tuple[dict[str, Any], str]:
    """Plotly settings of a heatmap of so many rows by position, and the place of the token in its hover template."""
    if len(labels) > MAX_HOVER_TOKENS:
        return {}, "position %{x}"
    return {"text": [[*map(escape_token_label, labels)]] * row_count}, "%{text}"


def escape_token_label(label: str) -> str:
    """A label of `token_labels` as plotly text on one line."""
    return style.escape_label(label, 200)

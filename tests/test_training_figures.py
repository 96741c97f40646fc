"""Figures of an adapter training, from small tables with known numbers."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support.refusals import assert_names

from probes.adapt import view as training

TRAINING = pd.DataFrame(
    {
        "adapter": "x",
        "step": [1, 2, 3],
        "context_length": [64, 64, 128],
        "loss": [4.0, 3.5, 3.0],
        "tokens": 64,
        "rate": 1.0,
    }
)
VALIDATION = pd.DataFrame(
    [
        {"adapter": "x", "step": step, "context_length": 64, "doc": doc, "position": position, "tokens": tokens}
        | {"nll": 4.0 - 0.1 * step * (1 + (doc == "b")) * (position == 64)}
        for step in (0, 1, 2)
        for doc in ("a", "b")
        for position, tokens in ((16, 16), (64, 48))
    ]
)


def test_training_loss_shows_every_step_and_marks_context_lengths() -> None:
    (line,) = training.plot_training_loss(TRAINING).data
    assert list(line.x) == [1, 2, 3]
    assert list(line.y) == [4.0, 3.5, 3.0]
    assert len(set(line.marker.symbol)) == 2


def test_validation_loss_is_the_change_from_step_zero_per_token() -> None:
    figure = training.plot_validation_loss(VALIDATION)
    line = next(trace for trace in figure.data if trace.mode == "lines+markers" or trace.name == "x")
    assert list(line.x) == [0, 1, 2]
    assert list(line.y) == pytest.approx([0.0, -0.15 * 48 / 64, -0.3 * 48 / 64])


def test_validation_loss_by_position_has_a_line_per_stored_step() -> None:
    figure = training.plot_validation_loss_by_position(VALIDATION, "x")
    assert [trace.name for trace in figure.data] == ["step 1", "step 2"]
    assert np.allclose(figure.data[1].y, [0.0, -0.3])


@pytest.mark.parametrize(
    ("plot", "table"), [(training.plot_training_loss, TRAINING), (training.plot_validation_loss, VALIDATION)]
)
def test_an_empty_table_gives_a_figure_with_the_reason(
    plot: Callable[[pd.DataFrame], go.Figure], table: pd.DataFrame
) -> None:
    assert plot(table).data
    for missing, named in ((table.head(0), ("data",)), (pd.DataFrame(), ("adapter", "step"))):
        empty = plot(missing)
        assert not empty.data
        (reason,) = empty.layout.annotations
        assert_names(reason.text, *named)

"""Private names of plotly: figures from settings that it need not check again."""

from typing import Any

import plotly.graph_objects as go

from headscope.compat.library_name import Library, LibraryName

PLOTLY = Library("plotly", ("7.1.0",))
VALIDATE = LibraryName(PLOTLY, "plotly.graph_objects:Figure._validate", "fast charts", example=go.Figure)


def unchecked_figure(settings: dict[str, Any]) -> go.Figure:
    """A figure from complete plotly settings, copied but not checked; plotly checks every later change.

    Plotly would convert some settings, so they must be as it stores them: arrays of numpy, nested dicts instead of
    names with underscores, and colour scales as pairs of position and colour.
    """
    figure = go.Figure(settings, _validate=False)
    for part in (figure, figure.layout, *figure.data):
        VALIDATE.of(part)
        part._validate = True
    return figure

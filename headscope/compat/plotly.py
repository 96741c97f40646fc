"""Private names of plotly: figures from settings that it need not check again."""

from typing import TYPE_CHECKING, Any

from headscope.compat.library_name import Library, LibraryName

if TYPE_CHECKING:
    import plotly.graph_objects as go

PLOTLY = Library("plotly", ("7.1.0",))


def _empty_figure() -> "go.Figure":
    import plotly.graph_objects as go

    return go.Figure()


VALIDATE = LibraryName(PLOTLY, "plotly.graph_objects:Figure._validate", "fast charts", example=_empty_figure)


def unchecked_figure(settings: dict[str, Any]) -> "go.Figure":
    """A figure from complete plotly settings, copied but not checked; plotly checks every later change.

    Plotly would convert some settings, so they must be as it stores them: arrays of numpy, nested dicts instead of
    names with underscores, and colour scales as pairs of position and colour.
    """
    import plotly.graph_objects as go

    figure = go.Figure(settings, **{VALIDATE.attribute: False})
    for part in (figure, figure.layout, *figure.data):
        VALIDATE.of(part)
        setattr(part, VALIDATE.attribute, True)
    return figure

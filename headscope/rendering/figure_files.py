"""Writes a chart to a file: an interactive page, or a vector or pixel image in the width of a paper's template."""

import importlib.util
import struct
import zlib
from pathlib import Path

import plotly.graph_objects as go

from headscope.base.output_files import Output
from headscope.errors import BadInput, ResourceMissing, did_you_mean
from headscope.plots.line_ends import restore_legend
from headscope.plots.selector import remove_menu
from headscope.plots.style import GRAPH_CONFIG
from headscope.rendering.blocks import Chart

IMAGE_FORMATS = ("pdf", "svg", "png", "webp", "jpg")
COLUMN_INCHES = {
    "icml": 3.25,
    "icml-wide": 6.75,
    "neurips": 5.5,
    "iclr": 5.5,
    "acl": 3.03,
    "acl-wide": 6.3,
    "ieee": 3.5,
    "ieee-wide": 7.16,
}
"""Width of a column of a template in inches; "wide" is the width of the text over both columns."""
PIXELS_PER_INCH = 96
"""Of CSS, in which plotly measures."""
FONT_SIZE = 8 * PIXELS_PER_INCH / 72
"""8 points, in px."""
PRINTED_MARGIN = 8
"""Space around a printed figure in px; plotly adds the room that labels of axes need."""
SCREEN_WIDTH, SCREEN_HEIGHT = 700, 450
"""Size in px of a figure that names none."""
MARK = b"headscope figure"
"""A comment in every figure."""
FIGURE = Output("a figure of headscope", MARK, "path")
LEAST_SHRINKAGE = 0.65
"""Height of a printed figure as a share of that on the screen, at least: rows of labels need their room."""
PIXEL_SCALE = 4
"""Pixels of a PNG, WebP or JPEG per px of the figure."""


def save_chart(chart: Chart, path: Path | str, width: str | float | None = None) -> Path:
    """Write the figure of a chart to a file whose ending names the format, and return its path.

    `width` is a template's column, such as "icml", or a number of inches: the figure then has 8-point labels and no
    title, which the caption of a paper replaces. HTML needs nothing else. Raises BadInput for another format or width,
    ResourceMissing for an image without the extra `export` or without a browser, which draws the image.
    """
    file = check_figure(path, width)
    kind = file.suffix.removeprefix(".").lower()
    figure = _fit_to_width(chart.picture if kind == "html" else remove_menu(chart.picture), width)
    if kind == "html":
        # The camera button writes what the browser draws, so that a page is a way to an SVG without the extra.
        content = figure.to_html(include_plotlyjs=True, config={**GRAPH_CONFIG, "displayModeBar": True}).encode()
    else:
        content = _draw_image(figure, kind, file)
    return FIGURE.write(file, _with_mark(content, kind))


def check_figure(path: Path | str, width: str | float | None = None) -> Path:
    """The path with "~" expanded. Raises BadInput as `save_chart` does, without drawing."""
    file = FIGURE.check(path)
    if file.suffix.removeprefix(".").lower() not in ("html", *IMAGE_FORMATS):
        raise BadInput(
            f"unknown figure format '{file.suffix}' of {file}. Use one of: .html, .{', .'.join(IMAGE_FORMATS)}"
        )
    _inches(width)
    return file


def _with_mark(content: bytes, kind: str) -> bytes:
    """The file with the mark of a figure, as a comment in its format."""
    if kind == "png":
        chunk = b"tEXtSoftware\0" + MARK
        framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        return content[:-12] + framed + content[-12:]  # the last 12 bytes end the image
    if kind == "jpg":
        return content[:2] + b"\xff\xfe" + struct.pack(">H", len(MARK) + 2) + MARK + content[2:]
    if kind == "webp":
        chunks = content[8:] + b"note" + struct.pack("<I", len(MARK)) + MARK  # of an even number of bytes
        return b"RIFF" + struct.pack("<I", len(chunks)) + chunks
    return content + (b"\n%%%s\n" if kind == "pdf" else b"\n<!-- %s -->\n") % MARK


def _inches(width: str | float | None) -> float | None:
    """The width in inches; None without one."""
    if width is None:
        return None
    if isinstance(width, str) and width not in COLUMN_INCHES:
        hint = did_you_mean(width, COLUMN_INCHES)
        raise BadInput(f"unknown width '{width}'{hint}. Use inches or one of: {', '.join(COLUMN_INCHES)}")
    inches = COLUMN_INCHES[width] if isinstance(width, str) else float(width)
    if not 1 <= inches <= 50:
        raise BadInput(f"width must be between 1 and 50 inches: {inches:g}. Use e.g. 3.25")
    return inches


def _fit_to_width(figure: go.Figure, width: str | float | None) -> go.Figure:
    """The figure, or a copy in the width of a column, with black 8-point labels and no title."""
    inches = _inches(width)
    if inches is None:
        return figure
    pixels = inches * PIXELS_PER_INCH
    printed = go.Figure(figure)
    restore_legend(printed)  # names at the ends of lines would take a third of a column
    shrinkage = max(pixels / (figure.layout.width or SCREEN_WIDTH), LEAST_SHRINKAGE)
    printed.update_xaxes(title_font_size=FONT_SIZE).update_yaxes(title_font_size=FONT_SIZE)
    return printed.update_layout(
        width=pixels,
        height=(figure.layout.height or SCREEN_HEIGHT) * min(shrinkage, 1),
        title=None,
        font={"size": FONT_SIZE, "color": "black"},
        margin=dict.fromkeys("lrtb", PRINTED_MARGIN),
        paper_bgcolor="white",
    )


def _draw_image(figure: go.Figure, kind: str, file: Path) -> bytes:
    """The image, which kaleido draws in Chrome or Chromium."""
    page = f"Or save {file.with_suffix('.html')}: its camera button writes an SVG"
    if importlib.util.find_spec("kaleido") is None:
        raise ResourceMissing(
            f"cannot draw {file}: kaleido is not installed. Run pip install 'headscope[export]'. {page}"
        )
    try:
        image: bytes = figure.to_image(kind, scale=1 if kind in ("pdf", "svg") else PIXEL_SCALE)
    except Exception as error:  # kaleido, choreographer and plotly each raise errors of their own
        if "chrome" not in f"{type(error).__name__} {error}".lower():
            raise
        raise ResourceMissing(
            f"cannot draw {file}: no Chrome or Chromium runs on this machine. Install one, or set BROWSER_PATH. {page}"
        ) from error
    return image

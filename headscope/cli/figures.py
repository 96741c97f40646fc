"""Charts of a report as files, for `headscope report --chart`."""

from pathlib import Path

from headscope import user_input
from headscope.errors import BadInput


def write_figures(paths: list[Path], topic: str, out: Path | None, width: str | None) -> None:
    """Write every chart of the combined runs that matches the topic, as `Run.charts` finds them, and print its file.

    Raises BadInput without a file, for a topic, format or width that does not exist, and for a heading that has tables
    only.
    """
    if out is None:
        raise BadInput("--chart writes a figure. Name its file, e.g. --out figure.pdf")
    from headscope.rendering import notebook
    from headscope.runs.run import combine_runs, open_runs

    run = combine_runs(open_runs(paths))
    run.check()
    charts = notebook.charts(run, topic)
    files = charts.files(user_input.expand_path(out, "--out"))
    if not files:
        raise BadInput(f"{user_input.quote(topic)} has tables and no chart. Use the title of a chart")
    for chart, file in zip(charts.charts, files, strict=True):
        print(f"Figure: {chart.save(file, _parse_width(width))}  {notebook.chart_title(chart)}")


def _parse_width(width: str | None) -> str | float | None:
    try:
        return None if width is None else float(width)
    except ValueError:
        return width

"""The command `export`, and charts of a report as files: scores of heads in the file formats of other tools."""

from pathlib import Path
from typing import Annotated

import typer

from headscope.base import user_input
from headscope.errors import BadInput

MAX_TOKENS = 2**24
"""Most tokens that a streaming head keeps."""


def write_figures(paths: list[Path], topic: str, out: Path | None, width: str | None) -> None:
    """Write every chart of the combined runs that matches the topic, as `Run.charts` finds them, and print its file.

    Raises BadInput without a file, for a topic, format or width that does not exist, and for a heading that has tables
    only.
    """
    if out is None:
        raise BadInput("--chart writes a figure. Name its file, e.g. --out figure.pdf")
    from headscope.rendering import figure_files, notebook
    from headscope.runs.run import combine_runs, open_runs

    figure_files.check_figure(out, _parse_width(width))
    run = combine_runs(open_runs(paths))
    run.check()
    charts = notebook.charts(run, topic)
    if not charts:
        raise BadInput(f"{user_input.quote(topic)} has tables and no chart. Use the title of a chart")
    for chart, file in zip(charts, charts.save(out, _parse_width(width)), strict=True):
        print(f"Figure: {file}  {notebook.chart_title(chart)}")


def _parse_width(width: str | None) -> str | float | None:
    try:
        return None if width is None else float(width)
    except ValueError:
        return width


def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One run directory.")],
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="duo (DuoAttention, kvpress), retrieval-head, headkv, qrhead, rtp-llm, lukv (kvpress LUKVPress), "
            "mha2mla, longrope, minference, csv, latex or json (a set of heads).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write, or folder for duo. It must not exist yet.")],
    score: Annotated[
        str | None,
        typer.Option(
            "--score",
            help="Column of the per-head table, such as retrieval or ess2_2048; for csv also several, separated by "
            "commas; for mha2mla mean_abs, rms or norm_product of rotary pairs; not for longrope and minference.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Label of the model; needed if the run has several.")
    ] = None,
    reduction: Annotated[
        str | None,
        typer.Option(
            "--reduction",
            help="Score of a KV group from its query heads, max or mean: duo, rtp-llm, lukv. [default: max]",
        ),
    ] = None,
    sink: Annotated[
        int | None,
        typer.Option(
            "--sink", min=0, max=MAX_TOKENS, help="First tokens that streaming heads keep: duo, rtp-llm. [default: 64]"
        ),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(
            "--recent",
            min=0,
            max=MAX_TOKENS,
            help="Last tokens that streaming heads keep: duo, rtp-llm. [default: 256]",
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--share",
            min=0,
            max=1,
            help="Share of KV groups that keep the whole context: rtp-llm. [default: 0.5]",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, max=1_000_000, help="Number of heads: qrhead, latex, json. [default: 16]"),
    ] = None,
) -> None:
    """Write a score of every head in the file format of another tool, for KV-cache compression or for a paper.

    A file PATH.headscope.json beside it (headscope.json in a folder) says where the scores come from: run, model,
    digest of the weights, and how query heads were reduced to KV groups.

    headscope export runs/RUN --format duo --score retrieval --model base --out pattern
    """
    if len(runs) > 1:
        raise BadInput(f"export takes one run, not {len(runs)}: {', '.join(map(str, runs))}. Give one of them")
    from headscope.runs.run import Run
    from headscope.scores import export_scores

    options = {"reduction": reduction, "sink": sink, "recent": recent, "share": share, "top": top}
    export_options = {name: value for name, value in options.items() if value is not None}
    path = export_scores(Run.open(runs[0]), file_format, out, score, model, **export_options)
    print(f"Export: {path}")

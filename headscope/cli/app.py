"""The command line `headscope`: its commands, and one-line errors. Everything heavy is imported on use."""

import errno
import io
import json
import os
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headscope.base import signals, user_input
from headscope.base.user_input import MAX_DOCUMENTS
from headscope.cli import bundle, checks, execute, export, plan, selfcheck
from headscope.cli.command_groups import Commands
from headscope.cli.flags import (
    EXAMPLES,
    All,
    GroupedCommand,
    Json,
    Out,
    PlaygroundModels,
    Quiet,
    example_maps,
    example_run,
)
from headscope.compat.typer import CLICK_EXCEPTION, NO_ARGUMENTS
from headscope.errors import BadInput, CannotWrite, HeadscopeError

if TYPE_CHECKING:
    pass

STUDY_FILES = Path(__file__).parents[1] / "study_files"

app = typer.Typer(
    name="headscope",
    cls=Commands,
    help="A microscope for the attention heads of language models.",
    epilog="Start with: headscope demo. Options of a command: headscope COMMAND --help. Version: headscope --version",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"headscope {version('headscope')}")
        raise typer.Exit


@app.callback()
def _global_options(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command(cls=GroupedCommand)
def demo(
    out: Out = Path("runs"),
    report: Annotated[
        Path, typer.Option("--report", help="HTML file to write the report to; an older report is replaced.")
    ] = Path("report.html"),
    docs: Annotated[
        int, typer.Option("--docs", min=1, max=MAX_DOCUMENTS, help="Number of documents per context length.")
    ] = 4,
    show_all: All = False,
    quiet: Quiet = False,
) -> None:
    """Measure the bundled model under four position schemes at 512 and 2,048 tokens, and write a report.

    The model is SmolLM2-135M-Instruct, quantised to four bits. The schemes are base, YaRN, YaRN without its attention
    factor, and AdaRoPE. Takes a few minutes on two cores. A model of the hub: headscope run --model base=ORG/NAME
    """
    from headscope.rendering.html_page import REPORT
    from headscope.study.config import read_study

    replace(REPORT, option="--report").check(report)  # before the minutes that the measurement takes
    study = read_study(STUDY_FILES / "demo.yaml", {"texts": {"docs": docs}})
    signals.announce_resume(True)
    run = execute(study, out, resume=True, quiet=quiet)  # an interrupted demo simply continues
    from headscope.rendering.console import print_line
    from headscope.rendering.terminal import print_summary, print_warnings

    print_warnings(run)
    print_summary(run, show_all)
    _write_report([run.path], report)
    print_line(f"Next: open the report in a browser, or explore the run head by head: headscope dash {out}")
    print_line(
        f"Then: headscope run --model base=smollm2-135m --model nope=smollm2-135m@nope --length 1024 --out {out}"
    )


@app.command(cls=GroupedCommand)
def dash(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUNS_DIR|RUN",
            show_default="the shipped example",
            help="Folder that holds runs, or the run to open first.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0 picks a free one.")
    ] = 8050,
    model: PlaygroundModels = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing: no notes, no tags, no kept prompts.")
    ] = False,
) -> None:
    """Explore runs in the browser: heads, model comparison, retrieval, influence, checkpoints, your own prompts.

    Local only: it listens on this machine and makes no network requests. New runs appear by themselves. With --model,
    the page Playground runs these models on prompts that you type. The app first shows the newest run of a folder. To
    see another one, or to compare several, choose them under "Combined runs". The app writes only what you keep:
    prompts of the playground as runs, and notes and tags in the folders of runs.
    """
    path = example_run() if directory is None else user_input.expand_path(directory, "directory")
    if not path.is_dir():
        raise BadInput(f"no directory '{directory}'. Check the path, or create a first run: headscope demo")
    from dashboards.app import serve
    from headscope.base.model_spec import ModelSpec
    from headscope.runs.run import Run, list_runs
    from headscope.study.config import parse_models

    models = parse_models(model or [])
    for spec in models.values():
        ModelSpec.parse(spec)
    path = path.resolve()
    folder = path.parent if (path / "run.json").is_file() else path
    if models and not any(isinstance(run, Run) for _, run in list_runs(folder)):
        raise BadInput(
            f"no finished run in '{directory}', which the app needs to open the playground. Create one, e.g. with "
            "headscope demo, or omit the directory to open the shipped example"
        )
    try:
        maps = example_maps() if path == example_run() else ()
        serve(path, port, models, read_only or path.is_relative_to(EXAMPLES), maps)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise CannotWrite(f"cannot listen on port {port}: {reason}. Choose another --port") from error


@app.command(cls=GroupedCommand)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories. Several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", show_default="report.html", help="File to write; an older one is replaced."),
    ] = None,
    chart: Annotated[
        str | None,
        typer.Option(
            "--chart",
            help="Instead write the charts of this heading, or with these words in their titles, to --out (.pdf, .svg, "
            ".png, .webp, .jpg or .html) and, if there are several, to files numbered -2, -3, ...",
        ),
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            help="With --chart: width of a paper's column, such as icml, or inches. [default: as on the screen]",
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML report of one or several runs, or a chart of it as a figure.

    headscope report runs/RUN --chart 'loss by position' --out loss.pdf --width icml
    """
    if chart is not None:
        export.write_figures(runs, chart, out, width)
    elif width is not None:
        raise BadInput(f"--width {width} is for a figure. Add --chart, or remove --width")
    else:
        _write_report(runs, out or Path("report.html"))


@app.command(cls=GroupedCommand)
def join(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Two or more run directories.")],
    out: Out = Path("runs"),
    name: Annotated[str, typer.Option("--name", help="Name appended to the run directory.")] = "joined",
    quiet: Quiet = False,
) -> None:
    """Combine several runs into one run directory, to share or ship it."""
    if not re.fullmatch(user_input.RUN_NAME_PATTERN, name):
        raise BadInput(f"invalid run name {user_input.quote(name)}. Use at most 100 letters, digits, - and _ in --name")
    from headscope.runs.run import Run
    from headscope.runs.writer import join_runs
    from headscope.study.progress import console_progress

    progress, opened = console_progress(quiet, can_resume=False), [Run.open(path) for path in runs]
    progress.start(len(opened), -1)  # a run is announced before it is read

    def announce(run_name: str) -> None:
        progress.advance(1)
        progress.set_activity(run_name)

    try:
        joined = join_runs(opened, out, name, announce)
    finally:
        progress.stop()
    print(f"Run: {joined.path}")


app.command(cls=GroupedCommand)(bundle.bundle)
app.command(cls=GroupedCommand)(export.export)
app.command(cls=GroupedCommand)(checks.compare)
app.command(cls=GroupedCommand)(checks.check)


@app.command("ls", cls=GroupedCommand)
def list_runs(
    directory: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs in a folder, newest first. Also list unfinished and damaged runs.

    It reads only the ends of the tables; headscope validate compares their whole content with its digests.
    """
    from headscope.errors import BadRun
    from headscope.runs.run import Run, unfinished_runs
    from headscope.runs.run import list_runs as finished_runs

    if not os.path.isdir(directory):
        raise BadInput(f"no directory '{directory}'. Check the path, or create a first run: headscope demo")
    if (directory / "run.json").is_file() or any(directory.glob("*.parquet")):
        raise BadInput(f"'{directory}' is a run, not a folder of runs. Use: headscope ls {directory.resolve().parent}")
    from headscope.rendering.console import bold, print_line
    from headscope.rendering.terminal import print_run_entry, run_to_dict

    entries: list[tuple[Path, Run | BadRun]] = []
    for path, run in finished_runs(directory):
        try:
            if isinstance(run, Run):
                run.check_footers()
            entries.append((path, run))
        except BadRun as error:
            entries.append((path, error))
    partial = {
        f".{name}.partial": f"unfinished, {cells} work item{'' if cells == 1 else 's'} stored. Repeat its command with "
        "--resume to continue"
        for name, cells in unfinished_runs(directory).items()
    }
    if as_json:
        rows = [
            run_to_dict(run, include_summary=False) if isinstance(run, Run) else {"path": str(path), "error": str(run)}
            for path, run in entries
        ]
        rows += [{"path": str(directory / name), "error": status} for name, status in partial.items()]
        print(json.dumps(rows))
        return
    if not entries and not partial:
        print_line(f"No runs in {directory} yet. Make one with: headscope demo")
    for name, status in partial.items():
        print_line(bold(name), "  ", status)
    for path, run in entries:
        if isinstance(run, Run):
            print_run_entry(run)
        else:
            print_line(bold(path.name), "  cannot be read: ", run)


@app.command(cls=GroupedCommand)
def validate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
) -> None:
    """Check run directories: digests, row counts, column types, value ranges, duplicate keys."""
    from headscope.runs.run import Run
    from headscope.runs.run_tables import validate as find_problems

    problems = [f"{path.name}: {problem}" for path in runs for problem in find_problems(Run.open(path))]
    for problem in problems:
        print(problem)
    if problems:
        problem_count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
        raise BadInput(f"{problem_count} in {_count_runs(runs)}. Measure the damaged runs again")
    print(f"{_count_runs(runs)} valid")


def _count_runs(runs: list[Path]) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


app.command(cls=GroupedCommand)(plan.plan)
app.command(cls=GroupedCommand)(plan.bench)
app.command(cls=GroupedCommand)(selfcheck.selfcheck)


def main() -> None:
    """Entry point. A user's mistake is one line on standard error and an exit code, never a traceback.

    Ctrl-C and SIGTERM also end with one line (`headscope.base.signals`).
    """
    signals.install_handlers()
    if sys.stdout is None:  # closed by the shell with >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the end)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a folder name may not be encodable
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # a full or closed output must not fail after this function
        if code == signals.TYPER_EXIT_CODE:
            raise KeyboardInterrupt
        sys.exit(code)
    except HeadscopeError as error:
        _print_last_line(f"headscope: {error}")
        sys.exit(error.exit_code)
    except NO_ARGUMENTS.resolve() as error:
        error.show()
        sys.exit(error.exit_code)
    except CLICK_EXCEPTION.resolve() as error:
        print(f"headscope: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _print_last_line(signals.message())
        sys.exit(signals.EXIT_CODE)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            _print_last_line("headscope: the working directory was deleted. Change to a folder that exists")
            sys.exit(BadInput.exit_code)
        _exit_without_output(error)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _print_last_line(text: str) -> None:
    """Print why the command ends, unless a second signal has printed it."""
    if signals.claim_last_line():
        print(text, file=sys.stderr, flush=True)


def _exit_without_output(error: OSError) -> None:
    """Exit after standard output could not be written: silently if its reader is gone, else with one line.

    Raises the error if it has another cause.
    """
    if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes the rest at exit
    if error.errno == errno.EPIPE:
        sys.exit(1)  # as typer does
    print("headscope: cannot write to standard output: no space left. Free some space", file=sys.stderr)
    sys.exit(CannotWrite.exit_code)


def _write_report(paths: list[Path], out: Path) -> None:
    from headscope.rendering import write_report
    from headscope.runs.run import open_runs

    print(f"Report: {write_report(open_runs(paths), out)}")


if __name__ == "__main__":
    main()

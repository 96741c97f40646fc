"""The commands of the probes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.commands.executing import execute, finish
from headscope.commands.flags import Config, Device, Docs, Dtype, Json, Limit, Models, Out, Quiet, Resume, Seed, Text


def needle(
    model: Models = None,
    text: Text = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="How many, or a list: 512,2048 (just one: 512,). \\[default: 4]")
    ] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Longest context. \\[default: 2048]")] = None,
    depths: Annotated[str | None, typer.Option("--depths", help="How many, or a list: 0,0.5,1. \\[default: 5]")] = None,
    needles: Annotated[int | None, typer.Option("--needles", help="How many needles. \\[default: 6]")] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Needles, JSON lines: name, question, opening, fact.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Haystacks a needle. \\[default: 1]")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="strict or wu. \\[default: strict]")] = None,
    template: Annotated[str | None, typer.Option("--template", help="prefix, plain, chat. \\[default: prefix]")] = None,
    out: Out = Path("runs"),
    config: Config = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Needle-in-a-Haystack: does the model find a hidden fact, and which heads copy it.

    The paper's grid: [bold]headscope needle --lengths 20 --max-length 10000 --depths 10 --needles 1[/bold]
    """
    from headscope.config import parse_models, read_study

    section = {"max_length": max_length, "needles": needles, "file": file, "seeds": seeds, "mode": mode}
    section |= {"lengths": _listed(lengths), "depths": _listed(depths), "template": template}
    shared = {"texts": {"source": text}, "seed": seed, "device": device, "dtype": dtype}
    study = read_study(config, {"name": None if config else "needle", **shared, "needle": section})
    if model:
        study = study.model_copy(update={"models": parse_models(model)})
    finish(execute(study, out, resume, quiet or as_json), as_json)


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
    finish(execute(study, out, resume, quiet or as_json), as_json)


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


def _listed(value: str | None) -> Any:
    """A count as it is, a comma-separated list or a fraction as a list."""
    return value.strip(",").split(",") if value and ("," in value or "." in value) else value

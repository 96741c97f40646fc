"""Notes on the models of a run: which are shown, and what makes their results differ from the checkpoint's."""

import re
from collections.abc import Iterator

from headscope.base.model_identity import INT8, Comparison, ModelIdentity
from headscope.results.result import Result
from headscope.results.words import join_words
from headscope.runs.columns import all_tables
from headscope.runs.run import Run
from headscope.runs.summary import (
    beyond_native_context,
    default_models,
    differing_texts,
    equal_models,
    model_identity,
    models_with_same_tokens,
)
from headscope.runs.trainings import latest_checkpoints, training_checkpoints

PART_OF_TEXT = re.compile(r"(.+) \(\d+ of \d+\)")
"""Name of a document that is a part of a text."""
MAX_OMITTED = 6
"""Maximum number of omitted models that are listed."""


def model_notes(run: Run) -> Iterator[Result]:
    """The notes on all models of a run."""
    if unread := sorted({*run.tables} - {*all_tables()}):
        yield Result(question="models.unread_tables", details={"tables": unread})
    if omitted := _omitted(run):
        yield omitted
    if versions := _several_versions(run):
        yield Result(question="models.versions", details={"versions": versions})
    first = run.models[0] if run.models else ""
    same_tokens = models_with_same_tokens(run, first) if first else []
    if other_tokens := [label for label in run.models if label not in same_tokens]:
        yield Result(question="models.tokenizers", baseline=first, details={"others": other_tokens})
    yield from _different_openings(run)
    for label, length, native in beyond_native_context(run):
        lengths = {"context_length": length, "native_context": native}
        yield Result(question="models.beyond_native_context", model=label, where=lengths)
    for entry in run.manifest["models"]:
        label = entry["label"]
        if "compatibility mode" in (entry.get("bridge") or ""):
            yield Result(question="models.compatibility_mode", model=label)
        yield from _identity_notes(label, model_identity(run, label))
        for source, origin in (entry.get("other_weights") or {}).items():
            details = {"source": source, "origin": origin[:12]}
            yield Result(question="models.other_weights", model=label, details=details)
    for label, other, comparison in equal_models(run):
        yield _equal_models(label, other, comparison)
    if (parts := _parts_of_texts(run)) is not None:
        yield parts
    if other_texts := differing_texts(run):
        yield Result(question="models.texts", baseline=first, details={"others": other_texts})


def _different_openings(run: Run) -> Iterator[Result]:
    """The models whose texts begin with a special token where those of the first do not, or the reverse.

    Tokenizers may name their BOS token differently, so only its presence counts.
    """
    openings = {entry["label"]: entry.get("opening_tokens") for entry in run.manifest["models"]}
    known = [(label, opening) for label, opening in openings.items() if opening is not None]
    for label, opening in known[1:]:
        first_label, first_opening = known[0]
        if bool(opening) != bool(first_opening):
            texts = ["".join(tokens) or "no special token" for tokens in (opening, first_opening)]
            details = {"opening": texts[0], "baseline_opening": texts[1]}
            yield Result(question="models.bos", model=label, baseline=first_label, details=details)


def _parts_of_texts(run: Run) -> Result | None:
    """How many documents are parts of a text that was cut, and of how many texts; None if no text was cut."""
    by_document = [name for name in run.tables if name in all_tables() and "doc" in all_tables()[name].keys]
    rows = {name: run.manifest["tables"][name]["rows"] for name in by_document}
    smallest = sorted(by_document, key=lambda name: rows[name])[:1]  # reading a large one would take seconds
    documents = {str(doc) for name in smallest for doc in run.distinct(name, ["doc"])["doc"]}
    texts = [match[1] for document in documents if (match := PART_OF_TEXT.fullmatch(document))]
    numbers = {"pieces": len(texts), "documents": len(documents), "texts": len({*texts})}
    return Result(question="models.text_parts", details=numbers) if texts else None


def _omitted(run: Run) -> Result | None:
    """Which models sentences and charts leave out; None if they show all."""
    default_labels, models = default_models(run), run.manifest["models"]
    omitted = [label for label in run.models if label not in default_labels]
    if not omitted:
        return None
    verb = "is" if len(omitted) == 1 else "are"
    trainings = training_checkpoints(models)["training"].nunique()
    if trainings > 1 and not {*omitted} & {*latest_checkpoints(models)}:
        count = "1 earlier checkpoint" if len(omitted) == 1 else f"{len(omitted)} earlier checkpoints"
        details = {"trainings": trainings, "omitted": f"{count} {verb}"}
        return Result(question="models.earlier_checkpoints", details=details)
    names = join_words(omitted) if len(omitted) <= MAX_OMITTED else f"{len(omitted)} models"
    details = {"shown": len(default_labels), "models": len(run.models), "omitted": f"{names} {verb}"}
    return Result(question="models.omitted", details=details)


def _several_versions(run: Run) -> str:
    """The libraries whose version changed while a run was measured, with the number of work items; "" if none did."""
    sets = [entry for part in run.parts for entry in part.manifest.get("versions_by_cell", ())]
    names = [name for name in (sets[0]["versions"] if sets else ()) if len({e["versions"].get(name) for e in sets}) > 1]
    if not names:
        return ""
    counts = [
        f"{len(entry['cells'])} work items with "
        + join_words([f"{name} {entry['versions'].get(name)}" for name in names])
        for entry in sets
    ]
    return "; ".join(counts)


def _identity_notes(label: str, identity: ModelIdentity) -> Iterator[Result]:
    """What makes the results of a model differ from those of its checkpoint."""
    if identity.contexts:
        yield Result(question="models.contexts", model=label, details={"contexts": [*identity.contexts]})
    if identity.hooks:
        yield Result(question="models.hooks", model=label, details={"hooks": [*identity.hooks]})
    if identity.quantization == INT8:
        yield Result(question="models.int8", model=label)


def _equal_models(first: str, second: str, comparison: Comparison) -> Result:
    """What two models with equal weights and position schemes share, what differs, and what is unknown."""
    differences = [difference for difference in comparison.differences if not difference.startswith("weights (")]
    details = {
        "rounding": comparison.weights.removeprefix("equal").replace(" after", ", equal after"),
        "limit": ", as far as the run records" if comparison.unknown else "",
        "differences": differences,
        "unknown": [*comparison.unknown],
    }
    question = "models.equal_weights" if differences else "models.equal"
    return Result(question=question, model=first, baseline=second, details=details)

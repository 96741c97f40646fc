"""Two runs paired: for each model, result and sample of the later run, the matching one of the earlier run."""

from collections.abc import Mapping
from functools import cached_property

from headscope.results.collection import results_with_parts
from headscope.results.result import Result
from headscope.runs.run import Run

MATCHING = "Models are matched by label, unless both runs have one model"
_TEXT_INPUTS = ("the texts", "the haystacks", "the needles", "the prompt", "the questions")
"""Beginnings of the names of inputs that are texts or prompts, in run.json."""


class RunPair:
    """An earlier and a later run. Models are matched by label; two runs of one model each are paired whatever their
    labels."""

    def __init__(self, before: Run, after: Run) -> None:
        self.before, self.after = before, after
        has_one_model = len(before.models) == len(after.models) == 1
        self._labels = dict(zip(after.models, before.models, strict=True)) if has_one_model else {}
        self._documents = tuple(_documents(run) for run in (before, after))
        prompts = _text_inputs(before, {})
        self._has_same_prompts = bool(prompts) and prompts == _text_inputs(after, self._labels)

    def earlier_label(self, model: str) -> str:
        """The label in the earlier run of a model of the later one."""
        return self._labels.get(model, model)

    def partner(self, after: Result) -> Result | None:
        """The answer of the earlier run to the same question, for the same model and conditions; None without one."""
        question, model, baseline, *conditions = after.key
        return self._earlier.get((question, self.earlier_label(model), self.earlier_label(baseline), *conditions))

    @cached_property
    def _earlier(self) -> Mapping[tuple[str, ...], Result]:
        """The results of the earlier run by key; of several with one key the one that is no part of another result."""
        return {result.key: result for result in reversed([*results_with_parts(self.before)])}

    def same_samples(self, before: Result, after: Result) -> list[str]:
        """The names of the documents, pairs or trials that both results have and that are equal, by their digests.

        Samples without a digest in run.json count as equal only if both runs have the same texts and prompts.
        """
        old, new = (
            documents.get(result.model, {}) for documents, result in zip(self._documents, (before, after), strict=True)
        )
        return [
            name
            for name in after.by_sample
            if name in before.by_sample
            and (old[name] == new[name] if name in old and name in new else self._has_same_prompts)
        ]


def _documents(run: Run) -> dict[str, dict[str, str]]:
    return {model["label"]: model.get("documents_sha256") or {} for model in run.manifest["models"]}


def _text_inputs(run: Run, labels: Mapping[str, str]) -> dict[str, str]:
    """Digests of the texts and prompts of a run, with the models by their labels in the earlier run."""
    inputs = {}
    for part in run.parts:
        for name, digest in (part.manifest.get("inputs") or {}).items():
            if name.startswith(_TEXT_INPUTS):
                renamed = name
                for new, old in labels.items():
                    renamed = renamed.replace(f"'{new}'", f"'{old}'")
                inputs[renamed] = digest
    return inputs

"""Heads that an option names, and kinds of ablation, as units and edits of the models of a study."""

from collections.abc import Sequence
from typing import Any

from headscope.base.ablation_names import MEAN_OF_TEXT
from headscope.base.model_identity import AcceptedWeights
from headscope.interventions.ablation import parse_ablation, reference_outputs, reference_tokens
from headscope.interventions.heads import layer_heads, refuse_other_head_set
from headscope.interventions.kinds import Replace, mean_over_tokens
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.runs.head_names import HEADS_OF_WEIGHTS, parse_heads
from headscope.study.context import StudyContext


class NamedHeads:
    """The heads of names such as L18H6, file:FILE and run:FOLDER:STATISTIC:COUNT, read once.

    Files and runs are recorded as inputs of the study, each by its name, so that those of several probes are all
    compared when a run resumes. Raises as `parse_heads` does.
    """

    def __init__(self, context: StudyContext, names: Sequence[str], weights: AcceptedWeights = "same"):
        self.context, self._weights = context, weights
        self._sets = {name: parse_heads(name) for name in names}
        for name, heads in self._sets.items():
            if name.startswith(("file:", "run:")):
                context.record_input(f"heads '{name}'", [",".join(heads.identifiers).encode()])

    @property
    def identifiers(self) -> list[str]:
        """The names of all heads, each once."""
        return [*dict.fromkeys(name for heads in self._sets.values() for name in heads.identifiers)]

    def of_name(self, name: str) -> list[str]:
        """The heads of one of the names."""
        return self._sets[name].identifiers

    def check(self, model: Model, label: str) -> None:
        """Raise BadInput for heads that the model does not have, and for heads that were measured on other weights than
        the model's, unless the options allow them; then record it."""
        for name, heads in self._sets.items():
            source = f"head set '{heads if name.startswith(HEADS_OF_WEIGHTS) else name}'"
            layer_heads(model, heads)
            if refuse_other_head_set(model, heads, self._weights, source, label):
                self.context.record_other_weights(label, source, heads.model_digests.label)


class StudyAblations:
    """Kinds of edit by name; the means of the reference text are kept for one model."""

    def __init__(self, context: StudyContext):
        self.context = context
        self._tokens: dict[str, Sequence[int]] = {}
        self._mean: tuple[str, Replace] | None = None

    def check(self, kinds: Sequence[str], label: str) -> list[Any]:
        """The kinds of edit before the model runs, None for those that need outputs; reads its reference text.

        Raises BadInput for a text that names no kind. A reference text is an input of the study.
        """
        if MEAN_OF_TEXT in kinds:
            self._reference_tokens(label)
        return [parse_ablation(kind, self.context.seed) for kind in kinds]

    def kind(self, kind: str, label: str, model: Model) -> Any:
        """The kind of edit for a model, whose means are those under its position scheme; None for resample."""
        if kind != MEAN_OF_TEXT:
            return parse_ablation(kind, self.context.seed)
        if self._mean is None or self._mean[0] != label:
            tokens = self._reference_tokens(label)
            with attached(model):
                outputs = reference_outputs(model, range(model.geometry.layers), tokens)
            self._mean = (label, mean_over_tokens(outputs, MEAN_OF_TEXT))
        return self._mean[1]

    def _reference_tokens(self, label: str) -> Sequence[int]:
        """The tokens of the reference text of a model."""
        if label not in self._tokens:
            model, tokenizer = self.context.model(label), self.context.tokenizer(label)
            self._tokens[label] = reference_tokens(model, tokenizer, self.context.study.texts.source)
            self.context.record_input(f"reference text of '{label}'", [self._tokens[label]])
        return self._tokens[label]

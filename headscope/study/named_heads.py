"""Heads that an option names, as units of the models of a study."""

from collections.abc import Sequence

from headscope.model_identity import AcceptedWeights, refuse_other_weights
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
        """Raise BadInput for heads that were measured on other weights than the model's, unless the options allow them;
        then record it."""
        for name, heads in self._sets.items():
            source = f"head set '{heads if name.startswith(HEADS_OF_WEIGHTS) else name}'"
            if refuse_other_weights(source, heads.model_digests, model.identity, label, self._weights):
                self.context.record_other_weights(label, source, heads.model_digests.label)

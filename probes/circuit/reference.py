"""Reference prompts of a set of prompts: which ones replace the outputs of ablated heads, and how many there are."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

import numpy as np

from headscope.base.ablation_names import MEAN_OF_PROMPTS
from headscope.errors import BadInput
from headscope.interventions.circuit import (
    ClassedPrompt,
    LayerOutputs,
    ReferenceMeans,
    no_outputs,
    outputs_of_prompt,
    token_classes,
)
from headscope.positions.model import Model
from headscope.prompts.pair_sets import PairSet
from headscope.prompts.pairs import TokenPair, common_suffix_length
from headscope.runs.aggregation import MIN_DOCUMENTS
from probes.circuit.declaration import CircuitOptions

log = logging.getLogger("headscope")


class Reference:
    """The reference prompts of `pairs`: the corrupted prompts of the set `reference`."""

    def __init__(self, options: CircuitOptions, seed: int, pairs: PairSet, reference: PairSet):
        self.options, self.seed, self.name = options, seed, reference.name
        self.prompts = [pairs.build(index) for index in range(len(pairs))]
        is_used = options.complement != "zero"
        self.others = [reference.build(index) for index in range(len(reference))] if is_used else []

    @cached_property
    def counts(self) -> list[int]:
        """The number of reference prompts of every prompt: in its mean, or drawn; 0 without reference prompts.

        By span, it is that of the rarest class of the prompt's tokens.
        """
        if self.options.complement == "resample":
            return [len(self._draws_for(index)) for index in range(len(self.prompts))]
        known = Counter(name for other in self._used for name in {*self._reference_classes(other)})
        counts = []
        for pair in self.prompts:
            own = Counter(name for other in self._own(pair) for name in {*self._reference_classes(other)})
            counts.append(min(known[name] - own[name] for name in self._classes(pair)))
        return counts

    @cached_property
    def _used(self) -> list[TokenPair]:
        """The reference prompts that can replace outputs: by position, those as long as a prompt."""
        lengths = {len(pair.clean) for pair in self.prompts}
        return [other for other in self.others if self.options.by == "span" or len(other.corrupted) in lengths]

    @cached_property
    def _by_ids(self) -> dict[tuple[int, ...], list[TokenPair]]:
        by_ids: dict[tuple[int, ...], list[TokenPair]] = {}
        for other in self._used:
            by_ids.setdefault(tuple(other.corrupted.tolist()), []).append(other)
        return by_ids

    def check(self, label: str) -> None:
        """Raise BadInput for a prompt without reference prompts; warn of too few, with the label of the model."""
        if self.options.complement == "zero":
            return
        for pair, count in zip(self.prompts, self.counts, strict=True):
            if not count:
                raise self._missing(pair)
        needed = self.options.draws if self.options.complement == "resample" else MIN_DOCUMENTS
        few = {len(pair.clean): count for pair, count in zip(self.prompts, self.counts, strict=True) if count < needed}
        if not few:
            return
        lengths = ", ".join(f"{length} tokens ({few[length]})" for length in sorted(few))
        if self.options.complement == "resample":
            log.warning(
                "%s: the reference set '%s' has fewer than the %d draws besides a prompt's own corrupted prompt, for "
                "prompts of %s. Use a larger reference set, or fewer draws",
                *(label, self.name, needed, lengths),
            )
        else:
            log.warning(
                "%s: the reference set '%s' has fewer than %d prompts in the mean besides a prompt's own, for prompts "
                "of %s. Use a larger reference set%s",
                *(label, self.name, needed, lengths),
                "" if self.options.by == "span" else ", or by 'span'",
            )

    def replacements(self, model: Model, memory_bytes: float) -> Iterator[Sequence[LayerOutputs]]:
        """For each prompt the replaced outputs: one mean, one reference prompt per draw, or none for zeros."""
        if self.options.complement == "zero":
            yield from ([no_outputs()] for _ in self.prompts)
        elif self.options.complement == "resample":
            for index in range(len(self.prompts)):
                drawn = self._draws_for(index)
                yield [outputs_of_prompt(model, ids, memory_bytes / len(drawn)) for ids in drawn]
        else:
            means = ReferenceMeans(model, self._with_classes(self._used))
            for pair in self.prompts:
                yield [means.of_prompt(self._classes(pair), self._with_classes(self._own(pair)), memory_bytes)]

    def _classes(self, pair: TokenPair) -> Sequence[Hashable]:
        """The classes of a prompt's tokens, whose outputs are averaged together."""
        if self.options.by == "span":
            return [*map(str, token_classes(pair))]
        return _positions(len(pair.clean))

    def _reference_classes(self, pair: TokenPair) -> Sequence[Hashable]:
        """The classes of the tokens of a pair's reference prompt."""
        return corrupted_classes(pair) if self.options.by == "span" else _positions(len(pair.corrupted))

    def _with_classes(self, others: Sequence[TokenPair]) -> list[ClassedPrompt]:
        return [(other.corrupted.tolist(), self._reference_classes(other)) for other in others]

    def _own(self, pair: TokenPair) -> list[TokenPair]:
        """The reference prompts that are the prompt itself, clean or corrupted, whose outputs keep its words."""
        own = {tuple(pair.clean.tolist()), tuple(pair.corrupted.tolist())}
        return [other for ids in sorted(own) for other in self._by_ids.get(ids, [])]

    def _draws_for(self, index: int) -> list[list[int]]:
        """The reference prompts of the length of one prompt that are drawn with the study's seed, to resample."""
        pair = self.prompts[index]
        own = [other.corrupted.tolist() for other in self._own(pair)]
        prompts = [other.corrupted.tolist() for other in self.others if len(other.corrupted) == len(pair.clean)]
        prompts = [ids for ids in prompts if ids not in own]
        order = np.random.default_rng([self.seed, index]).permutation(len(prompts))
        return [prompts[number] for number in order[: self.options.draws]]

    def _missing(self, pair: TokenPair) -> BadInput:
        """The error for a prompt without reference prompts."""
        if self.options.by == "span":
            own = self._own(pair)
            known = {name for other in self.others if other not in own for name in self._reference_classes(other)}
            missing = sorted({*map(str, self._classes(pair))} - {*map(str, known)})
            return BadInput(
                f"the reference set '{self.name}' has no tokens of the span '{missing[0]}' of '{pair.name}' in other "
                "prompts. Name the span there, or use by 'position'"
            )
        other_way = (
            "by 'span'" if self.options.complement == MEAN_OF_PROMPTS else f"complement '{MEAN_OF_PROMPTS}' by 'span'"
        )
        length, lengths = len(pair.clean), sorted({len(other.corrupted) for other in self.others})
        if length in lengths:
            return BadInput(
                f"the reference set '{self.name}' has only the prompt '{pair.name}' itself with {length} tokens, which "
                f"is not in its own mean or draws. Use a larger reference set, or {other_way}"
            )
        return BadInput(
            f"the reference set '{self.name}' has no prompt of {length} tokens, the length of '{pair.name}': its "
            f"prompts have {', '.join(map(str, lengths))}. Use another reference set, or {other_way}"
        )


def _positions(length: int) -> list[Hashable]:
    """The classes of the tokens of a prompt by position: prompts of another length have others."""
    return [(length, position) for position in range(length)]


def corrupted_classes(pair: TokenPair) -> list[str | None]:
    """The class of every token of the corrupted prompt: that of the clean prompt's token in its place.

    If the prompts differ in length, the tokens between their common start and end have the class of the tokens that
    they replace, or None if these are of no or several classes.
    """
    classes: list[str | None] = [*map(str, token_classes(pair))]
    if pair.has_equal_lengths:
        return classes
    most = min(len(pair.clean), len(pair.corrupted)) - pair.aligned
    start = common_suffix_length(pair.clean[:most][::-1], pair.corrupted[:most][::-1])
    end = len(pair.clean) - pair.aligned
    replaced = {*classes[start:end]}
    between = replaced.pop() if len(replaced) == 1 else None
    return [*classes[:start], *[between] * (len(pair.corrupted) - pair.aligned - start), *classes[end:]]

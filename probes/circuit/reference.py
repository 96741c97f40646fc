"""Reference prompts of a set of prompts: which ones replace the outputs of ablated heads, and how many there are."""

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
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
from headscope.study.option_rules import options_without_effect
from probes.circuit.declaration import CircuitOptions

log = logging.getLogger("headscope")
MEANS = ({"complement": MEAN_OF_PROMPTS, "by": "span"}, {"complement": MEAN_OF_PROMPTS, "by": "position"})
"""Options of the complements that messages advise, if these run."""


class Reference:
    """The reference prompts of `pairs`: the corrupted prompts of the set `reference`."""

    def __init__(self, options: CircuitOptions, seed: int, pairs: PairSet, reference: PairSet):
        self.options, self.seed, self.name = options, seed, reference.name
        self._sets = pairs, reference
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

    def check(self, label: str, references: Collection["Reference"]) -> None:
        """Raise BadInput for a prompt without reference prompts; warn of too few, with the label of the model.

        `references` are those of all sets and models of the study, with which the advice must run.
        """
        if self.options.complement == "zero":
            return
        for pair, count in zip(self.prompts, self.counts, strict=True):
            if not count:
                raise BadInput(f"{self._describe_missing(pair)}, or {_other_complement(references)}")
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
                ", or --by span" if self.options.by == "position" and _all_run(references, MEANS[0]) else "",
            )

    def replaced_by(self, complement: Mapping[str, str]) -> "Reference":
        """The same prompts with other options of the complement."""
        return Reference(self.options.model_copy(update=complement), self.seed, *self._sets)

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

    def _describe_missing(self, pair: TokenPair) -> str:
        """What is wrong with the reference prompts of a prompt without any, and how to change them."""
        own, length = self._own(pair), len(pair.clean)
        others = [other for other in self.others if other not in own]
        if not others:
            return (
                f"the reference set '{self.name}' has only the prompt '{pair.name}' itself, which is not in its own "
                "mean or draws. Use a larger reference set"
            )
        if self.options.by == "span":
            known = {name for other in others for name in self._reference_classes(other)}
            missing = next(name for name in sorted(map(str, self._classes(pair))) if name not in known)
            return (
                f"the reference set '{self.name}' has no tokens of the span '{missing}' of '{pair.name}' in other "
                "prompts. Name the span there"
            )
        lengths = sorted({len(other.corrupted) for other in others})
        return (
            f"the reference set '{self.name}' has no other prompt of {length} tokens, the length of '{pair.name}': the "
            f"others have {', '.join(map(str, lengths))}. Use another reference set"
        )


def _all_run(references: Collection[Reference], complement: Mapping[str, str]) -> bool:
    """Whether every prompt has reference prompts with these options of the complement."""
    return all(count for reference in references for count in reference.replaced_by(complement).counts)


def _other_complement(references: Collection[Reference]) -> str:
    """The advice to use the first other complement that runs: a mean, else zeros."""
    complement = next((mean for mean in MEANS if _all_run(references, mean)), {"complement": "zero"})
    options = next(iter(references)).options
    changed = [f"--{name} {value}" for name, value in complement.items() if getattr(options, name) != value]
    removed = options_without_effect(options.model_copy(update=complement))
    return f"use {' '.join(changed)}{' without ' if removed else ''}{' and '.join(f'--{name}' for name in removed)}"


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

"""Reference prompts of a set of prompts: which ones replace the outputs of ablated heads, and how many there are."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from headscope.errors import BadInput
from headscope.patching.complement_ablation import (
    LayerOutputs,
    mean_by_position,
    mean_by_span,
    outputs_by_class,
    outputs_of_prompt,
    token_classes,
)
from headscope.positions.model import Model
from headscope.prompts.pair_sets import PairSet
from headscope.prompts.pairs import TokenPair
from headscope.runs.aggregation import MIN_DOCUMENTS
from probes.circuit.schema import CircuitOptions

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
        if self.options.by == "span":
            known = Counter(name for other in self.others for name in {*token_classes(other).tolist()})
            return [min(known[name] for name in token_classes(pair).tolist()) for pair in self.prompts]
        return [len(self._ids_for(index)) for index in range(len(self.prompts))]

    @cached_property
    def _ids_by_length(self) -> dict[int, list[list[int]]]:
        by_length: dict[int, list[list[int]]] = {}
        for other in self.others:
            by_length.setdefault(len(other.corrupted), []).append(other.corrupted.tolist())
        return by_length

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
                "%s: the reference set '%s' has fewer than %d prompts in the mean, for prompts of %s; a mean of one "
                "may be the prompt's own corrupted run. Use a larger reference set%s",
                *(label, self.name, needed, lengths),
                "" if self.options.by == "span" else ", or by 'span'",
            )

    def replacements(self, model: Model) -> list[Sequence[LayerOutputs]]:
        """For each prompt the replaced outputs: one mean, one reference prompt per draw, or none for zeros."""
        if self.options.complement == "zero":
            return [[{}] for _ in self.prompts]
        if self.options.complement == "resample":
            return [
                [outputs_of_prompt(model, ids) for ids in self._ids_for(index)] for index in range(len(self.prompts))
            ]
        if self.options.by == "span":
            means = mean_by_span(model, ((pair.corrupted.tolist(), token_classes(pair)) for pair in self.others))
            return [[outputs_by_class(means, token_classes(pair))] for pair in self.prompts]
        first = {len(pair.clean): index for index, pair in reversed([*enumerate(self.prompts)])}
        of_length = {length: mean_by_position(model, self._ids_for(first[length])) for length in sorted(first)}
        return [[of_length[len(pair.clean)]] for pair in self.prompts]

    def _ids_for(self, index: int) -> list[list[int]]:
        """Reference prompts of the length of one prompt: all for a mean; to resample, drawn with the study's seed.

        The draws leave out the prompt's own corrupted prompt, which keeps the words of the clean one.
        """
        pair = self.prompts[index]
        prompts = self._ids_by_length.get(len(pair.clean), [])
        if self.options.complement != "resample":
            return prompts
        prompts = [ids for ids in prompts if ids != pair.corrupted.tolist()]
        order = np.random.default_rng([self.seed, index]).permutation(len(prompts))
        return [prompts[number] for number in order[: self.options.draws]]

    def _missing(self, pair: TokenPair) -> BadInput:
        """The error for a prompt without reference prompts."""
        if self.options.by == "span":
            known = {name for other in self.others for name in token_classes(other).tolist()}
            missing = sorted({*token_classes(pair).tolist()} - known)
            return BadInput(
                f"the reference set '{self.name}' has no tokens of the span '{missing[0]}' of '{pair.name}'. Name the "
                "span there, or use by 'position'"
            )
        length, lengths = len(pair.clean), sorted(self._ids_by_length)
        if length in lengths:
            return BadInput(
                f"the reference set '{self.name}' has only the corrupted prompt of '{pair.name}' itself with {length} "
                "tokens: no other can be drawn. Use a larger reference set, or complement 'mean' by 'span'"
            )
        return BadInput(
            f"the reference set '{self.name}' has no prompt of {length} tokens, the length of '{pair.name}': its "
            f"prompts have {', '.join(map(str, lengths))}. Use another reference set, or by 'span'"
        )

"""Needle-in-a-Haystack trials: every needle in every haystack at every context length and depth."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headscope.errors import BadInput
from headscope.prompts import haystack as wu_prompts
from headscope.prompts.haystack import Haystack, NeedlePrompt, NeedlePromptBuilder, Template, load_haystacks
from headscope.prompts.needles import Needle

log = logging.getLogger(__name__)

CONTROL = "absent"
"""Mode of a control trial: the same prompt without the needle."""


@dataclass(frozen=True)
class NeedleTrial:
    """A needle in a haystack at one depth or, in a control, the haystack alone, scored at every depth of the grid.

    `mode` is strict, wu, indirect or `CONTROL`; `needle` and `haystack` are indices into the grid;
    `shared_haystack_tokens` is the number of haystack tokens before the prompt leaves the haystack.
    """

    mode: str
    needle: int
    haystack: int
    length: int
    depths: tuple[float, ...]
    shared_haystack_tokens: int

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key: in this order, neighbouring prompts share the longest beginnings."""
        return (self.haystack, self.shared_haystack_tokens, self.needle, self.length)


@dataclass
class NeedleGrid:
    """All trials of some needles in the first `haystack_count` documents of a text source.

    `lengths` in tokens and `depths` in 0..1 are ascending; `mode` is strict or wu. With `own_sources`, one text source
    per needle, a needle is hidden in documents of its own source only.
    """

    needles: Sequence[Needle]
    lengths: Sequence[int]
    depths: Sequence[float]
    haystack_count: int
    source: str
    seed: int
    template: Template = "prefix"
    mode: str = "strict"
    own_sources: Sequence[str] = ()
    _has_warned: bool = False
    _prepared: dict[int, tuple[list[Haystack], list[NeedlePromptBuilder]]] = field(default_factory=dict)

    def prepare(self, tokenizer: Any) -> tuple[list[Haystack], list[NeedlePromptBuilder]]:
        """Haystacks and prompt builders, one per needle, in the tokens of this tokenizer."""
        if id(tokenizer) not in self._prepared:
            haystacks = [
                haystack
                for source in self.own_sources or [self.source]
                for haystack in load_haystacks(source, tokenizer, self.haystack_count, max(self.lengths), self.seed)
            ]
            template: Template = "published" if (self.mode, self.template) == ("wu", "plain") else self.template
            builders = [NeedlePromptBuilder(needle, tokenizer, template) for needle in self.needles]
            self._prepared[id(tokenizer)] = (haystacks, builders)
        return self._prepared[id(tokenizer)]

    def trials(self, tokenizer: Any) -> list[NeedleTrial]:
        """All trials, in the order in which neighbours share most. Raises BadInput for a grid that cannot be built.

        Depths at which the needle would be inserted at the same place are one trial, with the first such depth.
        """
        haystacks, builders = self.prepare(tokenizer)
        trials: list[NeedleTrial] = []
        merged_count = 0
        for haystack_index, haystack in enumerate(haystacks):
            for number, builder in enumerate(builders):
                if self.own_sources and haystack_index // self.haystack_count != number:
                    continue
                needle = self.needles[number]
                if haystack.contains_text(needle.fact):
                    raise BadInput(
                        f"needle '{needle.name}' is not hidden: {haystack.name} already states '{needle.fact}'. Use "
                        "another needle or another --text"
                    )
                mode = "indirect" if needle.is_indirect else self.mode
                insertion_point = wu_prompts.insertion_point if mode == "wu" else NeedlePromptBuilder.insertion_point
                for length in self.lengths:
                    points: dict[int, float] = {}  # insertion point -> the first depth that has it
                    for depth in self.depths:
                        points.setdefault(insertion_point(builder, haystack, length, depth), depth)
                    merged_count += len(self.depths) - len(points)
                    control_length = builder.haystack_length(haystack, length) + len(builder.needle_ids)
                    trials.append(
                        NeedleTrial(CONTROL, number, haystack_index, length, tuple(points.values()), control_length)
                    )
                    trials += [
                        NeedleTrial(mode, number, haystack_index, length, (depth,), shared_tokens)
                        for shared_tokens, depth in points.items()
                    ]
        if merged_count and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d needles are left out: they would be at the place of another depth, as a needle starts a sentence. "
                "Use fewer --depths or longer --lengths",
                merged_count,
            )
        return sorted(trials, key=lambda trial: trial.order)

    def prompts(self, tokenizer: Any, trial: NeedleTrial) -> list[NeedlePrompt]:
        """The trial's prompt, once per depth that is scored in it; all have the same token ids."""
        haystacks, builders = self.prepare(tokenizer)
        haystack, builder = haystacks[trial.haystack], builders[trial.needle]
        if trial.mode == CONTROL:
            return builder.control_prompts(haystack, trial.length, trial.depths)
        build = wu_prompts.prompt_with_needle if trial.mode == "wu" else NeedlePromptBuilder.prompt_with_needle
        return [build(builder, haystack, trial.length, depth) for depth in trial.depths]


def even_depths(count: int) -> list[float]:
    """`count` evenly spaced depths from 0 to 1; a single depth is in the middle."""
    return [0.5] if count == 1 else [number / (count - 1) for number in range(count)]

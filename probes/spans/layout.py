"""The query and key spans of one text, with names: parts of a prompt, messages, token classes, steps of an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headscope.errors import BadInput, did_you_mean
from headscope.measures.span_mass import BoolArray, SpanLayout
from headscope.prompts.span_tokens import SpanTokens
from headscope.prompts.spans import ALL, FIRST, GENERATED, LAST, REST, TEMPLATE
from headscope.prompts.token_classes import MATCHING, SAME, class_masks, matching_brackets, parse_classes
from headscope.prompts.token_text import token_texts
from probes.spans.declaration import WHOLE_PROMPT, SpansOptions


@dataclass(frozen=True, eq=False)
class NamedSpans:
    """Spans of one text: masks by name of query and key spans, the steps of the text after the prompt by the last step
    of each bin, and the query-dependent kinds of keys."""

    queries: Mapping[str, BoolArray]
    keys: Mapping[str, BoolArray]
    steps: Mapping[int, BoolArray]
    prompt_length: int
    tokens: Any = None
    matching: Any = None

    @property
    def layout(self) -> SpanLayout:
        """The spans as arrays: named queries, then steps; named keys, then same and matching."""
        queries, keys = [*self.queries.values(), *self.steps.values()], [*self.keys.values()]
        return SpanLayout(np.array(queries), np.array(keys), self.tokens, self.matching)

    @property
    def key_names(self) -> list[str]:
        relations = {SAME: self.tokens, MATCHING: self.matching}
        return [*self.keys, *(name for name, array in relations.items() if array is not None)]

    @property
    def has_continuation(self) -> bool:
        return bool(self.steps)

    @property
    def prompt_names(self) -> list[str]:
        """Names of the spans of the prompt that have lookback ratios; the whole prompt comes first."""
        is_before = np.arange(len(next(iter(self.keys.values())))) < self.prompt_length
        names = [name for name, mask in self.keys.items() if name != GENERATED and (mask & is_before).any()]
        return [WHOLE_PROMPT, *names]

    @property
    def prompt_masks(self) -> BoolArray:
        """The masks [spans, L] of `prompt_names`, within the prompt."""
        is_before = np.arange(len(next(iter(self.keys.values())))) < self.prompt_length
        return np.array([is_before, *(self.keys[name] & is_before for name in self.prompt_names[1:])])


def named_spans(tokens: SpanTokens, tokenizer: Any, classes: Sequence[str], is_prompt: bool = True) -> NamedSpans:
    """The spans of a text with token classes.

    `first` is no query span: its one row sees only itself. The first token belongs to no class and is no key of `same`
    and `matching`, so that attention sinks do not count.
    """
    parsed, length = parse_classes(classes), len(tokens.ids)
    texts, is_special = token_texts(tokenizer, tokens.ids) if parsed else ([], [])
    by_class = class_masks(texts, is_special, parsed)
    by_class = {name: mask & ~tokens.spans[FIRST] for name, mask in by_class.items()}
    by_class = {name: mask for name, mask in by_class.items() if mask.any()}
    keys = {**tokens.spans, **tokens.messages, **by_class}
    position = np.arange(length)
    queries = {name: mask for name, mask in keys.items() if name != FIRST and (is_prompt or name != REST)}
    if is_prompt:
        queries[LAST] = position == tokens.prompt_length - 1
    queries[ALL] = np.ones(length, dtype=bool)
    step, steps, last_step = position - tokens.prompt_length + 1, {}, 1
    while last_step // 2 < length - tokens.prompt_length:
        steps[last_step] = (step > last_step // 2) & (step <= last_step)
        last_step *= 2
    ids = np.where(tokens.spans[FIRST], -1, tokens.ids) if SAME in parsed else None
    matching = matching_brackets(texts, is_special) if MATCHING in parsed else None
    if matching is not None:
        matching[matching == 0] = -1
    return NamedSpans(queries, keys, steps, tokens.prompt_length, ids, matching)


def choose_pair(
    texts: Sequence[SpanTokens], options: SpansOptions, generates: Sequence[bool], is_prompt: bool = True
) -> tuple[str, str]:
    """The query and key span that the per-head table shows, checked against the spans of all texts.

    `generates` says which prompts the model continues. Default: from the generated text if every prompt has some, else
    from the last token (in ordinary texts from all); to the first named span or class. Raises BadInput for a span that
    no text has.
    """
    classes = [*parse_classes(options.classes)]
    spans = [name for tokens in texts for name in (*tokens.spans, *tokens.messages)] + [GENERATED] * any(generates)
    keys = [*dict.fromkeys([*spans, *classes])]
    queries = [name for name in keys if name not in (FIRST, SAME, MATCHING) and (is_prompt or name != REST)]
    queries += [LAST, ALL] if is_prompt else [ALL]
    for option, name, known in (("query", options.query, queries), ("key", options.key, keys)):
        if name is not None and name not in known:
            raise BadInput(f"no text has the {option} span '{name}'{did_you_mean(name, known)}. Use {', '.join(known)}")
    is_continued = all(GENERATED in text.spans or writes for text, writes in zip(texts, generates, strict=True))
    default_query = (GENERATED if is_continued else LAST) if is_prompt else ALL
    named = [name for name in keys if name not in (FIRST, TEMPLATE, GENERATED, REST)]
    return options.query or default_query, options.key or next(iter(named), FIRST)

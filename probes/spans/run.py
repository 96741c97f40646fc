"""Runner of the spans probe: the mass between spans of prompts, or between token classes of ordinary texts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers
from headscope.forward.image_inputs import adding_inputs, check_images_are_read_in_order
from headscope.forward.observe import FinishedPass, observe
from headscope.forward.prefix_cache import PrefixCachedGenerator
from headscope.measures.span_mass import LookbackRatios, SpanMass, TokenWeights
from headscope.models.loading import load_processor
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.span_tokens import SpanTokens, image_inputs, tokenize_spans
from headscope.prompts.spans import (
    FIRST,
    IMAGE,
    REST,
    SpanPrompt,
    check_class_names,
    parse_marks,
    parse_message,
    read_span_prompts,
)
from headscope.prompts.token_classes import parse_classes
from headscope.prompts.token_text import token_texts
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, PassCell, TextPass, document_of, pass_cost
from headscope.study.config import MAX_PROMPT_TOKENS
from headscope.study.context import StudyContext
from headscope.study.named_heads import NamedHeads
from headscope.study.prompts import read_prompt
from probes.spans.declaration import SpansOptions
from probes.spans.layout import NamedSpans, choose_pair, named_spans
from probes.spans.steering import ANSWER_METRICS, steering_rows

log = logging.getLogger("headscope")


@dataclass(frozen=True)
class _Generation:
    """A prompt whose continuation the model generates."""

    prompt: int
    length: int


@dataclass(frozen=True)
class _Steering:
    """A prompt whose continuation is scored without and with steering."""

    prompt: int
    length: int


@dataclass(frozen=True)
class _WithImages:
    """A prompt with images, which the passes of other probes do not read."""

    prompt: int
    length: int


class SpansRunner:
    """Cells: each (model, prompt), or each (model, context length, document) of ordinary texts.

    Prompts without generated text and ordinary texts are only observed, so their passes are shared with other probes.
    """

    def __init__(self, options: SpansOptions, context: StudyContext):
        self.options, self.context = options, context
        self.prompts = _load_prompts(options)
        check_class_names(self.prompts, parse_classes(options.classes))
        if self.prompts:
            context.record_input("prompts with spans", [repr(prompt) for prompt in self.prompts])
        is_named = options.heads != ["all"]
        self._named_heads = NamedHeads(context, options.heads, options.weights) if is_named else None
        self._tokens: dict[tuple[int, int], SpanTokens] = {}
        self._pairs: dict[str, tuple[str, str]] = {}
        self._warned: set[str] = set()
        self._checked: set[str] = set()
        self._processors: dict[str, Any] = {}

    def cells(self) -> list[Cell]:
        return [cell for label in self.context.labels for cell in self._cells(label)]

    def _cells(self, label: str) -> list[Cell]:
        if not self.prompts:
            self._pair(label)
            return [
                PassCell(
                    f"{label}: {length} tokens, document {number}",
                    label,
                    pass_cost(length),
                    text_pass=TextPass.over(document.ids[:length], number),
                )
                for length in self.options.lengths
                for number, document in enumerate(self._documents(label))
            ]
        self._pair(label)  # refuses an unknown span before anything is measured
        prompts = [self._prompt_tokens(label, number) for number in range(len(self.prompts))]
        self._warn_about_cut_tokens(prompts)
        self._check_copies(prompts)
        cells = [self._prompt_cell(label, number, tokens) for number, tokens in enumerate(prompts)]
        return cells if self.options.steer is None else [*cells, *self._steering_cells(label, prompts)]

    def _steering_cells(self, label: str, prompts: Sequence[SpanTokens]) -> list[Cell]:
        _, span = self._pair(label)
        if self._named_heads is not None:
            self._named_heads.check(self.context.model(label), label)
        for prompt, tokens in zip(self.prompts, prompts, strict=True):
            if prompt.images:
                raise BadInput(f"{prompt.location} has 'images', which steering does not read. Remove 'steer'")
            if not prompt.continuation:
                raise BadInput(
                    f"{prompt.location} has no 'continuation' that steering could change. Add one to every prompt"
                )
            spans = {**tokens.spans, **tokens.messages}
            if span not in spans or not spans[span][: tokens.prompt_length].any():
                raise BadInput(f"{prompt.location} has no span '{span}' to steer to. Name another one with 'key'")
        return [
            Cell(
                f"{label}: {prompt.name}, steered",
                label,
                3 * pass_cost(len(tokens.ids)),
                _Steering(number, len(tokens.ids)),
            )
            for number, (prompt, tokens) in enumerate(zip(self.prompts, prompts, strict=True))
        ]

    def _prompt_cell(self, label: str, number: int, tokens: SpanTokens) -> Cell:
        prompt = self.prompts[number]
        name, length = f"{label}: {prompt.name}", len(tokens.ids) + prompt.generate
        if prompt.images:
            return Cell(name, label, 3 * pass_cost(length), _WithImages(number, length))
        if prompt.generate:
            return Cell(name, label, 3 * pass_cost(length), _Generation(number, length))
        return PassCell(name, label, pass_cost(length), text_pass=TextPass.over(tokens.ids, number))

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        if self.prompts:
            return self._prompt_tokens(cell.model, cell.text_pass.document).ids
        document, length = document_of(cell, self._documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "SpansObserver":
        if self.prompts:
            number = cell.text_pass.document
            return self._prompt_observer(cell.model, number, self._prompt_tokens(cell.model, number), model)
        document, length = document_of(cell, self._documents)
        spans = named_spans(
            _text_tokens(document.ids[:length]),
            self.context.tokenizer(cell.model),
            self.options.classes,
            is_prompt=False,
        )
        keys = {"model": cell.model, "context_length": length, "doc": document.name}
        text = {"number": cell.text_pass.document, "group": [""], "is_prompt": False}
        return SpansObserver(model, spans, keys, text | self._shown(cell.model))

    def compute_rows(self, cell: "Cell[_Steering | _Generation]", model: Model) -> Mapping[str, Rows]:
        """Score a continuation under steering, or generate after a prompt and observe the pass over both."""
        number = cell.work.prompt
        if isinstance(cell.work, _Steering):
            return {"span_steering": self._steering_rows(cell.model, number, model)}
        tokens = self._prompt_tokens(cell.model, number)
        if isinstance(cell.work, _WithImages):
            return self._rows_with_images(cell.model, number, tokens, model)
        generator = PrefixCachedGenerator(model)
        is_end, most = _end_tokens(model), self.prompts[number].generate
        new_ids = generator.generate(np.array(tokens.ids, np.int32), lambda record: None, most, is_end)
        if len(new_ids) > 1 and is_end(new_ids[-1]):  # it is no text; alone it is the only row that there is
            new_ids = new_ids[:-1]
        extended = tokens.extended(new_ids)
        ids = torch.tensor(extended.ids)
        (tables,) = observe(model, ids, [lambda _: self._prompt_observer(str(cell.model), number, extended, model)])
        return tables

    def _rows_with_images(self, label: str, number: int, tokens: SpanTokens, model: Model) -> Mapping[str, Rows]:
        ids, processor = torch.tensor(tokens.ids), self._processor(label)
        inputs = image_inputs(self.context.tokenizer(label), processor, self.prompts[number])
        if label not in self._checked:
            check_images_are_read_in_order(model, ids, inputs)
            self._checked.add(label)
        with adding_inputs(model, inputs, len(ids)):
            (tables,) = observe(model, ids, [lambda _: self._prompt_observer(label, number, tokens, model)])
        return tables

    def _processor(self, label: str) -> Any:
        if label in self.context.in_memory_models:
            raise BadInput(f"model '{label}' has no processor of images. Name the folder of its checkpoint instead")
        checkpoint = self.context.specs[label].checkpoint
        if checkpoint not in self._processors:
            self._processors[checkpoint] = load_processor(checkpoint)
        return self._processors[checkpoint]

    def _steering_rows(self, label: str, number: int, model: Model) -> Rows:
        assert self.options.steer is not None
        tokens, (_, span) = self._prompt_tokens(label, number), self._pair(label)
        keys: dict[str, Any] = {
            "model": label,
            "context_length": len(tokens.ids),
            "doc": self.prompts[number].name,
        }
        heads = [] if self._named_heads is None else self._named_heads.identifiers
        rows = steering_rows(model, tokens, span, heads, self.options.steer)
        is_counted = [
            self.options.keep_failing or shows_answer(ANSWER_METRICS[metric], plain)
            for metric, plain in zip(rows["metric"], rows["plain"], strict=True)
        ]
        return {**keys, "key": span, "alpha": self.options.steer, **rows, "is_counted": is_counted}

    def _prompt_observer(self, label: str, number: int, tokens: SpanTokens, model: Model) -> "SpansObserver":
        prompt = self.prompts[number]
        spans = named_spans(tokens, self.context.tokenizer(label), self.options.classes)
        keys = {"model": label, "context_length": len(tokens.ids), "doc": prompt.name}
        stored = tokens if number == 0 and len(tokens.ids) <= MAX_PROMPT_TOKENS else None
        text = {"number": number, "group": [prompt.group], "is_prompt": True}
        return SpansObserver(model, spans, keys, text | self._shown(label), stored)

    # Tokens and spans ------------------------------------------------------------------------------------------------

    def _documents(self, label: str) -> Sequence[Any]:
        return self.context.documents(label, max(self.options.lengths))

    def _prompt_tokens(self, label: str, number: int) -> SpanTokens:
        """The prompt in the tokens of a model; models that share a tokenizer share them."""
        tokenizer, prompt = self.context.tokenizer(label), self.prompts[number]
        processor = self._processor(label) if prompt.images else None
        key = id(processor or tokenizer), number
        if key not in self._tokens:
            self._tokens[key] = tokenize_spans(tokenizer, prompt, processor)
        return self._tokens[key]

    def _shown(self, label: str) -> dict[str, str]:
        return dict(zip(("query", "key"), self._pair(label), strict=True))

    def _pair(self, label: str) -> tuple[str, str]:
        """The pair of spans that the per-head table shows for a model, over all of its prompts."""
        if label not in self._pairs:
            texts = [self._prompt_tokens(label, number) for number in range(len(self.prompts))]
            generates = [prompt.generate > 0 for prompt in self.prompts]
            self._pairs[label] = choose_pair(
                texts or [_text_tokens([0, 0])], self.options, generates or [False], bool(texts)
            )
        return self._pairs[label]

    def _check_copies(self, prompts: Sequence[SpanTokens]) -> None:
        """Raise BadInput for two prompts with the same tokens: intervals would count them as independent."""
        locations: dict[tuple[int | str, ...], str] = {}
        for prompt, tokens in zip(self.prompts, prompts, strict=True):
            content: tuple[int | str, ...] = (*tokens.ids, *(image.digest for image in prompt.images))
            if content in locations:
                raise BadInput(f"{prompt.location} has the same tokens as {locations[content]}. Remove one of them")
            locations[content] = prompt.location

    def _warn_about_cut_tokens(self, prompts: Sequence[SpanTokens]) -> None:
        cut = [line for tokens in prompts for line in tokens.cut_tokens]
        if cut and cut[0] not in self._warned:
            self._warned.add(cut[0])
            more = f" ({len(cut) - 1:,} more such tokens)" if len(cut) > 1 else ""
            log.warning("%s%s. Begin the next span at a space to cut elsewhere", cut[0], more)


class SpansObserver:
    """Measures the spans of one text; with `stored`, also the weight of each of its tokens.

    `keys` are the first columns of every table, `text` the others of `span_prompts`.
    """

    def __init__(
        self,
        model: Model,
        spans: NamedSpans,
        keys: Mapping[str, Any],
        text: Mapping[str, Any],
        stored: SpanTokens | None = None,
    ):
        self.spans, self.keys, self.text, self.stored = spans, keys, text, stored
        self.tokenizer = model.tokenizer
        self.needs_whole_text = IMAGE in spans.keys
        self.mass = SpanMass(model.geometry, spans.layout)
        self.lookback = self.weights = None
        if spans.has_continuation:
            self.lookback = LookbackRatios(model.geometry, spans.prompt_masks, spans.prompt_length)
        if stored is not None and text["query"] in spans.queries:
            self.weights = TokenWeights(model.geometry, spans.queries[text["query"]])

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self.mass.update, key_columns=self.mass.key_columns)
        if self.lookback is not None:
            layers.listen(self.lookback.update, key_columns=self.lookback.key_columns)
        if self.weights is not None:
            layers.listen(self.weights.update)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        tables: dict[str, Rows] = {
            "span_prompts": {**self.keys, **self.text, "prompt_tokens": self.spans.prompt_length},
            **self._mass_tables(),
        }
        if self.lookback is not None:
            ratios = self.lookback.compute()
            tables["span_lookback"] = {**self.keys, **ratios, "key": np.array(self.spans.prompt_names)[ratios["key"]]}
        if self.stored is not None and self.weights is not None:
            keys = {"model": self.keys["model"], "doc": self.keys["doc"]}
            texts, is_special = token_texts(self.tokenizer, self.stored.ids)
            position = np.arange(len(texts))
            names = np.array([*self.stored.spans])[np.array([*self.stored.spans.values()]).argmax(0)]
            tables["span_tokens"] = {**keys, "position": position, "text": texts, "special": is_special, "span": names}
            tables["span_weights"] = {**keys, **self.weights.compute()}
        return tables

    def _mass_tables(self) -> dict[str, Rows]:
        columns = self.mass.compute()
        is_step = columns["query"] >= len(self.spans.queries)
        query = np.array([*self.spans.queries, *map(str, self.spans.steps)])[columns["query"]]
        columns = {**columns, "key": np.array(self.spans.key_names)[columns["key"]], "query": query}
        tables: dict[str, Rows] = {
            "spans": {**self.keys, **{name: column[~is_step] for name, column in columns.items()}}
        }
        if is_step.any():
            kept = ("layer", "head", "kv_group", "key", "mass", "rows")
            steps = {name: columns[name][is_step] for name in kept}
            tables["span_steps"] = {**self.keys, **steps, "step": query[is_step].astype(np.int64)}
        return tables


def _text_tokens(ids: Sequence[int]) -> SpanTokens:
    """The tokens of an ordinary text: the first, and the rest."""
    is_first = np.arange(len(ids)) == 0
    return SpanTokens([*ids], {FIRST: is_first, REST: ~is_first}, {}, len(ids))


def _end_tokens(model: Model) -> Callable[[int], bool]:
    """A test whether a token ends generated text: one of the model's or the tokenizer's end tokens."""
    configured = model.module.generation_config.eos_token_id if model.module.generation_config else None
    candidates = [*(configured if isinstance(configured, list) else [configured]), model.tokenizer.eos_token_id]
    end_tokens = {token for token in candidates if token is not None}
    return lambda token: token in end_tokens


def _load_prompts(options: SpansOptions) -> list[SpanPrompt]:
    """The prompts of the options; none for ordinary texts. Raises BadInput for a prompt without spans."""
    if options.prompts is not None:
        return read_span_prompts(options.prompts)
    if (named := read_prompt(options)) is None:
        return []
    name, text = named
    marked = (parse_message if options.template else parse_marks)(text, "the prompt")
    if not marked.spans and not options.classes:
        raise BadInput("the prompt has no span. Mark its parts, as in [[context]]...[[/context]], or give 'classes'")
    if options.template:
        return [SpanPrompt(name, messages=(("user", marked),), location="the prompt")]
    return [SpanPrompt(name, marked, location="the prompt")]

"""The texts and sets of prompts of a probe, in the tokens of every model."""

import logging
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from typing import Any

from headscope.base import input_files, user_input
from headscope.errors import BadInput, ResourceMissing
from headscope.prompts import texts
from headscope.prompts.haystack import Haystack
from headscope.prompts.pair_sets import GENERATED_SETS, PROMPT_SET, PairSet, check_set_names, load_pair_set
from headscope.prompts.pairs import PAIR_OPTIONS, Alignment, TokenPair, stored_metric_name
from headscope.prompts.texts import TokenDocument
from headscope.study.config import MAX_PROMPT_TOKENS, PromptOptions, check_prompt
from headscope.study.context import StudyContext


class ProbeTexts:
    """The texts of a probe: its prompt, or the documents of the study at context lengths `lengths`."""

    def __init__(self, options: PromptOptions, lengths: Sequence[int], context: StudyContext):
        self._lengths, self._context, self._template = lengths, context, options.template
        self._prompts: dict[str, TokenDocument] = {}
        self._prompt = read_prompt(options)
        if self._prompt is not None:
            context.record_input("prompt", self._prompt)

    @property
    def is_prompt(self) -> bool:
        """Whether a prompt takes the place of documents."""
        return self._prompt is not None

    def lengths(self, label: str) -> Sequence[int]:
        """The context lengths in tokens; that of a prompt depends on the model's tokenizer."""
        return self._lengths if self._prompt is None else [len(self.documents(label)[0].ids)]

    def documents(self, label: str) -> list[TokenDocument]:
        """The prompt, or the documents of every length, as long as the longest, so that lengths compare."""
        if self._prompt is None:
            return self._context.documents(label, max(self._lengths))
        if label not in self._prompts:
            self._prompts[label] = self._tokenize(label, *self._prompt)
        return [self._prompts[label]]

    def _tokenize(self, label: str, name: str, text: str) -> TokenDocument:
        """The prompt in the tokens of a model. Raises BadInput if it has too few or too many of them."""
        ids = texts.prompt_tokens(text, self._context.tokenizer(label), MAX_PROMPT_TOKENS + 1, self._template)
        if len(ids) < 2:
            raise BadInput(f"the prompt has {len(ids)} token{'s' if not ids else ''}. Give a text of at least 2 tokens")
        if len(ids) > MAX_PROMPT_TOKENS:
            raise BadInput(
                f"the prompt has more than {MAX_PROMPT_TOKENS:,} tokens. Give a shorter one, or sample rows of it with "
                "--text file:PATH and --length"
            )
        template = "chat template: " if self._template else ""
        return TokenDocument(name, ids, sha256(f"{template}{text}".encode()).hexdigest())


def read_prompt(options: PromptOptions) -> tuple[str, str] | None:
    """Name and text of the prompt, if one is given.

    Raises BadInput for a blank prompt or control characters, ResourceMissing without its file.
    """
    if options.prompt is not None:
        name, text = "prompt", options.prompt
    elif options.prompt_file is not None:
        file = user_input.expand_path(options.prompt_file, "prompt file")
        try:
            text = input_files.read_text_file(file, f"prompt file {user_input.quote(options.prompt_file)}")
        except FileNotFoundError as error:
            location = f"{user_input.quote(options.prompt_file)} (from {user_input.working_directory()})"
            raise ResourceMissing(f"no prompt file at {location}. Check the path") from error
        name = f"prompt/{file.name}"
        try:
            check_prompt(text)
        except ValueError as error:
            raise BadInput(f"prompt file {user_input.quote(options.prompt_file)}: {error}") from error
    else:
        return None
    if not text.strip():
        raise BadInput(f"{'the prompt' if name == 'prompt' else f'{options.prompt_file}'} is blank. Give some text")
    return name, text


log = logging.getLogger("headscope")


class PromptSets:
    """Sets of prompts, each opened once for a model and recorded as an input of the study.

    `sources` are generated sets and files; None is the one set that `open_prompt` makes with a tokenizer. `alignment`
    is "free" for a probe that patches nothing, so that the prompts of a pair may differ in length, and "unused" for one
    that reads the clean prompt alone. `check`
    raises BadInput for a pair, by label and pair: for every pair of a file, and the first one of a generated set.
    Needles lie in `documents` of a model, by default those of the study. `options` are those of `PAIR_OPTIONS` that the
    probe has.
    """

    def __init__(
        self,
        context: StudyContext,
        sources: Sequence[str] | None,
        *,
        count: int,
        length: int,
        metric: Any,
        alignment: Alignment = "unused",
        open_prompt: Callable[[Any], PairSet] | None = None,
        check: Callable[[str, TokenPair], Any] | None = None,
        documents: Callable[[str], Sequence[Any]] | None = None,
        options: Collection[str] = PAIR_OPTIONS,
    ):
        self.context, self.sources = context, [*sources] if sources is not None else [PROMPT_SET]
        self._count, self._length, self._alignment, self._options = count, length, alignment, options
        self._metric = stored_metric_name(metric)
        self._open_prompt, self._check = open_prompt, check
        self._documents = documents or (lambda label: context.documents(label, length))
        self._opened: dict[tuple[str, str], PairSet] = {}

    def of_model(self, label: str) -> list[PairSet]:
        """All sets of a model, in the order of `sources`. Raises BadInput for two of one name.

        Those of the other models are opened as well, so that mistakes are reported before any model is opened.
        """
        sets = {other: [self.open(other, source) for source in self.sources] for other in self.context.labels}[label]
        check_set_names(sets)
        self.context.prompt_lengths[label].update(length for pairs in sets for length in pairs.clean_lengths)
        return sets

    def open(self, label: str, source: str) -> PairSet:
        """A set in the tokens of a model."""
        if (label, source) not in self._opened:
            pairs = self._load(label, source)
            if self._check is not None:
                for number in range(1 if source in GENERATED_SETS else len(pairs)):
                    self._check(label, pairs.build(number))
            if self._alignment in ("free", "unused") and source not in GENERATED_SETS:
                _warn_about_equal_prompts(pairs)
            self.context.record_input(f"prompts '{source}'", [pairs.digest.encode()])
            self._opened[label, source] = pairs
        return self._opened[label, source]

    def _load(self, label: str, source: str) -> PairSet:
        tokenizer = self.context.tokenizer(label)
        if self._open_prompt is not None:
            return self._open_prompt(tokenizer)

        def haystacks() -> list[Haystack]:
            return [Haystack(document.name, document.ids, tokenizer) for document in self._documents(label)]

        return load_pair_set(
            source,
            tokenizer,
            haystacks,
            count=self._count,
            length=self._length,
            seed=self.context.seed,
            alignment=self._alignment,
            metric=self._metric,
            options=self._options,
        )


def _warn_about_equal_prompts(pairs: PairSet) -> None:
    """Warn of pairs that differ in the corrupted prompt only: where it is not run, they are one sample, not several."""
    first: dict[tuple[bytes, ...], str] = {}
    copies = []
    for pair in map(pairs.build, range(len(pairs))):
        content = tuple(ids.tobytes() for ids in (pair.clean, pair.answer, pair.wrong))
        if first.setdefault(content, pair.name) != pair.name:
            copies.append(f"'{pair.name}' is '{first[content]}'")
    if copies:
        log.warning(
            "%d of %d prompts of '%s' repeat the clean prompt and answers of another (%s), and intervals count them as "
            "independent. Keep one of each",
            *(len(copies), len(pairs), pairs.name, copies[0]),
        )

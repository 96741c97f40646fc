"""The texts of a probe that observes forward passes: documents, or a prompt in their place."""

from collections.abc import Sequence
from hashlib import sha256

from headscope import user_input
from headscope.errors import BadInput, ResourceMissing
from headscope.prompts import texts
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
        if not file.is_file():
            location = f"{user_input.quote(options.prompt_file)} (from {user_input.working_directory()})"
            raise ResourceMissing(f"no prompt file at {location}. Check the path")
        name, text = f"prompt/{file.name}", next(texts.read_documents(f"file:{file}")).text
        try:
            check_prompt(text)
        except ValueError as error:
            raise BadInput(f"prompt file {user_input.quote(options.prompt_file)}: {error}") from error
    else:
        return None
    if not text.strip():
        raise BadInput(f"{'the prompt' if name == 'prompt' else f'{options.prompt_file}'} is blank. Give some text")
    return name, text

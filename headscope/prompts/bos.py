"""Whether prompts and texts begin with a BOS token: as the tokenizer does by itself, always, or never."""

from typing import Any, Literal

from headscope.errors import BadInput
from headscope.prompts.special_tokens import leading_special_tokens

BosChoice = Literal["auto", "yes", "no"]


def with_bos(tokenizer: Any, choice: BosChoice) -> Any:
    """The tokenizer (auto), or one that puts its BOS token (yes) or no special token (no) before every text.

    With yes, a tokenizer that already begins with special tokens keeps them. Raises BadInput if it has no BOS token.
    """
    if choice == "auto":
        return tokenizer
    leading = leading_special_tokens("a", tokenizer) if choice == "yes" else []
    if choice == "yes" and not leading:
        if tokenizer.bos_token_id is None:
            raise BadInput(
                "bos is 'yes', but the model's tokenizer has no BOS token. Use auto, and write a special token at the "
                "start of the prompt"
            )
        leading = [int(tokenizer.bos_token_id)]
    return _TokenizerWithBos(tokenizer, leading)


def opening_tokens(tokenizer: Any) -> list[str]:
    """The special tokens before every text, as text: [] or, for example, ["<s>"]."""
    return [str(token) for token in tokenizer.convert_ids_to_tokens(leading_special_tokens("a", tokenizer))]


class _TokenizerWithBos:
    """A tokenizer that puts `leading` before every text, in place of its own special tokens."""

    def __init__(self, tokenizer: Any, leading: list[int]):
        self._tokenizer, self._leading = tokenizer, leading

    def __call__(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> Any:
        encoded = self._tokenizer(text, add_special_tokens=False, **options)
        return {"input_ids": [*self._leading, *encoded["input_ids"]]} if add_special_tokens else encoded

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":  # copies and pickles look for their own methods
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

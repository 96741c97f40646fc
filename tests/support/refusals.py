"""Checks of errors that leave their wording free: the type, and the options and values that the message names."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Refusal = TypeVar("Refusal", bound=Exception)


@contextmanager
def refuses(error: type[Refusal], *named: object) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """The block must raise this error, not one derived from it, and its message must name these options and values."""
    with pytest.raises(error) as raised:
        yield raised
    assert type(raised.value) is error
    assert_names(str(raised.value), *named)


def assert_names(message: str, *named: object) -> None:
    """Assert that a message has each of these options and values as a whole word, in this form."""
    missing = [value for value in named if not re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", message)]
    assert not missing, f"the message does not name {missing}: {message}"

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
    """Assert that a message has each of these options and values in this form, not as a part of a longer one."""
    missing = [value for value in named if not re.search(_pattern(str(value)), message)]
    assert not missing, f"the message does not name {missing}: {message}"


def _pattern(value: str) -> str:
    """A pattern of this value: neither 5 in 0.5, -5, 5.1 or 2,005 nor --out in --out-dir; 5 is also 5.0."""
    before = r"(?<![\w-])(?<!\d[.,])" if value[:1].isdigit() else r"(?<!\w)"
    after = r"(?:\.0+)?(?!\w)(?![.,]\d)" if value[-1:].isdigit() else r"(?!\w)"
    return before + re.escape(value) + after + (r"(?!-\w)" if value.startswith("--") else "")

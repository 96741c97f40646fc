"""Options that take more from Python than text: a metric as a function, positions as numbers and ranges."""

from typing import Any

from pydantic import BeforeValidator, PlainSerializer, WrapValidator

from headscope.prompts.pairs import stored_metric_name
from headscope.prompts.token_positions import position_names


def _accept_function(value: Any, parse: Any) -> Any:
    return value if callable(value) else parse(value)


ACCEPTS_FUNCTION = WrapValidator(_accept_function)
STORES_NAME = PlainSerializer(stored_metric_name, return_type=str)
"""Annotations of such an option, as in Annotated[Literal[...], ACCEPTS_FUNCTION, STORES_NAME]."""
ACCEPTS_POSITIONS = BeforeValidator(position_names)
"""Annotation of a list of positions that may be a single one, or hold numbers, ranges and slices."""

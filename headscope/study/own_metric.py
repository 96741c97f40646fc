"""Let an option that names a metric take a function, too."""

from typing import Any

from pydantic import PlainSerializer, WrapValidator

from headscope.prompts.pairs import stored_metric_name


def _accept_function(value: Any, parse: Any) -> Any:
    return value if callable(value) else parse(value)


ACCEPTS_FUNCTION = WrapValidator(_accept_function)
STORES_NAME = PlainSerializer(stored_metric_name, return_type=str)
"""Annotations of such an option, as in Annotated[Literal[...], ACCEPTS_FUNCTION, STORES_NAME]."""

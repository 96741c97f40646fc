"""Build a position scheme from its spec."""

from dataclasses import MISSING, fields
from typing import Any

from headscope import user_input
from headscope.errors import BadInput, nearest
from headscope.model_spec import SchemeSpec
from headscope.positions.schemes import SCHEMES, Scheme

LARGEST = 2**31


def parse_scheme(text: str) -> Scheme:
    """The scheme written "NAME[:key=value,...]". Raises BadInput if it is invalid."""
    return build_scheme(SchemeSpec.parse(text))


def build_scheme(spec: SchemeSpec) -> Scheme:
    """The scheme that a spec describes. Raises BadInput for an unknown or missing key, or a value that is no number."""
    declared = {field.name: field for field in fields(SCHEMES[spec.name])}
    for key in spec.options:
        if key not in declared:
            keys = f"It takes {', '.join(declared)}" if declared else "It takes no keys"
            raise BadInput(f"scheme '{spec.name}' has no key '{key}'{nearest(key, declared)}. {keys}")
    values = {
        key: _parse_value(value, str(declared[key].type), f"{key} in scheme '{spec.text}'")
        for key, value in spec.options.items()
    }
    for key, field in declared.items():
        if field.default is MISSING and key not in values:
            example = "PATH" if field.type is str else 8
            raise BadInput(f"scheme '{spec.name}' needs {key}=..., e.g. {spec.name}:{key}={example}")
    try:
        scheme: Scheme = SCHEMES[spec.name](**values)
    except BadInput as error:
        raise BadInput(f"bad scheme '{spec.text}': {error}") from error
    return scheme


def _parse_value(text: str, kind: str, where: str) -> Any:
    if "str" in kind:
        return text
    try:
        number = int(text) if "int" in kind else float(text)
    except ValueError as error:
        raise BadInput(f"'{text}' is not a number: {where}") from error
    if isinstance(number, int) and abs(number) > LARGEST:
        raise BadInput(f"{user_input.quote(number)} is too large: {where}")
    return number

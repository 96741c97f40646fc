"""How position schemes are written: "NAME[:key=value,...]" <-> a scheme."""

from dataclasses import MISSING, fields
from typing import Any

from headscope import user_input
from headscope.errors import BadInput, nearest
from headscope.positions.schemes import SCHEMES, Scheme

LARGEST = 2**31


def parse(text: str) -> Scheme:
    """The scheme that `text` names, e.g. "yarn:factor=8,attention_factor=1".

    Raises BadInput naming the unknown scheme or key, the missing key, or the value that is no number.
    """
    name, _, rest = text.partition(":")
    if name not in SCHEMES:
        raise BadInput(f"unknown position scheme '{name}'{nearest(name, SCHEMES)}: known are {', '.join(SCHEMES)}")
    declared = {field.name: field for field in fields(SCHEMES[name])}
    values: dict[str, Any] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = item.partition("=")
        if not equals:
            raise BadInput(f"bad item '{item}' in scheme '{text}': expected key=value")
        if key not in declared:
            known = f"it takes {', '.join(declared)}" if declared else "it takes no keys"
            raise BadInput(f"scheme '{name}' has no key '{key}'{nearest(key, declared)}: {known}")
        if key in values:
            raise BadInput(f"key '{key}' stands twice in scheme '{text}': give it once")
        values[key] = _value(value, str(declared[key].type), f"{key} in scheme '{text}'")
    for key, field in declared.items():
        if field.default is MISSING and key not in values:
            raise BadInput(f"scheme '{name}' needs {key}=..., e.g. {name}:{key}={'PATH' if field.type is str else 8}")
    try:
        scheme: Scheme = SCHEMES[name](**values)
    except BadInput as error:
        raise BadInput(f"bad scheme '{text}': {error}") from error
    return scheme


def _value(text: str, kind: str, where: str) -> Any:
    if "str" in kind:
        return text
    try:
        number = int(text) if "int" in kind else float(text)
    except ValueError as error:
        raise BadInput(f"'{text}' is not a number: {where}") from error
    if isinstance(number, int) and abs(number) > LARGEST:
        raise BadInput(f"{user_input.quote(number)} is too large: {where}")
    return number

"""Validation of requests to the app's callbacks: those that the app's own page cannot have sent get status 400."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dash import Dash
from flask import request

from dashboards.layout import EMPTY_STATE

CALLBACK_PATH = "/_dash-update-component"
VALUE_TYPES: Mapping[str, tuple[type, ...]] = {
    "pathname": (str,),
    "search": (str,),
    "id": (dict,),
    "n_clicks": (int, type(None)),
    "value": (str, type(None)),
    "data": (dict, type(None)),
    "playground-count.value": (int, float, str, type(None)),
    "playground-token.data": (str, type(None)),
}
"""Accepted types of values, by property (`value`) or by component and property (`playground-count.value`)."""


def add_request_checks(app: Dash) -> None:
    """Answer a malformed request with one line, before Dash fails on it."""

    @app.server.before_request  # type: ignore[untyped-decorator]
    def check() -> tuple[str, int] | None:
        if request.path != CALLBACK_PATH or request.method != "POST":
            return None
        try:
            body = json.loads(request.get_data())
            json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate could be neither stored nor sent
        except (ValueError, RecursionError):
            return "the request is not JSON in UTF-8", 400
        return None if _is_well_formed(body, app.callback_map) else ("the request does not come from the app", 400)


def _is_well_formed(body: Any, callbacks: Mapping[str, Mapping[str, Any]]) -> bool:
    if not isinstance(body, dict) or not isinstance(output := body.get("output"), str):
        return False
    callback = callbacks.get(output, {})
    changed = body.get("changedPropIds")
    return (
        "callback" in callback
        and isinstance(changed, list)
        and all(isinstance(name, str) for name in changed)
        and _are_outputs(body.get("outputs"), output)
        and _are_values(body.get("inputs", []), callback["inputs"])
        and _are_values(body.get("state", []), callback["state"])
    )


def _are_outputs(outputs: Any, output: str) -> bool:
    """Whether these are the outputs of a callback named `output`: several between dots, or one."""
    if not output.startswith(".."):
        return _is_component_property(outputs)
    count = len(output.strip(".").split("..."))
    return isinstance(outputs, list) and len(outputs) == count and all(map(_is_component_property, outputs))


def _are_values(values: Any, declared: Sequence[Mapping[str, str]]) -> bool:
    """Whether these are the values of the declared components, one each, in order."""
    return (
        isinstance(values, list)
        and len(values) == len(declared)
        and all(_is_value(value, expected) for value, expected in zip(values, declared, strict=True))
    )


def _is_value(value: Any, declared: Mapping[str, str]) -> bool:
    """Whether this is a value of the declared component; its id may be a pattern such as {"run-note": ["MATCH"]}."""
    name, prop = declared["id"], declared["property"]
    if not _is_component_property(value) or value["property"] != prop:
        return False
    has_id = value["id"] == name
    if isinstance(value["id"], dict):
        has_id = name.startswith("{") and json.loads(name).keys() == value["id"].keys()
    content = value.get("value")
    types = VALUE_TYPES.get(f"{name}.{prop}", VALUE_TYPES.get(prop, (object,)))
    if not has_id or not isinstance(content, types):
        return False
    return name != "page-state" or content is None or _is_page_state(content)


def _is_component_property(item: Any) -> bool:
    """Whether this names a property of a component, whose id is a text or texts by name."""
    if not isinstance(item, dict) or not isinstance(item.get("property"), str):
        return False
    name = item.get("id")
    return isinstance(name, str) or (isinstance(name, dict) and all(isinstance(part, str) for part in name.values()))


def _is_page_state(state: Any) -> bool:
    return state.keys() == EMPTY_STATE.keys() and isinstance(state["control_values"], dict)

"""Malformed requests to the app: status 400 and one line, and no traceback in the log."""

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.synthetic_runs import synthetic_run

from dashboards.app import create_app
from dashboards.request_checks import CALLBACK_PATH
from headscope.runs.run import Run

SHOW = "..content.children...run-control.children...controls.children...page-state.data.."
BODY: dict[str, Any] = {
    "output": SHOW,
    "outputs": [{"id": i, "property": p} for i, p in (item.split(".") for item in SHOW.strip(".").split("..."))],
    "inputs": [
        {"id": "url", "property": "pathname", "value": "/"},
        {"id": "url", "property": "search", "value": ""},
    ],
    "state": [{"id": "page-state", "property": "data", "value": None}],
    "changedPropIds": ["url.pathname"],
}
DICT_ID = {"id": {"url": "x"}, "property": "pathname", "value": "/"}
NONSENSE: list[Any] = [None, 5, "x", [], {}, [5], [None], [{}], [[]], [{"id": 5, "property": 6}], [DICT_ID] * 2]
TEXTS = [b"", b"{", b"[]", b"5", b"null", b'"x"', b"{}", b"NaN", b"[" * 100_000, b"\xff\xfe", b'{"output": "\\ud800"}']


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base",), layers=2, docs=2, probes=("measure",))


@pytest.fixture(scope="module")
def client(run: Run) -> FlaskClient:
    server = create_app(run.path.parent).server
    server.config["PROPAGATE_EXCEPTIONS"] = False
    return server.test_client()


@pytest.fixture(autouse=True)
def tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert not [record for record in caplog.records if record.exc_info]


def post(client: FlaskClient, data: bytes) -> tuple[int, str]:
    headers = {"Origin": "http://127.0.0.1:8050"}
    reply = client.post(
        CALLBACK_PATH, data=data, content_type="application/json", headers=headers, base_url="http://127.0.0.1:8050"
    )
    return reply.status_code, reply.get_data(as_text=True)


def assert_refused(client: FlaskClient, data: bytes) -> None:
    status, text = post(client, data)
    assert status == 400, data[:100]
    assert text.startswith("the request ")
    assert "\n" not in text


def changed(**values: Any) -> bytes:
    return json.dumps(copy.deepcopy(BODY) | values).encode()


def test_the_request_of_the_page_is_answered(client: FlaskClient) -> None:
    status, text = post(client, json.dumps(BODY).encode())
    assert status == 200
    state = json.loads(text)["response"]["page-state"]["data"]
    again = changed(state=[{"id": "page-state", "property": "data", "value": state}])
    assert post(client, again)[0] in (200, 204)


@pytest.mark.parametrize("text", TEXTS)
def test_a_body_that_is_no_request_is_refused(client: FlaskClient, text: bytes) -> None:
    assert_refused(client, text)


@pytest.mark.parametrize("part", BODY)
def test_a_missing_or_malformed_part_of_a_request_is_refused(client: FlaskClient, part: str) -> None:
    for value in NONSENSE:
        if (part, value) != ("changedPropIds", []):  # the page sends no changed property at first
            assert_refused(client, changed(**{part: value}))
    assert_refused(client, json.dumps({key: value for key, value in BODY.items() if key != part}).encode())


@pytest.mark.parametrize("value", [5, [1], {}, None, True, "\ud800"])
def test_an_address_that_is_not_a_text_is_refused(client: FlaskClient, value: Any) -> None:
    for number, name in enumerate(("pathname", "search")):
        inputs = copy.deepcopy(BODY["inputs"])
        inputs[number] = {"id": "url", "property": name, "value": value}
        assert_refused(client, changed(inputs=inputs))


@pytest.mark.parametrize("value", [5, [1], "x", {}, {"pathname": "/"}])
def test_a_state_that_the_app_did_not_send_is_refused(client: FlaskClient, value: Any) -> None:
    assert_refused(client, changed(state=[{"id": "page-state", "property": "data", "value": value}]))


def notes(run: Run, note: Any, tags: Any, name: Any = None) -> bytes:
    name = run.path.name if name is None else name
    state = [
        {"id": {"save-notes": name}, "property": "id", "value": {"save-notes": name}},
        {"id": {"run-note": name}, "property": "value", "value": note},
        {"id": {"run-tags": name}, "property": "value", "value": tags},
    ]
    body = {
        "output": '{"notes-saved":["MATCH"]}.children',
        "outputs": {"id": {"notes-saved": name}, "property": "children"},
        "inputs": [{"id": {"save-notes": name}, "property": "n_clicks", "value": 1}],
        "changedPropIds": [json.dumps({"save-notes": name}) + ".n_clicks"],
        "state": state,
    }
    return json.dumps(body).encode()


def test_notes_that_are_not_text_are_refused_and_leave_no_file(client: FlaskClient, run: Run) -> None:
    for values in (
        ("x\ud800", "a"),
        ("x", "a\ud800"),
        (5, "a"),
        ("x", 5),
        ([1], {}),
        ("x", "a", 5),
        ("x", "a", "\ud800"),
    ):
        assert_refused(client, notes(run, *values))
    assert not [*run.path.glob("*notes.json")]
    assert post(client, notes(run, "hello", "a, b"))[0] == 200
    assert (run.path / "notes.json").exists()

"""The app: one callback that shows what the URL says, a few that change the URL, and a server on loopback alone."""

import gzip
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update
from flask import Flask, Response, request
from werkzeug.serving import make_server

from dashboards import export
from dashboards import layout as frame
from dashboards.controls import build_controls
from dashboards.lazy_loading import rendered_page
from dashboards.run_store import RunStore
from dashboards.view_state import parse_query
from headscope.errors import HeadscopeError

ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
"""The only names the server answers to, so that no other site's name can be pointed at it."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; font-src 'self' data:; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src 'self' "
)
INDEX_TEMPLATE = """<!doctype html>
<html lang="en">
<head>{%metas%}<title>headscope</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>"""


def create_app(path: Path) -> Dash:
    """The app on the runs of a folder; `place` is the folder, or the run to begin with."""
    app = Dash(
        "dashboards",
        title="headscope",
        update_title="",
        suppress_callback_exceptions=True,  # the parts of a page come and go
        serve_locally=True,
        index_string=INDEX_TEMPLATE,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.server.config.update(LIBRARY=RunStore(path), TRUSTED_HOSTS=ALLOWED_HOSTS)
    hidden = [dcc.Location("url", refresh=False), dcc.Download("saved"), dcc.Store("shown"), html.Div(className="busy")]
    app.layout = dmc.MantineProvider([*hidden, *frame.page_shell()], defaultColorScheme="auto")
    _register_page_callbacks(app)
    _register_browser_callbacks(app)
    _add_security_headers(app)
    return app


def serve(path: Path, port: int) -> None:
    """Answer on loopback until interrupted. Raises OSError when the port is taken."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with socket.create_server(("127.0.0.1", port)) as listening, suppress(KeyboardInterrupt):
        app = create_app(path).server
        server = make_server("127.0.0.1", port, app, threaded=True, fd=listening.fileno())
        print(
            f"headscope shows {path}\nOpen http://127.0.0.1:{listening.getsockname()[1]}  (Ctrl-C ends it)",
            flush=True,
        )
        server.serve_forever()


def _register_page_callbacks(app: Dash) -> None:
    url = [Input("url", "pathname"), Input("url", "search")]

    @app.callback(  # type: ignore[untyped-decorator]
        Output("content", "children"),
        Output("controls", "children"),
        Output("shown", "data"),
        *url,
        State("shown", "data"),
    )
    def show(path: str, search: str, before: dict[str, Any] | None) -> tuple[Any, Any, Any]:
        if before and frame.is_same_page(path, parse_query(search), before):
            return no_update, no_update, no_update
        try:
            drawn = rendered_page(path, search)
            page, run, view = drawn.page, drawn.run, drawn.view
            shown = drawn.all_components() if before and before["at"] == path else drawn.initial_components()
            now = frame.browser_state(path, page, run, view, drawn.content)
        except HeadscopeError as reason:
            return frame.empty_page(str(reason)), [], frame.EMPTY_STATE
        except Exception as error:  # a view that fails must not leave another page under these controls
            logging.getLogger("headscope").exception("the view %s%s fails", path, search)
            return frame.error_page(error), [], frame.EMPTY_STATE
        # Controls stay in place, and keep the focus, as long as they are the same ones.
        kept = before and frame.controls_signature(before) == frame.controls_signature(now)
        return shown, no_update if kept else build_controls(page, run, view), now

    @app.callback(  # type: ignore[untyped-decorator]
        Output({"rest": MATCH}, "children"),
        Input({"rest": MATCH}, "n_clicks"),  # the browser asks when it has drawn what is seen
        State({"rest": MATCH}, "id"),
        prevent_initial_call=True,
    )
    def rest(_: int, place: dict[str, str]) -> Any:
        path, mark, search = place["rest"].partition("?")
        try:
            return rendered_page(path, mark + search).deferred_components()
        except Exception as error:
            logging.getLogger("headscope").exception("the rest of the view %s fails", place["rest"])
            return html.P(frame.describe_error(error), className="note", role="status")

    @app.callback(  # type: ignore[untyped-decorator]
        Output("saved", "data"),
        Input("save", "n_clicks"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def save(clicks: int | None, path: str, search: str) -> Any:
        if not clicks:
            return no_update
        _, run, view, content = frame.resolve_url(path, parse_query(search))
        return dcc.send_string(
            export.render_page_html(content, run, view, f"{path}{search}"), export.export_file_name(content, run)
        )


def _register_browser_callbacks(app: Dash) -> None:
    def in_browser(function: str, *where: Input | Output | State) -> None:
        app.clientside_callback(ClientsideFunction("headscope", function), *where, prevent_initial_call=True)

    in_browser("reflect", Input("shown", "data"))
    in_browser("steer", Input({"control": ALL}, "value"), State("shown", "data"))
    in_browser("open", Input({"chart": ALL, "heads": True}, "clickData"))
    in_browser("pick", Input({"chart": ALL, "heads": True}, "selectedData"))
    in_browser("sorted", Input("grid", "filterModel"), Input("grid", "columnState"))
    in_browser("csv", Output("grid", "exportDataAsCsv"), Input("grid-csv", "n_clicks"))


def _add_security_headers(app: Dash) -> None:
    """Headers that let a page load from this server and nowhere else, and run no script that is not ours."""
    server: Flask = app.server

    @server.after_request
    def harden(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY + " ".join(app.csp_hashes())
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if not request.path.startswith(("/_dash-component-suites", "/assets")):
            response.headers["Cache-Control"] = "no-store"
        elif "max-age" not in response.headers.get("Cache-Control", ""):
            response.headers["Cache-Control"] = "max-age=3600"  # parts loaded late, whose names tell no version
        return _gzip_response(response)


def _gzip_response(response: Response) -> Response:
    """What is long and is text, in fewer bytes where the browser takes them."""
    if response.direct_passthrough or "gzip" not in request.headers.get("Accept-Encoding", "") or response.is_streamed:
        return response
    if len(data := response.get_data()) > 2000 and response.mimetype in ("application/json", "text/html"):
        response.set_data(gzip.compress(data, 4))
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Vary"] = "Accept-Encoding"
    return response

"""The Dash app: callbacks between the URL and the page, and a server that listens on loopback only."""

import gzip
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import DependencyException
from flask import Flask, Response, request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.serving import make_server

from dashboards import export, layout, run_notes
from dashboards.lazy_loading import rendered_page
from dashboards.pages.runs import describe_progress
from dashboards.playground.callbacks import register_callbacks
from dashboards.playground.worker import ModelWorker, add_worker
from dashboards.request_checks import add_request_checks
from dashboards.run_store import RunStore, current_store, run_label
from dashboards.view_state import parse_query
from headscope.errors import HeadscopeError

ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
"""Host names that the server answers to, so that the name of another site cannot be pointed at it."""
MAX_REQUEST_BYTES = 1_000_000
"""Longest body of a request; the app itself sends a few kB."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; font-src 'self' data:; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src 'self' "
)
INDEX_TEMPLATE = """<!doctype html>
<html lang="en">
<head>{%metas%}<title>headscope</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>"""


def create_app(
    path: Path,
    models: Mapping[str, str] | None = None,
    read_only: bool = False,
    combined_with: Sequence[str] = (),
) -> Dash:
    """The app on the runs of a folder; `path` is the folder, or the run to show first.

    That run is combined with the runs of the folder that `combined_with` names.
    `models` are the specs of the models of the playground, by label. A `read_only` app writes nothing.
    """
    app = Dash(
        "dashboards",
        title="headscope",
        update_title="",
        suppress_callback_exceptions=True,  # most components are not on every page
        serve_locally=True,
        index_string=INDEX_TEMPLATE,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.server.config.update(
        RUN_STORE=RunStore(path, read_only, combined_with),
        TRUSTED_HOSTS=ALLOWED_HOSTS,
        MAX_CONTENT_LENGTH=MAX_REQUEST_BYTES,
    )
    hidden = [
        dcc.Location("url", refresh=False),
        dcc.Download("page-download"),
        dcc.Store("page-state"),
        html.Div(className="progress-bar"),
    ]
    app.layout = dmc.MantineProvider([*hidden, *layout.page_shell()], defaultColorScheme="auto")
    _register_page_callbacks(app)
    _register_browser_callbacks(app)
    if not read_only:
        run_notes.register_callbacks(app)
    if models:
        add_worker(app.server, ModelWorker(models))
        register_callbacks(app)
    _add_security_headers(app)
    add_request_checks(app)
    app.server.add_url_rule("/newest-run", view_func=_newest_run)
    app.server.add_url_rule("/run-progress", view_func=_run_progress)
    return app


def _newest_run() -> dict[str, str]:
    """The newest run that has finished since the app was started, for the browser, which asks every few seconds."""
    newest = current_store().newest_since_start()
    return {"name": newest, "label": run_label(newest)} if newest else {}


def _run_progress() -> list[str]:
    """A sentence about each unfinished run, for the browser, which asks every few seconds while the page shows them."""
    return [*map(describe_progress, current_store().progress())]


def serve(
    path: Path,
    port: int,
    models: Mapping[str, str] | None = None,
    read_only: bool = False,
    combined_with: Sequence[str] = (),
) -> None:
    """Serve the app on loopback until interrupted. Raises OSError if the port is in use."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("headscope").setLevel(logging.DEBUG)  # with the traceback of each chart that fails
    with socket.create_server(("127.0.0.1", port)) as listening, suppress(KeyboardInterrupt):
        app = create_app(path, models, read_only, combined_with).server
        server = make_server("127.0.0.1", port, app, threaded=True, fd=listening.fileno())
        print(
            f"headscope shows {_describe_opened_run(app.config['RUN_STORE'])}\n"
            f"Open http://127.0.0.1:{listening.getsockname()[1]}  (Ctrl-C stops it)",
            flush=True,
        )
        server.serve_forever()


def _describe_opened_run(store: RunStore) -> str:
    """The runs that the app shows first, and the number of other runs in the folder."""
    names = store.readable_names()
    first, *combined = store.default_runs or names[:1] or [""]
    opened = " + ".join([str(store.folder / first), *combined])
    others = len({*names} - {first, *combined})
    return f"{opened}; {others} more under 'Combined runs'" if others else opened


def _register_page_callbacks(app: Dash) -> None:
    url = [Input("url", "pathname"), Input("url", "search")]

    @app.callback(  # type: ignore[untyped-decorator]
        Output("content", "children"),
        Output("run-control", "children"),
        Output("controls", "children"),
        Output("page-state", "data"),
        *url,
        State("page-state", "data"),
    )
    def show(path: str, search: str, before: dict[str, Any] | None) -> tuple[Any, Any, Any, Any]:
        if before and layout.is_same_page(path, parse_query(search), before):
            return no_update, no_update, no_update, no_update
        try:
            rendered = rendered_page(path, search)
            page, run, view = rendered.page, rendered.run, rendered.view
            same_path = before and before["pathname"] == path
            components = rendered.all_components() if same_path else rendered.initial_components()
            state = layout.browser_state(path, search, page, run, view, rendered.content)
        except HeadscopeError as reason:
            return layout.empty_page(str(reason)), [], [], layout.EMPTY_STATE
        except Exception as error:  # the previous page must not stay under these controls
            logging.getLogger("headscope").exception("the view %s%s fails", path, search)
            return layout.error_page(error), [], [], layout.EMPTY_STATE
        return components, *layout.new_controls(before, state, page, run, view), state

    @app.callback(  # type: ignore[untyped-decorator]
        Output({"deferred": MATCH, "part": "blocks"}, "children"),
        Input({"deferred": MATCH, "part": "request"}, "data"),  # the blocks replace it, so that it is set only once
        State({"deferred": MATCH, "part": "blocks"}, "id"),
        prevent_initial_call=True,
    )
    def load_deferred(_: Any, component_id: dict[str, str]) -> Any:
        path, mark, search = component_id["deferred"].partition("?")
        try:
            return rendered_page(path, mark + search).deferred_components()
        except HeadscopeError as reason:  # such as a run that was deleted meanwhile
            return html.P(f"The rest of this page cannot be shown: {reason}.", className="notice", role="status")
        except Exception as error:
            logging.getLogger("headscope").exception("the rest of the view %s fails", component_id["deferred"])
            return html.P(layout.describe_error(error), className="notice", role="status")

    @app.callback(  # type: ignore[untyped-decorator]
        Output("page-download", "data"),
        Input("save-page", "n_clicks"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def save(clicks: int | None, path: str, search: str) -> Any:
        if not clicks:
            return no_update
        try:
            _, run, view, content = layout.resolve_url(path, parse_query(search))
        except HeadscopeError:  # the page that is shown says why there is nothing to save
            return no_update
        page_html = export.render_page_html(content, run, view, f"{path}{search}")
        return dcc.send_string(page_html, export.export_file_name(content, run))

    @app.callback(  # type: ignore[untyped-decorator]
        Output("page-download", "data", allow_duplicate=True),
        Input("head-set-csv", "n_clicks"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def save_selected_heads(clicks: int | None, path: str, search: str) -> Any:
        if not clicks:
            return no_update
        try:
            _, run, view, _ = layout.resolve_url(path, parse_query(search))
        except HeadscopeError:  # the page that is shown says why there is nothing to save
            return no_update
        if not view.selected_heads:
            return no_update
        return dcc.send_string(view.select_rows(run.heads).to_csv(index=False), "selected-heads.csv")


def _register_browser_callbacks(app: Dash) -> None:
    def in_browser(function: str, *dependencies: Input | Output | State) -> None:
        app.clientside_callback(ClientsideFunction("headscope", function), *dependencies, prevent_initial_call=True)

    in_browser("showState", Input("page-state", "data"), State({"control": ALL}, "value"))
    in_browser("changeControls", Input({"control": ALL}, "value"), State("page-state", "data"))
    in_browser("openHead", Input({"chart": ALL, "heads": True}, "clickData"))
    in_browser("selectHeads", Input({"chart": ALL, "heads": True}, "selectedData"))
    in_browser("storeTableState", Input("head-table", "filterModel"), Input("head-table", "columnState"))
    in_browser("exportTable", Output("head-table", "exportDataAsCsv"), Input("head-table-csv", "n_clicks"))


def _add_security_headers(app: Dash) -> None:
    """Set headers that restrict a page to resources of this server and to the app's own scripts."""
    server: Flask = app.server

    @server.errorhandler(RequestEntityTooLarge)
    def request_too_long(_: RequestEntityTooLarge) -> tuple[str, int]:
        return f"the request is longer than {MAX_REQUEST_BYTES:,} bytes", 413

    @server.errorhandler(DependencyException)
    def unknown_component_file(_: DependencyException) -> tuple[str, int]:
        return "no such file", 404

    @server.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY + " ".join(app.csp_hashes())
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if not request.path.startswith(("/_dash-component-suites", "/assets", "/_favicon.ico")):
            response.headers["Cache-Control"] = "no-store"
        elif "max-age" not in response.headers.get("Cache-Control", ""):
            response.headers["Cache-Control"] = "max-age=3600"  # file names of lazily loaded parts hold no version
        return _gzip_response(response)


def _gzip_response(response: Response) -> Response:
    """Compress long JSON and HTML for browsers that accept gzip."""
    if response.direct_passthrough or "gzip" not in request.headers.get("Accept-Encoding", "") or response.is_streamed:
        return response
    if len(data := response.get_data()) > 2000 and response.mimetype in ("application/json", "text/html"):
        response.set_data(gzip.compress(data, 4))
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Vary"] = "Accept-Encoding"
    return response

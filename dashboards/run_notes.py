"""Notes and tags on runs, which the app writes beside a run, and the live progress of unfinished runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dash_mantine_components as dmc
from dash import MATCH, Dash, Input, Output, State, html
from flask import request

from dashboards.components import build_component
from dashboards.run_store import current_store
from dashboards.view_state import ViewState
from headscope.errors import BadInput, HeadscopeError
from headscope.rendering.blocks import TextBlock
from headscope.runs.column_metadata import capitalise
from headscope.runs.notes import RunNotes, read_notes, write_notes
from headscope.runs.run import Run


@dataclass(frozen=True)
class NotesBlock(TextBlock):
    """Forms for the notes and tags of runs."""

    run_names: Sequence[str] = ()


@dataclass(frozen=True)
class ProgressBlock(TextBlock):
    """Sentences about unfinished runs, which the browser updates."""


@build_component.register
def _progress_component(block: ProgressBlock, view: ViewState, block_id: str) -> html.Div:
    text = "\n".join(block.sentences) or "No run is unfinished."
    return html.Div(html.P(text, id="run-progress", **{"aria-live": "polite"}), className="text-block")


@build_component.register
def _notes_component(block: NotesBlock, view: ViewState, block_id: str) -> html.Div:
    return html.Div([_notes_form(name) for name in block.run_names], className="run-notes")


def _notes_form(run_name: str) -> html.Fieldset:
    notes = read_notes(current_store().folder / run_name)
    return html.Fieldset(
        [
            html.Legend(run_name),
            dmc.TextInput(
                id={"run-tags": run_name}, label="Tags", description="separated by commas", value=", ".join(notes.tags)
            ),
            dmc.Textarea(
                id={"run-note": run_name}, label="Note", value=notes.note, autosize=True, minRows=2, maxRows=12
            ),
            html.Div(
                [
                    html.Button("Save", id={"save-notes": run_name}, type="button"),
                    html.Span(id={"notes-saved": run_name}, role="status"),
                ],
                className="toolbar",
            ),
        ]
    )


def register_callbacks(app: Dash) -> None:
    """Register the callback that saves the notes on a run."""

    @app.callback(  # type: ignore[untyped-decorator]
        Output({"notes-saved": MATCH}, "children"),
        Input({"save-notes": MATCH}, "n_clicks"),
        State({"save-notes": MATCH}, "id"),
        State({"run-note": MATCH}, "value"),
        State({"run-tags": MATCH}, "value"),
        prevent_initial_call=True,
    )
    def save(_: int, component_id: dict[str, str], note: str | None, tags: str | None) -> Any:
        try:
            return save_notes(component_id["save-notes"], note or "", tags or "")
        except HeadscopeError as reason:
            return f"{capitalise(str(reason))}."


def save_notes(run_name: str, note: str, tags: str) -> str:
    """Store the notes on a run of the folder, for a request of the app's own page; say so.

    Raises BadInput for another site, an unknown run or notes that are too long, CannotWrite if the app is read-only.
    """
    folder = current_store().writable_folder()
    if request.headers.get("Origin") != request.host_url.rstrip("/"):
        raise BadInput("the request does not come from a page of the app. Load the page again")
    if not isinstance(run := current_store().list_runs().get(run_name), Run):
        raise BadInput(f"there is no run '{run_name[:200]}' in this folder. Load the page again")
    write_notes(folder / run_name, RunNotes.parse(note, tags))
    current_store().forget_scan()
    return f"Saved in {run.path.name}/notes.json."

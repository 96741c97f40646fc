"""The components of the playground: its inputs, the places of its results, and the results of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dash_mantine_components as dmc
import pandas as pd
from dash import dcc, html

from dashboards.components import build_component
from dashboards.playground.view import PlaygroundView
from dashboards.playground.worker import page_token
from dashboards.run_store import READ_ONLY_REASON, current_store
from dashboards.view_state import ViewState
from headscope.base.ablation_names import MEAN_OF_TEXT
from headscope.base.head_set import HeadSet
from headscope.base.heads import Head
from headscope.playground.prompt_predictions import PromptPrediction
from headscope.plots.style import SEQUENTIAL_SCALE, model_styles
from headscope.rendering.blocks import TextBlock
from headscope.rendering.text import to_visible_line, to_visible_token
from headscope.results.words import percent
from headscope.runs.column_metadata import capitalise

EXAMPLE_PROMPT = "When Mary and John went to the store, John gave a drink to"
ABLATION_KINDS = ("zero", MEAN_OF_TEXT, "uniform", "streaming:4+16", "top:16")
MAX_GENERATED = 200
OUTDATED_NOTE = "The results are of the earlier prompt. Run the new one: Ctrl+Enter."
KEEP_TOOLTIP = (
    "Keep measures the shown prompt under every model (patterns, losses, direct logit attribution, ablation, and "
    "detectors on random tokens) and stores a run in this folder."
)
LAYER_HEAD = ("layer", "head")
BUTTON_COLOUR = "#00558a"
"""Dark enough for white text, unlike the library's blue."""
HIGH_LOSS = 8.0
"""Loss in nats that gets the full shade."""
QUANTITIES: Mapping[str, str] = {
    "attribution": "direct logit attribution to the next token",
    "pair": "attention weight from a token to another one, or to selected text",
    "previous": "previous-token score",
    "current": "current-token score",
    "first": "first-token score",
    "duplicate": "duplicate-token score",
    "induction": "induction score",
    "patching": "activation patching from the second prompt",
}
"""What can be shown for every head, by name; all but attribution, pair and patching are the kinds of
`tasks.prompt_score_keys`."""


@dataclass(frozen=True)
class HeadChoice:
    """Heads that can be entered by name."""

    name: str
    heads: HeadSet


@dataclass(frozen=True)
class PlaygroundBlock(TextBlock):
    """The playground of the app; in a saved page it is its text."""

    models: Sequence[str] = ()
    first_head: Head = (0, 0)
    choices: Sequence[HeadChoice] = ()
    view: PlaygroundView = field(default_factory=dict)


@build_component.register
def playground_component(block: PlaygroundBlock, view: ViewState, block_id: str) -> html.Div:
    """The inputs, and the results, which are hidden until the first request."""
    results = html.Div(
        [_reading_section(), _attention_section(block), _heads_section(block.view)],
        id="playground-results",
        className="playground-results",
        hidden=True,
    )
    stores = [
        dcc.Store("playground-token", data=page_token()),
        dcc.Store("playground-prediction"),
        dcc.Store("playground-attention"),
        dcc.Store("playground-drawn"),
        dcc.Store("playground-pair", data=block.view.get("pair")),
    ]
    message = html.Div(
        html.P("Loading the models …", className="introduction"),
        id="playground-message",
        role="status",
    )
    kept = html.Div(id="playground-kept", role="status")
    outdated = html.P(OUTDATED_NOTE, id="playground-outdated", hidden=True, className="notice", role="status")
    return html.Div([*stores, *_inputs(block), message, kept, outdated, results], className="playground")


def _inputs(block: PlaygroundBlock) -> list[Any]:
    prompt = dmc.Textarea(
        id="playground-prompt",
        label="Prompt",
        autosize=True,
        minRows=2,
        maxRows=8,
        **_value(block.view, "prompt", EXAMPLE_PROMPT),
    )
    heads = dmc.TextInput(
        id="playground-heads",
        label="Ablate heads",
        placeholder="none, or L18H6, L5H3",
        **_value(block.view, "heads", ""),
    )
    choices = [{"value": str(choice.heads), "label": choice.name} for choice in block.choices]
    choice = dmc.Select(
        id="playground-choice",
        label="Insert heads",
        placeholder="top heads or a set",
        data=[*{option["value"]: option for option in choices}.values()],
        searchable=True,
        comboboxProps={"width": 420, "position": "bottom-start"},
    )
    kind = dmc.Autocomplete(
        id="playground-kind", label="Ablation", data=[*ABLATION_KINDS], **_value(block.view, "kind", "zero")
    )
    generated = {"min": 0, "max": MAX_GENERATED} | _value(block.view, "count", 20)
    count = dmc.NumberInput(id="playground-count", label="Generate tokens", **generated)
    is_read_only = current_store().is_read_only
    buttons = html.Div(
        [
            dmc.Button("Run", id="playground-run", size="sm", color=BUTTON_COLOUR),
            dmc.Button("Cancel", id="playground-cancel", size="sm", variant="default"),
            dmc.Button("Keep", id="playground-keep", size="sm", variant="default", disabled=is_read_only),
        ],
        className="playground-buttons",
        title=f"Keep is off: {READ_ONLY_REASON}." if is_read_only else KEEP_TOOLTIP,
    )
    return [
        prompt,
        html.Div([heads, choice, kind, count, buttons], className="playground-inputs"),
        _second_prompt(block.view),
    ]


def _value(view: PlaygroundView, name: str, default: str | int) -> dict[str, Any]:
    """The value of an input: that of the link, else what the reader typed last in this tab, else the default."""
    return {"value": view[name]} if name in view else {"value": default, **PERSISTENT}


PERSISTENT: Mapping[str, Any] = {"persistence": True, "persistence_type": "session"}
"""The browser keeps what the user typed until the tab is closed."""


def _second_prompt(view: PlaygroundView) -> html.Details:
    corrupted = dmc.Textarea(
        id="playground-corrupted",
        label="Corrupted prompt",
        description="As many tokens as the prompt, another answer.",
        autosize=True,
        minRows=1,
        maxRows=4,
        **_value(view, "corrupted", "When Mary and John went to the store, Mary gave a drink to"),
    )
    answer, wrong = (
        dmc.TextInput(id=f"playground-{name}", label=label, w=130, **_value(view, name, default))
        for name, label, default in (("answer", "Answer", " Mary"), ("wrong", "Wrong answer", " John"))
    )
    button = dmc.Button("Patch", id="playground-patch", size="sm", variant="default")
    row = html.Div([corrupted, answer, wrong, button], className="playground-inputs second-prompt")
    return html.Details([html.Summary("Second prompt, for activation patching"), row])


def _reading_section() -> html.Section:
    return html.Section(
        [
            html.H2("Tokens"),
            html.P(TOKEN_LEGEND, id="token-legend", className="playground-legend"),
            html.Div(id="playground-tokens", className="playground-tokens"),
            html.H2("Next token"),
            html.Div(id="playground-next"),
            html.H2("Continuation"),
            html.Div(id="playground-continuation"),
        ],
        **{"aria-label": "The prompt"},
    )


TOKEN_LEGEND = f"Shade: loss of the token in nats, full at {HIGH_LOSS:g}."


def _attention_section(block: PlaygroundBlock) -> html.Section:
    layer, head = (block.view.get(name, str(index)) for name, index in zip(LAYER_HEAD, block.first_head, strict=True))
    choose = {"allowDeselect": False, "w": 84}
    scale = dmc.SegmentedControl(
        id="playground-scale",
        data=[{"value": "log", "label": "log"}, {"value": "linear", "label": "linear"}],
        value=block.view.get("scale", "log"),
        size="xs",
    )
    models = {"data": [*block.models], "value": block.view.get("model", block.models[0]), "allowDeselect": False}
    tools = [
        dmc.Select(id="playground-model", label="Model", w=150, **models),
        dmc.Select(id="playground-layer", label="Layer", data=[layer], value=layer, **choose),
        dmc.Select(id="playground-head", label="Head", data=[head], value=head, **choose),
        html.Div([html.Span("Colour", className="control-label"), scale]),
    ]
    picture = html.Div(
        html.Canvas(id="attention-canvas"),
        id="attention-picture",
        tabIndex=0,
        role="group",
        **{
            "aria-label": "Attention pattern; arrow keys move, Enter locks the query token, Escape releases it",
            "data-colours": " ".join(SEQUENTIAL_SCALE),
        },
    )
    return html.Section(
        [
            html.H2("Attention", id="attention-title"),
            html.Div(tools, className="toolbar"),
            html.Div(id="playground-attention-message"),
            html.Div(
                [
                    picture,
                    html.P(id="attention-scale", className="playground-legend"),
                    html.P(id="attention-readout", **{"aria-live": "polite"}),
                    html.Div(id="attention-heads", role="group", **{"aria-label": "Heads of the layer"}),
                ],
                id="attention-body",
            ),
        ],
        className="playground-attention",
        **{"aria-label": "Attention"},
    )


def _heads_section(view: PlaygroundView) -> html.Section:
    quantity = dmc.Select(
        id="playground-quantity",
        label="Show for every head",
        data=[{"value": name, "label": capitalise(label)} for name, label in QUANTITIES.items()],
        value=view.get("quantity", "attribution"),
        allowDeselect=False,
        w=320,
    )
    chosen = view.get("next_token")
    token = dmc.Select(
        id="playground-next-token", label="Next token", data=[], value=chosen, allowDeselect=False, w=150
    )
    return html.Section(
        [
            html.H2("All heads"),
            html.Div([quantity, token], className="toolbar"),
            html.Div(id="playground-all-heads"),
        ],
        className="playground-all-heads",
        **{"aria-label": "All heads"},
    )


def notice(reason: object) -> html.P:
    """A message in place of a result."""
    return html.P(f"{capitalise(str(reason))}.", className="notice", role="status")


def display_token(text: str) -> str:
    """A token as visible text on one line."""
    return to_visible_token(to_visible_line(text))


def token_components(prediction: PromptPrediction) -> list[html.Span]:
    """The tokens of a prompt, shaded by their loss."""
    losses = [None, *prediction.losses.tolist()]
    components = []
    for position, (text, loss) in enumerate(zip(prediction.token_texts, losses, strict=True)):
        shade = 0.0 if loss is None else min(1.0, loss / HIGH_LOSS)
        tooltip = f"token {position:,}" + ("" if loss is None else f": loss {loss:.2f} nats")
        name = "token special" if prediction.is_special[position] else "token"
        attributes = {"title": tooltip, "data-token": position, "data-loss-shade": f"{100 * shade:.0f}%"}
        style = {"--shade": f"{100 * shade:.0f}%"}
        components.append(html.Span(display_token(text), className=name, style=style, **attributes))
        if "\n" in text:
            components.append(html.Br())
    return components


def next_token_table(predictions: Sequence[PromptPrediction]) -> html.Div:
    """The probability of each next token and the mean loss, one column per model, before and after ablation."""
    styles = model_styles(pd.DataFrame({"model": [prediction.model for prediction in predictions]}))
    head = html.Thead(html.Tr([html.Th("token", scope="col"), *(html.Th(p.label, scope="col") for p in predictions)]))
    rows = []
    for name, text in predictions[0].next_texts.items():
        cells = [_probability_cell(p.next_tokens[name], styles[p.model].colour, p.is_ablated) for p in predictions]
        rows.append(html.Tr([html.Th(html.Span(display_token(text), className="token-name"), scope="row"), *cells]))
    losses = [html.Td(f"{p.mean_loss:.3f}" if len(p.losses) else "–") for p in predictions]
    foot = html.Tfoot(html.Tr([html.Th("loss", scope="row", title="mean loss of the prompt, nats per token"), *losses]))
    caption = "Probability of the next token, and mean loss of the prompt (nats/token)"
    table = html.Table([html.Caption(caption), head, html.Tbody(rows), foot], className="next-tokens")
    return html.Div(table, className="scroll", tabIndex=0, role="region", **{"aria-label": caption})


def _probability_cell(probability: float | None, colour: str, is_ablated: bool) -> html.Td:
    if probability is None:
        return html.Td("not in its vocabulary")
    style = {"--width": f"{100 * probability:.2f}%", "--colour": colour}
    bar = html.Span(className="probability-bar after" if is_ablated else "probability-bar", style=style)
    return html.Td([bar, html.Span(percent(probability, 1))], title=f"{probability:.6f}")


def continuation_list(continuations: Sequence[tuple[str, bool, str]]) -> html.Dl:
    """The generated text of each model, before and after ablation."""
    items: list[Any] = []
    for model, is_ablated, text in continuations:
        items += [html.Dt(f"{model}, ablated" if is_ablated else model), html.Dd(to_visible_line(text).strip() or "–")]
    return html.Dl(items, className="continuations")

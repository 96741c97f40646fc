"""Callbacks of the playground: each asks the worker process for one result and shows it, or says why it cannot."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
from dash import ClientsideFunction, Dash, Input, Output, State, ctx, html, no_update

from dashboards.components import PLAYGROUND_BLOCK, build_chart
from dashboards.playground.components import (
    MAX_GENERATED,
    QUANTITIES,
    continuation_list,
    display_token,
    next_token_table,
    notice,
    token_components,
)
from dashboards.playground.worker import authorized_worker, run_task
from dashboards.run_store import current_store
from dashboards.view_state import build_url
from headscope.base import user_input
from headscope.base.ablation_names import ablation_in_generation
from headscope.base.head_set import HeadSet
from headscope.errors import BadInput, HeadscopeError
from headscope.playground.prompt_predictions import PromptPrediction
from headscope.plots.head_matrices import plot_head_values
from headscope.rendering.blocks import Chart
from headscope.runs.column_metadata import capitalise

TOKEN = State("playground-token", "data")
PREDICTIONS = Input("playground-prediction", "data")
MODEL = Input("playground-model", "value")


def register_callbacks(app: Dash) -> None:
    """Register all callbacks of the playground."""
    _register_prompt(app)
    _register_results(app)
    _register_in_browser(app)


def _register_prompt(app: Dash) -> None:
    app.callback(
        Output("playground-prediction", "data"),
        Output("playground-message", "children"),
        Output("playground-continuation", "children", allow_duplicate=True),
        Output("playground-all-heads", "children", allow_duplicate=True),
        Input("playground-run", "n_clicks"),
        State("playground-prompt", "value"),
        State("playground-heads", "value"),
        State("playground-kind", "value"),
        State("playground-count", "value"),
        TOKEN,
        running=[(Output("playground-run", "loading"), True, False)],
        prevent_initial_call="initial_duplicate",
    )(_predict)
    app.callback(
        Output("playground-kept", "children"),
        Input("playground-keep", "n_clicks"),
        State("playground-prediction", "data"),
        State("playground-next-token", "value"),
        TOKEN,
        running=[(Output("playground-keep", "loading"), True, False)],
        prevent_initial_call=True,
    )(_keep)
    app.callback(
        Output("playground-message", "children", allow_duplicate=True),
        Input("playground-cancel", "n_clicks"),
        TOKEN,
        prevent_initial_call=True,
    )(_cancel)
    app.callback(
        Output("playground-tokens", "children"),
        Output("playground-next", "children"),
        Output("playground-layer", "data"),
        Output("playground-layer", "value"),
        Output("playground-next-token", "data"),
        Output("playground-next-token", "value"),
        Output("playground-results", "hidden"),  # last: no choice is possible before its options are there
        PREDICTIONS,
        MODEL,
        State("playground-layer", "value"),
        State("playground-next-token", "value"),
        prevent_initial_call=True,
    )(_show_predictions)


def _register_results(app: Dash) -> None:
    app.callback(
        Output("playground-continuation", "children"),
        Input("playground-drawn", "data"),  # after the attention, because it takes longest
        TOKEN,
        prevent_initial_call=True,
    )(_continue_prompt)
    app.callback(
        Output("playground-attention", "data"),
        Output("playground-attention-message", "children"),
        Output("playground-head", "data"),
        Output("playground-head", "value"),
        PREDICTIONS,
        MODEL,
        Input("playground-layer", "value"),
        State("playground-head", "value"),
        TOKEN,
        prevent_initial_call=True,
    )(_attend)
    app.callback(
        Output("playground-all-heads", "children"),
        PREDICTIONS,
        MODEL,
        Input("playground-quantity", "value"),
        Input("playground-next-token", "value"),
        Input("playground-patch", "n_clicks"),
        Input("playground-pair", "data"),
        State("playground-corrupted", "value"),
        State("playground-answer", "value"),
        State("playground-wrong", "value"),
        TOKEN,
        prevent_initial_call=True,
    )(_show_heads)


def _register_in_browser(app: Dash) -> None:
    app.clientside_callback(
        ClientsideFunction("playground", "drawAttention"),
        Output("playground-drawn", "data"),
        Input("playground-attention", "data"),
        Input("playground-head", "value"),
        Input("playground-scale", "value"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("playground", "markOutdated"),
        Output("playground-outdated", "hidden"),
        Input("playground-prompt", "value"),
        PREDICTIONS,
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("playground", "keepView"),
        PREDICTIONS,
        MODEL,
        *(Input(f"playground-{name}", "value") for name in ("layer", "head", "quantity", "scale", "next-token")),
        Input("playground-pair", "data"),
        *(State(f"playground-{name}", "value") for name in ("corrupted", "answer", "wrong")),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("playground", "insertHeads"),
        Output("playground-heads", "value"),
        Input("playground-choice", "value"),
        prevent_initial_call=True,
    )


def _or_notice(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The callback, which shows why it fails where its result would be."""

    @wraps(callback)
    def call(*arguments: Any) -> Any:
        try:
            return callback(*arguments)
        except HeadscopeError as reason:
            return notice(reason)

    return call


def _predict(run: int | None, prompt: str, heads: str, kind: str, count: Any, token: str) -> tuple[Any, ...]:
    """The predictions, without those results of the earlier prompt that are computed later; none after an error."""
    try:
        request = parse_request(prompt, heads, kind)
        step = {"run": run, "request": request, "count": parse_count(count)}
        predictions = run_task(token, "predict", **request)
    except HeadscopeError as reason:
        return None, notice(reason), None, None
    return step | {"predictions": [prediction.to_json() for prediction in predictions]}, None, None, None


@_or_notice
def _keep(_: int, data: Any, next_token: str, token: str) -> Any:
    return store_prompt_as_run(data, next_token, token)


@_or_notice
def _cancel(_: int, token: str) -> Any:
    authorized_worker(token).cancel(token)
    return no_update


def _show_predictions(data: Any, model: str, layer: str, next_token: str) -> tuple[Any, ...]:
    if not data:
        return (*(no_update,) * 6, True)
    predictions = [PromptPrediction.from_json(values) for values in data["predictions"]]
    prediction = next(p for p in predictions if p.model == model)
    layers = [str(number) for number in prediction.heads_by_layer]
    options = [{"value": name, "label": display_token(text)} for name, text in prediction.next_texts.items()]
    return (
        token_components(prediction),
        next_token_table(predictions),
        layers,
        no_update if layer in layers else layers[0],  # as in `_attend`: a choice made meanwhile must stay
        options,
        no_update if next_token in prediction.next_texts else options[0]["value"],
        False,
    )


@_or_notice
def _continue_prompt(step: Any, token: str) -> Any:
    return continuation_list(run_task(token, "continue", **step["request"], count=step["count"]))


def _attend(data: Any, model: str, layer: str, head: str, token: str) -> tuple[Any, ...]:
    if not data:
        return (no_update,) * 4
    step = {name: data[name] for name in ("run", "request", "count")}
    try:
        weights = run_task(token, "attention", prompt=data["request"]["prompt"], model=model, layer=int(layer))
    except HeadscopeError as reason:
        return step, notice(reason), no_update, no_update
    heads = [str(number) for number in range(len(weights))]
    picture = attention_picture(weights, data, model, int(layer))
    # A head clicked meanwhile must stay chosen, so the choice is written only where the layer lacks that head.
    return step | {"picture": picture}, None, heads, no_update if head in heads else "0"


@_or_notice
def _show_heads(data: Any, model: str, quantity: str, next_token: str, _: int, pair: Any, *rest: str) -> Any:
    is_other_pair = [*ctx.triggered_prop_ids] == ["playground-pair.data"] and quantity != "pair"
    if not data or is_other_pair:
        return no_update
    *second, token = rest
    if quantity == "pair":
        return pair_chart(data, model, pair, token)
    return heads_chart(data, model, quantity, next_token, second, token)


def store_prompt_as_run(data: Mapping[str, Any] | None, next_token: str, token: str) -> html.P:
    """Store what is shown as a run, and name it. Raises CannotWrite if the app is read-only."""
    folder = current_store().writable_folder()
    if not data:
        raise BadInput("nothing is shown yet. Run the prompt first")
    name = run_task(token, "keep", **data["request"], out=str(folder), token=next_token)
    link = html.A(name, href=build_url("/", {"run": name}))
    return html.P(["Kept as the run ", link, "."], className="notice")


def parse_request(prompt: str | None, heads: str | None, kind: str | None) -> dict[str, Any]:
    """The arguments of `tasks.predict_prompt`. Raises BadInput for an empty prompt or a wrong head or ablation."""
    if not (prompt or "").strip():
        raise BadInput("the prompt is empty. Type some text")
    try:
        selected = HeadSet.parse((heads or "").replace(";", ","))
        kind = ablation_in_generation(kind or "")
    except ValueError as error:
        raise BadInput(str(error)) from error
    return {"prompt": prompt, "heads": [list(head) for head in selected], "kind": kind}


def parse_count(count: Any) -> int:
    """The number of tokens to generate. Raises BadInput if it is not one from 0 to `MAX_GENERATED`."""
    if not isinstance(count, int) or not 0 <= count <= MAX_GENERATED:
        raise BadInput(f"cannot generate {user_input.quote(count)} tokens. Enter a number from 0 to {MAX_GENERATED}")
    return count


def attention_picture(weights: Any, data: Mapping[str, Any], model: str, layer: int) -> dict[str, Any]:
    """The attention of a layer for the browser: weights [heads, queries, keys] as base64 of float32, and the tokens."""
    texts = next(prediction["token_texts"] for prediction in data["predictions"] if prediction["model"] == model)
    encoded = base64.b64encode(np.ascontiguousarray(weights, "<f4").tobytes()).decode()
    tokens = [display_token(text) for text in texts]
    return {"model": model, "layer": layer, "shape": list(weights.shape), "weights": encoded, "tokens": tokens}


def heads_chart(
    data: Mapping[str, Any], model: str, quantity: str, next_token: str, second: Sequence[str], token: str
) -> Any:
    """A layer x head matrix of the quantity, with the ablated heads framed."""
    prompt = {"prompt": data["request"]["prompt"], "model": model}
    label, unit = QUANTITIES[quantity], ""
    if quantity == "attribution":
        text = dict(data["predictions"][0]["next_texts"])[next_token]
        label, unit = f"direct logit attribution to “{display_token(text).strip()}”", "logits"
        values = run_task(token, "attribution", **prompt, token=next_token)
        caption = "What each head adds directly to the logit at the last token, minus the mean over the vocabulary."
    elif quantity == "patching":
        values = run_task(token, "patching", **prompt, **second_prompt(*second))
        caption = f"{values.attrs['note']} ".lstrip() + (
            "Estimate (gradient-based): share of the logit difference between the two answers that the head's output "
            "from the prompt restores in the corrupted prompt."
        )
    else:
        values = run_task(token, "scores", **prompt, kind=quantity)
        caption = "Mean attention weight over the rows of this prompt that see such a token."
    is_signed = quantity in ("attribution", "patching")
    return _matrix_component(values, data, f"{capitalise(label)}: {model}", caption, (model, label, unit, is_signed))


def pair_chart(data: Mapping[str, Any], model: str, pair: Mapping[str, Any] | None, token: str) -> Any:
    """A layer x head matrix of the weight from one token of the prompt to another, or to a selected part of it."""
    query, key = ((pair or {}).get(name) for name in ("query", "key"))
    if not isinstance(query, int) or not isinstance(key, int):
        raise BadInput("no tokens are chosen. Click a query token of the prompt, then an earlier token, or select text")
    last_key = (pair or {}).get("last_key", key)
    tokens = {"query": query, "key": key, "last_key": last_key}
    values = run_task(token, "pair", prompt=data["request"]["prompt"], model=model, **tokens)
    texts = next(prediction["token_texts"] for prediction in data["predictions"] if prediction["model"] == model)
    name, first, last = (
        f"“{display_token(texts[position]).strip()}” ({position})" for position in (query, key, last_key)
    )
    names = [name, first if key == last_key else f"{first} … {last}"]
    title = f"Attention weight from {names[0]} to {names[1]}: {model}"
    caption = "Summed attention weight of every head at this query token on these key tokens of the prompt."
    return _matrix_component(values, data, title, caption, (model, "attention weight", "", False))


def _matrix_component(
    values: Any, data: Mapping[str, Any], title: str, caption: str, scale: tuple[str, str, str, bool]
) -> Any:
    """The chart of a value of every head; `scale` is the model, the label, the unit, and whether values are signed."""
    figure = plot_head_values(values, title, *scale)
    hint = " Click a head to draw its attention, shift-click to ablate it or not."
    ablated_heads = {(layer, head) for layer, head in data["request"]["heads"]}
    return build_chart(
        Chart(figure, caption, describe_largest(values, scale[2])), ablated_heads, PLAYGROUND_BLOCK, hint
    )


def second_prompt(corrupted: str | None, answer: str | None, wrong: str | None) -> dict[str, str]:
    """The arguments of `tasks.patching_estimate`. Raises BadInput if one of them is empty."""
    arguments = {"corrupted": corrupted or "", "answer": answer or "", "wrong": wrong or ""}
    if empty := next((name for name, text in arguments.items() if not text.strip()), None):
        label = {"corrupted": "corrupted prompt", "answer": "answer", "wrong": "wrong answer"}[empty]
        raise BadInput(f"the {label} of the second prompt is empty. Type it below the prompt")
    return arguments


def describe_largest(values: Any, unit: str) -> str:
    """A sentence with the three heads of largest value."""
    largest = values[values["value"].map(math.isfinite)].sort_values("value", ascending=False, kind="stable")[:3]
    heads = [f"L{row.layer}H{row.head} {row.value:.3g}" for row in largest.itertuples()]
    return f"Largest: {', '.join(heads)}{' ' + unit if unit else ''}." if heads else ""

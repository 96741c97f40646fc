"""Generate a model's answer to a needle prompt, score the heads at every step, attribute its tokens to heads."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headscope.attention.geometry import Geometry, stack_layers
from headscope.attention.record import AttentionRecord
from headscope.decomposition.residual_decomposition import AttentionBranch, Norm, ResidualDecomposition
from headscope.decomposition.residual_inspection import decompose_residual_stream
from headscope.forward.capture import capturing
from headscope.forward.prefix_cache import GenerationRequest, PrefixCachedGenerator, StepListener, TokenIds
from headscope.measures.copying import AnswerKeys, CopyScoreAccumulator, CopyScores, TokenSpan, last_query_weights
from headscope.measures.logit_attribution import direct_logit_attribution, last_query_outputs
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts import haystack
from headscope.prompts.haystack import NeedlePrompt, NeedlePromptBuilder, decode_tokens
from headscope.prompts.token_text import token_texts
from headscope.runs.arrow import Rows


@dataclass(frozen=True, eq=False)
class AnswerAttribution:
    """Mean direct logit attribution to the tokens of an answer, minus the mean over the vocabulary; 0 without a token.

    A final soft cap is linearised at the logits of each step.
    `total` [layers, H]; `through_spans` [S, layers, H], through each of S token spans.
    """

    total: Tensor
    through_spans: Tensor


def decompose_residual(model: Model, ids: TokenIds) -> ResidualDecomposition:
    """The decomposition of the model's logits. Raises UnsupportedModel if they are not a sum over heads."""
    input_ids = torch.from_numpy(ids.astype("int64"))[None].to(model.device)
    with attached(model), evaluating(model), capturing(model) as layers:
        return decompose_residual_stream(model, layers, input_ids, allow_scaled_layers=True)


class AttributionAccumulator:
    """Accumulates head outputs and the inputs and outputs of norms over the steps of one answer.

    `update` receives every layer of each step, inside `hooks_registered`. `compute` needs the answer's tokens.
    """

    def __init__(self, decomposition: ResidualDecomposition, spans: Sequence[TokenSpan]):
        self.decomposition, self.spans = decomposition, spans
        self._head_terms = [
            layer.attention_branch for layer in decomposition.scaled_layers() if layer.attention_branch is not None
        ]
        self._step_outputs: list[dict[int, Tensor]] = []
        self._norm_calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self._current_step: dict[int, Tensor] = {}
        self._row = 0

    @contextmanager
    def hooks_registered(self) -> Iterator[None]:
        """Record the input and output of every norm between a head and the logits at each step."""
        norms = [heads.norm for heads in self._head_terms if heads.norm is not None] + [self.decomposition.final_norm]
        with ExitStack() as stack:
            for norm in norms:
                handle = norm.module.register_forward_hook(self._norm_hook(norm), with_kwargs=True)
                stack.callback(handle.remove)
            for heads in self._head_terms:
                if heads.is_gated:
                    handle = heads.projected_module.register_forward_pre_hook(partial(self._apply_gate, heads))
                    stack.callback(handle.remove)
            yield

    def update(self, record: AttentionRecord, weights: Tensor) -> None:
        """Add one layer of one step, with the weights [H, Lk] of its last query."""
        self._current_step[record.layer] = last_query_outputs(record, weights, self.spans)
        self._row = record.batch_index

    def compute(self, tokens: Tensor) -> AnswerAttribution:
        """Attribution to `tokens` [T], which the first T steps produced."""
        decomposition, steps, spans = self.decomposition, len(tokens), len(self.spans)
        tokens = tokens.to(decomposition.unembedding.device)
        logits = None
        if decomposition.soft_cap is not None and steps:
            logits = decomposition.logits(self._joined_calls(decomposition.final_norm, steps)[1])
        direction = decomposition.final_norm.pull_back(decomposition.logit_gradients(tokens, logits)[0])
        direction = decomposition.logit_factor * direction / self._scales(decomposition.final_norm, steps)
        results = []
        for heads in self._head_terms:
            head_direction = (
                direction if heads.norm is None else heads.norm.pull_back(direction) / self._scales(heads.norm, steps)
            )
            if not steps:
                results.append(torch.zeros(1 + spans, len(self._step_outputs[0][heads.layer_index][0])))
                continue
            z = torch.stack([step[heads.layer_index] for step in self._step_outputs[:steps]])  # T, 1 + S, H, d
            rows = z.flatten(0, 1).transpose(0, 1)
            head_direction = head_direction.to(heads.projection.device)
            attribution = direct_logit_attribution(
                rows, heads.projection, head_direction.repeat_interleave(1 + spans, 0)
            )
            means = attribution.view(len(attribution), steps, 1 + spans).double().mean(1).T
            results.append((heads.factor * means).float().cpu())
        total, *through_spans = stack_layers(results, 0).transpose(0, 1)
        return AnswerAttribution(total, torch.stack(through_spans))

    def _apply_gate(self, heads: AttentionBranch, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Multiply the outputs of the last query's heads by their gates."""
        if (outputs := self._current_step.get(heads.layer_index)) is not None:  # None in other steps
            gated = args[0][self._row, -1].float().view_as(outputs[0])
            self._current_step[heads.layer_index] = outputs * (gated / outputs[0]).nan_to_num()

    def _norm_hook(self, norm: Norm) -> Any:
        def record_call(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if not self._current_step:  # part of a prompt, or a step of another sequence
                return
            call = args[0][self._row, -1:].clone(), output[self._row, -1:].clone()
            self._norm_calls.setdefault(module, []).append(call)
            if norm is self.decomposition.final_norm:
                self._step_outputs.append(self._current_step)
                self._current_step = {}

        return record_call

    def _joined_calls(self, norm: Norm, steps: int) -> tuple[Tensor, Tensor]:
        """Inputs and outputs of a norm at the first steps, [T, D] each."""
        inputs, outputs = zip(*self._norm_calls[norm.module][:steps], strict=True)
        return torch.cat(inputs), torch.cat(outputs)

    def _scales(self, norm: Norm, steps: int) -> Tensor:
        """The divisor of a norm at each step, [T, 1]."""
        return norm.scales(*self._joined_calls(norm, steps))[:, None] if steps else torch.ones(0, 1)


MIN_KEY_WEIGHT = 0.15
"""Least weight of a key that is stored at an answer step: a head has at most six of them [ours]."""
EXTRA_ANSWER_STEPS = 6
"""Answer steps of a strict trial beyond the number of scored tokens [ours]."""


@dataclass(frozen=True, eq=False)
class TrialAnswer:
    """Outcome of a trial: the answer, its recall 0..1, the text of each scored step, copy scores of the heads, the keys
    that they attend to (`AnswerKeys.compute`) and, if requested, their attribution."""

    text: str
    recall: float
    step_texts: list[str]
    copies: CopyScores
    keys: tuple[torch.Tensor, torch.Tensor]
    attribution: AnswerAttribution | None = None


@dataclass(frozen=True, eq=False)
class TrialPrompt:
    """A trial to answer: its prompt once per span to score, with the same tokens, its builder and its mode."""

    prompts: Sequence[NeedlePrompt]
    builder: NeedlePromptBuilder
    mode: str

    @property
    def ids(self) -> np.ndarray:
        return self.prompts[0].ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(prompt.start, prompt.end) for prompt in self.prompts]


def answer_trials(
    generator: PrefixCachedGenerator, trials: Sequence[TrialPrompt], decomposition: ResidualDecomposition | None = None
) -> list[TrialAnswer]:
    """Generate the answers to trials of one length together, and score every head on the spans of each trial.

    With a `decomposition`, also compute attribution, in total and through the whole needle.
    """
    layers = generator.model.geometry.layers
    copy_scores = CopyScoreAccumulator(layers, [trial.spans for trial in trials])
    answer_keys = AnswerKeys(layers, MIN_KEY_WEIGHT)
    attributions = []
    if decomposition is not None:
        for trial in trials:
            needles = [(start - trial.builder.cue_count, end) for start, end in trial.spans]
            attributions.append(AttributionAccumulator(decomposition, needles))

    def listen(numbers: Sequence[int], records: Sequence[AttentionRecord]) -> None:
        weights = last_query_weights(records)
        copy_scores.add(records[0].layer, numbers, weights)
        answer_keys.add(records[0].layer, numbers, weights)
        if attributions:
            for number, record, own_weights in zip(numbers, records, weights, strict=True):
                attributions[number].update(record, own_weights)

    with ExitStack() as hooks:
        for accumulator in attributions:
            hooks.enter_context(accumulator.hooks_registered())
        answers = generate_answers(generator, trials, listen)
    results = []
    for number, (trial, (tokens, answer_tokens)) in enumerate(zip(trials, answers, strict=True)):
        scored = torch.tensor(tokens if trial.mode == "wu" else answer_tokens, dtype=torch.int64)
        copies = copy_scores.compute(number, torch.from_numpy(trial.ids.astype(np.int64)), scored)
        if trial.mode == "wu":
            lengths = torch.tensor([[[end - start]] for start, end in trial.spans])
            copies = CopyScores(copies.copy_counts / lengths, copies.copy_counts, copies.span_mass, copies.copy_events)
        text = answer_text(trial.builder, answer_tokens)
        step_texts = [*text_increments(trial.builder.tokenizer, scored.tolist())]
        attribution = attributions[number].compute(scored) if attributions else None
        recall, keys = rouge1_recall(trial.builder.scored_text, text), answer_keys.compute(number, len(scored))
        results.append(TrialAnswer(text, recall, step_texts, copies, keys, attribution))
    return results


def generate_answers(
    generator: PrefixCachedGenerator, trials: Sequence[TrialPrompt], listener: StepListener = lambda *_: None
) -> list[tuple[list[int], list[int]]]:
    """The tokens generated for each trial, and those of them before the token that ends the answer.

    With Wu et al.'s own prompt (`is_published`) answers also end as in their code, and the token that ends them belongs
    to the answer.
    """
    requests = [_request(generator.model, trial) for trial in trials]
    answers = []
    for trial, request, tokens in zip(trials, requests, generator.generate_batch(requests, listener), strict=True):
        keeps_last = trial.builder.is_published or not request.is_last_token(tokens[-1])
        answers.append((tokens, tokens if keeps_last else tokens[:-1]))
    return answers


def _request(model: Model, trial: TrialPrompt) -> GenerationRequest:
    """What to generate for a trial; the number of steps follows from the scored tokens of its first span."""
    builder, (start, end) = trial.builder, trial.spans[0]
    max_steps = haystack.MAX_STEPS if trial.mode == "wu" else end - start + EXTRA_ANSWER_STEPS
    is_last = answer_end_test(model, builder.tokenizer, stop_at_end_token=trial.mode != "wu")
    if builder.is_published:
        published = builder.tokenizer.convert_tokens_to_ids(haystack.PUBLISHED_END_TOKEN)
        return GenerationRequest(trial.ids, max_steps, {published, haystack.PUBLISHED_END_ID}.__contains__)
    return GenerationRequest(trial.ids, max_steps, is_last)


def answer_text(builder: NeedlePromptBuilder, answer_tokens: Sequence[int]) -> str:
    """The text of an answer without white space around it."""
    return decode_tokens(builder.tokenizer, np.array(answer_tokens, np.int32)).strip()


def text_increments(tokenizer: Any, tokens: Sequence[int]) -> Iterator[str]:
    """The text that each token adds; a character split over several tokens belongs to the last of them."""
    complete_text = ""
    for step in range(1, len(tokens) + 1):
        text = decode_tokens(tokenizer, np.array(tokens[:step], np.int32))
        is_complete = step == len(tokens) or not text.endswith("\ufffd")
        yield text.removeprefix(complete_text) if is_complete else ""
        complete_text = text if is_complete else complete_text


def answer_end_test(model: Model, tokenizer: Any, stop_at_end_token: bool) -> Callable[[int], bool]:
    """A test whether a token ends an answer: it contains a line break or, if requested, is an end token."""
    configured = model.module.generation_config.eos_token_id if model.module.generation_config else None
    candidates = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    end_tokens = {token for token in candidates if token is not None} if stop_at_end_token else set()
    return lambda token: token in end_tokens or "\n" in decode_tokens(tokenizer, np.array([token], np.int32))


def rouge1_recall(reference: str, answer: str) -> float:
    """ROUGE-1 recall, 0..1: share of the reference words, counted with repeats, in the answer. No stemming [ours]."""
    words, remaining = re.findall(r"\w+", reference.lower()), re.findall(r"\w+", answer.lower())
    repeated = 0
    for word in words:
        if word in remaining:
            remaining.remove(word)
            repeated += 1
    return repeated / len(words)


IntArray = npt.NDArray[np.int64]
WEIGHT_LEVELS = 128
"""Levels of the weights in `needle_keys`: rounded weights take a third of the space."""
CONTEXT_TOKENS = 40
"""Haystack tokens stored on each side of a needle."""


def retrieval_columns(copies: CopyScores, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `retrieval` for every depth, layer and head."""
    scores = {
        "score": copies.scores.reshape(-1).numpy(),
        "copies": copies.copy_counts.reshape(-1).numpy(),
        "mass": copies.span_mass.reshape(-1).clamp(max=1).numpy(),
    }
    return _existing_heads(_head_and_depth_columns(copies.scores, geometry, depths) | scores, geometry)


def attribution_columns(attribution: AnswerAttribution, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `needle_attribution` for every depth, layer and head."""
    rest = attribution.total - attribution.through_spans
    columns = {"through": attribution.through_spans.reshape(-1).numpy(), "rest": rest.reshape(-1).numpy()}
    return _existing_heads(_head_and_depth_columns(attribution.through_spans, geometry, depths) | columns, geometry)


def _existing_heads(columns: dict[str, Any], geometry: Geometry) -> dict[str, Any]:
    """The rows of heads that their layer has: layers may differ in their number of heads."""
    heads = np.array(geometry.layer_heads)[np.searchsorted(geometry.layer_numbers, columns["layer"])]
    return {name: column[columns["head"] < heads] for name, column in columns.items()}


def _head_and_depth_columns(numbers: torch.Tensor, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Key columns of numbers [depths, layers, H]."""
    span, layer, head = np.indices(numbers.shape).reshape(3, -1)
    return _head_columns(layer, head, geometry) | {"depth": np.array(depths)[span]}


def _head_columns(layer_index: IntArray, head: IntArray, geometry: Geometry) -> dict[str, Any]:
    """Key columns of heads; `layer_index` counts the layers from 0."""
    return {
        "layer": np.array(geometry.layer_numbers)[layer_index],
        "head": head,
        "kv_group": geometry.kv_group(layer_index, head),
    }


def needle_tokens_row(prompt: NeedlePrompt, builder: NeedlePromptBuilder, keys: Mapping[str, Any]) -> Rows:
    """The row of `needle_tokens`: the prompt around the needle, and the question."""
    ids, question_start = prompt.ids, len(prompt.ids) - len(builder.suffix_ids)
    # A span that mode wu finds may start before the scored part, and so the cue before the prompt.
    start, needle, end = prompt.start, max(0, prompt.start - builder.cue_count), prompt.end
    parts = {
        "before": ids[max(0, needle - CONTEXT_TOKENS) : needle],
        "cue": ids[needle:start],
        "scored": ids[start:end],
        "after": ids[end : min(question_start, end + CONTEXT_TOKENS)],
        "question": ids[question_start:],
    }
    return {**keys, **{name: [decode_tokens(builder.tokenizer, part)] for name, part in parts.items()}}


def prompt_row(prompt: NeedlePrompt, builder: NeedlePromptBuilder, keys: Mapping[str, Any]) -> Rows:
    """The row of `needle_prompts`: the text of every token of the prompt."""
    texts, _ = token_texts(builder.tokenizer, prompt.ids.tolist())
    return {**keys, "tokens": [json.dumps(texts, ensure_ascii=False)]}


def answer_step_rows(answer: TrialAnswer, geometry: Geometry, keys: Mapping[str, Any]) -> dict[str, Rows]:
    """Rows of `needle_steps`, `needle_copies` and `needle_keys`; a table without rows is omitted."""
    rows: dict[str, Rows] = {}
    if answer.step_texts:
        rows["needle_steps"] = {**keys, "step": list(range(len(answer.step_texts))), "text": answer.step_texts}
    _, layer, step, head, key = answer.copies.copy_events.numpy().T
    if len(key):
        rows["needle_copies"] = {**keys, "step": step, **_head_columns(layer, head, geometry), "key": key}
    indices, weights = answer.keys
    if len(weights):
        layer, step, head, key = indices.numpy().T
        columns = {"step": step, **_head_columns(layer, head, geometry), "key": key}
        rows["needle_keys"] = {**keys, **columns, "weight": np.round(weights.numpy() * WEIGHT_LEVELS) / WEIGHT_LEVELS}
    return rows

"""Runner of the ablation probe: every head ablated by itself, and named heads together, on one prompt per cell."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from headscope.attention.backend import OutputEdit
from headscope.forward.ablation import (
    Heads,
    ablation_edit,
    heads_by_layer,
    reference_outputs,
    reference_tokens,
)
from headscope.forward.patching import BATCH_TOKENS, MetricName, PairTokens, finite_metric, metric_function
from headscope.forward.replay import Replay
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.pair_sets import PairSet, check_set_names, load_pair_set
from headscope.prompts.pairs import PromptPair, TokenPair, tokenize_pair
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from probes.ablation.schema import ABLATION, ABLATION_SETS, PROMPT_SET, AblationOptions

STREAM_MEMORY_BYTES = 2**30
"""Memory for the residual streams of a prompt; the rest is on disk."""


@dataclass(frozen=True)
class _AblationTask:
    prompts: str
    index: int


class AblationRunner:
    """Cells: every prompt of every set and model."""

    def __init__(self, options: AblationOptions, context: StudyContext):
        self.options, self.context = options, context
        self._pair_sets: dict[tuple[str, str], PairSet] = {}
        self._reference: tuple[str, dict[int, torch.Tensor]] | None = None

    def cells(self) -> list[Cell]:
        sources = self.options.pairs or [PROMPT_SET]
        cells = []
        for label in self.context.labels:
            sets = [self._pair_set(label, source) for source in sources]
            check_set_names(sets)
            if self.options.kinds != ["zero"]:
                self._reference_ids(label)  # recorded before the work begins, and reports a text that is too short
            head_count = sum(map(len, self._heads(self.context.model(label)).values()))
            cost = (1 + 0.5 * head_count * len(self.options.kinds)) * pass_cost(32)
            cells += [
                Cell(f"{label}: {pairs.name}, {name}", label, cost, _AblationTask(source, index))
                for source, pairs in zip(sources, sets, strict=True)
                for index, name in enumerate(pairs.pair_names)
            ]
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        pairs = self._pair_set(cell.model, cell.task.prompts)
        pair = pairs.build(cell.task.index)
        replay = _AnswerReplay(model, pair, self.options.metric)
        keys: dict[str, Any] = {"model": cell.model, "prompts": pairs.name, "pair": pair.name}
        keys |= {"metric": self.options.metric, "metric_before": replay.value({})}
        tables = {ABLATION.name: _columns(keys, self._single_heads(replay, cell.model, model))}
        if self.options.heads != ["all"]:
            tables[ABLATION_SETS.name] = _columns(keys, self._all_heads(replay, cell.model, model))
        return tables

    def _single_heads(self, replay: "_AnswerReplay", label: str, model: Model) -> Iterator[dict[str, Any]]:
        """One row per kind and head, ablated by itself."""
        for kind in self.options.kinds:
            for layer, members in self._heads(model).items():
                edits = [self._edit(kind, label, model, layer, [head]) for head in members]
                for head, value in zip(members, replay.values_of(layer, edits), strict=True):
                    group = model.geometry.kv_group(layer, head)
                    number = model.geometry.layer_numbers[layer]
                    yield {"kind": kind, "layer": number, "head": head, "kv_group": group, "metric_after": value}

    def _all_heads(self, replay: "_AnswerReplay", label: str, model: Model) -> Iterator[dict[str, Any]]:
        """One row per kind with all heads ablated together."""
        heads = self._heads(model)
        for kind in self.options.kinds:
            edits = {layer: self._edit(kind, label, model, layer, members) for layer, members in heads.items()}
            yield {"kind": kind, "size": sum(map(len, heads.values())), "metric_after": replay.value(edits)}

    def _edit(self, kind: Any, label: str, model: Model, layer: int, heads: list[int]) -> OutputEdit:
        """The ablation of heads of one layer; resample draws the same positions for every prompt."""
        reference = None if kind == "zero" else self._reference_outputs(label, model)[layer]
        return ablation_edit(kind, heads, reference, torch.Generator().manual_seed(self.context.seed))

    def _heads(self, model: Model) -> dict[int, list[int]]:
        """The heads to ablate by index of their attention layer."""
        names: Heads = self.options.heads
        if self.options.heads == ["all"]:
            names = {number: range(model.geometry.heads) for number in model.geometry.layer_numbers}
        return heads_by_layer(model, names)

    def _reference_outputs(self, label: str, model: Model) -> dict[int, torch.Tensor]:
        """Head outputs of every layer on the reference text, under the model's position scheme; kept for its cells."""
        if self._reference is None or self._reference[0] != label:
            with attached(model):
                outputs = reference_outputs(model, [*range(model.geometry.layers)], self._reference_ids(label))
            self._reference = (label, outputs)
        return self._reference[1]

    def _reference_ids(self, label: str) -> Sequence[int]:
        """The tokens of the reference text, recorded as an input of the study."""
        ids = reference_tokens(self.context.study.texts.source, self.context.tokenizer(label))
        self.context.record_input(f"reference text of '{label}'", [ids])
        return ids

    def _pair_set(self, label: str, source: str) -> PairSet:
        """A set of prompts in the tokens of a model."""
        if (label, source) not in self._pair_sets:
            options, tokenizer = self.options, self.context.tokenizer(label)
            if options.prompt is not None:
                pairs = _single_pair_set(options, tokenizer)
            else:
                pairs = load_pair_set(
                    source,
                    tokenizer,
                    list,
                    count=options.count,
                    length=options.length,
                    seed=self.context.seed,
                    alignment="equal",
                    metric=options.metric,
                )
            self.context.record_input(f"prompts '{source}'", [pairs.digest.encode()])
            self._pair_sets[label, source] = pairs
        return self._pair_sets[label, source]


def _single_pair_set(options: AblationOptions, tokenizer: Any) -> PairSet:
    """The prompt of the options as a set of one."""
    prompt, answer = str(options.prompt), str(options.answer)
    pair = PromptPair(PROMPT_SET, prompt, prompt, answer, options.wrong or "")
    is_one_token = options.metric in ("logit_diff", "logprob")
    needs_wrong = options.metric == "logit_diff"
    tokens = tokenize_pair(tokenizer, pair, needs_one_token=is_one_token, needs_wrong=needs_wrong)
    return PairSet(PROMPT_SET, [PROMPT_SET], lambda index: tokens, repr(pair))


class _AnswerReplay:
    """One prompt and its answer after a full pass, under the model's scheme."""

    def __init__(self, model: Model, pair: TokenPair, metric: MetricName):
        ids = torch.from_numpy(np.concatenate([pair.clean, pair.answer]).astype(np.int64)).to(model.device)[None]
        self.answer, wrong = (torch.from_numpy(t.astype(np.int64)).to(model.device) for t in (pair.answer, pair.wrong))
        schedule: Any = model.schedule
        self._replay = Replay(model, schedule, ids, STREAM_MEMORY_BYTES, len(pair.clean))
        with self._replay.running():
            self._replay.record_streams()
            logits = self._replay.target_logits({})
        self._metric = metric_function(metric, PairTokens(ids, ids, self.answer, wrong, len(pair.clean)), logits)

    def value(self, edits: Mapping[int, OutputEdit]) -> float:
        """The metric with edited head outputs in some attention layers."""
        with self._replay.running():
            return self._finite_metric(self._replay.target_logits(edits))

    def values_of(self, layer: int, edits: Sequence[OutputEdit]) -> list[float]:
        """The metric with each of these edits of one attention layer by itself."""
        with self._replay.running():
            z, call = self._replay.attention(layer)
            batch = max(1, BATCH_TOKENS // z.shape[2])
            batches = [edits[first : first + batch] for first in range(0, len(edits), batch)]
            outputs = (torch.cat([edit(z, call) for edit in members]) for members in batches)
            logits = torch.cat([self._replay.target_logits_of(layer, variants) for variants in outputs])
        return [self._finite_metric(row_logits) for row_logits in logits]

    def _finite_metric(self, logits: torch.Tensor) -> float:
        return finite_metric(self._replay.model, self._metric, logits, self.answer)


def _columns(keys: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Rows:
    return pd.DataFrame([*map(dict, rows)]).assign(**keys)

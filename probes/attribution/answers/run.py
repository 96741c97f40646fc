"""Runner of the attribution of answers: one pass over each prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.decomposition.logit_attribution import LogitAttribution, attribute_logits
from headscope.errors import BadInput
from headscope.positions.model import Model
from headscope.prompts.haystack import Haystack, Ids, decode_tokens
from headscope.prompts.pair_sets import (
    GENERATED_SETS,
    PROMPT_SET,
    PairSet,
    check_set_names,
    load_pair_set,
    single_pair_set,
)
from headscope.prompts.pairs import TokenPair
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.config import MAX_PROMPT_TOKENS
from headscope.study.context import StudyContext
from headscope.study.prompt import read_prompt
from probes.attribution.answers.schema import ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS
from probes.attribution.schema import AttributionOptions


@dataclass(frozen=True)
class AnswerWork:
    """The prompt with number `index` of a set."""

    prompts: str
    index: int


class AnswerRunner:
    """Cells: every prompt of every set and model."""

    def __init__(self, options: AttributionOptions, context: StudyContext):
        self.options, self.context = options, context
        self._pair_sets: dict[tuple[str, str], PairSet] = {}

    def cells(self) -> list[Cell]:
        sources = self.options.pairs or [PROMPT_SET]
        cells = []
        for label in self.context.labels:
            sets = [self._pair_set(label, source) for source in sources]
            check_set_names(sets)
            cells += [
                Cell(
                    f"{label}: {pairs.name}, {name}, answer",
                    label,
                    1.5 * pass_cost(self.options.prompt_length),
                    AnswerWork(source, number),
                )
                for source, pairs in zip(sources, sets, strict=True)
                for number, name in enumerate(pairs.pair_names)
            ]
        return cells

    def compute_rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        pairs = self._pair_set(cell.model, cell.work.prompts)
        pair = pairs.build(cell.work.index)
        wrong = int(pair.wrong[0]) if len(pair.wrong) else None
        terms = attribute_logits(model, torch.from_numpy(pair.clean.astype(np.int64)), int(pair.answer[0]), wrong)
        keys = {"model": cell.model, "prompts": pairs.name, "pair": pair.name}
        return {
            ANSWER_HEADS.name: {**keys, **_head_rows(terms)},
            ANSWER_PARTS.name: {**keys, **_part_rows(answer_parts(terms))},
            ANSWER_TOKENS.name: _token_rows(self.context.tokenizer(cell.model), pair).assign(**keys),
        }

    def _pair_set(self, label: str, source: str) -> PairSet:
        """A set of prompts in the tokens of a model, recorded as an input of the study."""
        if (label, source) not in self._pair_sets:
            pairs = self._open_pair_set(label, source)
            if source not in GENERATED_SETS:
                for index in range(len(pairs)):
                    _check_pair(pairs.build(index), self.context.tokenizer(label), needs_wrong=source != PROMPT_SET)
            self.context.record_input(f"prompts '{source}'", [pairs.digest.encode()])
            self._pair_sets[label, source] = pairs
        return self._pair_sets[label, source]

    def _open_pair_set(self, label: str, source: str) -> PairSet:
        options, tokenizer = self.options, self.context.tokenizer(label)
        if prompt := read_prompt(options):
            return single_pair_set(
                tokenizer,
                prompt[1],
                str(options.answer),
                options.wrong or "",
                template=options.template,
                needs_one_token=True,
                needs_wrong=False,
            )
        return load_pair_set(
            source,
            tokenizer,
            partial(self._haystacks, label),
            count=options.count,
            length=options.prompt_length,
            seed=self.context.seed,
            alignment="end",  # corrupted prompts are not run
            metric="logprob",  # answers of one token
        )

    def _haystacks(self, label: str) -> list[Haystack]:
        """The documents of the study as texts for needles."""
        documents = self.context.documents(label, self.options.prompt_length)
        return [Haystack(document.name, document.ids, self.context.tokenizer(label)) for document in documents]


def answer_parts(terms: LogitAttribution) -> dict[tuple[str, int], Tensor]:
    """The terms [rows] by (part, layer) of an answer's logit; "logit" is the sum of all others.

    The biases after the heads of a layer are a part of that layer.
    """
    parts = {name: part for name, part in terms.part_terms.items() if name[0] != "bias"}
    layers = {number: bias for number, bias in enumerate(terms.layer_biases) if bool(bias.any())}
    return {**parts, **{("attention_bias", number): bias for number, bias in layers.items()}} | {
        ("bias", 0): terms.final_bias
    }


def _head_rows(terms: LogitAttribution) -> dict[str, np.ndarray]:
    geometry = terms.geometry
    layers, heads = np.nonzero(np.arange(geometry.heads) < np.array(geometry.layer_heads)[:, None])
    columns = {"layer": np.array(geometry.layer_numbers)[layers], "head": heads}
    columns["kv_group"] = geometry.kv_group(layers, heads)
    return _by_row(columns, terms.head_terms[layers, heads])


def _part_rows(parts: Mapping[tuple[str, int], Tensor]) -> dict[str, np.ndarray]:
    columns = {"part": np.array([name for name, _ in parts]), "layer": np.array([layer for _, layer in parts])}
    return _by_row(columns, torch.stack([*parts.values()]))


def _by_row(columns: Mapping[str, np.ndarray], contributions: Tensor) -> dict[str, np.ndarray]:
    """Key columns [n] and contributions [n, rows] as columns of a table with a row per position."""
    count, rows = contributions.shape
    return {
        **{name: np.repeat(column, rows) for name, column in columns.items()},
        "position": np.tile(np.arange(rows), count),
        "contribution": contributions.cpu().numpy().reshape(-1),
    }


def _token_rows(tokenizer: Any, pair: TokenPair) -> pd.DataFrame:
    def texts(ids: Ids) -> list[str]:
        return [decode_tokens(tokenizer, ids[at : at + 1]) for at in range(len(ids))]

    frame = pd.DataFrame({"position": np.arange(len(pair.clean)), "token": texts(pair.clean)})
    return frame.assign(answer=texts(pair.answer)[0], wrong="".join(texts(pair.wrong)))


def _check_pair(pair: TokenPair, tokenizer: Any, needs_wrong: bool) -> None:
    """Raise BadInput for a prompt that is too long, equal answers, or a pair of a file without a wrong answer."""
    location = pair.location or "the prompt"
    if len(pair.clean) > MAX_PROMPT_TOKENS:
        raise BadInput(
            f"{location}: the prompt has {len(pair.clean):,} tokens, and every row of it is stored. Use at most "
            f"{MAX_PROMPT_TOKENS:,} tokens"
        )
    if np.array_equal(pair.answer, pair.wrong):
        raise BadInput(
            f"{location}: answer and wrong answer are the same token '{decode_tokens(tokenizer, pair.answer)}'. Change "
            "one"
        )
    if needs_wrong and not len(pair.wrong):
        raise BadInput(f"{location}: it has no wrong answer, which attribution compares with. Add 'wrong'")

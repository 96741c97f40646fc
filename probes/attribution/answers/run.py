"""Runner of the attribution of answers: one pass over each prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.decomposition.logit_attribution import LogitAttribution, attribute_logits
from headscope.errors import BadInput
from headscope.positions.model import Model
from headscope.prompts.answers import shows_answer
from headscope.prompts.haystack import Ids, decode_tokens
from headscope.prompts.pair_sets import PairSet, single_pair_set
from headscope.prompts.pairs import TokenPair
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.config import MAX_PROMPT_TOKENS
from headscope.study.context import StudyContext
from headscope.study.prompts import PromptSets, read_prompt
from probes.attribution.answers.declaration import ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS, COUNTED_BY
from probes.attribution.declaration import AttributionOptions


@dataclass(frozen=True)
class AnswerWork:
    """The prompt with number `index` of a set."""

    prompts: str
    index: int
    length: int


class AnswerRunner:
    """Cells: every prompt of every set and model."""

    def __init__(self, options: AttributionOptions, context: StudyContext):
        self.options, self.context = options, context
        self.sets = PromptSets(
            context,
            options.pairs,
            count=options.count,
            length=options.prompt_length,
            metric="logprob",  # answers of one token
            open_prompt=self._open_prompt if options.pairs is None else None,
            check=self._check_pair,
            options=(),
        )

    def cells(self) -> list[Cell]:
        return [
            Cell(
                f"{label}: {pairs.name}, {name}, answer",
                label,
                1.5 * pass_cost(pairs.length),
                AnswerWork(source, number, pairs.length),
            )
            for label in self.context.labels
            for source, pairs in zip(self.sets.sources, self.sets.of_model(label), strict=True)
            for number, name in enumerate(pairs.pair_names)
        ]

    def compute_rows(self, cell: Cell[AnswerWork], model: Model) -> Mapping[str, Rows]:
        pairs = self.sets.open(cell.model, cell.work.prompts)
        pair = pairs.build(cell.work.index)
        wrong = int(pair.wrong[0]) if len(pair.wrong) else None
        terms = attribute_logits(model, torch.from_numpy(pair.clean.astype(np.int64)), int(pair.answer[0]), wrong)
        keys = {"model": cell.model, "prompts": pairs.name, "pair": pair.name}
        logit = float(terms.part_terms["logit", 0][-1])
        is_alone = wrong is None or self.options.pairs is None  # means are over no other prompt
        is_counted = is_alone or self.options.keep_failing or shows_answer(COUNTED_BY, logit)
        return {
            ANSWER_HEADS.name: {**keys, **_head_rows(terms), "is_counted": is_counted},
            ANSWER_PARTS.name: {**keys, **_part_rows(answer_parts(terms)), "is_counted": is_counted},
            ANSWER_TOKENS.name: _token_rows(self.context.tokenizer(cell.model), pair).assign(**keys),
        }

    def _open_prompt(self, tokenizer: Any) -> PairSet:
        """The prompt of the options as a set."""
        prompt = read_prompt(self.options)
        assert prompt is not None
        return single_pair_set(
            tokenizer,
            prompt[1],
            str(self.options.answer),
            self.options.wrong or "",
            template=self.options.template,
            needs_one_token=True,
            needs_wrong=False,
            options=(),
        )

    def _check_pair(self, label: str, pair: TokenPair) -> None:
        """Raise BadInput for a prompt that is too long, or a pair of a set without a wrong answer."""
        location = pair.location or "the prompt"
        if len(pair.clean) > MAX_PROMPT_TOKENS:
            raise BadInput(
                f"{location}: the prompt has {len(pair.clean):,} tokens, and every row of it is stored. Use at most "
                f"{MAX_PROMPT_TOKENS:,} tokens"
            )
        if self.options.pairs is not None and not len(pair.wrong):
            raise BadInput(f"{location}: it has no wrong answer, which attribution compares with. Add 'wrong'")


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

"""Runner of the sparsity probe: rules on rows of texts, on rows that answer about a needle, and in whole models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.attention.families import indexers
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers
from headscope.forward.logits import score_answer
from headscope.forward.observe import FinishedPass, observe
from headscope.interventions.kinds import KeyCount
from headscope.interventions.sparse_attention import all_heads, attend_by_rule, attending_by
from headscope.measures.row_sampling import IntArray, select_last_octave
from headscope.measures.sparse_rows import SparseRows
from headscope.measures.sparse_rules import Indexer, Rule, parse_rule
from headscope.positions.model import Model
from headscope.runs.aggregation import plain_types
from headscope.runs.arrow import Rows
from headscope.scores.minference import read_patterns
from headscope.study.cells import Cell, PassCell, TextPass, document_of, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompts import PromptSets
from probes.sparsity.analysis import choose_rules, rule_family
from probes.sparsity.declaration import (
    ALL,
    ANSWER,
    BEST,
    DENSE,
    LAYER_BELOW,
    PUBLISHED,
    QUERY_BEFORE,
    SPARSE_CHOICE,
    SPARSE_ROWS,
    TEXT,
    SparsityOptions,
)
from probes.sparsity.patterns import PromptRule, head_patterns, own_rules

SPARSE_PASS_COST = 4.0
"""Time of a pass in which every head attends by a rule, in plain passes."""


@dataclass(frozen=True)
class WholeModelWork:
    """A pass in which every head attends by a rule: over a document, or a prompt about a needle with its answer."""

    rule: str
    length: int
    number: int
    is_answer: bool = False
    prerequisites: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ChoiceWork:
    """The choice of each head's own best rules from the stored rows of texts, `prerequisites`."""

    length: int
    left_out: str
    prerequisites: tuple[str, ...] = field(compare=False)


class SparsityRunner:
    """Cells: each (model, context length, document), and each (model, needle), whose passes are only observed and so
    shared; and each of these texts with each rule, if the rules are applied in the whole model. Before these, the own
    best rules of the heads are chosen for each document from the rows of the others."""

    def __init__(self, options: SparsityOptions, context: StudyContext):
        self.options, self.context = options, context
        try:
            self.rules = [*dict.fromkeys(map(parse_rule, options.rules))]
        except ValueError as error:
            raise BadInput(f"'rules': {error}") from error
        self.patterns = None if options.patterns is None else read_patterns(options.patterns)
        if self.patterns is not None:
            context.record_input(f"the patterns in '{options.patterns}'", [repr(self.patterns)])
        self.needles = PromptSets(
            context,
            ["needle"],
            count=options.needles,
            length=max(options.lengths),
            metric="nll",
            documents=self._documents,
        )

    def cells(self) -> list[Cell]:
        kinds = self._text_cells, self._answer_cells, self._choice_cells, self._whole_model_cells
        return [cell for label in self.context.labels for cells in kinds for cell in cells(label)]

    def _text_cells(self, label: str) -> Sequence[Cell]:
        return [
            PassCell(
                _text_id(label, length, number),
                label,
                pass_cost(length),
                text_pass=TextPass.over(document.ids[:length], number),
            )
            for length in self.options.lengths
            for number, document in enumerate(self._documents(label))
        ]

    def _answer_cells(self, label: str) -> Sequence[Cell]:
        if not self.options.needles:
            return []
        pairs, cells = self.needles.open(label, "needle"), []
        for number, name in enumerate(pairs.pair_names):
            ids = self._answer_ids(label, number)[0]
            text_pass = TextPass.over(ids, number)
            cells.append(PassCell(f"{label}: {name}", label, pass_cost(len(ids)), name, text_pass=text_pass))
        return cells

    def _choice_cells(self, label: str) -> list[Cell]:
        """A cell per length and document that is judged, and one for the answers about needles."""
        if not (self.options.loss and self._best_names):
            return []
        names, longest = [document.name for document in self._documents(label)], max(self.options.lengths)
        places = [(length, number) for length in self.options.lengths for number in range(len(names))]
        choices: dict[str, tuple[int, int | None]] = {self._choice_id(label, *place): place for place in places}
        if self.options.needles:
            choices[self._choice_id(label, longest, None)] = longest, None
        cells = []
        for name, (length, judged) in choices.items():
            left_out = judged if len(names) > 1 else None
            chosen_on = tuple(_text_id(label, length, number) for number in range(len(names)) if number != left_out)
            cells.append(
                Cell(name, label, 0, ChoiceWork(length, ALL if left_out is None else names[left_out], chosen_on))
            )
        return cells

    def _choice_id(self, label: str, length: int, judged: int | None) -> str:
        """The cell that chooses rules for a document, or for answers (None): from the others if there are any."""
        is_without = judged is not None and len(self._documents(label)) > 1
        chosen_on = f"all documents but {judged}" if is_without else "all documents"
        return f"{label}: best rules at {length} tokens, by {chosen_on}"

    def _whole_model_cells(self, label: str) -> list[Cell]:
        """A cell per rule and text, in which every head attends by the rule."""
        if not self.options.loss:
            return []
        texts = [(length, n, False) for length in self.options.lengths for n in range(len(self._documents(label)))]
        if self.options.needles:
            texts += [
                (max(self.options.lengths), number, True) for number in range(len(self.needles.open(label, "needle")))
            ]
        works = []
        for length, number, is_answer in texts:
            choice = (self._choice_id(label, length, None if is_answer else number),)
            for rule in self._rule_names:
                needs = choice if rule in self._best_names else ()
                works.append(WholeModelWork(rule, length, number, is_answer, needs))
        cells = []
        for work in works:
            text = f"needle {work.number}" if work.is_answer else f"{work.length} tokens, document {work.number}"
            cost = pass_cost(work.length) * (1 if work.rule == DENSE else SPARSE_PASS_COST)
            cells.append(Cell(f"{label}: whole model by {work.rule}, {text}", label, cost, work))
        return cells

    def compute_rows(self, cell: Cell[ChoiceWork | WholeModelWork], model: Model) -> Mapping[str, Rows]:
        """Rows of a cell of a whole model, or of a choice of rules."""
        if isinstance(cell.work, ChoiceWork):
            return {SPARSE_CHOICE.name: self._choose(cell.model, cell.work)}
        work = cell.work
        rule = self._rule(work, cell.model, model)
        keys: dict[str, Any] = {"model": cell.model, "context_length": work.length, "rule": work.rule}
        if work.is_answer:
            pairs = self.needles.open(cell.model, "needle")
            pair = pairs.build(work.number)
            if rule is not None and rule.depends_on_later_queries:
                rule = PromptRule(rule, len(pair.clean))
            with attending_by(model, rule) as count:
                nll, success = score_answer(model, pair.clean, pair.answer)
            answer = {"pair": [pairs.pair_names[work.number]], "nll": nll, "success": success, "kept": count.mean}
            return {"sparse_answers": {**keys, **answer}}
        document = self._documents(cell.model)[work.number]
        ids = torch.tensor(document.ids[: work.length])
        (tables,) = observe(model, ids, [lambda _: LossObserver(model, rule, {**keys, "doc": document.name})])
        return tables

    @property
    def _rule_names(self) -> list[str]:
        """The rules of whole models."""
        published = [] if self.patterns is None else [PUBLISHED]
        return [DENSE, *map(str, self.rules), *published, *self._best_names]

    @property
    def _best_names(self) -> list[str]:
        """The rules of each head's own best rule, at the costs of the first rule's sizes, if rules can differ."""
        families = {rule_family(str(rule)) for rule in self.rules if not rule.needs_dense_weights}
        first = rule_family(str(self.rules[0]))
        sizes = [str(rule) for rule in self.rules if rule_family(str(rule)) == first]
        return [f"{BEST}:{rule}" for rule in sizes] if len(families) > 1 else []

    def _choose(self, label: str, work: ChoiceWork) -> pd.DataFrame:
        """The rule of every head by the stored rows of texts, for each of the `_best_names`."""
        stored = pd.concat(
            plain_types(self.context.read_cell("sparsity", cell, SPARSE_ROWS.name)) for cell in work.prerequisites
        )
        groups = stored.groupby(["layer", "head"])["kv_group"].first()
        blocks = []
        for name in self._best_names:
            own_rules = choose_rules(stored, name.removeprefix(f"{BEST}:")).rename("own_rule")
            blocks.append(pd.concat([groups, own_rules], axis=1).reset_index().assign(rule=name))
        return pd.concat(blocks).assign(model=label, context_length=work.length, left_out=work.left_out)

    def _rule(self, work: WholeModelWork, label: str, model: Model) -> Rule | None:
        """The rule of a cell; None is that of dense attention."""
        if work.rule in self._best_names:
            rows = self.context.read_cell("sparsity", work.prerequisites[0], SPARSE_CHOICE.name)
            return own_rules(rows[rows["rule"] == work.rule], model.geometry)
        if work.rule == PUBLISHED and self.patterns is not None:
            return head_patterns(self.patterns, model.geometry, label)
        return None if work.rule == DENSE else {str(rule): rule for rule in self.rules}[work.rule]

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        if cell.work is not None:
            return self._answer_ids(cell.model, cell.text_pass.document)[0]
        document, length = document_of(cell, self._documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "SparsityObserver":
        select: Callable[[int | None, int | None], IntArray]
        if cell.work is not None:
            _, rows = self._answer_ids(cell.model, cell.text_pass.document)
            keys = {"context_length": max(self.options.lengths), "doc": cell.work, "rows_of": ANSWER}
            select = lambda window, chunk_size: rows  # noqa: E731
        else:
            document, length = document_of(cell, self._documents)
            keys = {"context_length": length, "doc": document.name, "rows_of": TEXT}
            seed = self.context.seed + cell.text_pass.document
            select = partial(select_last_octave, length, self.options.rows, seed)
        rules = [*self.rules]
        if self.patterns is not None:
            rules.append(head_patterns(self.patterns, model.geometry, cell.model))
        if indexers(model.module):
            rules.append(Indexer())
        return SparsityObserver(SparseRows(model.geometry, rules, select), {"model": cell.model, **keys})

    def _documents(self, label: str) -> Sequence[Any]:
        return self.context.documents(label, max(self.options.lengths))

    def _answer_ids(self, label: str, number: int) -> tuple[list[int], IntArray]:
        """The tokens of a prompt about a needle with its answer, and the rows that produce the answer."""
        pair = self.needles.open(label, "needle").build(number)
        ids = [*map(int, pair.clean), *map(int, pair.answer)]
        return ids, np.arange(len(pair.clean) - 1, len(ids) - 1)


class SparsityObserver:
    """Measures the rules in one pass; `keys` are the first columns of every table."""

    def __init__(self, rows: SparseRows, keys: Mapping[str, Any]):
        self.rows, self.keys = rows, keys
        self.needs_whole_text = rows.needs_whole_text

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self.rows.update)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        by_rule, by_head = self.rows.compute()
        rules, number = self.rows.rules, by_rule["rule"]
        needs_dense = np.array([rule.needs_dense_weights for rule in rules])[number]
        columns: dict[str, Any] = {**by_rule, "rule": _rule_names(rules)[number]}
        overlaps = {QUERY_BEFORE: columns.pop("overlap"), LAYER_BELOW: columns.pop("layer_overlap")}
        place = pd.DataFrame({name: columns[name] for name in ("layer", "head", "kv_group", "rule")})
        blocks = [place.assign(other=other, overlap=values) for other, values in overlaps.items()]
        return {
            "sparse_rows": {**self.keys, **columns, "needs_dense": needs_dense},
            "sparse_overlap": pd.concat(blocks).dropna().assign(**self.keys),
            "sparse_keys": {**self.keys, **by_head},
        }


class LossObserver:
    """Measures the loss of a pass in which every head attends by a rule; `keys` are columns of its table."""

    def __init__(self, model: Model, rule: Rule | None, keys: Mapping[str, Any]):
        self.model, self.rule, self.keys, self._count = model, rule, keys, KeyCount()
        self.needs_whole_text = rule is not None and rule.needs_whole_text

    def listen(self, layers: CapturedLayers) -> None:
        self._count = attend_by_rule(self.model, layers, self.rule, all_heads(self.model.geometry))

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        return {"sparse_loss": {**self.keys, **finished_pass.loss_by_position(), "kept": self._count.mean}}


def _text_id(label: str, length: int, number: int) -> str:
    return f"{label}: {length} tokens, document {number}"


def _rule_names(rules: Sequence[Rule]) -> np.ndarray:
    return np.array([*map(str, rules)])

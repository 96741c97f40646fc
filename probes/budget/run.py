"""Runner of the budget probe: scores of heads, orders of KV groups, and losses while a share of them streams."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.forward.stored_cache import observe_cache
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompts import PromptSets
from probes.budget import passes
from probes.budget.declaration import (
    ANSWERS,
    CACHE,
    EVERY_ORDER,
    LOSS,
    ORDERS,
    RANDOM,
    SCORE_ERRORS,
    SCORES,
    SETTINGS,
    STABILITY,
    TASKS,
    BudgetOptions,
    order_name,
)
from probes.budget.streaming_order import (
    SIGNS_AND_COLUMNS,
    UNIT,
    FixedScores,
    cache_bytes,
    lowest_groups,
    measured_scores,
    random_ranks,
    rank_groups,
    set_stability,
    streaming_count,
)

if TYPE_CHECKING:
    from headscope.tasks.harness import Score
    from headscope.tasks.task_set import TaskSet

log = logging.getLogger("headscope")

ALL_DOCUMENTS = -1
"""Value of `half` if no score is measured, so that all documents are judged by one order."""


@dataclass(frozen=True)
class BudgetWork:
    """One step: scores (and the loss without streaming), orders, all (everything streams), losses, answers or tasks.

    `order` and `draw` are those of losses, answers and tasks; `half` is that of the documents that are judged.
    `prompts` is a set of prompts, or the name of a task.
    """

    step: Literal["scores", "orders", "all", "losses", "answers", "tasks"]
    length: int = 0
    document: int = 0
    order: str = EVERY_ORDER
    draw: int = 0
    half: int = ALL_DOCUMENTS
    prompts: str = ""
    prerequisites: tuple[str, ...] = field(default=(), compare=False)


class BudgetRunner:
    """Cells: per model, scores of each document, the orders for each half of the documents, and losses by document,
    order and draw. An order costs a pass per share and document; the passes without streaming and with all KV groups
    streaming are shared by all orders."""

    def __init__(self, options: BudgetOptions, context: StudyContext):
        self.options, self.context = options, context
        self._fixed = {
            order_name(order): FixedScores(order, context.labels)
            for order in options.orders
            if order not in SIGNS_AND_COLUMNS and order != RANDOM
        }
        for name, scores in self._fixed.items():
            context.record_input(f"the scores of the order '{name}'", scores.content)
        self._measures = any(order in SIGNS_AND_COLUMNS for order in options.orders)
        if self._measures and context.study.texts.docs < 2:
            raise BadInput("measured orders need two halves of the documents: 1 document. Use at least --docs 2")
        self.sets = PromptSets(
            context,
            options.prompts,
            count=options.count,
            length=max(options.lengths),
            metric="nll",
            documents=self._haystacks,
        )
        self._tasks = self._find_tasks()
        if max(options.lengths) <= options.sink + options.recent:
            log.warning(
                "streaming hides no token of %d: the window has %d + %d. Use longer texts, or a smaller --sink and "
                "--recent",
                max(options.lengths),
                options.sink,
                options.recent,
            )

    def cells(self) -> list[Cell]:
        cells: list[Cell] = []
        for label in self.context.labels:  # reports mistakes before any model is opened
            self._warn_of_measured_documents(label)
            self.sets.of_model(label)
        for label in self.context.labels:
            for name, scores in self._fixed.items():
                model = self.context.model(label)
                scores.by_head(label, model.geometry)  # refuses the scores of a model with other heads
                if origin := scores.check_model(label, model, self.options.weights):
                    self.context.record_other_weights(label, f"the scores of the order '{name}'", origin)
            cells += self._model_cells(label)
        return cells

    def compute_rows(self, cell: Cell[BudgetWork], model: Model) -> Mapping[str, Rows]:
        step: Callable[[str, BudgetWork, Model], Mapping[str, Rows]] = {
            "scores": self._score_rows,
            "orders": self._order_rows,
            "all": self._loss_rows,
            "losses": self._loss_rows,
            "answers": self._answer_rows,
            "tasks": self._task_rows,
        }[cell.work.step]
        return step(cell.model, cell.work, model)

    def _model_cells(self, label: str) -> Iterator[Cell]:
        options = self.options
        documents, longest = range(len(self._documents(label))), max(options.lengths)
        places = [(length, document) for length in options.lengths for document in documents]

        def cell(name: str, cost: float, **work: Any) -> Cell:
            return Cell(f"{label}: {name}", label, cost, BudgetWork(**work))

        def place(length: int, document: int) -> str:
            return f"{length} tokens, document {document}"

        scores = {at: cell(f"scores, {place(*at)}", 1.2 * pass_cost(at[0]), step="scores", length=at[0], document=at[1])
                  for at in places}  # fmt: skip
        yield from scores.values()
        orders = {}
        for half in sorted({self._half(document) for document in documents}):
            measured = [scores[longest, n].id for n in documents if self._measures and n % 2 != half]
            orders[half] = cell(f"orders, half {half}", 0, step="orders", half=half, prerequisites=tuple(measured))
        yield from orders.values()
        for length, n in places:
            cost = 0.8 * pass_cost(length)
            yield cell(f"all stream, {place(length, n)}", cost, step="all", length=length, document=n)
            for order, draw in self._orders():
                work = {"length": length, "document": n, "order": order, "draw": draw, "half": self._half(n)}
                name = f"order {order}, draw {draw}, {place(length, n)}"
                needs = (orders[self._half(n)].id,)
                yield cell(name, len(self._shares) * cost, step="losses", **work, prerequisites=needs)
        last_half = max(orders)  # needles lie in the documents of this half
        for source in options.prompts:
            pairs = self.sets.open(label, source)
            cost, prompts = len(pairs) * pass_cost(pairs.length), {"prompts": source, "length": pairs.length}
            yield cell(f"answers to {pairs.name}", 2 * cost, step="answers", **prompts)
            for order, draw in self._orders():
                work = {"order": order, "draw": draw, "half": last_half, **prompts}
                name, needs = f"answers to {pairs.name}, order {order}, draw {draw}", (orders[last_half].id,)
                yield cell(name, len(self._shares) * cost, step="answers", **work, prerequisites=needs)
        for harness_task in self._tasks or ():
            assert self._tasks is not None
            cost = self._tasks.cost(harness_task, longest, options.task_limit)
            work = {"length": longest, "prompts": harness_task.name}
            yield cell(f"task {harness_task.name}", 2 * cost, step="tasks", **work)
            for order, draw in self._orders():
                choice = {"order": order, "draw": draw, "half": last_half, "prerequisites": (orders[last_half].id,)}
                name = f"task {harness_task.name}, order {order}, draw {draw}"
                yield cell(name, len(self._shares) * cost, step="tasks", **work, **choice)

    # Rows of each step ---------------------------------------------------------------------------------------------

    def _score_rows(self, label: str, work: BudgetWork, model: Model) -> Mapping[str, Rows]:
        """The scores of all heads on a document, and its loss without streaming."""
        if shares_keys_across_layers(model):
            raise UnsupportedModel(
                f"layers of '{model.name}' share keys, so a KV group that streams in one of them frees no memory. Use "
                "another model"
            )
        document = self._documents(label)[work.document]
        ids, seed = document.ids[: work.length], self.context.seed + work.document
        rows = None if self.options.rows == "exact" else self.options.rows
        columns, losses = passes.scores_and_losses(model, ids, self.options.window, rows, seed)
        keys: dict[str, Any] = {"model": label, "context_length": work.length, "doc": document.name}
        tables = {
            table.name: {**keys, **{name: columns[name] for name in columns if name in {*table.keys, *table.values}}}
            for table in (SCORES, SCORE_ERRORS)
        }
        return {**tables, LOSS.name: {**keys, "order": EVERY_ORDER, "draw": 0, "share": 0.0, **losses}}

    def _order_rows(self, label: str, work: BudgetWork, model: Model) -> Mapping[str, Rows]:
        """Every order for a half of the documents, with the size of the KV cache; and the settings, once."""
        keys: dict[str, Any] = {"model": label, "half": work.half}
        stored, errors = (self._read_scores(work, table.name) for table in (SCORES, SCORE_ERRORS))
        ranks, sizes, stabilities = [], [], []
        for order, draw in self._orders():
            table = self._ranks(label, order, draw, model, stored)
            ranks.append(table.assign(**keys, order=order, draw=draw))
            sizes.append(self._cache_rows(table, model).assign(**keys, order=order, draw=draw))
            if order in SIGNS_AND_COLUMNS:
                stability = set_stability(stored, errors, order, self.options.reduction, self._shares)
                stabilities.append(stability.assign(**keys, order=order))
        rows: dict[str, Rows] = {ORDERS.name: pd.concat(ranks), CACHE.name: pd.concat(sizes)}
        if stabilities:
            rows[STABILITY.name] = pd.concat(stabilities)
        if work.half <= 0:
            options, window = self.options, self.options.window
            settings: dict[str, Any] = {"sink": window.sink, "recent": window.recent}
            settings["bound"] = options.max_loss_increase
            groups = sum(model.geometry.layer_kv_groups)
            rows[SETTINGS.name] = {"model": label, **settings, "groups": [groups], "reduction": options.reduction}
        return rows

    def _read_scores(self, work: BudgetWork, table: str) -> pd.DataFrame:
        """The rows of a table from the documents that a half's orders are measured on; empty if none is measured."""
        parts = [self.context.read_stored(f"budget/{cell}", table) for cell in work.prerequisites]
        return pd.concat(parts) if parts else pd.DataFrame()

    def _loss_rows(self, label: str, work: BudgetWork, model: Model) -> Mapping[str, Rows]:
        """The loss of a document at every share of an order, or with all KV groups streaming."""
        document = self._documents(label)[work.document]
        blocks = []
        shares = self._streaming_groups(work, model)
        for share, groups in shares.items():
            losses = passes.losses(model, document.ids[: work.length], groups, self.options.window)
            blocks.append(pd.DataFrame(losses).assign(share=share))
            if len(shares) > 1:
                self.context.advance(
                    0.8 * pass_cost(work.length), f"order {work.order}: {share:.0%} of KV groups stream"
                )
        keys: dict[str, Any] = {"model": label, "context_length": work.length, "doc": document.name}
        return {LOSS.name: pd.concat(blocks).assign(**keys, order=work.order, draw=work.draw)}

    def _answer_rows(self, label: str, work: BudgetWork, model: Model) -> Mapping[str, Rows]:
        """The answers to a set of prompts at every share of an order, or at 0 and 1."""
        pairs, rows = self.sets.open(label, work.prompts), []
        for share, groups in self._streaming_groups(work, model, with_none=True).items():
            for index, name in enumerate(pairs.pair_names):
                nll, success = passes.score_answer(model, pairs.build(index), groups, self.options.window)
                rows.append({"pair": name, "share": share, "nll": nll, "success": success})
        keys: dict[str, Any] = {"model": label, "prompts": pairs.name, "order": work.order, "draw": work.draw}
        return {ANSWERS.name: pd.DataFrame(rows).assign(**keys)}

    def _task_rows(self, label: str, work: BudgetWork, model: Model) -> Mapping[str, Rows]:
        """The scores on a task of the harness at every share of an order, or at 0 and 1."""
        assert self._tasks is not None
        harness_task, blocks = self._tasks[work.prompts], []
        for share, groups in self._streaming_groups(work, model, with_none=True).items():
            with passes.streaming(model, groups, self.options.window), passes.recording_input_lengths(model) as lengths:
                scores = self._tasks.scores(model, label, harness_task, work.length, self.options.task_limit)
            blocks += [_score_by_document(score).assign(share=share) for score in scores if _has_document_scores(score)]
        if work.order == EVERY_ORDER:
            self._warn_about_task(harness_task.name, scores, max(lengths))
        keys: dict[str, Any] = {"model": label, "context_length": work.length, "order": work.order, "draw": work.draw}
        return {TASKS.name: pd.concat(blocks).assign(**keys)} if blocks else {}

    # Orders --------------------------------------------------------------------------------------------------------

    def _orders(self) -> list[tuple[str, int]]:
        """(name, draw) of every order."""
        return [
            (order_name(order), draw)
            for order in self.options.orders
            for draw in range(self.options.draws if order == RANDOM else 1)
        ]

    def _half(self, document: int) -> int:
        """The half of the documents that a document belongs to."""
        return document % 2 if self._measures else ALL_DOCUMENTS

    @property
    def _shares(self) -> list[float]:
        """Shares at which orders differ."""
        return [share for share in self.options.shares if 0 < share < 1]

    def _ranks(self, label: str, order: str, draw: int, model: Model, stored: pd.DataFrame) -> pd.DataFrame:
        if order == RANDOM:
            units = [(number, group) for number, groups in zip(
                model.geometry.layer_numbers, model.geometry.layer_kv_groups, strict=True) for group in range(groups)
            ]  # fmt: skip
            return random_ranks(pd.DataFrame(units, columns=UNIT), self.context.seed, draw)
        if order in SIGNS_AND_COLUMNS:
            scores = measured_scores(stored, order)
        else:
            scores = self._fixed[order].by_head(label, model.geometry)
        return rank_groups(scores, self.options.reduction)

    def _streaming_groups(
        self, work: BudgetWork, model: Model, with_none: bool = False
    ) -> dict[float, passes.GroupsByLayer]:
        """The streaming KV groups by share, for the order of a cell.

        For every order: all of them at share 1 and, `with_none`, none at share 0.
        """
        if work.order == EVERY_ORDER:
            geometry = model.geometry
            counts = zip(geometry.layer_numbers, geometry.layer_kv_groups, strict=True)
            everything: dict[float, passes.GroupsByLayer] = {
                1.0: {number: tuple(range(groups)) for number, groups in counts}
            }
            return {0.0: {}, **everything} if with_none else everything
        ranks = self.context.read_stored(f"budget/{work.prerequisites[0]}", ORDERS.name)
        ranks = ranks[(ranks["order"] == work.order) & (ranks["draw"] == work.draw)]
        return {share: lowest_groups(ranks, streaming_count(share, len(ranks))) for share in self._shares}

    def _cache_rows(self, ranks: pd.DataFrame, model: Model) -> pd.DataFrame:
        """The size of the KV cache at every share and context length."""
        geometry = model.geometry
        size = partial(
            cache_bytes,
            observe_cache(model),
            dict(zip(geometry.layer_numbers, geometry.layer_kv_groups, strict=True)),
            window=self.options.window,
            bytes_per_value=model.module.dtype.itemsize,
        )
        rows = []
        for share in [0.0, *self._shares, 1.0]:
            count = streaming_count(share, len(ranks))
            groups = lowest_groups(ranks, count)
            for length in sorted({*self.options.lengths, *self.options.cache_lengths}):
                sizes = {"cache_bytes": size(groups, length=length), "full_bytes": size({}, length=length)}
                rows.append({"context_length": length, "share": share, "groups": count, **sizes})
        return pd.DataFrame(rows)

    # Inputs --------------------------------------------------------------------------------------------------------

    def _documents(self, label: str) -> list[TokenDocument]:
        """The documents of every length: those that are long enough for the longest."""
        return self.context.documents(label, max(self.options.lengths))

    def _find_tasks(self) -> "TaskSet | None":
        options = self.options
        if not options.tasks:
            return None
        from headscope.tasks.task_set import TaskSet  # the harness is an extra

        return TaskSet(options.tasks, [max(options.lengths)], options.trust_task_code, self.context)

    def _warn_about_task(self, name: str, scores: "Sequence[Score]", longest: int) -> None:
        """Warn of metrics that cannot be compared by document, and of prompts that streaming does not change."""
        for score in scores:
            if not _has_document_scores(score):
                log.warning("metric %s of task %s is not a mean over documents, so it is left out", score.metric, name)
        window = self.options.window
        if longest <= window.sink + window.recent:
            log.warning(
                "streaming changes nothing in task %s: its longest prompt has %d tokens, the window %d + %d. Use a "
                "smaller --sink and --recent, or a task with longer prompts",
                *(name, longest, window.sink, window.recent),
            )

    def _warn_of_measured_documents(self, label: str) -> None:
        names = {document.name for document in self._documents(label)}
        for order, scores in self._fixed.items():
            if shared := sorted(names & scores.measured_documents):
                log.warning(
                    "the run of the order '%s' measured %d of the %d documents that judge it (%s): its curve may be "
                    "too good. Use another --text for an independent judgement",
                    *(order, len(shared), len(names), shared[0]),
                )

    def _haystacks(self, label: str) -> Sequence[Any]:
        """The documents that needles lie in: those that are judged with the order."""
        return self._documents(label)[1::2] if self._measures else self._documents(label)


def _has_document_scores(score: "Score") -> bool:
    """Whether a score of the harness is the mean of one number per document."""
    is_number = all(isinstance(value, int | float) for value in score.values)
    # A score that is not a number is one by document too: storing it fails, leaving it out would hide it.
    return is_number and bool(np.isclose(np.mean(score.values), score.score, equal_nan=True))


def _score_by_document(score: "Score") -> pd.DataFrame:
    columns = {"document": range(len(score.values)), "score": np.asarray(score.values, np.float64)}
    keys = {name: getattr(score, name) for name in ("task", "metric", "filter", "higher_is_better")}
    return pd.DataFrame(columns).assign(**keys)

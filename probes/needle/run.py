"""Needle-in-a-Haystack: which heads copy a hidden fact while the model answers a question about it.

After Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality". Cells are ordered so that
those which begin alike follow each other, and each goes through the model only from where it differs.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pandas as pd

from headscope.errors import BadInput
from headscope.forward.interventions import Intervention
from headscope.forward.prefix_cache import PrefixReader
from headscope.forward.residual_decomposition import Stream
from headscope.positions.model import Model
from headscope.prompts.haystack import Haystack, NeedlePrompt, NeedlePromptBuilder, decoded
from headscope.prompts.needle_grid import CONTROL, NeedleGrid, NeedleTrial
from headscope.prompts.needles import read_needles
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from probes.needle import ablation
from probes.needle import rows as rows_of
from probes.needle.ablation import HALVES, AblationTask, half_of
from probes.needle.attribution import stream_of
from probes.needle.generation import answered, recall, spoken
from probes.needle.heads import ranked
from probes.needle.options import NeedleOptions

log = logging.getLogger("headscope")

SUCCESS = 0.5
"""ROUGE-1 recall above which a trial succeeds."""


class NeedleRunner:
    """Cells: each (model, haystack, needle, context length, depth), and for each but the depth a control without; then
    each knock-out, over half of the needles."""

    def __init__(self, options: NeedleOptions, context: StudyContext):
        self.options, self.context = options, context
        self.needles = read_needles(options.file, options.needles, options.kind)
        if options.mode == "wu" and (other := [needle.name for needle in self.needles if needle.indirect]):
            raise BadInput(f"needle '{other[0]}' has a cue, and mode wu counts copies of literal ones: use mode strict")
        if options.ablate_top and len(self.needles) < HALVES:
            raise BadInput("knockout ranks heads by one half of the needles and asks for the other: give two needles")
        context.record_input("needles", (text for needle in self.needles for text in astuple(needle)))
        self.grid = NeedleGrid(
            self.needles,
            options.grid_lengths,
            options.grid_depths,
            options.seeds,
            context.study.texts.source,
            context.seed,
            options.template,
            options.mode,
        )
        self._reader: tuple[str, PrefixReader] | None = None
        self._stream: tuple[str, Stream] | None = None
        self._ranked: dict[tuple[str, int], pd.DataFrame | None] = {}
        self._means: dict[tuple[str, str], Intervention] = {}

    def cells(self) -> list[Cell]:
        cells = []
        for label in self.context.labels:
            before: NeedleTrial | None = None
            for trial in self._trials(label):
                shared = 0 if before is None or before.haystack != trial.haystack else before.branch
                cost = pass_cost(trial.length) - pass_cost(shared)
                cells.append(Cell(f"{label}: {self._name(trial)}", label, cost, trial))
                before = trial
            cells += self._knockouts(label, cells)
        return cells

    def _knockouts(self, label: str, trials: Sequence[Cell]) -> list[Cell]:
        """The knock-outs of one model, of whose cells `trials` holds all others."""
        if not self.options.ablate_top:
            return []
        every = self.context.model(label).geometry
        if max(self.options.ablate_top) > every.layers * every.heads:
            raise BadInput(
                f"knockout {max(self.options.ablate_top)}: '{label}' has {every.layers * every.heads} heads; give fewer"
            )
        mine = [cell for cell in trials if cell.model == label]
        cells = []
        for how in self.options.ablation:
            for size in sorted(set(self.options.ablate_top)):
                for draw in range(1 + self.options.draws):
                    for half in range(HALVES):
                        before = tuple(cell.id for cell in mine if half_of(cell.task.needle) != half)
                        asked = [cell for cell in mine if half_of(cell.task.needle) == half]
                        which = f"the top {size} heads" if draw == 0 else f"{size} heads of draw {draw}"
                        name = f"{label}: {how} of {which}, half {half} of the needles"
                        cost = sum(cell.cost for cell in asked if cell.task.mode != CONTROL)
                        cells.append(Cell(name, label, cost, AblationTask(how, size, draw, half, before)))
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        if isinstance(cell.task, AblationTask):
            return self._knocked_out(cell.model, cell.task, model)
        trial: NeedleTrial = cell.task
        prompter, prompts = self._prepare(cell.model)[1][trial.needle], self._prompts(cell.model, trial)
        stream = self._how_it_adds(cell.model, model, prompts[0]) if self.options.attribution else None
        answer = answered(self._reading(cell.model, model), prompts, prompter, trial.mode, stream)
        keys = self._keys(cell.model, trial)
        rows: dict[str, Rows] = {
            "needles": {
                **keys,
                "depth": list(trial.depths),
                "prompt_tokens": len(prompts[0].ids),
                "span_start": [prompt.start for prompt in prompts],
                "span_end": [prompt.end for prompt in prompts],
                "answer": answer.text,
                "recall": answer.recall,
                "success": answer.recall > SUCCESS,
                "steps": len(answer.pieces),
            },
            "retrieval": {**keys, **rows_of.per_head(answer.copies, model.geometry, trial.depths)},
        }
        if trial.mode != CONTROL:
            one = {**keys, "depth": trial.depths[0]}
            rows |= {
                "needle_tokens": rows_of.around(prompts[0], prompter, one),
                **rows_of.steps(answer, model.geometry, one),
            }
        if answer.written is not None:
            rows["needle_attribution"] = {**keys, **rows_of.writes(answer.written, model.geometry, trial.depths)}
        return rows

    def _knocked_out(self, label: str, task: AblationTask, model: Model) -> Mapping[str, Rows]:
        """Every trial of one half of the needles with a set of heads silenced; nothing where no success ranks heads."""
        order = self._ranking(label, task)
        if order is None:
            log.warning("%s finds none of the needles that would rank its heads: it gets no knock-out", label)
            return {}
        heads = ablation.chosen(order, task, self.context.seed)
        units = ablation.units_of(heads, model.geometry)
        stacks, prompters = self._prepare(label)
        if (label, task.ablation) not in self._means:
            longest = max(self.options.grid_lengths)
            haystack = np.concatenate([stacks[0].opening, stacks[0].ids])[:longest]
            self._means[label, task.ablation] = ablation.silence(task.ablation, model, haystack)
        self.forget()
        reader, rows = PrefixReader(model), []
        with ablation.silenced(model, units, self._means[label, task.ablation]):
            for trial in self._trials(label):
                if trial.mode != CONTROL and half_of(trial.needle) == task.half:
                    (prompt,), prompter = self._prompts(label, trial), prompters[trial.needle]
                    _, said = spoken(reader, prompt.ids, prompter, trial.mode, prompt.end - prompt.start)
                    text = decoded(prompter.tokenizer, np.array(said, np.int32)).strip()
                    share = recall(prompter.scored_text, text)
                    found = {"answer": text, "recall": share, "success": share > SUCCESS}
                    rows.append({**self._keys(label, trial), "depth": trial.depths[0], **found})
        groups = heads["head"] // model.geometry.heads_per_group
        knocked = heads.assign(model=label, half=task.half, kv_group=groups)
        return {
            name: frame.assign(ablation=task.ablation, size=task.size, draw=task.draw)
            for name, frame in (("needle_ablation", pd.DataFrame(rows)), ("needle_ablated_heads", knocked))
        }

    def _ranking(self, label: str, task: AblationTask) -> pd.DataFrame | None:
        """Every head by its score over the successful trials of the other half, from the stored cells; None without."""
        if (label, task.half) not in self._ranked:
            name = "retrieval" if self.options.rank_by == "copies" else "needle_attribution"
            trials, scores = (
                pd.concat([self.context.read_stored(f"needle/{cell}", table) for cell in task.prerequisites])
                for table in ("needles", name)
            )
            self._ranked[label, task.half] = ranked(trials, scores)
        return self._ranked[label, task.half]

    def _keys(self, label: str, trial: NeedleTrial) -> dict[str, Any]:
        """The key columns of a trial but its depth."""
        return {
            "model": label,
            "mode": trial.mode,
            "needle": self.needles[trial.needle].name,
            "context_length": trial.length,
            "doc": self._prepare(label)[0][trial.haystack].name,
            "seed": self.context.seed + trial.haystack,
        }

    def forget(self) -> None:
        """Drop the cached prefix: the next prompt is read from its start."""
        self._reader = None

    def _trials(self, label: str) -> list[NeedleTrial]:
        self._prepare(label)
        return self.grid.trials(self.context.tokenizer(label))

    def _prompts(self, label: str, trial: NeedleTrial) -> list[NeedlePrompt]:
        return self.grid.prompts(self.context.tokenizer(label), trial)

    def _prepare(self, label: str) -> tuple[list[Haystack], list[NeedlePromptBuilder]]:
        """Haystacks and needles in this model's tokens; models with one tokenizer share them."""
        tokenizer = self.context.tokenizer(label)
        is_new = not self.grid.is_prepared(tokenizer)
        stacks, builders = self.grid.prepare(tokenizer)
        if is_new:
            parts = (part for stack in stacks for part in (stack.name, stack.opening, stack.ids))
            self.context.record_input(f"haystacks of '{label}'", parts)
        return stacks, builders

    def _reading(self, label: str, model: Model) -> PrefixReader:
        if self._reader is None or self._reader[0] != label:
            self._reader = None  # its cache goes before the next one grows
            self._reader = (label, PrefixReader(model))
            if not self._reader[1].shares:
                log.warning("queries of %s depend on the total length: every answer step reads its whole prompt", label)
        return self._reader[1]

    def _how_it_adds(self, label: str, model: Model, prompt: NeedlePrompt) -> Stream:
        """How the model's logits are a sum, seen once a model."""
        if self._stream is None or self._stream[0] != label:
            self._stream = (label, stream_of(model, prompt.ids))
        return self._stream[1]

    def _name(self, trial: NeedleTrial) -> str:
        where = f"depth {trial.depths[0]:.4f}" if trial.mode != CONTROL else "without the needle"
        needle, seed = self.needles[trial.needle].name, self.context.seed + trial.haystack
        return f"needle {needle}, seed {seed}, {trial.length} tokens, {where}"

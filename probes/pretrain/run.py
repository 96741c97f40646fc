"""The `pretrain` section: small models trained from random weights under different positions, alike in everything else.

A cell is a stretch of optimiser steps of one training. It goes on from the state that the stretch before it left, keeps
checkpoints/TRAINING/step-NNNNNN in the run where one is due, and measures the held-out loss by position. Trainings of a
seed take turns, so that at any time all of them have come about as far.
"""

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headscope.errors import BadInput, Diverged
from headscope.models.checkpoint import pick_device
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import load
from headscope.positions.schedule import Fixed
from headscope.prompts.texts import CHARACTERS_PER_TOKEN, Document, TokenDocument, first_tokens, read
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import Materials
from headscope.study.digests import Content
from headscope.study.monitor import look
from probes.adapt.learning import tell_of_warmup, wsd
from probes.adapt.samples import Slices, without
from probes.adapt.validation import held_out_loss
from probes.pretrain import models
from probes.pretrain.learning import Pretraining
from probes.pretrain.options import Pretrain
from probes.pretrain.variants import schedule, told


@dataclass(frozen=True)
class _Stretch:
    variant: str
    seed: int
    first: int
    last: int

    @property
    def training(self) -> str:
        """What the training goes by in tables and folders."""
        return f"{self.variant}-s{self.seed}"


class PretrainSection:
    """Cells: for every seed, stretch by stretch, each variant."""

    def __init__(self, config: Pretrain, materials: Materials):
        self.config, self.materials = config, materials
        self.held_out_texts = self._held_out()
        materials.uses("held-out texts", _content(self.held_out_texts))
        materials.uses("training texts", _content(self._learned()))
        tell_of_warmup(config.steps, config.warmup)

    def _held_out(self) -> list[Document]:
        """The first of the study's texts, in their seeded order, that are long enough whatever the vocabulary."""
        texts, length = self.materials.study.texts, CHARACTERS_PER_TOKEN * self.config.validation_length
        long = (document for document in read(texts.source, self.materials.seed) if len(document.text) >= length)
        found = [*islice(long, texts.docs)]
        if len(found) < texts.docs:
            raise BadInput(
                f"{len(found)} documents in {texts.source} have {length:,} characters, but {texts.docs} are to be held "
                "out: ask for fewer --docs, a smaller --validation-length or another --text"
            )
        return found

    def _learned(self) -> Iterator[Document]:
        return (each for source in self.config.train for each in without(self._held_out_digests, source))

    @property
    def _held_out_digests(self) -> dict[str, str]:
        return {document.name: document.digest for document in self.held_out_texts}

    def cells(self) -> list[Cell]:
        stops = self.config.stops
        stretches = [(0, 0), *pairwise(stops)]
        planned = self.config.planned
        seeds = dict.fromkeys(seed for _, seed in planned)
        return [
            self._cell(_Stretch(variant, seed, first, last))
            for seed in seeds
            for first, last in stretches
            for variant in (variant for variant, its_own in planned if its_own == seed)
        ]

    def _cell(self, stretch: _Stretch) -> Cell:
        validation = pass_cost(self.config.validation_length) / 3 * self.materials.study.texts.docs
        cost = validation + (stretch.last - stretch.first) * self._step_cost
        steps = f"steps {stretch.first + 1} to {stretch.last}" if stretch.last else "step 0"
        return Cell(f"{stretch.training}: {steps}", None, cost, stretch)

    def rows(self, cell: Cell, model: None) -> Mapping[str, Rows]:
        stretch: _Stretch = cell.task
        drawn = models.random_model(self.config, len(self.tokenizer), self._seed(stretch))
        training = load(drawn.to(self._device), tokenizer=self.tokenizer)
        positions = schedule(stretch.variant, training)
        learner = Pretraining(training, positions, self.config)
        if stretch.first:
            learner.load(self._state(stretch, stretch.first))
        drawn.train()
        with attached(training, positions):
            steps = [self._step(learner, stretch, step) for step in range(stretch.first, stretch.last)]
        found = held_out_loss(training, positions, self.held_out)
        if not np.isfinite(found["nll"]).all():
            raise self._diverged("the held-out loss is no longer finite", stretch, stretch.last)
        self._keep(learner, positions, stretch)
        if self.config.watch and stretch.last in self.config.kept:
            now = training.under(positions, stretch.variant)
            resume = stretch.last > self.config.kept[0]
            look(self.materials, stretch.training, now, self.config.length, stretch.last, resume)
        tables: dict[str, Rows] = {"validation": {"adapter": stretch.training, "step": stretch.last, **found}}
        if steps:
            columns = {name: [row[name] for row in steps] for name in steps[0]}
            tables["training"] = {"adapter": stretch.training, **columns}
        return tables

    def _step(self, learner: Pretraining, stretch: _Stretch, step: int) -> dict[str, Any]:
        config = self.config
        slices = copy.copy(self.slices)
        slices.seed = self._seed(stretch)
        batch = torch.stack([slices.draw(config.length, step, number) for number in range(config.batch)])
        factor = wsd(step, config.steps, config.warmup)
        began = time.monotonic()
        try:
            loss = learner.step(batch, factor)
        except Diverged as error:
            raise self._diverged(str(error), stretch, step + 1) from error
        speed = batch.numel() / (time.monotonic() - began)
        said = f"{stretch.training} step {step + 1} of {config.steps}: loss {loss:.3f}, {speed:.0f} tokens/s"
        self.materials.advance(self._step_cost, said)
        return {
            "step": step + 1,
            "context_length": config.length,
            "tokens": batch.numel(),
            "loss": loss,
            "rate": factor,
        }

    def _keep(self, learner: Pretraining, positions: Fixed | AdaRoPE, stretch: _Stretch) -> None:
        """Store the state to go on from, and a checkpoint where one is due."""
        if stretch.last in self.config.kept:
            folder = self.materials.files / "checkpoints" / stretch.training / f"step-{stretch.last:06d}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            models.keep(folder, learner.model.module, self.tokenizer, told(stretch.variant), positions)
        state = self._state(stretch, stretch.last)
        state.parent.mkdir(exist_ok=True)
        if 0 < stretch.last < self.config.steps:
            learner.save(state)
        for stop in self.config.stops:  # this stretch's own start stays until it is stored
            if stop < stretch.first:
                self._state(stretch, stop).unlink(missing_ok=True)

    def _diverged(self, what: str, stretch: _Stretch, step: int) -> Diverged:
        return Diverged(f"{stretch.training}: {what} at step {step}; train at a lower rate, e.g. --rate 1e-4")

    # What all trainings share -------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The vocabulary that is learned from the training texts, those that are held out left aside."""
        return models.learned_tokenizer((each.text for each in self._learned()), self.config.vocabulary)

    @cached_property
    def held_out(self) -> list[TokenDocument]:
        length = self.config.validation_length
        found = [TokenDocument(d.name, first_tokens(d.text, self.tokenizer, length)) for d in self.held_out_texts]
        if short := next((each for each in found if len(each.ids) < length), None):
            raise BadInput(f"{short.name} holds {len(short.ids)} tokens, fewer than --validation-length {length}")
        return found

    @cached_property
    def slices(self) -> Slices:
        alike = self.config.mix == "sources"
        slices = Slices(self.config.train, self.tokenizer, self._held_out_digests, self.materials.seed, alike)
        slices.check(self.config.length)
        return slices

    def _seed(self, stretch: _Stretch) -> int:
        return self.materials.seed + stretch.seed

    @property
    def _device(self) -> torch.device:
        return pick_device(self.materials.study.device)

    @property
    def _step_cost(self) -> float:
        return self.config.batch * pass_cost(self.config.length)

    def _state(self, stretch: _Stretch, step: int) -> Path:
        # Beside what becomes part of the run.
        return self.materials.files.with_name("state") / f"{stretch.training}-{step:06d}.safetensors"


def _content(documents: Iterable[Document]) -> Content:
    return (part for document in documents for part in (document.name, document.text))

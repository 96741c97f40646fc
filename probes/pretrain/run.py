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
from headscope.prompts.texts import CHARACTERS_PER_TOKEN, Document, TokenDocument, first_tokens, read_documents
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import DigestParts
from headscope.study.monitor import measure_training_step
from probes.adapt.sequence_sampler import SequenceSampler, exclude_held_out
from probes.adapt.trainer import warn_if_warmup_too_long, wsd_rate_factor
from probes.adapt.validation import held_out_loss
from probes.pretrain import model_setup
from probes.pretrain.options import PretrainOptions
from probes.pretrain.trainer import PretrainTrainer
from probes.pretrain.variants import initial_positions, stored_scheme_name


@dataclass(frozen=True)
class _TrainingSegment:
    variant: str
    seed: int
    start_step: int
    end_step: int

    @property
    def training_name(self) -> str:
        """What the training goes by in tables and folders."""
        return f"{self.variant}-s{self.seed}"


class PretrainRunner:
    """Cells: for every seed, stretch by stretch, each variant."""

    def __init__(self, options: PretrainOptions, context: StudyContext):
        self.options, self.context = options, context
        self.held_out_texts = self._choose_held_out_texts()
        context.record_input("held-out texts", _digest_content(self.held_out_texts))
        context.record_input("training texts", _digest_content(self._training_texts()))
        warn_if_warmup_too_long(options.steps, options.warmup)

    def _choose_held_out_texts(self) -> list[Document]:
        """The first of the study's texts, in their seeded order, that are long enough whatever the vocabulary."""
        texts, length = self.context.study.texts, CHARACTERS_PER_TOKEN * self.options.validation_length
        long = (document for document in read_documents(texts.source, self.context.seed) if len(document.text) >= length)
        found = [*islice(long, texts.docs)]
        if len(found) < texts.docs:
            raise BadInput(
                f"{len(found)} documents in {texts.source} have {length:,} characters, but {texts.docs} are to be held "
                "out: ask for fewer --docs, a smaller --validation-length or another --text"
            )
        return found

    def _training_texts(self) -> Iterator[Document]:
        return (each for source in self.options.train for each in exclude_held_out(self._held_out_digests, source))

    @property
    def _held_out_digests(self) -> dict[str, str]:
        return {document.name: document.digest for document in self.held_out_texts}

    def cells(self) -> list[Cell]:
        stops = self.options.segment_bounds
        stretches = [(0, 0), *pairwise(stops)]
        planned = self.options.parsed_trainings
        seeds = dict.fromkeys(seed for _, seed in planned)
        return [
            self._segment_cell(_TrainingSegment(variant, seed, first, last))
            for seed in seeds
            for first, last in stretches
            for variant in (variant for variant, its_own in planned if its_own == seed)
        ]

    def _segment_cell(self, segment: _TrainingSegment) -> Cell:
        validation = pass_cost(self.options.validation_length) / 3 * self.context.study.texts.docs
        cost = validation + (segment.end_step - segment.start_step) * self._step_cost
        steps = f"steps {segment.start_step + 1} to {segment.end_step}" if segment.end_step else "step 0"
        return Cell(f"{segment.training_name}: {steps}", None, cost, segment)

    def rows(self, cell: Cell, model: None) -> Mapping[str, Rows]:
        stretch: _TrainingSegment = cell.task
        drawn = model_setup.random_model(self.options, len(self.tokenizer), self._training_seed(stretch))
        training = load(drawn.to(self._device), tokenizer=self.tokenizer)
        positions = initial_positions(stretch.variant, training)
        learner = PretrainTrainer(training, positions, self.options)
        if stretch.start_step:
            learner.load(self._state_path(stretch, stretch.start_step))
        drawn.train()
        with attached(training, positions):
            steps = [self._train_step(learner, stretch, step) for step in range(stretch.start_step, stretch.end_step)]
        found = held_out_loss(training, positions, self.held_out_documents)
        if not np.isfinite(found["nll"]).all():
            raise self._divergence_error("the held-out loss is no longer finite", stretch, stretch.end_step)
        self._save_segment(learner, positions, stretch)
        if self.options.watch and stretch.end_step in self.options.checkpoint_steps:
            now = training.under(positions, stretch.variant)
            resume = stretch.end_step > self.options.checkpoint_steps[0]
            measure_training_step(self.context, stretch.training_name, now, self.options.length, stretch.end_step, resume)
        tables: dict[str, Rows] = {"validation": {"adapter": stretch.training_name, "step": stretch.end_step, **found}}
        if steps:
            columns = {name: [row[name] for row in steps] for name in steps[0]}
            tables["training"] = {"adapter": stretch.training_name, **columns}
        return tables

    def _train_step(self, trainer: PretrainTrainer, segment: _TrainingSegment, step: int) -> dict[str, Any]:
        config = self.options
        slices = copy.copy(self.sampler)
        slices.seed = self._training_seed(segment)
        batch = torch.stack([slices.sample_sequence(config.length, step, number) for number in range(config.batch)])
        factor = wsd_rate_factor(step, config.steps, config.warmup)
        began = time.monotonic()
        try:
            loss = trainer.step(batch, factor)
        except Diverged as error:
            raise self._divergence_error(str(error), segment, step + 1) from error
        speed = batch.numel() / (time.monotonic() - began)
        said = f"{segment.training_name} step {step + 1} of {config.steps}: loss {loss:.3f}, {speed:.0f} tokens/s"
        self.context.advance(self._step_cost, said)
        return {
            "step": step + 1,
            "context_length": config.length,
            "tokens": batch.numel(),
            "loss": loss,
            "rate": factor,
        }

    def _save_segment(self, trainer: PretrainTrainer, positions: Fixed | AdaRoPE, segment: _TrainingSegment) -> None:
        """Store the state to go on from, and a checkpoint where one is due."""
        if segment.end_step in self.options.checkpoint_steps:
            folder = self.context.files / "checkpoints" / segment.training_name / f"step-{segment.end_step:06d}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            model_setup.save_checkpoint(folder, trainer.model.module, self.tokenizer, stored_scheme_name(segment.variant), positions)
        state = self._state_path(segment, segment.end_step)
        state.parent.mkdir(exist_ok=True)
        if 0 < segment.end_step < self.options.steps:
            trainer.save(state)
        for stop in self.options.segment_bounds:  # this stretch's own start stays until it is stored
            if stop < segment.start_step:
                self._state_path(segment, stop).unlink(missing_ok=True)

    def _divergence_error(self, reason: str, segment: _TrainingSegment, step: int) -> Diverged:
        return Diverged(f"{segment.training_name}: {reason} at step {step}; train at a lower rate, e.g. --rate 1e-4")

    # What all trainings share -------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The vocabulary that is learned from the training texts, those that are held out left aside."""
        return model_setup.train_tokenizer((each.text for each in self._training_texts()), self.options.vocabulary)

    @cached_property
    def held_out_documents(self) -> list[TokenDocument]:
        length = self.options.validation_length
        found = [TokenDocument(d.name, first_tokens(d.text, self.tokenizer, length)) for d in self.held_out_texts]
        if short := next((each for each in found if len(each.ids) < length), None):
            raise BadInput(f"{short.name} holds {len(short.ids)} tokens, fewer than --validation-length {length}")
        return found

    @cached_property
    def sampler(self) -> SequenceSampler:
        alike = self.options.mix == "sources"
        slices = SequenceSampler(self.options.train, self.tokenizer, self._held_out_digests, self.context.seed, alike)
        slices.check_length(self.options.length)
        return slices

    def _training_seed(self, segment: _TrainingSegment) -> int:
        return self.context.seed + segment.seed

    @property
    def _device(self) -> torch.device:
        return pick_device(self.context.study.device)

    @property
    def _step_cost(self) -> float:
        return self.options.batch * pass_cost(self.options.length)

    def _state_path(self, segment: _TrainingSegment, step: int) -> Path:
        # Beside what becomes part of the run.
        return self.context.files.with_name("state") / f"{segment.training_name}-{step:06d}.safetensors"


def _digest_content(documents: Iterable[Document]) -> DigestParts:
    return (part for document in documents for part in (document.name, document.text))

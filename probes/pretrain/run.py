"""Runner of the pretrain probe: small models trained from random weights that differ only in their position scheme.

A cell is a segment of optimiser steps of one training. It restores the state at the end of the previous segment, saves
checkpoints/TRAINING/step-NNNNNN in the run if the options ask for that step, and measures the validation loss by
position. The trainings of a seed alternate, so that all of them reach about the same step at any time.
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

from headscope.errors import BadInput, TrainingDiverged
from headscope.models import device_map
from headscope.models.checkpoint import pick_device
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import load
from headscope.positions.schedule import FixedSchedule
from headscope.prompts.texts import CHARACTERS_PER_TOKEN, Document, TokenDocument, first_tokens, read_documents
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import DigestParts
from headscope.study.monitor import measure_training_step
from headscope.training.adapter_trainer import validation_loss, warn_if_warmup_too_long, wsd_rate_factor
from headscope.training.sequence_sampler import SequenceSampler, exclude_validation_texts
from probes.pretrain.declaration import PretrainOptions, TrainingKey
from probes.pretrain.trainer import PretrainTrainer, initial_positions, random_model, save_checkpoint, train_tokenizer


@dataclass(frozen=True)
class _TrainingSegment:
    variant: str
    seed: int
    start_step: int
    end_step: int

    @property
    def training(self) -> TrainingKey:
        return TrainingKey(self.variant, self.seed)


class PretrainRunner:
    """Cells: for every seed, segment by segment, each variant."""

    def __init__(self, options: PretrainOptions, context: StudyContext):
        self.options, self.context = options, context
        self._refuse_too_large()
        self.validation_texts = self._choose_validation_texts()
        context.record_input("held-out texts", _digest_content(self.validation_texts))
        context.record_input("training texts", _digest_content(self._training_texts()))
        warn_if_warmup_too_long(options.steps, options.warmup)

    def _refuse_too_large(self) -> None:
        """Refuse a model and a batch that cannot fit into the memory of the device."""
        free = device_map.free_bytes(self._device)
        if free is not None and self.options.least_bytes > free:
            raise BadInput(
                f"a training step needs at least {device_map.format_bytes(self.options.least_bytes)}, but "
                f"{self._device} has {device_map.format_bytes(free)} free. Use smaller --layers, --width, "
                "--feed-forward, --batch or --length"
            )

    def _choose_validation_texts(self) -> list[Document]:
        """The first of the study's texts, in seeded order, that are long enough for any vocabulary."""
        texts, length = self.context.study.texts, CHARACTERS_PER_TOKEN * self.options.validation_length
        candidates = read_documents(texts.source, self.context.seed)
        validation_texts = [*islice((document for document in candidates if len(document.text) >= length), texts.docs)]
        if len(validation_texts) < texts.docs:
            raise BadInput(
                f"too few validation documents: {texts.docs} are needed, but only {len(validation_texts)} in "
                f"{texts.source} have {length:,} characters. Use fewer --docs, a smaller --validation-length or "
                "another --text"
            )
        return validation_texts

    def _training_texts(self) -> Iterator[Document]:
        for source in self.options.training_texts:
            yield from exclude_validation_texts(self._validation_digests, source)

    @property
    def _validation_digests(self) -> dict[str, str]:
        return {document.name: document.digest for document in self.validation_texts}

    def cells(self) -> list[Cell]:
        segments = [(0, 0), *pairwise(self.options.segment_bounds)]
        trainings = self.options.parsed_trainings
        return [
            self._segment_cell(_TrainingSegment(variant, seed, start, end))
            for seed in dict.fromkeys(seed for _, seed in trainings)
            for start, end in segments
            for variant in (variant for variant, variant_seed in trainings if variant_seed == seed)
        ]

    def _segment_cell(self, segment: _TrainingSegment) -> Cell:
        validation = pass_cost(self.options.validation_length) / 3 * self.context.study.texts.docs
        cost = validation + (segment.end_step - segment.start_step) * self._step_cost
        steps = f"steps {segment.start_step + 1} to {segment.end_step}" if segment.end_step else "step 0"
        return Cell(f"{segment.training.name}: {steps}", "", cost, segment)

    def compute_rows(self, cell: "Cell[_TrainingSegment]", model: None) -> Mapping[str, Rows]:
        segment = cell.work
        module = random_model(self.options, len(self.tokenizer), self._training_seed(segment))
        trained = load(module.to(self._device), tokenizer=self.tokenizer)
        positions = initial_positions(segment.variant, trained)
        trainer = PretrainTrainer(trained, positions, self.options)
        if segment.start_step:
            trainer.load(self._state_path(segment, segment.start_step))
        module.train()
        with attached(trained, positions):
            step_records = [
                self._train_step(trainer, segment, step) for step in range(segment.start_step, segment.end_step)
            ]
        validation = validation_loss(trained, positions, self.validation_documents)
        if not np.isfinite(validation["nll"]).all():
            raise self._divergence_error("the validation loss is not finite", segment, segment.end_step)
        self._save_segment(trainer, positions, segment)
        if self.options.measure_checkpoints and segment.end_step in self.options.checkpoint_steps:
            measure_training_step(
                self.context,
                segment.training.name,
                trained.with_schedule(positions, segment.variant),
                self.options.length,
                segment.end_step,
                resume=segment.end_step > self.options.checkpoint_steps[0],
            )
        keys = {"adapter": segment.training.name}
        tables: dict[str, Rows] = {"validation": {**keys, "step": segment.end_step, **validation}}
        if step_records:
            tables["training"] = keys | {name: [record[name] for record in step_records] for name in step_records[0]}
        return tables

    def _train_step(self, trainer: PretrainTrainer, segment: _TrainingSegment, step: int) -> dict[str, Any]:
        """Take one optimiser step; its row of table `training`."""
        options = self.options
        sampler = copy.copy(self.sampler)
        sampler.seed = self._training_seed(segment)
        batch = torch.stack([sampler.sample_sequence(options.length, step, index) for index in range(options.batch)])
        factor = wsd_rate_factor(step, options.steps, options.warmup)
        start_time = time.monotonic()
        try:
            loss = trainer.step(batch, factor)
        except TrainingDiverged as error:
            raise self._divergence_error(str(error), segment, step + 1) from error
        speed = batch.numel() / (time.monotonic() - start_time)
        progress = f"{segment.training.name} step {step + 1} of {options.steps}: loss {loss:.3f}, {speed:.0f} tokens/s"
        self.context.advance(self._step_cost, progress)
        return {
            "step": step + 1,
            "context_length": options.length,
            "tokens": batch.numel(),
            "loss": loss,
            "rate": factor,
        }

    def _save_segment(
        self, trainer: PretrainTrainer, positions: FixedSchedule | AdaRoPE, segment: _TrainingSegment
    ) -> None:
        """Write the state from which training resumes, and a checkpoint if the options ask for this step."""
        if segment.end_step in self.options.checkpoint_steps:
            folder = self.context.files_folder / "checkpoints" / segment.training.name / f"step-{segment.end_step:06d}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            save_checkpoint(folder, trainer.model.module, self.tokenizer, segment.training, positions)
        state_file = self._state_path(segment, segment.end_step)
        state_file.parent.mkdir(exist_ok=True)
        if 0 < segment.end_step < self.options.steps:
            trainer.save(state_file)
        for step in self.options.segment_bounds:  # keep the state at start_step until this segment is stored
            if step < segment.start_step:
                self._state_path(segment, step).unlink(missing_ok=True)

    def _divergence_error(self, reason: str, segment: _TrainingSegment, step: int) -> TrainingDiverged:
        return TrainingDiverged(
            f"training {segment.training.name} diverged at step {step}: {reason}. Use a lower learning rate, e.g. "
            "--learning-rate 1e-4"
        )

    # Shared by all trainings --------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, trained on the training texts without the validation texts."""
        return train_tokenizer((document.text for document in self._training_texts()), self.options.vocabulary)

    @cached_property
    def validation_documents(self) -> list[TokenDocument]:
        length = self.options.validation_length
        documents = [TokenDocument(d.name, first_tokens(d.text, self.tokenizer, length)) for d in self.validation_texts]
        if short := next((document for document in documents if len(document.ids) < length), None):
            raise BadInput(
                f"validation document {short.name} is too short: it has {len(short.ids)} tokens, fewer than "
                f"--validation-length {length}. Use a smaller --validation-length or another --text"
            )
        return documents

    @cached_property
    def sampler(self) -> SequenceSampler:
        uniform_over_sources = self.options.sample_by == "sources"
        sampler = SequenceSampler(
            self.options.training_texts,
            self.tokenizer,
            self._validation_digests,
            self.context.seed,
            uniform_over_sources,
            self.validation_documents,
        )
        sampler.check_length(self.options.length)
        return sampler

    def _training_seed(self, segment: _TrainingSegment) -> int:
        return self.context.seed + segment.seed

    @property
    def _device(self) -> torch.device:
        return pick_device(self.context.study.device)

    @property
    def _step_cost(self) -> float:
        return self.options.batch * pass_cost(self.options.length)

    def _state_path(self, segment: _TrainingSegment, step: int) -> Path:
        # Outside context.files_folder, which becomes part of the finished run.
        return self.context.files_folder.with_name("state") / f"{segment.training.name}-{step:06d}.safetensors"


def _digest_content(documents: Iterable[Document]) -> DigestParts:
    return (part for document in documents for part in (document.name, document.text))

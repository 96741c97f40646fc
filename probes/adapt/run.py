"""Runner of the adapt probe: trains AdaRoPE, and optionally a LoRA (paper, 'AdaRoPE in Context Extension').

A cell is a segment of optimiser steps. It restores the state at the end of the previous segment, saves the adapter as
adapters/step-NNNN.safetensors in the run, and measures the validation loss by position on the validation documents.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from headscope.errors import BadInput, TrainingDiverged
from headscope.forward.logits import refuse_non_finite_losses
from headscope.positions.adarope import METADATA_KEY, AdaRoPE, lora_folder_of
from headscope.positions.attach import resolve_schedule
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import digest_adarope_adapter
from headscope.study.executor import peak_bytes
from headscope.study.monitor import measure_training_step
from headscope.training.adapter_trainer import (
    AdapterTrainer,
    adding_lora,
    frozen_weights,
    validation_loss,
    warn_if_warmup_too_long,
    wsd_rate_factor,
)
from headscope.training.adarope_variants import VARIANT_SETUPS
from headscope.training.sequence_sampler import SequenceSampler
from probes.adapt.declaration import AdaptOptions

log = logging.getLogger("headscope")


@dataclass(frozen=True)
class _TrainingSegment:
    start_step: int
    end_step: int


class AdaptRunner:
    """Cells: the validation loss of the base model and of step 0, then every training segment."""

    def __init__(self, options: AdaptOptions, context: StudyContext):
        self.options, self.context = options, context
        (self.model_label,) = context.labels
        if options.adapter is not None:
            context.record_input("adapter to start from", [digest_adarope_adapter(options.adapter)])
        self.validation_documents = context.documents(self.model_label, options.validation_length)
        validation_digests = {document.name: document.digest for document in self.validation_documents}
        tokenizer, uniform_over_sources = context.tokenizer(self.model_label), options.sample_by == "sources"
        self.sampler = SequenceSampler(
            options.training_texts,
            tokenizer,
            validation_digests,
            context.seed,
            uniform_over_sources,
            self.validation_documents,
        )
        documents = self.sampler.documents.items()
        context.record_input("training texts", (part for name, ids in documents for part in (name, ids)))
        for phase in self.options.phases:
            self.sampler.check_length(phase.length)
        warn_if_warmup_too_long(options.total_steps, options.warmup)
        if options.start is not None or options.adapter is not None:  # a mistake in it must not cost a measurement
            self._initial_adapter(context.model(self.model_label))

    def cells(self) -> list[Cell]:
        segment_steps, steps = self.options.save_every, self.options.total_steps
        validation = pass_cost(self.options.validation_length) / 3 * len(self.validation_documents)
        segments = [
            _TrainingSegment(start, min(start + segment_steps, steps)) for start in range(0, steps, segment_steps)
        ]
        return [
            Cell("base: held-out loss", self.model_label, validation),
            Cell("step 0: held-out loss", self.model_label, validation, _TrainingSegment(0, 0)),
            *(
                Cell(
                    f"steps {segment.start_step + 1} to {segment.end_step}",
                    self.model_label,
                    validation + sum(self._step_cost(step) for step in range(segment.start_step, segment.end_step)),
                    segment,
                )
                for segment in segments
            ),
        ]

    def compute_rows(self, cell: "Cell[_TrainingSegment | None]", model: Model) -> Mapping[str, Rows]:
        if cell.work is None:
            losses = validation_loss(model, "base", self.validation_documents)
            refuse_non_finite_losses(model, losses["nll"])
            return {"nll": {"model": self.model_label, **losses}}
        segment = cell.work
        with self._trainer_at_step(model, segment.start_step) as (trainer, peft):
            step_records = [self._train_step(trainer, step) for step in range(segment.start_step, segment.end_step)]
            validation = validation_loss(model, trainer.adarope, self.validation_documents)
            if not np.isfinite(validation["nll"]).all():
                raise self._divergence_error("the validation loss is not finite", segment.end_step)
            self._save_segment(trainer, peft, segment, validation, step_records)
            if self.options.measure_checkpoints:
                measure_training_step(
                    self.context,
                    f"{self.context.study.name}-heads",
                    model.with_schedule(trainer.adarope, "adarope"),
                    self.options.validation_length,
                    segment.end_step,
                    segment.end_step > 0,
                )
        keys = {"adapter": self.context.study.name}
        tables: dict[str, Rows] = {"validation": {**keys, "step": segment.end_step, **validation}}
        if step_records:
            tables["training"] = keys | {name: [record[name] for record in step_records] for name in step_records[0]}
        return tables

    def _train_step(self, trainer: AdapterTrainer, step: int) -> dict[str, Any]:
        """Take one optimiser step; its row of table `training`."""
        phase = self.options.phase_at(step)
        batch = [self.sampler.sample_sequence(phase.length, step, index) for index in range(phase.batch)]
        factor = wsd_rate_factor(step, self.options.total_steps, self.options.warmup)
        start_time = time.monotonic()
        try:
            loss = trainer.step(batch, factor)
        except TrainingDiverged as error:
            raise self._divergence_error(str(error), step + 1) from error
        speed = phase.length * phase.batch / (time.monotonic() - start_time)
        progress = (
            f"step {step + 1} of {self.options.total_steps}: {phase.batch} x {phase.length} tokens, loss {loss:.3f}, "
            f"{speed:.0f} tokens/s, peak {peak_bytes() / 1e9:.1f} GB"
        )
        self.context.advance(self._step_cost(step), progress)
        return {
            "step": step + 1,
            "context_length": phase.length,
            "tokens": phase.length * phase.batch,
            "loss": loss,
            "rate": factor,
        }

    def _divergence_error(self, reason: str, step: int) -> TrainingDiverged:
        return TrainingDiverged(
            f"training diverged at step {step}: {reason}. Use lower learning rates, e.g. --frequency-learning-rate "
            f"0.01 --scale-learning-rate 0.001; the last good adapter is in {self._adapter_folder}"
        )

    def _step_cost(self, step: int) -> float:
        phase = self.options.phase_at(step)
        return phase.batch * pass_cost(phase.length)

    # Trainable parameters and saved files -------------------------------------------------------------------------

    @contextmanager
    def _trainer_at_step(self, model: Model, step: int) -> Iterator[tuple[AdapterTrainer, Any]]:
        """The trainer in its state after `step` steps, and the PeftModel of its LoRA or None."""
        options = self.options
        with ExitStack() as stack:
            stack.enter_context(frozen_weights(model))
            peft = None
            if options.strategy != "adarope":
                peft = stack.enter_context(adding_lora(model, options.lora_rank, options.lora_alpha, self.context.seed))
            adarope = self._initial_adapter(model)
            rates = (options.frequency_learning_rate, options.scale_learning_rate, options.lora_learning_rate)
            trainer = AdapterTrainer(model, adarope, rates, peft, options.checkpoint_activations_above)
            if step:
                trainer.load(self._state_path(step))
            yield trainer, peft

    def _initial_adapter(self, model: Model) -> AdaRoPE:
        """The adapter before step 1: from YaRN, from another scheme, or a trained adapter to continue."""
        if self.options.adapter is not None:
            adarope = self._continued_adapter(self.options.adapter, model)
        else:
            start = self.options.start or f"yarn:factor={self.options.factor:g}"
            adarope = AdaRoPE.from_schedule(model, resolve_schedule(model, start)).to(model.device)
            adarope.metadata["start"] = start
        trains_positions = self.options.strategy in ("adarope", "joint", "adarope-joint")
        VARIANT_SETUPS[self.options.variant if trains_positions else "frozen"](adarope)
        return adarope

    def _continued_adapter(self, adapter_path: str, model: Model) -> AdaRoPE:
        """Load an adapter to continue; its metadata becomes `before`. Raises BadInput if it does not fit the study."""
        adarope = AdaRoPE.load(adapter_path, model)
        if adarope.lora_folder is not None:
            raise BadInput(f"adapter '{adapter_path}' already has a LoRA. Start from a stage 1 adapter, which has none")
        names, digests = _training_document_names(adarope), _training_document_digests(adarope)
        for document in self.validation_documents:
            if document.name in names or document.digest in digests:
                raise BadInput(
                    f"adapter '{adapter_path}' was trained on {document.name}, which is a validation document "
                    "of this study. Use another --text"
                )
        if len(digests) < len(names):
            log.warning(
                "adapter %s records its training texts by name only. Make sure that it was not trained on a validation "
                "document",
                adapter_path,
            )
        adarope.metadata["before"] = {"sha256": adarope.sha256, **adarope.metadata}
        return adarope

    def _save_segment(
        self,
        trainer: AdapterTrainer,
        peft: Any,
        segment: _TrainingSegment,
        validation: Mapping[str, Any],
        step_records: list[dict[str, Any]],
    ) -> None:
        """Write the adapter (and LoRA) at the segment's end, and the state from which training resumes."""
        self._adapter_folder.mkdir(parents=True, exist_ok=True)
        earlier = (
            _read_losses(self._adapter_path(segment.start_step))
            if segment.end_step
            else {"held_out": {}, "training": []}
        )
        mean_loss = np.average(validation["nll"], weights=validation["tokens"])
        losses = {
            "held_out": {**earlier["held_out"], str(segment.end_step): round(float(mean_loss), 5)},
            "training": earlier["training"] + [round(record["loss"], 4) for record in step_records],
        }
        file = self._adapter_path(segment.end_step)
        if peft is not None:
            peft.save_pretrained(lora_folder_of(file))
        trainer.adarope.save(
            file,
            **({} if peft is None else {"lora": {"rank": self.options.lora_rank, "alpha": self.options.lora_alpha}}),
            step=segment.end_step,
            config=self.options.model_dump(mode="json"),
            seed=self.context.seed,
            trained_on=sorted({*self.sampler.documents, *_training_document_names(trainer.adarope)}),
            trained_on_digests=sorted({*self.sampler.digests.values(), *_training_document_digests(trainer.adarope)}),
            held_out=[document.name for document in self.validation_documents],
            losses=losses,
        )
        if 0 < segment.end_step < self.options.total_steps:
            self._state_path(0).parent.mkdir(exist_ok=True)
            trainer.save(self._state_path(segment.end_step))
        for step in range(segment.start_step):  # keep the state at start_step until this segment is stored
            self._state_path(step).unlink(missing_ok=True)

    @property
    def _adapter_folder(self) -> Path:
        return self.context.files_folder / "adapters"

    def _adapter_path(self, step: int) -> Path:
        return self._adapter_folder / f"step-{step:04d}.safetensors"

    def _state_path(self, step: int) -> Path:
        # Outside context.files_folder, which becomes part of the finished run.
        return self.context.files_folder.with_name("state") / f"step-{step:04d}.safetensors"


def _training_document_names(adarope: AdaRoPE) -> list[str]:
    """Names of the documents that an adapter was trained on before this training."""
    names: list[str] = adarope.metadata.get("trained_on", [])
    return names


def _training_document_digests(adarope: AdaRoPE) -> list[str]:
    """Digests of those documents, whose names may differ between studies; older adapters have only names."""
    digests: list[str] = adarope.metadata.get("trained_on_digests", [])
    return digests


def _read_losses(adapter: Path) -> dict[str, Any]:
    with safe_open(adapter, "pt") as file:
        losses: dict[str, Any] = json.loads(file.metadata()[METADATA_KEY])["losses"]
    return losses

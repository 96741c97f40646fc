"""The `adapt` section: learn AdaRoPE, and a LoRA if asked, on a frozen checkpoint (paper, 'AdaRoPE in Context
Extension').

A cell is a stretch of optimiser steps: it goes on from the state that the stretch before it left, keeps the adapter as
adapters/step-NNNN.safetensors in the run, and measures the loss by position on the held-out documents.
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

from headscope.errors import BadInput, Diverged
from headscope.positions import lora
from headscope.positions.adarope import METADATA, AdaRoPE
from headscope.positions.attach import resolve
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import digest_adapter
from headscope.study.executor import peak_bytes
from headscope.study.monitor import measure_training_step
from probes.adapt.options import AdaptOptions
from probes.adapt.sequence_sampler import SequenceSampler
from probes.adapt.trainer import AdapterTrainer, frozen_weights, warn_if_warmup_too_long, wsd_rate_factor
from probes.adapt.validation import held_out_loss
from probes.adapt.variants import VARIANT_SETUPS

log = logging.getLogger("headscope")


@dataclass(frozen=True)
class _TrainingSegment:
    start_step: int
    end_step: int


class AdaptRunner:
    """Cells: the held-out loss of the base model and of the untrained start, then every stretch of steps."""

    def __init__(self, options: AdaptOptions, context: StudyContext):
        self.options, self.context = options, context
        (self.model_label,) = context.labels
        if options.adapter is not None:
            context.record_input("adapter to start from", [digest_adapter(options.adapter)])
        self.held_out_documents = context.documents(self.model_label, options.validation_length)
        held_out = {document.name: document.digest for document in self.held_out_documents}
        tokenizer, alike = context.tokenizer(self.model_label), options.mix == "sources"
        self.sampler = SequenceSampler(options.train, tokenizer, held_out, context.seed, alike)
        learned = self.sampler.documents.items()
        context.record_input("training texts", (part for name, ids in learned for part in (name, ids)))
        for phase in self.options.phases:
            self.sampler.check_length(phase.length)
        warn_if_warmup_too_long(options.total_steps, options.warmup)

    def cells(self) -> list[Cell]:
        keep, steps = self.options.keep, self.options.total_steps
        validation = pass_cost(self.options.validation_length) / 3 * len(self.held_out_documents)
        stretches = [_TrainingSegment(first, min(first + keep, steps)) for first in range(0, steps, keep)]
        return [
            Cell("base: held-out loss", self.model_label, validation),
            Cell("step 0: held-out loss", self.model_label, validation, _TrainingSegment(0, 0)),
            *(
                Cell(
                    f"steps {stretch.start_step + 1} to {stretch.end_step}",
                    self.model_label,
                    validation + sum(self._step_cost(step) for step in range(stretch.start_step, stretch.end_step)),
                    stretch,
                )
                for stretch in stretches
            ),
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        if cell.task is None:
            return {"nll": {"model": self.model_label, **held_out_loss(model, "base", self.held_out_documents)}}
        stretch: _TrainingSegment = cell.task
        with self._trainer_at_step(model, stretch.start_step) as (learner, peft):
            training = [self._train_step(learner, step) for step in range(stretch.start_step, stretch.end_step)]
            found = held_out_loss(model, learner.adarope, self.held_out_documents)
            if not np.isfinite(found["nll"]).all():
                raise self._divergence_error("the held-out loss is no longer finite", stretch.end_step)
            self._save_segment(learner, peft, stretch, found, training)
            if self.options.watch:
                now = model.under(learner.adarope, "adarope")
                length = self.options.validation_length
                measure_training_step(self.context, f"{self.context.study.name}-heads", now, length, stretch.end_step, stretch.end_step > 0)
        tables: dict[str, Rows] = {"validation": {"adapter": self.context.study.name, "step": stretch.end_step, **found}}
        if training:
            columns = {name: [row[name] for row in training] for name in training[0]}
            tables["training"] = {"adapter": self.context.study.name, **columns}
        return tables

    def _train_step(self, trainer: AdapterTrainer, step: int) -> dict[str, Any]:
        phase = self.options.phase_at(step)
        batch = [self.sampler.sample_sequence(phase.length, step, number) for number in range(phase.batch)]
        factor = wsd_rate_factor(step, self.options.total_steps, self.options.warmup)
        began = time.monotonic()
        try:
            loss = trainer.step(batch, factor)
        except Diverged as error:
            raise self._divergence_error(str(error), step + 1) from error
        speed = phase.length * phase.batch / (time.monotonic() - began)
        said = f"step {step + 1} of {self.options.total_steps}: {phase.batch} x {phase.length} tokens, loss {loss:.3f}"
        said = f"{said}, {speed:.0f} tokens/s, peak {peak_bytes() / 1e9:.1f} GB"
        self.context.advance(self._step_cost(step), said)
        return {
            "step": step + 1,
            "context_length": phase.length,
            "tokens": phase.length * phase.batch,
            "loss": loss,
            "rate": factor,
        }

    def _divergence_error(self, reason: str, step: int) -> Diverged:
        return Diverged(
            f"{reason} at step {step}; the last good adapter is kept in {self._adapter_folder}: learn at lower rates, "
            "e.g. --frequency-rate 0.01 --scale-rate 0.001"
        )

    def _step_cost(self, step: int) -> float:
        phase = self.options.phase_at(step)
        return phase.batch * pass_cost(phase.length)

    # What is learned and kept ------------------------------------------------------------------------------------

    @contextmanager
    def _trainer_at_step(self, model: Model, step: int) -> Iterator[tuple[AdapterTrainer, Any]]:
        """The training as it stands after `step` steps: at hand, or read back, or new."""
        config = self.options
        with ExitStack() as stack:
            stack.enter_context(frozen_weights(model))
            peft = None
            if config.strategy != "adarope":
                peft = stack.enter_context(lora.added(model, config.lora_rank, config.lora_alpha, self.context.seed))
            adarope = self._initial_adapter(model)
            rates = (config.frequency_rate, config.scale_rate, config.lora_rate)
            learner = AdapterTrainer(model, adarope, rates, peft, config.recompute_above)
            if step:
                learner.load(self._state_path(step))
            yield learner, peft

    def _initial_adapter(self, model: Model) -> AdaRoPE:
        """The adapter before any step: YaRN's, another scheme's, or the learned one to go on from."""
        yarn = f"yarn:factor={self.options.factor:g}"
        if self.options.adapter is not None:
            adarope = self._continued_adapter(self.options.adapter, model, yarn)
        else:
            start = self.options.start or yarn
            adarope = AdaRoPE.untrained(model, resolve(model, start)).to(model.device)
            adarope.metadata["start"] = start
        learns_positions = self.options.strategy in ("adarope", "joint", "adarope-joint")
        VARIANT_SETUPS[self.options.variant if learns_positions else "frozen"](adarope)
        return adarope

    def _continued_adapter(self, adapter_path: str, model: Model, yarn_scheme: str) -> AdaRoPE:
        """An adapter to go on from; its own story becomes `before`."""
        adarope = AdaRoPE.load(adapter_path, model)
        if adarope.lora is not None:
            raise BadInput(f"adapter '{adapter_path}' has a LoRA already; start from one of stage 1")
        start = adarope.metadata.get("start", yarn_scheme)
        if start.startswith("yarn:") and start != yarn_scheme:
            raise BadInput(f"adapter '{adapter_path}' was learned from {start}, not {yarn_scheme}: give its own --factor")
        for each in self.held_out_documents:
            if each.name in _training_document_names(adarope) or each.digest in _training_document_digests(adarope):
                raise BadInput(
                    f"adapter '{adapter_path}' was learned on {each.name}, which is held out here: give other --text"
                )
        if len(_training_document_digests(adarope)) < len(_training_document_names(adarope)):
            log.warning(
                "adapter %s tells names alone of what it learned from: see that no held-out text is among it", adapter_path
            )
        adarope.metadata["before"] = {"sha256": adarope.sha256, **adarope.metadata}
        return adarope

    def _save_segment(
        self, trainer: AdapterTrainer, peft: Any, segment: _TrainingSegment, validation: Mapping[str, Any], step_records: list[dict[str, Any]]
    ) -> None:
        """Store the adapter (and LoRA) of the stretch's end, and the state to go on from."""
        self._adapter_folder.mkdir(parents=True, exist_ok=True)
        before = _read_losses(self._adapter_path(segment.start_step)) if segment.end_step else {"held_out": {}, "training": []}
        mean = np.average(validation["nll"], weights=validation["tokens"])
        losses = {
            "held_out": {**before["held_out"], str(segment.end_step): round(float(mean), 5)},
            "training": before["training"] + [round(row["loss"], 4) for row in step_records],
        }
        file = self._adapter_path(segment.end_step)
        if peft is not None:
            peft.save_pretrained(lora.beside(file))
        trainer.adarope.save(
            file,
            **({} if peft is None else {"lora": {"rank": self.options.lora_rank, "alpha": self.options.lora_alpha}}),
            step=segment.end_step,
            config=self.options.model_dump(mode="json"),
            seed=self.context.seed,
            trained_on=sorted({*self.sampler.documents, *_training_document_names(trainer.adarope)}),
            trained_on_digests=sorted({*self.sampler.digests.values(), *_training_document_digests(trainer.adarope)}),
            held_out=[document.name for document in self.held_out_documents],
            losses=losses,
        )
        if 0 < segment.end_step < self.options.total_steps:
            self._state_path(0).parent.mkdir(exist_ok=True)
            trainer.save(self._state_path(segment.end_step))
        for step in range(segment.start_step):  # this stretch's own start stays until it is stored
            self._state_path(step).unlink(missing_ok=True)

    @property
    def _adapter_folder(self) -> Path:
        return self.context.files / "adapters"

    def _adapter_path(self, step: int) -> Path:
        return self._adapter_folder / f"step-{step:04d}.safetensors"

    def _state_path(self, step: int) -> Path:
        # Beside what becomes part of the run.
        return self.context.files.with_name("state") / f"step-{step:04d}.safetensors"


def _training_document_names(adarope: AdaRoPE) -> list[str]:
    """Documents that an adapter was learned on before this training."""
    documents: list[str] = adarope.metadata.get("trained_on", [])
    return documents


def _training_document_digests(adarope: AdaRoPE) -> list[str]:
    """Of their texts, which may be called otherwise here; older adapters tell names alone."""
    digests: list[str] = adarope.metadata.get("trained_on_digests", [])
    return digests


def _read_losses(adapter: Path) -> dict[str, Any]:
    with safe_open(adapter, "pt") as file:
        losses: dict[str, Any] = json.loads(file.metadata()[METADATA])["losses"]
    return losses

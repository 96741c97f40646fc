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
from headscope.study.context import Materials
from headscope.study.digests import of_adapter
from headscope.study.executor import peak_bytes
from headscope.study.monitor import look
from probes.adapt.learning import Learner, frozen, tell_of_warmup, wsd
from probes.adapt.options import Adapt
from probes.adapt.samples import Slices
from probes.adapt.validation import held_out_loss
from probes.adapt.variants import VARIANTS

log = logging.getLogger("headscope")


@dataclass(frozen=True)
class _Stretch:
    first: int
    last: int


class AdaptSection:
    """Cells: the held-out loss of the base model and of the untrained start, then every stretch of steps."""

    def __init__(self, config: Adapt, materials: Materials):
        self.config, self.materials = config, materials
        (self.label,) = materials.labels
        if config.adapter is not None:
            materials.uses("adapter to start from", [of_adapter(config.adapter)])
        self.held_out = materials.documents(self.label, config.validation_length)
        held_out = {document.name: document.digest for document in self.held_out}
        tokenizer, alike = materials.tokenizer(self.label), config.mix == "sources"
        self.slices = Slices(config.train, tokenizer, held_out, materials.seed, alike)
        learned = self.slices.documents.items()
        materials.uses("training texts", (part for name, ids in learned for part in (name, ids)))
        for phase in self.config.phases:
            self.slices.check(phase.length)
        tell_of_warmup(config.steps, config.warmup)

    def cells(self) -> list[Cell]:
        keep, steps = self.config.keep, self.config.steps
        validation = pass_cost(self.config.validation_length) / 3 * len(self.held_out)
        stretches = [_Stretch(first, min(first + keep, steps)) for first in range(0, steps, keep)]
        return [
            Cell("base: held-out loss", self.label, validation),
            Cell("step 0: held-out loss", self.label, validation, _Stretch(0, 0)),
            *(
                Cell(
                    f"steps {stretch.first + 1} to {stretch.last}",
                    self.label,
                    validation + sum(self._step_cost(step) for step in range(stretch.first, stretch.last)),
                    stretch,
                )
                for stretch in stretches
            ),
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        if cell.task is None:
            return {"nll": {"model": self.label, **held_out_loss(model, "base", self.held_out)}}
        stretch: _Stretch = cell.task
        with self._learner(model, stretch.first) as (learner, peft):
            training = [self._step(learner, step) for step in range(stretch.first, stretch.last)]
            found = held_out_loss(model, learner.adarope, self.held_out)
            if not np.isfinite(found["nll"]).all():
                raise self._diverged("the held-out loss is no longer finite", stretch.last)
            self._keep(learner, peft, stretch, found, training)
            if self.config.watch:
                now = model.under(learner.adarope, "adarope")
                length = self.config.validation_length
                look(self.materials, f"{self.materials.study.name}-heads", now, length, stretch.last, stretch.last > 0)
        tables: dict[str, Rows] = {"validation": {"adapter": self.materials.study.name, "step": stretch.last, **found}}
        if training:
            columns = {name: [row[name] for row in training] for name in training[0]}
            tables["training"] = {"adapter": self.materials.study.name, **columns}
        return tables

    def _step(self, learner: Learner, step: int) -> dict[str, Any]:
        phase = self.config.phase(step)
        batch = [self.slices.draw(phase.length, step, number) for number in range(phase.batch)]
        factor = wsd(step, self.config.steps, self.config.warmup)
        began = time.monotonic()
        try:
            loss = learner.step(batch, factor)
        except Diverged as error:
            raise self._diverged(str(error), step + 1) from error
        speed = phase.length * phase.batch / (time.monotonic() - began)
        said = f"step {step + 1} of {self.config.steps}: {phase.batch} x {phase.length} tokens, loss {loss:.3f}"
        said = f"{said}, {speed:.0f} tokens/s, peak {peak_bytes() / 1e9:.1f} GB"
        self.materials.advance(self._step_cost(step), said)
        return {
            "step": step + 1,
            "context_length": phase.length,
            "tokens": phase.length * phase.batch,
            "loss": loss,
            "rate": factor,
        }

    def _diverged(self, what: str, step: int) -> Diverged:
        return Diverged(
            f"{what} at step {step}; the last good adapter is kept in {self._adapters}: learn at lower rates, "
            "e.g. --frequency-rate 0.01 --scale-rate 0.001"
        )

    def _step_cost(self, step: int) -> float:
        phase = self.config.phase(step)
        return phase.batch * pass_cost(phase.length)

    # What is learned and kept ------------------------------------------------------------------------------------

    @contextmanager
    def _learner(self, model: Model, step: int) -> Iterator[tuple[Learner, Any]]:
        """The training as it stands after `step` steps: at hand, or read back, or new."""
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(frozen(model))
            peft = None
            if config.strategy != "adarope":
                peft = stack.enter_context(lora.added(model, config.lora_rank, config.lora_alpha, self.materials.seed))
            adarope = self._start(model)
            rates = (config.frequency_rate, config.scale_rate, config.lora_rate)
            learner = Learner(model, adarope, rates, peft, config.recompute_above)
            if step:
                learner.load(self._state(step))
            yield learner, peft

    def _start(self, model: Model) -> AdaRoPE:
        """The adapter before any step: YaRN's, another scheme's, or the learned one to go on from."""
        yarn = f"yarn:factor={self.config.factor:g}"
        if self.config.adapter is not None:
            adarope = self._learned(self.config.adapter, model, yarn)
        else:
            start = self.config.start or yarn
            adarope = AdaRoPE.untrained(model, resolve(model, start)).to(model.device)
            adarope.metadata["start"] = start
        learns_positions = self.config.strategy in ("adarope", "joint", "adarope-joint")
        VARIANTS[self.config.variant if learns_positions else "frozen"](adarope)
        return adarope

    def _learned(self, file: str, model: Model, yarn: str) -> AdaRoPE:
        """An adapter to go on from; its own story becomes `before`."""
        adarope = AdaRoPE.load(file, model)
        if adarope.lora is not None:
            raise BadInput(f"adapter '{file}' has a LoRA already; start from one of stage 1")
        start = adarope.metadata.get("start", yarn)
        if start.startswith("yarn:") and start != yarn:
            raise BadInput(f"adapter '{file}' was learned from {start}, not {yarn}: give its own --factor")
        for each in self.held_out:
            if each.name in _trained_on(adarope) or each.digest in _digests(adarope):
                raise BadInput(
                    f"adapter '{file}' was learned on {each.name}, which is held out here: give other --text"
                )
        if len(_digests(adarope)) < len(_trained_on(adarope)):
            log.warning(
                "adapter %s tells names alone of what it learned from: see that no held-out text is among it", file
            )
        adarope.metadata["before"] = {"sha256": adarope.sha256, **adarope.metadata}
        return adarope

    def _keep(
        self, learner: Learner, peft: Any, stretch: _Stretch, found: Mapping[str, Any], training: list[dict[str, Any]]
    ) -> None:
        """Store the adapter (and LoRA) of the stretch's end, and the state to go on from."""
        self._adapters.mkdir(parents=True, exist_ok=True)
        before = _losses(self._adapter(stretch.first)) if stretch.last else {"held_out": {}, "training": []}
        mean = np.average(found["nll"], weights=found["tokens"])
        losses = {
            "held_out": {**before["held_out"], str(stretch.last): round(float(mean), 5)},
            "training": before["training"] + [round(row["loss"], 4) for row in training],
        }
        file = self._adapter(stretch.last)
        if peft is not None:
            peft.save_pretrained(lora.beside(file))
        learner.adarope.save(
            file,
            **({} if peft is None else {"lora": {"rank": self.config.lora_rank, "alpha": self.config.lora_alpha}}),
            step=stretch.last,
            config=self.config.model_dump(mode="json"),
            seed=self.materials.seed,
            trained_on=sorted({*self.slices.documents, *_trained_on(learner.adarope)}),
            trained_on_digests=sorted({*self.slices.digests.values(), *_digests(learner.adarope)}),
            held_out=[document.name for document in self.held_out],
            losses=losses,
        )
        if 0 < stretch.last < self.config.steps:
            self._state(0).parent.mkdir(exist_ok=True)
            learner.save(self._state(stretch.last))
        for step in range(stretch.first):  # this stretch's own start stays until it is stored
            self._state(step).unlink(missing_ok=True)

    @property
    def _adapters(self) -> Path:
        return self.materials.files / "adapters"

    def _adapter(self, step: int) -> Path:
        return self._adapters / f"step-{step:04d}.safetensors"

    def _state(self, step: int) -> Path:
        # Beside what becomes part of the run.
        return self.materials.files.with_name("state") / f"step-{step:04d}.safetensors"


def _trained_on(adarope: AdaRoPE) -> list[str]:
    """Documents that an adapter was learned on before this training."""
    documents: list[str] = adarope.metadata.get("trained_on", [])
    return documents


def _digests(adarope: AdaRoPE) -> list[str]:
    """Of their texts, which may be called otherwise here; older adapters tell names alone."""
    digests: list[str] = adarope.metadata.get("trained_on_digests", [])
    return digests


def _losses(adapter: Path) -> dict[str, Any]:
    with safe_open(adapter, "pt") as file:
        losses: dict[str, Any] = json.loads(file.metadata()[METADATA])["losses"]
    return losses

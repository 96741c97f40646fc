"""Contracts of the parts of a probe that run models."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.study.cells import ObservingRunner, ProbeRunner
    from headscope.study.context import StudyContext


class RunnerParts:
    """The parts of a probe that may import torch."""

    def runner(self) -> "Callable[[Any, StudyContext], ProbeRunner | ObservingRunner]":
        """The class that executes it, called with its options and the study."""
        raise NotImplementedError("the probe has no runner")

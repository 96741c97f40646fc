"""Contracts of the parts of a probe that run models."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.positions.model import Model
    from headscope.study.cells import ObservingRunner, ProbeRunner
    from headscope.study.context import StudyContext


class RunnerParts:
    """The parts of a probe that may import torch."""

    def runner(self) -> "Callable[[Any, StudyContext], ProbeRunner | ObservingRunner]":
        """The class that executes it, called with its options and the study."""
        raise NotImplementedError("the probe has no runner")

    def bench(self, model: "Model", length: int) -> "Mapping[str, Callable[[], object]]":
        """Functions to time up to a context length, by name; the first is the reference for the others."""
        return {}

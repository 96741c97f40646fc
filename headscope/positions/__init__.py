"""Position schemes: specs and rules, trained parameters, and attaching a scheme to a model."""

from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve_schedule
from headscope.positions.model import Model, load
from headscope.positions.schemes import parse_scheme

__all__ = ["AdaRoPE", "Model", "attached", "load", "parse_scheme", "resolve_schedule"]

"""Position schemes: their rules, their specs, learned parameters, and attaching them to a model."""

from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.model import Model, load
from headscope.positions.scheme_syntax import parse_scheme

__all__ = ["AdaRoPE", "Model", "attached", "load", "parse_scheme", "resolve"]

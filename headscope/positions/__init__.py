"""Position schemes: what they are (`schemes`), how they are written (`syntax`), learned parameters (`adarope`), a
checkpoint under one (`model`), and how one is put on and taken off (`attach`)."""

from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.model import Model, load
from headscope.positions.scheme_syntax import parse

__all__ = ["AdaRoPE", "Model", "attached", "load", "parse", "resolve"]

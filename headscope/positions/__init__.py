"""Position schemes: what they are (`schemes`), how they are written (`spec`), learned parameters (`adarope`),
and how they are put on a model (`attach`)."""

from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.spec import parse

__all__ = ["AdaRoPE", "attached", "parse", "resolve"]

"""Lazy imports: the stub of a module declares its names and where they come from, for Python and for editors."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any


class LazyNames:
    """The names that the stub beside a module imports from headscope."""

    def __init__(self, module_file: str) -> None:
        stub = Path(module_file).with_suffix(".pyi").read_text(encoding="utf-8")
        lines = re.findall(r"^from \.(\S+) import (\w+) as \2$", stub, re.MULTILINE)
        self.modules = {name: f"headscope.{module}" for module, name in lines}

    def load(self, name: str) -> Any:
        """Import the name."""
        return getattr(import_module(self.modules[name]), name)

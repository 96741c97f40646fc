"""Runs in words and figures: findings and charts in order, on the terminal and as one HTML page.

`report.write([run], "report.html")` writes the page.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.report.html import render, write

__all__ = ["render", "write"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # what probes hand on needs neither templates nor plotly's script
        from headscope.report import html

        return getattr(html, name)
    raise AttributeError(f"module 'headscope.report' has no attribute '{name}'")

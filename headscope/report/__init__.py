"""Runs in words and figures: findings and charts in order, on the terminal and as one HTML page.

`report.write([run], "report.html")` writes the page.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.report.html_page import render_report, write_report

__all__ = ["render_report", "write_report"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # what probes hand on needs neither templates nor plotly's script
        from headscope.report import html_page

        return getattr(html_page, name)
    raise AttributeError(f"module 'headscope.report' has no attribute '{name}'")

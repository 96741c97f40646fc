"""Reports: findings and charts of runs in the terminal, as one HTML page, as a static site, and in a notebook.

`report.write_report([run], "report.html")` writes the HTML page.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.rendering.html_page import render_report, write_report

__all__ = ["render_report", "write_report"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # lazy: the blocks that probes import need neither jinja nor plotly.js
        from headscope.rendering import html_page

        return getattr(html_page, name)
    raise AttributeError(f"module 'headscope.rendering' has no attribute '{name}'")

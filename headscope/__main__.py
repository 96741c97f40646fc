"""Entry point of the command `headscope`. It handles signals before it imports anything slow."""

import gc

from headscope.base import signals

GC_THRESHOLD = 10_000
"""Objects between two garbage collections. Python's 700 cost a sixth of the time of imports and of reports."""


def main() -> None:
    """Entry point of the command `headscope`, and of `python -m headscope`."""
    signals.install_handlers()
    gc.set_threshold(GC_THRESHOLD)
    from headscope.cli import app

    app.main()


if __name__ == "__main__":
    main()

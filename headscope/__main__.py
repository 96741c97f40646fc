"""The way in: signals are heeded from the first line, before what takes time to import."""

from headscope import signals


def main() -> None:
    """Entry point of the command `headscope`, and of `python -m headscope`."""
    signals.install_handlers()
    from headscope.cli import app

    app.main()


if __name__ == "__main__":
    main()

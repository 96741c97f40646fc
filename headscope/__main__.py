"""Entry point of the command `headscope`. It handles signals before it imports anything slow."""

from headscope import signals


def main() -> None:
    """Entry point of the command `headscope`, and of `python -m headscope`."""
    signals.install_handlers()
    from headscope.cli import app

    app.main()


if __name__ == "__main__":
    main()

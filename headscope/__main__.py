"""The way in: signals are heeded from the first line, before what takes time to import."""

from headscope import stopping


def main() -> None:
    """Entry point of the command `headscope`, and of `python -m headscope`."""
    stopping.listen()
    from headscope import cli

    cli.main()


if __name__ == "__main__":
    main()

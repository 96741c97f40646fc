"""Private names of typer, which brings its own click without public names for it."""

from typing import TYPE_CHECKING

from headscope.compat.library_name import Library, LibraryName

if TYPE_CHECKING:
    from typer._click.core import Command as Command
    from typer._click.core import Context as Context
    from typer._click.exceptions import ClickException as ClickException

TYPER = Library("typer", ("0.29.0", "0.29.2"))
COMMAND_LINE = "the command line"

CLICK_EXCEPTION = LibraryName(TYPER, "typer._click.exceptions:ClickException", COMMAND_LINE)
NO_ARGUMENTS = LibraryName(TYPER, "typer._click.exceptions:NoArgsIsHelpError", COMMAND_LINE)
DISPLAY_TYPE = LibraryName(TYPER, "typer.core:TyperOption.display_type", "the help of options", ("ctx",))
"""Older versions than 0.29 lack it."""

"""The commands by question: the built-in ones and one for every installed probe."""

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from headscope.base import plugins, user_input
from headscope.base.declaration import Declaration
from headscope.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from headscope.compat.typer import Command, Context

QUESTIONS = {
    "Heads": "What heads attend to",
    "Prompts": "What heads attend to",
    "Causes": "Which heads an answer or the loss depends on",
    "Tasks": "What the model still does in long contexts",
    "Training": "How positions train",
}
"""Heading of the commands of probes in the help, by the tab of their pages in the app; of another tab, its name."""
COMMAND_GROUPS = {
    "Start": ("demo", "dash"),
    **dict.fromkeys(QUESTIONS.values(), ()),
    "Compare, check and share": ("report", "compare", "check", "join", "bundle", "export", "ls", "validate"),
    "Cost, and correctness on this machine": ("plan", "bench", "selfcheck"),
}
"""The built-in commands by heading."""


def command_groups() -> dict[str, list[str]]:
    """The names of all commands by question, as help and README list them."""
    groups = {heading: [*names] for heading, names in COMMAND_GROUPS.items()}
    for probe in plugins.requestable_probes().values():
        heading = QUESTIONS.get(probe.navigation_group, probe.navigation_group)
        groups.setdefault(heading, []).append(probe.command_name)
    return groups


class Commands(TyperGroup):
    """The built-in commands and one for every installed probe."""

    def list_commands(self, ctx: "Context") -> list[str]:
        names = [probe.command_name for probe in plugins.requestable_probes().values()]
        first, *rest = super().list_commands(ctx)
        return [first, *names, *rest]

    def format_help(self, ctx: "Context", formatter: Any) -> None:
        """List the commands as plain text: importing rich would take a third of the time."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        first_lines = {name: (command.help or "").partition("\n\n")[0] for name, command in commands.items() if command}
        for heading, names in command_groups().items():
            with formatter.section(heading):
                formatter.write_dl([(name, first_lines[name]) for name in names])
        self.format_epilog(ctx, formatter)

    def get_command(self, ctx: "Context", cmd_name: str) -> "Command | None":
        probes = plugins.requestable_probes().values()
        if cmd_name == "measure":
            raise BadInput("unknown command 'measure'. Use: headscope run --model base=smollm2-135m")
        if probe := next((probe for probe in probes if cmd_name == probe.command_name), None):
            return ProbeCommand(probe)
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing:
            suggestion = did_you_mean(cmd_name, self.list_commands(ctx))
            raise BadInput(f"no command {user_input.quote(cmd_name)}{suggestion}. headscope --help lists all")
        return command


class ProbeCommand(TyperCommand):
    """The command of a probe. Its flags are read only when needed, so that listing commands is fast."""

    def __init__(self, probe: Declaration) -> None:
        super().__init__(probe.command_name, help=probe.summary, rich_markup_mode=None)
        self.probe = probe

    def with_flags(self) -> "Command":
        """The same command with all its flags."""
        from headscope.cli.probe_commands import build_command

        return build_command(self.probe)

    def make_context(
        self, info_name: str | None, args: list[str], parent: "Context | None" = None, **extra: Any
    ) -> "Context":
        user_input.check_arguments(args)
        return self.with_flags().make_context(info_name, args, parent, **extra)

"""The ``conserve`` command, which loads a subcommand when it is called."""

import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from conserve.addons import ADDONS, LAB, missing, offered
from conserve.versions import build, installed, other_package
from conserve_cli.output import refuse
from conserve_cli.surroundings import adapt

# Each command's module, whose `cli` it is, and its line in `conserve --help`, which so loads none.
# Add-ons give more of them by entry points of the group `conserve.commands`.
_RUNNING = "conserve_cli.running"
COMMANDS = {
    "serve": (
        "conserve_cli.serve",
        "Start the application, say when it is ready, and stay until Ctrl-C.",
    ),
    "top": (_RUNNING, "Watch a running application's engines, what waits, and its times."),
    "ps": (_RUNNING, "List a running application's conversations."),
    "cache": (_RUNNING, "Say why prompt tokens were computed again, and what to do."),
    "end": (_RUNNING, "End a conversation of a running application."),
    "drain": (_RUNNING, "Move an engine's conversations to others, and give it nothing new."),
    "doctor": (
        "conserve_cli.doctor.command",
        "Say what is wrong with this machine, or with a cluster, and what to do about it.",
    ),
    "keys": ("conserve_cli.keys", "API keys, their tenants, and tenants' limits."),
    "adapters": ("conserve_cli.adapters", "LoRA adapters that an application takes up, in place."),
}


# All commands in the order of the help, and those that an add-on has.
ORDER = ("serve", "demo", "top", "ps", "cache", "record", "end", "drain", "bench", "doctor",
         "profile", "plan", "simulate", "keys", "adapters")  # fmt: skip
_OF_LAB = ("demo", "record", "bench", "profile", "plan", "simulate")


def commands() -> dict[str, tuple[str, str]]:
    """Return the commands of the core and of the add-ons that are installed, in order."""
    found = dict(COMMANDS)
    for of_addon in offered("conserve.commands").values():
        found |= of_addon
    # Others' commands come last.
    places = {name: place for place, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(ORDER))))


class LazyGroup(TyperGroup):
    """A group that knows its commands' names and help lines, and imports only the one called.

    So `conserve serve` need not wait for what measures and draws.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._found = commands()
        for name, (_, line) in self._found.items():
            self.add_command(TyperCommand(name, help=line))

    # Typer does not export Click's types.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the called command instead of its stand-in for the help."""
        if args[0] in _OF_LAB and args[0] not in self._found:
            ctx.fail(missing(args[0], LAB))
        # It takes 0.3 s: what looks at a running application does without.
        if args[0] in ("serve", "demo", "doctor") and (other := other_package()):
            refuse(other)
        name, stand_in, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, stand_in, rest
        module, _ = self._found[name]
        try:
            command = get_command(import_module(module).cli)
        except ModuleNotFoundError as error:
            # An add-on's command may need another add-on. An error within one is not hidden.
            needed = (error.name or "").partition(".")[0]
            if needed not in ADDONS or find_spec(needed) is not None:
                raise
            ctx.fail(missing(name, needed))
        # A module may have several of these commands.
        return name, getattr(command, "commands", {}).get(name, command), rest


cli = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _say_versions(asked: bool) -> None:
    if asked:
        conserve, *others = installed().items()
        for name, version in (conserve, *zip(("commit", "build"), build(), strict=True), *others):
            typer.echo(f"{name} {version or '(not installed)'}")
        raise typer.Exit


# Typer makes a group only of an application with commands or a callback.
@cli.callback()
def conserve(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_versions,
            is_eager=True,
            help="Say which version this is, and of what it runs on.",
        ),
    ] = False,
) -> None:
    """ConServe: serve multi-turn agents, scheduled by the conversation."""


def main() -> None:
    if os.getpid() == 1:
        # In a container. The kernel drops signals that process 1 has no handler for.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    adapt()
    cli()


if __name__ == "__main__":
    main()

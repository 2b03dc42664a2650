"""Settings as `conserve serve`, `demo` and `doctor` take them: ``name=value`` arguments."""

from typing import Annotated

import typer
from rich.markup import escape

from conserve.console import new_console
from conserve.settings import Settings, SettingsError, load

console = new_console()

SettingArguments = Annotated[
    list[str] | None,
    typer.Argument(help="Settings, as for `serve run conserve.app`: decoders=3 model=..."),
]


def settings_from(arguments: list[str] | None) -> Settings:
    """The settings that these arguments give.

    Raises:
        typer.Exit: one is wrong, which is said; the exit status is 2.
    """
    pairs = [argument.partition("=") for argument in arguments or []]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        console.print(f"[red]{bad[0]!r} is not a setting; write name=value.[/red]")
        raise typer.Exit(2)
    try:
        return load({name: value for name, _, value in pairs})
    except SettingsError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(2) from None

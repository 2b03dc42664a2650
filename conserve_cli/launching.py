"""Starting the application for a command, and stopping it with the command."""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from conserve.console import new_console
from conserve.launch import Launch, LaunchError, require_free
from conserve.settings import RoleSettings, Settings
from conserve_cli.gpu_plan import looked_at, on_cpus, show

console = new_console()

LogFile = Annotated[Path | None, typer.Option("--log", help="Where the application's log goes.")]


@contextlib.contextmanager
def launched(
    settings: Settings, arguments: list[str], log: Path | None
) -> Iterator[tuple[Launch, str]]:
    """Have the application serve for the time of a ``with`` block; yields it and its URL.

    Args:
        settings: what the arguments come to.
        arguments: what ``serve run conserve.app`` is given.
        log: where the application's log goes; None: a file among the temporary ones.

    Raises:
        typer.Exit: it did not come up (status 1), was interrupted (status 130), or has no place on
            these GPUs (status 2); each is said.
    """
    settings = _laid_out(settings)
    path = log or Path(tempfile.gettempdir()) / f"conserve-{os.getpid()}.log"
    url = f"http://{_reachable(settings.host)}:{settings.port}"
    started_s = time.monotonic()
    # A plain `kill`, or a closed terminal, ends it as Ctrl-C does, with all that it started.
    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        require_free(url)
        with Launch(arguments, path) as application:
            try:
                phases = _wait_until_serving(application, settings, url)
                parts = ", ".join(f"{name} {took_s:.1f}" for name, took_s in phases.items())
                console.print(
                    f"Serving after {time.monotonic() - started_s:.1f} s: {parts} (log: {path}).",
                    highlight=False,
                )
                yield application, url
            except KeyboardInterrupt:
                console.print("Stopping.")
                raise typer.Exit(130) from None
    except LaunchError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _laid_out(settings: Settings) -> Settings:
    if os.environ.get("RAY_ADDRESS"):
        # Nodes may join that cluster, so the application alone can say. If it chooses how many
        # decoders there are, one is enough to serve.
        if "decoders" in settings.model_fields_set or settings.device == "cpu":
            return settings
        return settings.model_copy(update={"decoders": RoleSettings(replicas=1)})
    found = looked_at(settings)
    if found is None:
        return on_cpus(settings)[0]
    show(*found)
    return found[0]


def _wait_until_serving(application: Launch, settings: Settings, url: str) -> dict[str, float]:
    last = ""
    with console.status("starting") as status:

        def on_progress(text: str) -> None:
            nonlocal last
            status.update(text)
            if text != last and not console.is_terminal:
                console.print(f"  {text}")
            last = text

        return application.wait_until_serving(
            url,
            settings.prefiller_replicas,
            settings.decoders.replicas,
            timeout_s=1800,
            on_progress=on_progress,
        )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host

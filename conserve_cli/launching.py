"""Starts the application with a command's settings, and stops it with the command."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from conserve.launch import Launch, LaunchError, require_free
from conserve.settings import RoleSettings, Settings, SettingsError, load
from conserve_cli.gpu_plan import looked_at, on_cpus, show
from conserve_cli.output import console, ended_by_signals, refuse

LogFile = Annotated[Path | None, typer.Option("--log", help="Where the application's log goes.")]
SettingArguments = Annotated[
    list[str] | None,
    typer.Argument(help="Settings, as for `serve run conserve.app`: decoders=3 model=..."),
]


def settings_from(arguments: list[str] | None) -> Settings:
    """Return the settings that these arguments give, or end the command with status 2."""
    pairs = [argument.partition("=") for argument in arguments or []]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        refuse(f"{bad[0]!r} is not a setting; write name=value.")
    try:
        return load({name: value for name, _, value in pairs})
    except SettingsError as error:
        refuse(str(error))


@contextlib.contextmanager
def launched(
    settings: Settings, arguments: list[str], log: Path | None
) -> Iterator[tuple[Launch, str]]:
    """Run the application during a ``with`` block; yield it and its URL.

    Ends the command with status 1 if it does not come up, 2 if it does not fit on these GPUs, and
    130
    if it is interrupted.

    Args:
        settings: those that the arguments give.
        arguments: for ``serve run conserve.app``.
        log: the application's log; None: a temporary file.
    """
    _require_certificate(settings)
    settings = _laid_out(settings)
    path = log or Path(tempfile.gettempdir()) / f"conserve-{os.getpid()}.log"
    url = f"{settings.scheme}://{_reachable(settings.host)}:{settings.port}"
    started_s = time.monotonic()
    try:
        require_free(url)
        with ended_by_signals(), Launch(arguments, path) as application:
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
        refuse(str(error), 1)


def _require_certificate(settings: Settings) -> None:
    if os.environ.get("RAY_ADDRESS"):
        # It is on the head's disk.
        return
    from deployments.router.certificate import require_certificate

    try:
        require_certificate(settings)
    except SettingsError as error:
        refuse(str(error))


def _laid_out(settings: Settings) -> Settings:
    if os.environ.get("RAY_ADDRESS"):
        # Nodes may join that cluster, so only the application can tell. If it chooses the number of
        # decoders, one is enough to serve.
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
            encoders=settings.encoders.replicas,
        )


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host

"""Starts the application with a command's settings, and stops it with the command."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psutil
import typer
from rich.markup import escape

from conserve.launch import LAUNCHER, Launch, LaunchError, ended
from conserve.settings import RoleSettings, Settings, SettingsError, load
from conserve_cli import surroundings
from conserve_cli.cluster import is_alone
from conserve_cli.gpu_plan import examined, require_arguments, show
from conserve_cli.output import console, ended_by_signals, refuse
from conserve_cli.surroundings import forget_proxies, own_folder
from hetero.gpu_layout import is_given
from hetero.gpu_plan import GpuPlan

LogFile = Annotated[Path | None, typer.Option("--log", help="Where the application's log goes.")]
# For engines to leave and Ray to end, after the last turn.
_ENDS_WITHIN_S = 60.0
SettingArguments = Annotated[
    list[str] | None,
    typer.Argument(help="Settings, as for `serve run conserve.app`: decoders=3 model=..."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="File of settings, YAML or JSON (docs/reference/settings.md); arguments override it.",
    ),
]


def given(arguments: list[str] | None, config: Path | None) -> list[str]:
    """Return all arguments for ``serve run conserve.app``: those of a command, and its file."""
    # The application may have another working directory.
    file = [] if config is None else [f"config={config.absolute()}"]
    return [*file, *(arguments or [])]


def settings_from(arguments: list[str]) -> Settings:
    """Return the settings that these arguments give, or end the command with status 2."""
    pairs = [argument.partition("=") for argument in arguments]
    for given_as, (name, equals, _) in zip(arguments, pairs, strict=True):
        if not (name and equals):
            refuse(f"{given_as!r} is not a setting; write name=value.")
    try:
        return load({name: value for name, _, value in pairs})
    except SettingsError as error:
        refuse(str(error))


def laid_out(settings: Settings) -> Settings:
    """Return the settings with the engines that a start waits for, once all checks are passed.

    If one fails, this ends the command with status 2.
    """
    notes = list(surroundings.notes)
    if left := left_behind():
        pids = " ".join(map(str, left))
        notes.append(f"An earlier run left {', '.join(left.values())}: end them by kill -9 {pids}")
    for note in notes:
        console.print(f"[yellow]{escape(note)}.[/yellow]", highlight=False)
    if not is_alone():
        # Nodes may join, so only the application can tell: where it chooses, one engine is enough.
        require_arguments(settings)
        if settings.device == "cpu":
            return settings
        return settings.with_each(settings.for_each(_fewest))
    settled, plan = examined(settings, planning=False)
    if isinstance(plan, GpuPlan):
        show(settled, plan)
    elif plan is not None:
        console.print(f"dtype: {plan.dtype}.", highlight=False, markup=False)
    return settled


def _fewest(settings: Settings) -> Settings:
    fewest = {"decoders": 1} | ({"prefillers": 0} if settings.prefillers_host else {})
    unsaid = [role for role in fewest if not is_given(settings, role)]
    chosen = {role: RoleSettings(replicas=fewest[role]) for role in unsaid}
    return settings.model_copy(update=chosen)


def left_behind() -> dict[int, str]:
    """Return the names of processes of earlier launches, by pid, whose launcher has ended."""
    found: dict[int, str] = {}
    here = os.stat("/proc/self/ns/pid")
    # `process_iter` may return an earlier process whose pid has been given to another one.
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            launcher = int(process.environ().get(LAUNCHER) or os.getpid())
            there = os.stat(f"/proc/{process.pid}/ns/pid")
            if os.path.samestat(here, there) and not psutil.pid_exists(launcher):
                # Ray's workers and engines have titles in the place of their environment.
                below = process.children(recursive=True)
                found |= {one.pid: one.name() for one in (process, *below)}
    return found


@contextlib.contextmanager
def launched(
    settings: Settings, arguments: list[str], log: Path | None
) -> Iterator[tuple[Launch, str]]:
    """Run the application during a ``with`` block; yield it and its URL.

    Ends the command with status 1 if it does not come up, and 130 if it is interrupted.

    Args:
        settings: those that the arguments give, from `laid_out`.
        arguments: for ``serve run conserve.app``.
        log: the application's log; None: a temporary file, of which the last few are kept.
    """
    # As ``serve run conserve.app``, but it can finish what runs.
    command = [sys.executable, "-m", "conserve_cli.run", *arguments]
    try:
        path = log or _new_log()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        refuse(f"the application's log cannot be written: {error}; name another with --log FILE")
    url = f"{settings.scheme}://{_reachable(settings.host)}:{settings.port}"
    started_s = time.monotonic()
    try:
        with ended_by_signals(), Launch(arguments, path, command=command) as application:
            forget_proxies()
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


def _new_log() -> Path:
    folder = own_folder()
    for old in ended(folder.glob("serve-*.log")):
        old.unlink(missing_ok=True)
        old.with_name(f"{old.name}.1").unlink(missing_ok=True)
    return folder / f"serve-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"


class _Terminated(Exception):
    """SIGTERM has come."""


def wait_or_drain(application: Launch, drain_s: float) -> int:
    """Return the status with which an application ends: 0 where it finishes its turns at SIGTERM.

    Another signal, or Ctrl-C, raises KeyboardInterrupt, and so ends it at once.

    Args:
        drain_s: how long turns may run on.
    """

    def terminate(number: int, frame: Any) -> NoReturn:
        # The one before raises KeyboardInterrupt.
        signal.signal(signal.SIGTERM, before)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return application.wait()
    except _Terminated:
        console.print(
            f"Finishing the turns that run, for {drain_s:g} s at most. Another signal ends it now."
        )
        try:
            if not application.drain(drain_s + _ENDS_WITHIN_S):
                console.print("Some turns did not finish in time.")
        except KeyboardInterrupt:
            application.stop(grace_s=0)
            raise
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_serving(application: Launch, settings: Settings, url: str) -> dict[str, float]:
    last = ""
    with console.status("starting") as status:

        def on_progress(text: str) -> None:
            nonlocal last
            status.update(text)
            if text != last and not console.is_terminal:
                console.print(f"  {text}")
            last = text

        each = settings.each.values()
        return application.wait_until_serving(
            url,
            sum(own.prefiller_replicas for own in each),
            sum(own.decoders.replicas for own in each),
            timeout_s=1800,
            on_progress=on_progress,
            encoders=sum(own.encoders.replicas for own in each),
        )


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host

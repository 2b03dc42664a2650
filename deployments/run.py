"""Runs the application until a signal, as `conserve serve` does: ``python -m deployments.run``.

It is ``serve run conserve.app``, but for SIGTERM: then running turns are finished first.
"""

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ray import serve

from deployments.app import app

NAME = "default"
_LOOK_S = 0.5


class _Terminated(Exception):
    """SIGTERM has come."""


def main(arguments: Sequence[str]) -> None:
    """Serve with these settings, each as ``name=value``."""
    signal.signal(signal.SIGTERM, _terminate)
    given = {name: value for name, _, value in (one.partition("=") for one in arguments)}
    try:
        serve.run(app(given), name=NAME, route_prefix="/")
        while True:
            time.sleep(_LOOK_S)
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _delete()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()


def _delete() -> None:
    """Return when each replica has finished what it runs, or was killed by Serve."""
    serve.delete(NAME, _blocking=False)
    try:
        while NAME in serve.status().applications:
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass


def _terminate(number: int, frame: Any) -> NoReturn:
    # Ray's handler of fatal signals comes first, and has set an alarm that aborts the process.
    signal.alarm(0)
    raise _Terminated


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs the application until a signal, as `conserve serve` does: ``python -m conserve_cli.run``.

It is ``serve run conserve.app``, but for SIGTERM: then running turns are finished first.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ray import serve

from conserve.launch import end_with_launcher
from deployments.app import app

NAME = "default"
_LOOK_S = 0.5
_LEAVES_S = 20.0


class _Terminated(Exception):
    """SIGTERM has come."""


def main(arguments: Sequence[str]) -> None:
    """Serve with these settings, each as ``name=value``."""
    # A cluster that it joins keeps what Serve runs, unless it is told.
    end_with_launcher(grace_s=_LEAVES_S if "RAY_ADDRESS" in os.environ else 0.0)
    given = {name: value for name, _, value in (one.partition("=") for one in arguments)}
    application = app(given)
    # Over the handlers of Ray, which has started: they exit, and abort after three seconds.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        serve.run(application, name=NAME, route_prefix="/")
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
    raise _Terminated


if __name__ == "__main__":
    main(sys.argv[1:])

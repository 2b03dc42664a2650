"""Has a worker of Ray's hear of the first SIGTERM, which would end it at once.

Ray 2.60 handles the signal itself. An actor cannot replace the handler, as its code never runs in
the main thread.
"""

from collections.abc import Callable
from typing import Any

from deployments.upstream.patch import Patch, of


def at_sigterm(told: Callable[[], Any]) -> None:
    """Have this worker call ``told`` at the first SIGTERM; a second one ends it."""
    from ray._private import worker

    exits = worker.raise_sys_exit_with_custom_error_message

    def first(*given: Any, **named: Any) -> None:
        worker.raise_sys_exit_with_custom_error_message = exits
        told()

    worker.raise_sys_exit_with_custom_error_message = first


PATCH = Patch(
    name="sigterm_exits",
    seams=of("ray._private.worker", "raise_sys_exit_with_custom_error_message Worker.main_loop"),
    why="a signal to a router's process cuts its clients' streams",
    upstream="not reported: let actors handle SIGTERM by themselves (near: ray-project/ray#15282)",
    process="router",
)

"""Lets the process that has an engine's client call the scheduler in the engine's core.

vLLM's utility calls take the name of an attribute of ``EngineCore``, and run it in the core's own
thread between two steps: after half a millisecond in an idle engine, after a step in a busy one. No
attribute passes a call on to a scheduler of one's own (``scheduler_cls``), so this adds one.
"""

from collections.abc import Callable
from typing import Any

from deployments.upstream.patch import Patch


def offer(name: str, obey: Callable[[Any, Any], Any]) -> None:
    """Have ``obey(scheduler, asked)`` answer utility calls of this name in this process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, lambda core, asked: obey(core.scheduler, asked))


PATCH = Patch(
    name="unreachable_scheduler",
    seams=(
        "vllm.v1.engine.core:EngineCoreProc._handle_client_request",
        "vllm.v1.engine.core:EngineCore.scheduler",
        "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async",
    ),
    why="the table cannot have an engine's scheduler keep or release histories, nor see its load",
    upstream="not reported: let scheduler_cls expose utility methods, as for workers' extensions",
    process="engine",
    ends="AsyncLLM has a call for schedulers",
    without="engine_scheduler=vllm",
)

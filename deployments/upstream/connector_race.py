"""Lets replicas of engines that start together register the same connectors.

Ray Serve LLM registers four KV connectors in the cluster while it is imported, each after a look
whether it is there. If another replica registers one between the look and the call, Ray takes that
for an error, and the replica fails to load.
"""

import functools
from typing import Any

from deployments.upstream.patch import Patch, of


def keep_what_is_registered() -> None:
    """Have this process leave what another one has registered. Call it before Ray's import."""
    from ray.llm._internal.serve.utils.registry import ComponentRegistry

    register = ComponentRegistry.register

    @functools.wraps(register)
    def registered(registry: Any, name: str, value: Any) -> None:
        try:
            register(registry, name, value)
        except ValueError:
            if not registry.contains(name):
                raise

    ComponentRegistry.register = registered


PATCH = Patch(
    name="connector_race",
    seams=of("ray.llm._internal.serve.utils.registry:ComponentRegistry", "register contains"),
    why="of replicas that start together, one fails to load and starts again",
    upstream="not reported: _initialize_registry (kv_transfer/factory.py) looks, then registers",
    process="server",
)

"""Actors that an application has one of: whoever asks first makes it, the others find it."""

import hashlib
from collections.abc import Mapping
from typing import Any

import ray

from conserve.settings import Settings
from deployments.messages import HEAD_NODE


def actor_name(application: str, part: str, settings: Settings) -> str:
    """Return Ray's name for the actor of an application's part.

    Other settings, another actor: one that lives on would keep those it has.
    """
    digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:8]
    return f"conserve:{application}:{part}:{digest}"


def find_or_make(
    kind: type, name: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """The actor of this name, on the head node, where the routers are.

    It outlives the replica that happened to start it, is restarted however often it dies, and has
    to end itself when nobody is left who calls it.

    Args:
        kind: its class.
        environment: variables of its process.
    """
    return (
        ray.remote(kind)
        .options(
            name=name,
            namespace="serve",
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=100_000,
            num_cpus=0,
            # Other nodes may come and go.
            resources={HEAD_NODE: 0.001},
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
        .remote(*arguments)
    )

"""Starts or finds actors of which an application has only one."""

import hashlib
from collections.abc import Mapping
from typing import Any

import ray

from conserve.settings import Settings
from deployments.messages import HEAD_NODE


def actor_name(application: str, part: str, settings: Settings) -> str:
    """Return Ray's name for an actor; with other settings it is another actor."""
    digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:8]
    return f"conserve:{application}:{part}:{digest}"


def find_or_make(
    kind: type, name: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Return the actor of this name on the head node, with ``environment`` variables.

    It outlives the replica that started it, Ray restarts it, and it has to end itself when it has
    no
    callers left.
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
            # Only the head node is sure to stay.
            resources={HEAD_NODE: 0.001},
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
        .remote(*arguments)
    )

"""Calls a function when a worker has loaded its model, before it measures what is left for KV.

vLLM calls connectors then, but gives them no model. It can only keep layers of language models in
host memory, not those of vision towers.
"""

import functools
from collections.abc import Callable
from typing import Any

from deployments.upstream.patch import Patch, of


def call_when_loaded(call: Callable[[Any], object]) -> None:
    """Have this process's worker pass itself to a function once it has loaded the model."""
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model

    @functools.wraps(load)
    def load_model(worker: Any, **options: Any) -> None:
        load(worker, **options)
        call(worker)

    Worker.load_model = load_model


PATCH = Patch(
    name="unhooked_loading",
    package="vllm",
    seams=of("vllm.v1.worker.gpu_worker:Worker", "load_model get_model"),
    why="media.tower_layers could not give a vision tower's memory to KV",
    upstream="not reported: pass the loaded model to ECConnectorBase.start_worker_services",
    process="engine",
    ends="start_worker_services of connectors takes the model, or vLLM offloads towers",
    used_by="deployments/engine/vision/connector.py",
    without="media.tower_layers=null",
)

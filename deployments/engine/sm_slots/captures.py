"""CUDA graphs on the SMs of the stream that is current, in the place of any stream's.

The stream on which a graph is captured decides on which SMs it runs, wherever it is launched.
vLLM 0.29 captures on a stream that it makes for that, which keeps to no SMs.
"""

import dataclasses
import inspect
from typing import Any


def capture_where_it_runs() -> None:
    """Have this process capture graphs on its current stream from now on.

    May be called repeatedly. ``graph_capture`` of vLLM 0.29's ``distributed/parallel_state.py``
    makes a context with a new stream, unless it is given one; so it gets another maker of contexts.

    Raises:
        RuntimeError: this vLLM captures in another way.
    """
    from vllm.distributed import parallel_state
    from vllm.utils.torch_utils import current_stream

    made: Any = parallel_state.GraphCaptureContext
    if hasattr(made, "__wrapped__"):
        return
    parameters = list(inspect.signature(parallel_state.graph_capture).parameters)
    fields = [field.name for field in dataclasses.fields(made)]
    if parameters != ["device", "graph_capture_context"] or fields != ["stream"]:
        raise RuntimeError(
            "sm_slots is made for vLLM 0.29, and this one captures CUDA graphs in another way: "
            "deployments/engine/sm_slots/captures.py has to be adapted; leave sm_slots out"
        )

    def here(stream: Any) -> Any:
        return made(current_stream())

    here.__wrapped__ = made  # type: ignore[attr-defined]
    parallel_state.GraphCaptureContext = here

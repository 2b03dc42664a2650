"""Has vLLM capture CUDA graphs on the current stream.

``graph_capture`` of vLLM 0.32 makes a context with a new stream, which keeps to no SMs, and the
stream on which a graph is captured decides where it runs.
"""

from typing import Any

from deployments.upstream.patch import Patch, of


def capture_where_it_runs() -> None:
    """Change this process, which may be changed already."""
    from vllm.distributed import parallel_state
    from vllm.utils.torch_utils import current_stream

    made: Any = parallel_state.GraphCaptureContext
    if hasattr(made, "__wrapped__"):
        return

    def here(stream: Any) -> Any:
        return made(current_stream())

    here.__wrapped__ = made  # type: ignore[attr-defined]
    parallel_state.GraphCaptureContext = here


PATCH = Patch(
    name="captured_elsewhere",
    seams=(
        *of("vllm.distributed.parallel_state", "graph_capture GraphCaptureContext"),
        "vllm.utils.torch_utils:current_stream",
    ),
    why="graphs of an engine on SM slots run on all SMs of its GPU",
    upstream="not reported: graph_capture could take a stream again, as until vLLM 0.29",
    process="engine",
    device="cuda",
)

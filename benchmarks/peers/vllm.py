"""vLLM's own server, bare: one engine, no router, with as many cores as all engines of others.

Settings: vLLM's defaults with the shared engine arguments (prefix caching and chunked prefill
are on). On CPUs it has the threads and the KV space of N engines. On GPUs it is one engine on
one GPU, unless the engine arguments say otherwise: ``tensor_parallel_size`` or
``data_parallel_size``.
"""

from benchmarks.peers.options import Options, engine_arguments, engine_environment
from benchmarks.peers.plan import Part, PeerPlan
from conserve.engines import server_command

NAME = "vllm"


def plan(options: Options) -> PeerPlan:
    """One engine."""
    arguments = engine_arguments(options)
    environment = engine_environment(options)
    if not options.gpu:
        threads = str(options.engines)
        environment |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": threads}
    command = server_command(options.model_source, options.served_model, options.port, arguments)
    return PeerPlan(
        parts=(Part(NAME, tuple(command), environment),),
        engine_arguments={"engine": arguments},
        prefillers=0,
        decoders=1,
        # With one engine there is nothing to choose.
        session_header=None,
    )

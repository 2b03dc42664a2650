"""Ray Serve LLM's own application, with session affinity: each replica does everything.

Settings: ``build_openai_app`` with N replicas, direct streaming, and `ConsistentHashRouter` on
the conversation's header; see `benchmarks.peers.ray_llm` for where they are documented.
"""

from benchmarks.peers.options import Options, engine_arguments
from benchmarks.peers.plan import PeerPlan
from benchmarks.peers.ray_llm import llm_config, serving_part

NAME = "ray_serve_llm"


def plan(options: Options) -> PeerPlan:
    """N replicas."""
    engine = engine_arguments(options)
    arguments = {"llm_configs": [llm_config(options, options.engines, engine)]}
    return PeerPlan(
        parts=(serving_part(NAME, options, "build_openai_app", arguments),),
        engine_arguments={"replica": engine},
        prefillers=0,
        decoders=options.engines,
    )

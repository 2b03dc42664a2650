"""ConServe that prefills wherever all conversations together wait least for it.

Settings: ``placement=elastic`` with ``prefillers=1 decoders=N-1``. Everything else, the engines'
chunk too, is what ``conserve serve`` starts with, as `ray_serve_llm` and `vllm` have their own
defaults.
"""

from benchmarks.peers.application import application
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan, require_two

NAME = "elastic"


def plan(options: Options) -> PeerPlan:
    """One prefiller and N - 1 decoders, any of which may host and prefill."""
    require_two(options.engines, NAME)
    return application(
        NAME, options, f"placement={NAME}", prefillers=1, decoders=options.engines - 1
    )

"""ConServe that prefills wherever all conversations together wait least for it.

Settings: ``placement=elastic`` with ``prefillers=1 decoders=N-1``. Every engine may come to prefill
beside its decodes, so each has the collocated baseline's chunk (`collocated`). Everything else is
what ``conserve serve`` starts with.
"""

from benchmarks.peers.application import application
from benchmarks.peers.collocated import chunk_tokens
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan, require_two

NAME = "elastic"


def plan(options: Options) -> PeerPlan:
    """One prefiller and N - 1 decoders, any of which may host and prefill."""
    require_two(options.engines, NAME)
    return application(
        NAME,
        options,
        f"placement={NAME}",
        prefillers=1,
        decoders=options.engines - 1,
        engine={"max_num_batched_tokens": chunk_tokens(options)},
    )

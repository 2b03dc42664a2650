"""ConServe as in the paper: one prefiller, and decoders that keep their conversations.

Settings: ``placement=conversation`` with ``prefillers=1 decoders=N-1``, as the paper has it on four
GPUs (section 5.1). Everything else is what ``conserve serve`` starts with; that itself places as
`elastic`.
"""

from benchmarks.peers.application import application
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan, require_two

NAME = "conserve"


def plan(options: Options) -> PeerPlan:
    """One prefiller and N - 1 decoders."""
    require_two(options.engines, NAME)
    return application(
        NAME, options, "placement=conversation", prefillers=1, decoders=options.engines - 1
    )

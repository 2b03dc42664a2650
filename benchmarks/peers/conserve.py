"""ConServe itself: one prefiller, and decoders that keep their conversations.

Settings: ``placement=conversation``, its default, with ``prefillers=1 decoders=N-1``, as the
paper has it on four GPUs (section 5.1). Everything else is what ``conserve serve`` starts with.
"""

from benchmarks.peers.application import application
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan, require_two

NAME = "conserve"


def plan(options: Options) -> PeerPlan:
    """One prefiller and N - 1 decoders."""
    require_two(options.engines, NAME)
    return application(NAME, options, prefillers=1, decoders=options.engines - 1)

"""Every turn's prefill on the prefiller: the paper's full disaggregation (section 5.1).

Settings: ConServe's own application with ``placement=full_disaggregation prefillers=1
decoders=N-1``: the same engines, connector and router as ``conserve``, so that the placement is
all that differs.
"""

from benchmarks.peers.application import application
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan, require_two

NAME = "full_disaggregation"


def plan(options: Options) -> PeerPlan:
    """One prefiller and N - 1 decoders."""
    require_two(options.engines, NAME)
    return application(
        NAME, options, f"placement={NAME}", prefillers=1, decoders=options.engines - 1
    )

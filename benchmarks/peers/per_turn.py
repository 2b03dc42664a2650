"""One decision a turn, some of them wrong: AMPD, as the paper compares with it (section 5.1).

Settings: ConServe's own application with ``placement=per_turn:R prefillers=1 decoders=N-1``. R is
0.1 unless the options say otherwise, as in all of the paper's results but its figure 12. KV really
moves both ways here; the paper stalls the request for as long instead.
"""

from benchmarks.peers.application import application
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan, require_two

NAME = "per_turn"


def plan(options: Options) -> PeerPlan:
    """One prefiller and N - 1 decoders."""
    require_two(options.engines, NAME)
    return application(
        NAME,
        options,
        f"placement={NAME}:{options.wrong_decision_rate}",
        prefillers=1,
        decoders=options.engines - 1,
    )

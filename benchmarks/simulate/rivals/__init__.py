"""Other systems, by the rules that their papers and code state, on the same simulated engines.

All of them use engines that prefill and decode. One file has one system's rules: `Rival` says what
a system decides, `benchmarks.simulate.rivals.fleet` does it.
"""

from collections.abc import Mapping

from benchmarks.simulate.rivals.affinity import Affinity
from benchmarks.simulate.rivals.attained import Attained
from benchmarks.simulate.rivals.least_loaded import LeastLoaded
from benchmarks.simulate.rivals.names import RivalName
from benchmarks.simulate.rivals.rival import Engine, Program, Rival
from benchmarks.simulate.rivals.thunderagent import ThunderAgent
from benchmarks.simulate.rivals.ttl import Ttl

__all__ = ["Engine", "Program", "Rival", "RivalName", "make_rival"]


def make_rival(
    name: RivalName, engines: Mapping[str, Engine], *, ttl_s: float = 2.0, discounts: bool = True
) -> Rival:
    """A system's rules, for these engines.

    Args:
        ttl_s, discounts: `Ttl`'s and `ThunderAgent`'s.
    """
    match name:
        case "vllm":
            return LeastLoaded(engines)
        case "affinity":
            return Affinity(engines)
        case "ttl":
            return Ttl(engines, ttl_s)
        case "attained":
            return Attained(engines)
        case "thunderagent":
            return ThunderAgent(engines, discounts)

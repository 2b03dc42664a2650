"""Autellix: who has had the least goes first."""

from benchmarks.simulate.rivals.affinity import Affinity
from benchmarks.simulate.rivals.rival import Program

# Bounds of the queues, in seconds of service: each four times the one before.
_FIRST_S, _FACTOR, _QUEUES = 1.0, 4.0, 8


class Attained(Affinity):
    """Autellix (Luo et al., arXiv 2502.13965): program-level attained service (PLAS).

    Taken: a turn's priority is the time that engines have worked on the turns of its program that
    are over, in discrete queues with exponentially growing bounds, first come first served in each.

    Simplified: a turn keeps its queue until it ends, and one that runs is preempted only where KV
    runs out, the last in that order (as vLLM's priority scheduling does), where the paper's engine
    also demotes running turns and swaps their KV to host memory; and programs stay on the engine
    that they began on, where the paper sends short turns to the least loaded one.
    """

    def priority(self, program: Program) -> float:
        """The queue, from 0."""
        bound_s, queue = _FIRST_S, 0
        while program.attained_s >= bound_s and queue < _QUEUES - 1:
            bound_s *= _FACTOR
            queue += 1
        return float(queue)

"""Continuum: KV of programs whose tools run is kept for a while."""

from collections.abc import Mapping

from benchmarks.simulate.rivals.affinity import Affinity
from benchmarks.simulate.rivals.rival import Engine, Program


class Ttl(Affinity):
    """Continuum (Li et al., arXiv 2511.02230), with a fixed time to live as in its released code.

    Taken: after a turn its program's KV stays for ``ttl_s``, whatever waits; it may be dropped
    before that if turns that run need a block and there is none else, or if nothing runs and
    nobody waiting fits. Turns wait in the order in which their programs came (program-level first
    come, first served).

    Simplified: the paper sets each tool's time to live from the times seen of that tool; the
    released code has 2 s for all, and does not keep KV for tools that take longer on average. Tools
    have no names here, so KV is kept at every turn's end. Several engines are used by affinity.
    """

    def __init__(self, engines: Mapping[str, Engine], ttl_s: float) -> None:
        super().__init__(engines)
        self._ttl_s = ttl_s

    def priority(self, program: Program) -> float:
        """Let whoever came first go first."""
        return program.arrived_s

    def keep_s(self, program: Program) -> float:
        """The same for all."""
        return self._ttl_s

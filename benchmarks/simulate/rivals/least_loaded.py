"""Stock vLLM engines behind a router that balances requests."""

from benchmarks.simulate.rivals.rival import Program, Rival


class LeastLoaded(Rival):
    """Each turn goes to the engine with the fewest; engines serve first come, first served.

    This is what vLLM's own load balancing between data-parallel engines does, by requests that wait
    and run. A turn that comes to another engine than the one before finds nothing cached there.
    """

    def route(self, program: Program, now_s: float) -> str | None:
        """The least loaded engine."""
        return self.least_loaded()

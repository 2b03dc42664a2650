"""Stock vLLM engines behind a router with session affinity."""

from benchmarks.simulate.rivals.rival import Program, Rival


class Affinity(Rival):
    """A program's first turn goes to the engine with the fewest turns, the others follow it.

    So do session-aware routers, as vLLM's production stack's and Ray Serve LLM's (ThunderAgent,
    section 3.2, describes them as the "KV-aware" baseline).
    """

    def route(self, program: Program, now_s: float) -> str | None:
        """The engine that the program began on."""
        return program.engine_id or self.least_loaded()

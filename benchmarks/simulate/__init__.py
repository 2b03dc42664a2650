"""What a cluster would do: a discrete-event simulation with the live system's own policies."""

from benchmarks.simulate.cluster import Cluster, SimulationError, System
from benchmarks.simulate.costs import Costs

__all__ = ["Cluster", "Costs", "SimulationError", "System"]

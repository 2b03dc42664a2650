"""What a cluster would do: a discrete-event simulation with the live system's own policies."""

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.costs import Costs
from benchmarks.simulate.system import SimulationError, System

__all__ = ["Cluster", "Costs", "SimulationError", "System"]

"""Simulates a cluster by discrete events, with the live system's own policies."""

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.costs import Costs
from benchmarks.simulate.system import SimulationError, System

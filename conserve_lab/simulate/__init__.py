"""Simulates a cluster by discrete events, with the live system's own policies."""

from conserve_lab.simulate.cluster import Cluster
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.system import SimulationError, System

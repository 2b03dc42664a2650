"""Makes what `conserve bench` sends: conversations and their arrivals, on demand and repeatable.

A workload is iterated over for pairs of arrival (s) and script; each iteration starts anew.
"""

from benchmarks.workloads.agents import agents
from benchmarks.workloads.dialogues import dialogues
from benchmarks.workloads.plan import Arrivals, Pattern, Workload, WorkloadError
from benchmarks.workloads.recorded import recorded
from benchmarks.workloads.replay import Changes
from benchmarks.workloads.synthetic import PRESETS, Latency, Shape, Spread, synthetic

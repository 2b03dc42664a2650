"""Makes what `conserve bench` sends: conversations and their arrivals, on demand and repeatable.

A workload is iterated over for pairs of arrival (s) and script; each iteration starts anew.
"""

from conserve_lab.workloads.agents import agents
from conserve_lab.workloads.dialogues import dialogues
from conserve_lab.workloads.plan import Arrivals, Pattern, Workload, WorkloadError
from conserve_lab.workloads.recorded import recorded
from conserve_lab.workloads.replay import Changes
from conserve_lab.workloads.synthetic import PRESETS, Latency, Shape, Spread, synthetic

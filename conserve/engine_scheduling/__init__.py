"""Decides what runs next inside one engine and which KV it keeps between turns; see README.md."""

from conserve.engine_scheduling.chunks import ChunkController
from conserve.engine_scheduling.feedback import FeedbackQueue
from conserve.engine_scheduling.kinds import KINDS, Kind, WaitFor, kind_of
from conserve.engine_scheduling.lane import PrefillLane
from conserve.engine_scheduling.load import SchedulerLoad
from conserve.engine_scheduling.reserve import DecodeReserve
from conserve.engine_scheduling.retention import Pin, Retention
from conserve.engine_scheduling.step_cost import StepCost

__all__ = [
    "KINDS",
    "ChunkController",
    "DecodeReserve",
    "FeedbackQueue",
    "Kind",
    "Pin",
    "PrefillLane",
    "Retention",
    "SchedulerLoad",
    "StepCost",
    "WaitFor",
    "kind_of",
]

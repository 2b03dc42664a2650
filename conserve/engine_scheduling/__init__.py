"""Decides what runs next inside one engine and which KV it keeps between turns; see README.md."""

from conserve.engine_scheduling.calls import (
    KINDS,
    Kind,
    PrefillLane,
    SchedulerLoad,
    WaitFor,
    kind_of,
)
from conserve.engine_scheduling.chunks import ChunkController, StepCost
from conserve.engine_scheduling.feedback import FeedbackQueue
from conserve.engine_scheduling.reserve import DecodeReserve
from conserve.engine_scheduling.retention import Pin, Retention
from conserve.engine_scheduling.stages import DecodeShare, Stage, Stages

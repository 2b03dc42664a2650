"""Decides what runs next inside one engine and which KV it keeps between turns; see README.md."""

from conserve_inside.policy.background import Background
from conserve_inside.policy.calls import KINDS, Kind, PrefillLane, Route, kind_of
from conserve_inside.policy.chunks import ChunkController, StepCost
from conserve_inside.policy.feedback import FeedbackQueue
from conserve_inside.policy.reserve import DecodeReserve
from conserve_inside.policy.retention import Pin, Retention
from conserve_inside.policy.stages import DecodeShare, Stage, Stages

"""The load that an engine's scheduler reports with each beat."""

import msgspec

from conserve.engine_scheduling.kinds import Kind


class SchedulerLoad(msgspec.Struct, frozen=True):
    """A scheduler's calls and blocks now, and its counts since the engine's start.

    Attributes:
        waiting, running: calls on each level, from 0.
        cut: chunks that were made smaller, or put off, for decodes.
        parts: prompts that began without room for all of them.
        preempted: calls, by level.
        reclaimed_blocks: pinned ones that were given up before their time.
        lane_waiting: None, like all of the lane's, without a lane.
        lane_tokens: left to compute in the lane.
        lane_prefills: by outcome: done, or failed and computed inline.
        decode_sms: SMs that steps have, where the lane has the others; None if no border moves.
    """

    waiting: list[int]
    running: list[int]
    running_kinds: dict[Kind, int]
    begun: dict[Kind, int]
    cut: dict[Kind, int]
    parts: int
    preempted: list[int]
    reclaimed_blocks: int
    pinned_blocks: int
    free_blocks: int
    blocks: int
    tpot_s: float
    tpot_bound_s: float
    budget_tokens: int
    lane_waiting: int | None = None
    lane_running: int | None = None
    lane_tokens: int | None = None
    lane_prefills: dict[str, int] | None = None
    lane_computed_tokens: int | None = None
    decode_sms: int | None = None

"""The load that an engine's scheduler tells with each beat."""

import msgspec

from conserve.engine_scheduling.kinds import Kind


class SchedulerLoad(msgspec.Struct, frozen=True):
    """Tells what is with a scheduler now, and what it has done since its engine's start.

    Attributes:
        waiting, running: calls on each level, 0 first.
        running_kinds: those that run, by what they are.
        begun: calls that have begun, by what they were.
        cut: chunks that were made smaller, or put off, for those who decode.
        parts: prompts that began without room for all of them.
        preempted: calls, by level.
        reclaimed_blocks: given up between turns before their time.
        pinned_blocks: kept between turns now.
        free_blocks, blocks: of the engine's KV.
        tpot_s, tpot_bound_s: time per output token of late, and its bound.
        budget_tokens: what a step may prefill beside decodes.
        lane_waiting, lane_running: calls that wait for the prefill lane, and that are in it;
            None, as all of the lane's: there is none.
        lane_tokens: left to compute in the lane.
        lane_prefills: by what became of them: done, or failed and computed inline.
        lane_computed_tokens: in the lane.
        decode_sms: how many SMs steps have, where the lane has the engine's others; None: nothing
            moves a border between them.
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

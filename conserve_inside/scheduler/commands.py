"""Commands from the process that has the engine's client to the scheduler in the engine's core.

Each is a `Command`, which the scheduler obeys between two steps (`upstream.unreachable_scheduler`).
A command that fails raises at its caller, and the engine goes on.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from conserve.direct import Notice
from conserve.wire import history_key
from conserve_inside.border import HoldBorder
from conserve_inside.policy import KINDS
from conserve_inside.scheduler.histories import Histories
from deployments.event_loop import in_background
from deployments.messages import SchedulerLoad
from deployments.upstream import unreachable_scheduler
from deployments.upstream.patch import require

logger = logging.getLogger("ray.serve")

_UTILITY = "conserve_command"
# To release a history, all that the scheduler knows is searched. A thousand at a time would hold up
# a step; between two commands the engine goes on.
_AT_ONCE = 16


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Keep the blocks of idle histories, each for its seconds from now on, by key."""

    for_s: dict[str, float]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Evict histories' blocks before all others; see `Histories.release`."""

    keys: list[str]


class Observe(msgspec.Struct, frozen=True, tag=True):
    """Return a `SchedulerLoad`."""


Command = Pin | Release | Observe | HoldBorder


# --- in the engine's core -------------------------------------------------------------------------


def offer_commands() -> None:
    """Have this process's ``EngineCore`` obey commands."""
    require(unreachable_scheduler.PATCH)
    unreachable_scheduler.offer(
        _UTILITY, lambda scheduler, asked: obey(scheduler, msgspec.convert(asked, Command))
    )


def obey(scheduler: Any, command: Command) -> int | SchedulerLoad | list[int] | None:
    """Obey a command; returns how many blocks were pinned or released, the load, or sizes."""
    histories: Histories = scheduler.histories
    now_s: float = scheduler.clock()
    match command:
        case Pin(for_s):
            return sum(histories.pin(key, hold_s, now_s) for key, hold_s in for_s.items())
        case Release(keys):
            return sum(histories.release(key) for key in keys)
        case Observe():
            return _observed(scheduler, now_s)
        case HoldBorder(decode_sms, for_s):
            return None if scheduler.lane is None else scheduler.lane.hold(decode_sms, for_s)


def _observed(scheduler: Any, now_s: float) -> SchedulerLoad:
    running, counts = scheduler.running, scheduler.counts
    levels, pool = len(counts.preempted), scheduler.kv_cache_manager.block_pool
    waiting = [*scheduler.waiting._heap, *scheduler.kv_holding_waiting._heap]
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    for request in running:
        turn = scheduler.turns[request.request_id]
        kinds[turn.kind if request.is_prefill_chunk else "decode"] += 1
    return SchedulerLoad(
        waiting=_by_level([scheduler.level(one, now_s) for one in waiting], levels),
        running=_by_level([scheduler.level(one, now_s) for one in running], levels),
        running_kinds=kinds,
        begun=dict(counts.begun),
        cut=dict(counts.cut),
        parts=counts.parts,
        preempted=list(counts.preempted),
        reclaimed_blocks=scheduler.histories.reclaimed_blocks,
        pinned_blocks=scheduler.histories.kept_blocks,
        free_blocks=pool.get_num_free_blocks(),
        blocks=pool.num_gpu_blocks - 1,
        tpot_s=scheduler.chunks.tpot_s,
        tpot_bound_s=scheduler.chunks.late_s,
        budget_tokens=scheduler.chunks.allowed_tokens(),
        **({} if scheduler.lane is None else scheduler.lane.observed()),
    )


def _by_level(levels: list[int], number: int) -> list[int]:
    return [levels.count(level) for level in range(number)]


# --- in the replica -------------------------------------------------------------------------------


class SchedulerClient:
    """Calls the scheduler of an engine whose scheduler knows conversations.

    No method but `command` waits for the scheduler: an answer comes between two steps, and a step
    may take longer than the table waits for an engine's beat.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._load: SchedulerLoad | None = None
        self._asks = False

    def hear(self, notice: Notice) -> None:
        """Release the histories that a notice of the table says are paused, or have ended."""
        self.release((*notice.given_up, *notice.ended))

    def release(self, histories: Iterable[tuple[str, int]]) -> None:
        keys = [history_key(history_id, incarnation) for history_id, incarnation in histories]
        if keys:
            # Otherwise their blocks are evicted by themselves, later.
            in_background(self._in_parts("release", keys, Release))

    def hold(self, holds: Iterable[tuple[str, int, float]]) -> None:
        for_s = {history_key(one, incarnation): hold_s for one, incarnation, hold_s in holds}
        if for_s:
            # Otherwise the scheduler holds histories by its own averages.
            parts = self._in_parts("hold", [*for_s], lambda some: Pin({k: for_s[k] for k in some}))
            in_background(parts)

    def load(self) -> SchedulerLoad | None:
        """Return the scheduler's last answer, once, and ask for another one for the next time."""
        load, self._load = self._load, None
        if not self._asks:
            self._asks = True
            in_background(self._observe())
        return load

    async def command(self, command: Command) -> Any:
        return await self._client.engine_core.call_utility_async(_UTILITY, command)

    async def _observe(self) -> None:
        try:
            self._load = msgspec.convert(await self.command(Observe()), SchedulerLoad)
        except Exception as error:
            # Beats go on without it, and check by themselves whether the engine lives.
            logger.warning("the engine's scheduler does not tell its load: %s", error)
        finally:
            self._asks = False

    async def _in_parts(
        self, what: str, keys: list[str], command: Callable[[list[str]], Command]
    ) -> None:
        try:
            for at in range(0, len(keys), _AT_ONCE):
                await self.command(command(keys[at : at + _AT_ONCE]))
        except Exception as error:
            logger.warning(
                "the engine's scheduler did not %s %d histories: %s", what, len(keys), error
            )

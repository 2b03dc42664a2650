"""Knows of a request whose turn it is, and how far it has come."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from conserve.engine_scheduling import KINDS, Kind, WaitFor
from conserve.wire import TURN


@dataclass(slots=True)
class Turn:
    """One request. Times are of the scheduler's clock.

    Attributes:
        key: its history's; of a request that is nobody's turn, its own id.
        is_known: whether it is a history's turn, of which something is worth keeping.
        since_s: when it came, or was preempted: it waits since then.
        resume_s: in how many seconds after it its client expects the next turn.
        last: whether its client says that it is the last one.
        kind: what it was when it began to run.
        missing_tokens: what caches did not have of it when it came.
        charged_tokens: up to where in its sequence it has been charged.
        runs: whether it has begun to, and was not preempted since.
        waited_s: before it ran, all in all.
        waited_for_s: what for, as far as it was looked at.
    """

    key: str
    is_known: bool
    since_s: float
    resume_s: float | None = None
    last: bool = False
    kind: Kind = "cold"
    missing_tokens: int = 0
    charged_tokens: int = 0
    runs: bool = False
    waited_s: float = 0.0
    waited_for_s: dict[WaitFor, float] = field(default_factory=dict)

    def waits(self, what: WaitFor, for_s: float) -> None:
        """It has waited for something, for so long again."""
        self.waited_for_s[what] = self.waited_for_s.get(what, 0.0) + for_s

    @property
    def waited_for(self) -> WaitFor | None:
        """Return what it has waited for longest; None: it was not seen to wait."""
        return max(self.waited_for_s, key=lambda one: self.waited_for_s[one], default=None)


def turn_of(request: Any, now_s: float) -> Turn:
    """Read what a request says of itself (`conserve.wire.scheduled_turn`)."""
    said = (request.kv_transfer_params or {}).get(TURN)
    if not isinstance(said, dict):
        return Turn(request.request_id, False, now_s)
    return Turn(str(said["key"]), True, now_s, said["resume_s"], bool(said["last"]))


class Waits:
    """Looks at those who wait, each time the scheduler orders them, and notes what for.

    A queue moves from its head: what the first one of a step is refused for, those behind it wait
    for, too.

    Args:
        turns: by request.
    """

    def __init__(self, turns: dict[str, Turn]) -> None:
        self._turns = turns
        self._seen_s: float | None = None
        self._refused = False

    def new_step(self) -> None:
        """Nobody has been refused room yet."""
        self._refused = False

    def no_room(self) -> None:
        """There is not enough KV free for who is next."""
        self._refused = True

    def look(self, scheduler: Any, waiting: Iterable[Any], now_s: float) -> None:
        """A step has been scheduled, and these were left out."""
        waited_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        left: WaitFor = "step"
        if self._refused:
            left = "room"
        elif len(scheduler.running) >= scheduler.max_num_running_reqs:
            left = "place"
        for request in waiting:
            turn = self._turns[request.request_id]
            loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            # Who came after the last look has waited since then.
            turn.waits("load" if loads else left, min(waited_s, max(0.0, now_s - turn.since_s)))

    def nobody(self) -> None:
        """Nobody waits: the time until somebody does is not waited through."""
        self._seen_s = None


def _by_kind() -> dict[Kind, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class Counts:
    """Since the engine's start.

    Attributes:
        begun: requests that have begun to run, by what they were: cold or resume.
        cut: chunks made smaller for those who decode, or put off for them, by what they were of.
        parts: prompts that began without room for all of them.
        preempted: requests, by level.
    """

    levels: int
    begun: dict[Kind, int] = field(default_factory=_by_kind)
    cut: dict[Kind, int] = field(default_factory=_by_kind)
    parts: int = 0
    preempted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.preempted = [0] * self.levels


class Parts:
    """Which call has begun without room for all of it, and how much of a chunk there is room for.

    Args:
        scheduler: vLLM's, whose running requests and blocks are looked at.
        block_tokens: tokens of a block.

    Attributes:
        current: the request that has begun so, and still computes its prompt; None: nobody's.
    """

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._scheduler = scheduler
        self._block_tokens = block_tokens
        self.current: str | None = None

    def new_step(self) -> None:
        """Look whether it still does."""
        if self.current is None:
            return
        one = self._scheduler.requests.get(self.current)
        if one is None or one.status != RequestStatus.RUNNING or not one.is_prefill_chunk:
            self.current = None

    def fitting(self, request: Any, start: int, tokens: int, keeps: bool) -> int:
        """How many tokens of a chunk there is room for, without preempting anybody.

        Args:
            start: how many are computed already, or found in caches.
            keeps: whether histories are kept that would give way.

        Returns:
            All of them also where it is vLLM's to say no: the call waits, or somebody is preempted.
        """
        manager = self._scheduler.kv_cache_manager
        free, size = manager.block_pool.get_num_free_blocks(), self._block_tokens
        runs = request.status == RequestStatus.RUNNING
        if free >= (start + tokens if runs else request.num_tokens) // size + 1:
            return tokens
        decodes = sum(not one.is_prefill_chunk for one in self._scheduler.running)
        if runs:
            have, evictable = len(manager.get_blocks(request.request_id).blocks[0]), 0
        else:
            if self.current is not None or request.num_preemptions:
                return tokens
            hits = manager.get_computed_blocks(request)[0].blocks[0]
            have, evictable = len(hits), sum(block.ref_cnt == 0 for block in hits)
            if -(-request.num_tokens // size) - have + evictable <= free:
                return tokens
        room = (have + free - evictable - decodes) * size - start
        if room < size:
            if runs and keeps:
                return self.whole_blocks(start, tokens, size)
            # Who runs waits for those who decode; who waits needs room for all of it.
            return 0 if runs and decodes else tokens
        if not runs:
            self.current = request.request_id
        return self.whole_blocks(start, tokens, room)

    def whole_blocks(self, start: int, tokens: int, limit: int) -> int:
        """At most ``limit`` of a chunk's tokens, up to a block's end unless that is the chunk's."""
        if tokens <= limit:
            return tokens
        end = (start + limit) // self._block_tokens * self._block_tokens
        return end - start if end > start else limit

"""The scheduler's account of turns, what they wait for, prompts in parts, and counts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from conserve.wire import TURN, WaitFor
from conserve_inside.policy import KINDS, Kind


@dataclass(slots=True)
class Turn:
    """A request and how far it has come. Times are of the scheduler's clock.

    Attributes:
        key: its history's, or its own id if it is no history's turn.
        since_s: when it came or was preempted, and began to wait.
        resume_s: in how many seconds its client expects the next turn.
        last, background: whether its client says that it is the last one, and waits for others.
        missing_tokens: tokens that caches did not have when it came.
        charged_tokens: the tokens of its sequence that its history was charged for.
        waited_s: all its time before it ran; `waited_for_s` has the part whose reason was seen.
    """

    key: str
    is_known: bool
    since_s: float
    resume_s: float | None = None
    last: bool = False
    background: bool = False
    kind: Kind = "cold"
    missing_tokens: int = 0
    charged_tokens: int = 0
    runs: bool = False
    waited_s: float = 0.0
    waited_for_s: dict[WaitFor, float] = field(default_factory=dict)

    def waits(self, what: WaitFor, for_s: float) -> None:
        self.waited_for_s[what] = self.waited_for_s.get(what, 0.0) + for_s

    @property
    def waited_for(self) -> WaitFor | None:
        """Return what it waited for longest; None: it was not seen to wait."""
        return max(self.waited_for_s, key=lambda one: self.waited_for_s[one], default=None)


def turn_of(request: Any, now_s: float) -> Turn:
    said = (request.kv_transfer_params or {}).get(TURN)
    if not isinstance(said, dict):
        return Turn(request.request_id, False, now_s)
    return Turn(said["key"], True, now_s, said["resume_s"], said["last"], said["background"])


class Waits:
    """Notes what requests wait for, each time the scheduler orders them.

    A queue moves from its head, so all behind its first request wait for the same.
    """

    def __init__(self, turns: dict[str, Turn]) -> None:
        self._turns = turns
        self._seen_s: float | None = None
        self._refused = False

    def new_step(self) -> None:
        self._refused = False

    def no_room(self) -> None:
        self._refused = True

    def look(self, scheduler: Any, waiting: Iterable[Any], now_s: float) -> None:
        waited_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        left: WaitFor = "step"
        if self._refused:
            left = "room"
        elif len(scheduler.running) >= scheduler.max_num_active_reqs:
            left = "place"
        for request in waiting:
            turn = self._turns[request.request_id]
            loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            # A request that came after the last look has waited since it came.
            turn.waits("load" if loads else left, min(waited_s, max(0.0, now_s - turn.since_s)))


def _by_kind() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class Counts:
    """Counts of requests and chunks since the engine's start.

    Attributes:
        begun: requests that have begun to run, by kind.
        cut: chunks made smaller, or put off, for decodes.
        parts: prompts begun without room for all of them.
        preempted: requests, by level.
    """

    levels: int
    begun: dict[str, int] = field(default_factory=_by_kind)
    cut: dict[str, int] = field(default_factory=_by_kind)
    parts: int = 0
    preempted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.preempted = [0] * self.levels


class Parts:
    """Begins a prompt for which there is not enough room with a part of it (`current`).

    It is MARS's Opportunistic Co-Scheduler (section 4.3). So that such prompts do not take each
    other's room, one at a time begins so, none that was preempted does, and a block is left for
    each decode.
    """

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._scheduler = scheduler
        self._block_tokens = block_tokens
        self.current: str | None = None

    def new_step(self) -> None:
        if self.current is None:
            return
        one = self._scheduler.requests.get(self.current)
        if one is None or one.status != RequestStatus.RUNNING or not one.is_prefill_chunk:
            self.current = None

    def fitting(self, request: Any, start: int, tokens: int, keeps: bool) -> int:
        """Return how many tokens of a chunk fit without preempting a request.

        It is all of them where vLLM should refuse the call or preempt another.
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
            # A running one waits for those that decode. A waiting one needs room for all of it.
            return 0 if runs and decodes else tokens
        if not runs:
            self.current = request.request_id
        return self.whole_blocks(start, tokens, room)

    def whole_blocks(self, start: int, tokens: int, limit: int) -> int:
        """Return at most ``limit`` of a chunk's tokens, up to a block's end or the chunk's."""
        if tokens <= limit:
            return tokens
        end = (start + limit) // self._block_tokens * self._block_tokens
        return end - start if end > start else limit

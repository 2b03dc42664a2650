"""A plan of `tests.acceptance.chaos`, played in virtual time on `chaos_processes`."""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine import detokenizer

from conserve.clock import unix_s
from conserve.histories.prefixes import Points, held_together
from conserve.placement import PolicyName
from conserve.settings import Settings
from tests.acceptance.chaos.plan import Plan, PlannedConversation, PlannedKill, PlannedTurn
from tests.unit.deployments.chaos_processes import (
    Caller,
    Cluster,
    Engine,
    Process,
    Router,
    TableProcess,
    Words,
    answer_to,
    text_of,
    tokens_of,
)

# How long it takes until there is another one of what was killed.
_ENGINE_S, _TABLE_S, _ROUTER_S = 12.0, 1.0, 2.0
# A dead core is found by Serve's own check.
_FOUND_S = 4.0
_TURN_S = 900.0
# Those whose clients have left for good make room by it.
_IDLE_S = 120.0
_CAPACITY_TOKENS = 6000  # Of a plan of size 1.


class Broken(Exception):
    """The connection to the router broke, or could not be made."""


class World:
    """Everybody who has a part in it.

    Args:
        placement: the policy; under one of them the prefiller hosts conversations, too.

    Attributes:
        retries: how often turns were sent again, by cause.
        killed: how many died, by what they were.
        restores: how many came back from a pause, by where from.
        on_prefillers: conversations that prefillers have answered.
    """

    def __init__(self, plan: Plan, placement: PolicyName) -> None:
        self.plan = plan
        draw = random.Random(f"{plan.seed} settings")
        self._queue_limit = draw.choice([1, 4, 64])
        chosen: dict[str, Any] = {
            "placement": placement,
            "decoders": {"replicas": 2},
            "queue_timeout_s": draw.choice([5, 60]),
            "idle_timeout_s": _IDLE_S,
            "continue_streams": draw.random() < 0.7,
            "pausing": draw.random() < 0.5,
        }
        settings = Settings(**chosen)
        self.cluster = Cluster(settings, self._table_process(settings))
        self.router: Router | None = None
        self.retries: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.on_prefillers: set[str] = set()
        self.turns = 0
        self._made = 0
        self._began_s = asyncio.get_running_loop().time()
        self._outside = Process()
        self._operator = Caller(self.cluster, self._outside)
        self._answering: set[asyncio.Task[Any]] = set()

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    # --- processes ---------------------------------------------------------------------------

    def _table_process(self, settings: Settings) -> TableProcess:
        return TableProcess(settings=settings, queue_limit=self._queue_limit)

    async def start(self) -> None:
        """Start everything."""
        self._prefiller()
        for _ in range(2):
            self._decoder()
        self._start_router()
        await asyncio.sleep(1)

    def _prefiller(self) -> None:
        self._made += 1
        Engine(
            cluster=self.cluster,
            name=f"prefiller#{self._made}",
            role="prefiller",
            capacity_tokens=self._capacity_tokens,
        )

    def _decoder(self) -> None:
        self._made += 1
        name = f"decoder#{self._made}"
        Engine(cluster=self.cluster, name=name, capacity_tokens=self._capacity_tokens)

    @property
    def _capacity_tokens(self) -> int:
        return int(self.plan.size * _CAPACITY_TOKENS)

    def _start_router(self) -> None:
        self._made += 1
        self.router = Router(cluster=self.cluster, name=f"router#{self._made}")

    def engines(self, role: str) -> list[Engine]:
        """Those that live, in order."""
        return [one for one in self.cluster.engines.values() if one.role == role]

    def hosts(self) -> list[Engine]:
        """Those that conversations are bound to."""
        if self.cluster.settings.prefillers_host:
            return list(self.cluster.engines.values())
        return self.engines("decoder")

    async def _kill(self, kill: PlannedKill) -> None:
        decoders = self.engines("decoder")
        whole = len(decoders) == 2 and not any(one.core_dead for one in decoders)
        if kill.victim in ("decoder", "engine core", "both decoders") and not whole:
            return
        self.killed[kill.victim] += 1
        one = decoders[int(kill.draw * len(decoders))] if decoders else None
        if kill.victim == "table":
            self.cluster.table.kill()
            await asyncio.sleep(_TABLE_S)
            self._count_restores()
            self.cluster.table = self._table_process(self.cluster.settings)
        elif kill.victim == "router" and self.router is not None:
            dead, self.router = self.router, None
            dead.kill()
            await asyncio.sleep(_ROUTER_S)
            self._start_router()
        elif kill.victim == "prefiller" and (prefillers := self.engines("prefiller")):
            prefillers[0].kill()
            await asyncio.sleep(_ENGINE_S)
            self._prefiller()
        elif kill.victim == "engine core":
            assert one is not None
            one.core_dead = True
            await asyncio.sleep(_FOUND_S)
            await self._replace(one)
        elif kill.victim == "decoder":
            assert one is not None
            await self._replace(one)
        elif kill.victim == "both decoders":
            await asyncio.gather(*map(self._replace, decoders))

    async def _replace(self, decoder: Engine) -> None:
        decoder.kill()
        await asyncio.sleep(_ENGINE_S)
        self._decoder()

    async def _kills(self) -> None:
        running = []
        for kill in self.plan.kills():
            await asyncio.sleep(max(0.0, kill.at_s - self._now_s))
            running.append(asyncio.ensure_future(self._kill(kill)))
        await asyncio.gather(*running)

    async def _silences(self) -> None:
        """A decoder that is not heard of for a while, and is there all the time."""
        draw = random.Random(f"{self.plan.seed} silences")
        while self.plan.kill_every_s and self._now_s < self.plan.duration_s:
            await asyncio.sleep(draw.uniform(0, 2) * self.plan.duration_s)
            decoder = draw.choice(self.hosts() or [None])
            if decoder is not None:
                self.killed["silence"] += 1
                decoder.silent = True
                await asyncio.sleep(draw.choice([3.0, 17.0, 25.0]))
                decoder.silent = False

    # --- clients -----------------------------------------------------------------------------

    async def play(self) -> None:
        """Play the plan to its end, and wait until nothing is under way any more."""
        clients = [self._client(number) for number in range(self.plan.clients)]
        await asyncio.gather(self._kills(), self._silences(), *clients)
        if self._answering:
            await asyncio.wait(self._answering, timeout=300)
        assert not self._answering, "a turn that nobody waits for does not end"
        await asyncio.sleep(30)

    async def _client(self, number: int) -> None:
        for conversation in self.plan.conversations(number):
            await self._converse(conversation)
            if self._now_s >= self.plan.duration_s:
                break

    async def _converse(self, conversation: PlannedConversation) -> None:
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.think_s)
            messages.append({"role": "user", "content": conversation.prose(number)})
            async with asyncio.timeout(_TURN_S):
                answered = await self._answered(conversation, turn, messages)
            if answered is None:
                return
            content, name = answered
            right = text_of(answer_to(tokens_of(messages), turn.output_tokens))
            assert content == right, f"{conversation.key}, turn {number}"
            messages.append({"role": "assistant", "content": content})
            self.turns += 1
        if conversation.released:
            await self._operator.release(name)

    async def _answered(
        self, conversation: PlannedConversation, turn: PlannedTurn, messages: list[dict[str, str]]
    ) -> tuple[str, str] | None:
        """An answer and the conversation's id; None if the client has left for good."""
        body = {"messages": messages, "max_tokens": turn.output_tokens, "stream": turn.streamed}
        raw = json.dumps({**body, "model": "conserve-embedded"}).encode()
        misdeed = turn.misdeed
        backoff_s = 0.5
        while True:
            if misdeed == "half-send":
                self._in_background(self._send_half(raw, turn.for_s))
            asked = Asked(self, raw, conversation.name)
            if misdeed in ("cancel", "reconnect", "vanish"):
                await asyncio.sleep(turn.misdeed_s)
                # One goes on for a while, beside the one that follows.
                asyncio.get_running_loop().call_later(
                    turn.for_s if misdeed == "reconnect" else 0, asked.gone.set
                )
                self.retries[misdeed] += 1
                if misdeed == "vanish":
                    return None
                misdeed = None
                continue
            if misdeed == "stall":
                asked.stalls(turn.misdeed_s, turn.for_s)
            misdeed = None
            try:
                return await asked.answer()
            except Broken as error:
                self.retries[str(error)] += 1
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, 8.0)

    async def _send_half(self, raw: bytes, for_s: float) -> None:
        with contextlib.suppress(Broken):
            asked = Asked(self, raw, "half-sent", half=True)
            asyncio.get_running_loop().call_later(for_s, asked.gone.set)
            await asked.answer()

    def _in_background(self, work: Any) -> None:
        self.running(asyncio.ensure_future(work))

    def running(self, task: "asyncio.Task[Any]") -> None:
        """Have the end of the run wait for this."""
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    # --- what must hold ----------------------------------------------------------------------

    def _count_restores(self) -> None:
        memory = self.cluster.table.service._table.memory
        self.restores.update({} if memory is None else memory.restores)

    async def check(self) -> None:
        """Nothing is under way; table and holdings agree, and a new table agrees with the old."""
        assert self.cluster.failures == []
        before = self._require_agreement()
        self._count_restores()
        # The rest is idle for as long as it may be meanwhile.
        young = {
            one.id
            for decoder in self.hosts()
            for one in decoder.holdings.all()
            if unix_s() - one.last_used_s < _IDLE_S - 15
        }
        self.cluster.table.kill()
        self.cluster.table = self._table_process(self.cluster.settings)
        await asyncio.sleep(10)
        after = self._require_agreement()
        assert young <= set(after), "a table made from holdings lacks some"
        for id, one in after.items():
            # Who was paused counts until it is known again that there is no room; so does what
            # was known to be lost.
            uncounted = None in (one[0], before[id][0]) or not before[id][1]
            assert uncounted or one == before[id], "a table made from holdings differs"
        for id in before:
            await self._operator.release(id)
        await asyncio.sleep(3)
        assert self._require_agreement() == {}
        assert self.cluster.failures == []
        for decoder in self.hosts():
            assert decoder.holdings.all() == []
            assert decoder.holdings._stored_tokens == {}

    def _require_agreement(self) -> dict[str, tuple[str | None, int]]:
        """What is bound where and holds what, once table and decoders agree about it."""
        service = self.cluster.table.service
        assert len(service._admission.queue) == 0
        assert not service._room.pending
        assert not service._running.routers
        assert not service._running.decoders
        table = service._table
        live = table.live()
        assert [one.id for one in live if one.running] == []
        assert table.reasoning == 0
        assert all(one.queued_tokens == 0 for one in table.prefillers.values())
        assert set(table.decoders) == {one.name for one in self.hosts()}
        for decoder in self.hosts():
            bound = [one for one in live if one.home == decoder.name]
            mine = {one.id: one.held_tokens for one in bound}
            # With its next beat it is told of those that have just ended.
            untold = set(service._registry.engines[decoder.name].ended)
            holdings = {
                one.id: one.held_tokens
                for one in decoder.holdings.all()
                if (one.id, one.incarnation) not in untold
            }
            # A decoder keeps its record of what is paused, or has moved on, until that ends.
            left = {id: tokens for id, tokens in holdings.items() if id not in mine}
            # And it does not know what else went with what a turn of another did not find.
            seen = {id: holdings.get(id) if tokens else 0 for id, tokens in mine.items()}
            # Nor that a turn which was cut has given way to the one with which its client asked
            # again: the engine has its KV yet, and nobody comes back to it.
            for one in decoder.holdings.all():
                for newest in one.tails[:1]:
                    whole = dict(Points(one.points))[newest]
                    if mine.get(one.id) == whole < one.held_tokens:
                        seen[one.id] = whole
            assert mine == seen, f"{decoder.name} differs"
            known = set() if table.memory is None else table.memory.left_on(decoder.name)
            assert set(left) <= known, f"{decoder.name} has others"
            assert table.decoders[decoder.name].held_tokens == held_together(bound)
            assert table.decoders[decoder.name].conversations == len(mine)
        return {one.id: (one.home, one.held_tokens) for one in live}


class Asked:
    """One request to the router, under way.

    Attributes:
        gone: set when the client leaves.
    """

    def __init__(self, world: World, raw: bytes, name: str | None, *, half: bool = False) -> None:
        self.gone = asyncio.Event()
        self._world = world
        self._continues = world.cluster.settings.continue_streams
        self._parts: list[bytes] = []
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._open_s: float | None = None
        self._half = half
        self._body: list[bytes] = [raw[: len(raw) // 2] if half else raw]
        self._task: asyncio.Task[Any] | None = None
        if world.router is not None:
            headers = [] if name is None else [(b"x-conversation-id", name.encode())]
            scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers}
            self._task = world.router.start(world.router.turns(scope, self._receive, self._send))
            world.running(self._task)

    def stalls(self, after_s: float, for_s: float) -> None:
        """Stop reading after a while, for a while."""
        now_s = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(after_s, self._stop_reading, now_s + after_s + for_s)

    def _stop_reading(self, until_s: float) -> None:
        self._open_s = until_s

    async def _receive(self) -> Any:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": self._half}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._open_s is not None:
            await asyncio.sleep(max(0.0, self._open_s - asyncio.get_running_loop().time()))
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    async def answer(self) -> tuple[str, str]:
        """The whole answer, and the conversation's id.

        Raises:
            Broken: there is none, for a reason that goes away.
        """
        if self._task is None:
            raise Broken("no router")
        await asyncio.wait([self._task])
        if self._task.cancelled():
            raise Broken("router gone")
        self._task.result()
        whole = b"".join(self._parts)
        if self._status == 0:
            raise Broken("left")
        if self._status != 200:
            error = json.loads(whole)["error"]
            final = (self._status, error["code"]) == (500, "engines_lost")
            assert self._status in (408, 429, 503) or final, error
            raise Broken(f"{self._status} {error['code']}")
        name = self._headers[b"x-conversation-id"].decode()
        # A stream that began with a comment, while it waited, had no decoder then.
        if self._headers.get(b"x-conserve-decoder", b"").startswith(b"prefiller"):
            self._world.on_prefillers.add(name)
        if not self._headers[b"content-type"].startswith(b"text/event-stream"):
            return json.loads(whole)["choices"][0]["message"]["content"], name
        events = [line[6:] for line in whole.split(b"\n\n") if line[:6] == b"data: "]
        texts = []
        for event in events:
            parsed = {} if event == b"[DONE]" else json.loads(event)
            if "error" in parsed:
                # What two engines died with goes to no third.
                code = parsed["error"]["code"]
                assert not self._continues or code == "engines_lost", f"cut: {parsed['error']}"
                raise Broken("cut")
            texts += [one["delta"].get("content") or "" for one in parsed.get("choices", [])]
        assert events[-1] == b"[DONE]", "a stream ends without a word"
        return "".join(texts), name


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """A detokenizer; and `time.time_ns`, from which tables number turns, on the loop's clock."""
    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer, "IncrementalDetokenizer", Words)
        patch.setattr(time, "time_ns", lambda: int((1.7e9 + loop.time()) * 1e9))
        yield


class Errors(logging.Handler):
    """What was logged as an error, which no part of ConServe may have to."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


async def play(plan: Plan, placement: PolicyName) -> World:
    """Play a plan; fails if something does not hold."""
    with _stand_ins():
        world = World(plan, placement)
        try:
            await world.start()
            await world.play()
            await world.check()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
    return world

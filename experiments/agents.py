"""The agents of all experiments on real engines: chat conversations, streamed over HTTP."""

import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from conserve_lab.peers.plan import CONVERSATION_HEADER

MODEL = "conserve-embedded"
_WORDS = [
    "open",
    "close",
    "read",
    "write",
    "file",
    "class",
    "return",
    "import",
    "value",
    "index",
    "print",
    "while",
    "yield",
]
_PATH = "/v1/chat/completions"
Message = dict[str, str]


class Refused(RuntimeError):
    """A server refused a turn.

    Attributes:
        status: of its answer.
    """

    def __init__(self, url: str, status: int, said: bytes) -> None:
        super().__init__(f"{url}: {status} {said[:300]!r}")
        self.status = status


@dataclass(slots=True)
class Answer:
    """An answer, as far as it has come. It is parsed on demand, when the clock has stopped.

    Attributes:
        headers: the response's; empty before it has begun.
        sent_s, ended_s: when the request was sent and the answer ended.
        arrivals_s: when each part of the stream came. A server that sends several tokens at a time
            shows fewer and longer gaps.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)

    def add(self, part: bytes) -> None:
        """Take in what has come just now."""
        self.arrivals_s.append(time.perf_counter())
        self._parts.append(part)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def text(self) -> str:
        said = (
            choice.get("delta") or choice["message"]
            for event in self._events()
            for choice in event["choices"]
        )
        return "".join(one.get("content") or "" for one in said)

    @property
    def usage(self) -> dict[str, Any]:
        """Return the server's count of tokens; empty if it has sent none."""
        found: dict[str, Any] = {}
        for event in self._events():
            found = event.get("usage") or found
        return found

    def _events(self) -> list[dict[str, Any]]:
        raw = b"".join(self._parts)
        if not self.headers.get("Content-Type", "").startswith("text/event-stream"):
            return [json.loads(raw)]
        lines = raw.split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def gaps_between(answers: Iterable[Answer], from_s: float, to_s: float) -> list[float]:
    """Return answers' times between tokens that were over, or begun, in between."""
    return [
        later_s - earlier_s
        for answer in answers
        for earlier_s, later_s in pairwise(answer.arrivals_s)
        if later_s >= from_s and earlier_s <= to_s
    ]


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    messages: list[Message],
    tokens: int,
    headers: Mapping[str, str] | None = None,
    *,
    answer: Answer | None = None,
    **fields: Any,
) -> Answer:
    """Have a conversation's messages answered, greedily, with ``tokens`` output tokens.

    Args:
        answer: grows while the answer comes; None: a new one.
        fields: of the request's body, beside or in the place of the usual ones; None: left out.

    Raises:
        Refused: the server did.
    """
    answer = answer or Answer()
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = {name: value for name, value in (body | fields).items() if value is not None}
    raw = json.dumps(body).encode()
    sent = {**(headers or {}), "Content-Type": "application/json"}
    answer.sent_s = time.perf_counter()
    async with session.post(url + _PATH, data=raw, headers=sent) as response:
        if response.status != 200:
            raise Refused(url, response.status, await response.read())
        answer.headers = response.headers
        async for part in response.content.iter_any():
            answer.add(part)
    answer.ended_s = time.perf_counter()
    return answer


async def end(session: aiohttp.ClientSession, url: str, name: str) -> None:
    async with session.delete(f"{url}/v1/conversations/{name}") as response:
        await response.read()


def clients(timeout_s: float | None = 600.0) -> AbstractAsyncContextManager[aiohttp.ClientSession]:
    """Return a session with as many connections as are asked for."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def words(rng: random.Random, count: int) -> str:
    """Draw a text of ``count`` words, of about a token each."""
    return " ".join(rng.choices(_WORDS, k=count))


@dataclass(frozen=True, slots=True)
class Shape:
    """How long an agent's conversations and their turns are, in words of about a token each.

    Attributes:
        first_words: of a conversation's first prompt.
        later_words: of what each later turn appends.
        output_tokens: of each answer.
    """

    first_words: int = 400
    later_words: int = 30
    output_tokens: int = 64
    turns: int = 9


USUAL = Shape()


class Agent:
    """One client: a conversation after another, the same ones with every system.

    Args:
        seed: what its prompts are drawn from, and its conversations are called by.
        header: by which the system tells conversations apart.
        on_refused: awaited with the status where a turn is refused, which is then sent again; None:
            it ends in `Refused`.

    Attributes:
        held_tokens: what the next turn repeats: the conversation so far, its last answer included.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        seed: str,
        *,
        shape: Shape = USUAL,
        header: str = CONVERSATION_HEADER,
        on_refused: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._session = session
        self._url = url
        self._seed = seed
        self._shape = shape
        self._header = header
        self._on_refused = on_refused
        self._number = 0
        self._turn = 0
        self._messages: list[Message] = []
        self.rng = random.Random(seed)
        self.held_tokens = 0

    async def turn(self, **fields: Any) -> Answer:
        """Make the next turn; after a conversation's last one, the first of a new one.

        Args:
            fields: as those of `ask`.
        """
        if self._turn == 0:
            self._number += 1
            self._messages = []
        shape = self._shape
        prompt = words(self.rng, shape.later_words if self._turn else shape.first_words)
        self._messages.append({"role": "user", "content": prompt})
        headers = {self._header: f"{self._seed}-{self._number}"}
        answer = await self._answered(headers, fields)
        usage = answer.usage
        if usage["completion_tokens"] != shape.output_tokens:
            raise RuntimeError(
                f"{self._url}: {usage['completion_tokens']} tokens, not {shape.output_tokens}"
            )
        self._messages.append({"role": "assistant", "content": answer.text})
        self._turn = (self._turn + 1) % shape.turns
        self.held_tokens = usage["total_tokens"] if self._turn else 0
        return answer

    async def warm_turn(self) -> Answer:
        """Make a later turn; where a conversation begins, its first turn goes before it."""
        if self._turn == 0:
            await self.turn()
        return await self.turn()

    async def prepare(self) -> None:
        """Have the next turn be a warm one, for which nothing has to be made before."""
        if self._turn == 0:
            await self.warm_turn()

    async def _answered(self, headers: Mapping[str, str], fields: dict[str, Any]) -> Answer:
        shape = self._shape
        while True:
            try:
                return await ask(
                    self._session, self._url, self._messages, shape.output_tokens, headers, **fields
                )
            except Refused as error:
                if self._on_refused is None:
                    raise
                await self._on_refused(error.status)

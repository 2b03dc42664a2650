"""What happens in a run, drawn from its seed: who says what, who misbehaves, and what is killed.

Pure: the same seed gives the same run, whoever plays it, as far as those who play it keep time.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Victim = Literal[
    "decoder", "engine core", "both decoders", "prefiller", "lmcache", "table", "router", "node",
    "disk files", "disk folder", "disk space",
]  # fmt: skip
"""The process that is killed, or the part of the disk that is harmed.

A decoder is its replica; an engine core is a decoder's, whose replica lives. LMCache's server is
killed as it writes a file. Files of KV are damaged; the disk's folder, or its space, is missing for
a while.
"""

Misdeed = Literal["cancel", "stall", "half-send", "reconnect", "vanish"]
"""What a client does with a turn.

It leaves and asks again (cancel); stops reading for a while (stall); sends half of a request on
another connection, and no more (half-send); asks again while the first is still being answered, and
lets that one go later (reconnect); leaves, and never comes back to the conversation (vanish).
"""

VICTIMS: tuple[Victim, ...] = get_args(Victim)
MISDEEDS: tuple[Misdeed, ...] = get_args(Misdeed)

# Decoders, whose death costs most, are in the majority; both at once is rare: nothing is served.
_WEIGHTS = {
    "decoder": 4,
    "engine core": 4,
    "both decoders": 1,
    "prefiller": 2,
    "lmcache": 2,
    "table": 3,
    "router": 5,
    "node": 1,
    "disk files": 3,
    "disk folder": 1,
    "disk space": 1,
}


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn of a conversation.

    Attributes:
        words: length of what the client says, in words, which are tokens, roughly.
        output_tokens: so many are asked for.
        think_s: the client's pause before it.
        misdeed_s: how long after sending it the client misbehaves.
        for_s: how long a stall lasts, or a half-sent request stays open, or both of a turn that was
            sent twice run.
    """

    words: int
    output_tokens: int
    streamed: bool
    think_s: float
    misdeed: Misdeed | None = None
    misdeed_s: float = 0.0
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedConversation:
    """A conversation's script.

    Attributes:
        name: the id that its client sends; None: it sends none, and is recognised.
        key: tells it from all others of the run; also seeds what it says.
        released: whether the client ends it after its last turn.
    """

    key: str
    name: str | None
    turns: tuple[PlannedTurn, ...]
    released: bool

    def prose(self, turn: int) -> str:
        """What the client says in a turn; no other conversation begins like this one."""
        draw = random.Random(f"{self.key} turn {turn}")
        said = " ".join(draw.choice(_WORDS) for _ in range(self.turns[turn].words))
        return f"{self.key} {turn}: {said}"


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """``kill -9`` of a process, or harm to the disk."""

    at_s: float
    victim: Victim
    draw: float
    """In [0, 1): which one, where there are several."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run.

    Args:
        clients: conversations that live at a time; when one ends, its client begins another.
        duration_s: no conversation begins later, and nothing is killed.
        kill_every_s: the mean time between kills; 0: none.
        victims: who may be killed.
        pace: what all times of clients are multiplied with.
        size: what all lengths, of messages and answers, are multiplied with.
    """

    seed: int
    clients: int
    duration_s: float
    kill_every_s: float
    victims: tuple[Victim, ...] = VICTIMS
    pace: float = 1.0
    size: float = 1.0

    def conversations(self, client: int) -> Iterator[PlannedConversation]:
        """One client's conversations, without end."""
        number = 0
        while True:
            yield self._conversation(client, number)
            number += 1

    def kills(self) -> list[PlannedKill]:
        """All kills, in order."""
        draw = random.Random(f"{self.seed} kills")
        kills: list[PlannedKill] = []
        weights = [_WEIGHTS[victim] for victim in self.victims]
        at_s = 0.0
        while self.kill_every_s and weights:
            at_s += draw.uniform(0.3, 1.7) * self.kill_every_s
            (victim,) = draw.choices(self.victims, weights)
            if at_s >= self.duration_s:
                break
            kills.append(PlannedKill(at_s, victim, draw.random()))
        return kills

    def _conversation(self, client: int, number: int) -> PlannedConversation:
        key = f"chaos-{self.seed}-{client}-{number}"
        draw = random.Random(key)
        named = draw.random() < 0.6
        turns = tuple(self._turn(draw, first=turn == 0) for turn in range(draw.randint(2, 6)))
        return PlannedConversation(key, key if named else None, turns, draw.random() < 0.8)

    def _turn(self, draw: random.Random, *, first: bool) -> PlannedTurn:
        words = draw.randint(150, 900) if first else draw.randint(5, 120)
        misdeed = draw.choice(MISDEEDS) if draw.random() < 0.3 else None
        return PlannedTurn(
            words=max(1, int(self.size * words)),
            output_tokens=max(1, int(self.size * draw.choice([8, 24, 60, 120, 200]))),
            streamed=draw.random() < 0.75,
            think_s=self.pace * draw.choice([0.0, 0.1, 0.5, 2.0, 4.0]),
            misdeed=misdeed,
            # The first moments have most of the states that a turn can be in.
            misdeed_s=self.pace * draw.choice([0.0, 0.05, 0.3, 1.0, 3.0]),
            for_s=self.pace * draw.choice([0.5, 2.0, 8.0]),
        )


_WORDS = (
    *("open", "close", "read", "write", "file", "class", "return", "import", "value", "index"),
    *("print", "while", "yield", "token", "block", "cache", "decoder", "turn", "prompt", "answer"),
    *("agent", "tool", "result", "error", "count", "length", "prefix", "batch", "step", "queue"),
)

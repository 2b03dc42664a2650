"""Conversations are recognised by their messages on every turn."""

import gzip
import itertools
import json
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.recognition import Digest, TailIndex
from tests.checkout import DATA
from tests.unit.conserve.recognition.digests import candidate_digests, tail_digest
from tests.unit.conserve.recognition.messages import (
    SEEDS,
    SYSTEM,
    USER,
    Message,
    never_busy,
    random_answer,
    text_of,
)

TRAJECTORIES = DATA / "tau-bench" / "gpt-4o-airline.json.gz"


class Server:
    """Recognises turns as the router does, and remembers what each conversation really said."""

    def __init__(self) -> None:
        self.index = TailIndex()
        self.tails: dict[str, Digest] = {}
        self.ids = (f"conv-{n}" for n in itertools.count())
        self.opened = 0

    def recognise(
        self, messages: list[Message], busy: Callable[[str], bool] = never_busy
    ) -> str | None:
        return self.index.match(candidate_digests(messages), busy)

    def finish(self, id: str | None, messages: list[Message], answer: Message) -> str:
        if id is None:
            id = next(self.ids)
            self.opened += 1
        if id in self.tails:
            self.index.discard(id, [self.tails[id]])
        self.tails[id] = tail_digest(messages, answer)
        self.index.add(id, [self.tails[id]])
        return id


def imperfect_echo(answer: Message, rng: random.Random) -> Message:
    """The answer as an agent may send it back: same meaning, other bytes."""
    content = answer["content"]
    if content and rng.random() < 0.5 and "</think>" in content:
        content = content.partition("</think>")[2]
    if rng.random() < 0.3:
        content = (content or "").strip()
    if isinstance(content, str) and rng.random() < 0.3:
        content = [{"type": "text", "text": content + rng.choice(["", "\n"])}]
    echo: Message = {"content": content} if content or rng.random() < 0.5 else {}
    echo["role"] = "assistant"
    calls = []
    for call in answer["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            value = json.loads(arguments or "{}")
        except ValueError:
            arguments += rng.choice(["", " "])
        else:
            arguments = rng.choice(
                [
                    arguments,
                    value,
                    json.dumps(value, ensure_ascii=False, separators=(",", ":")),
                    json.dumps(value, indent=2),
                ]
            )
        function = {"arguments": arguments, "name": name}
        calls.append({"function": function, "id": f"new_{rng.random()}", "type": "function"})
    if calls or rng.random() < 0.5:
        echo["tool_calls"] = calls
    if rng.random() < 0.3:
        echo |= {"name": "agent", "refusal": None, "reasoning": "forged", "unknown": None}
    return echo


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 8))
def test_imperfect_echoes_are_recognised_on_every_turn(seed: int, many: int) -> None:
    rng = random.Random(seed)
    server = Server()
    histories: list[list[Message]] = [[SYSTEM, {**USER, "content": str(n)}] for n in range(many)]
    ids: list[str | None] = [None] * many
    for _ in range(6):
        for n in rng.sample(range(many), many):
            history = histories[n]
            assert server.recognise(history) == ids[n]
            answer = random_answer(rng)
            ids[n] = server.finish(ids[n], history, answer)
            history.append(imperfect_echo(answer, rng))
            for call in answer["tool_calls"]:
                result = {"role": "tool", "tool_call_id": call["id"], "content": text_of(rng)}
                history.append(result)
            if not answer["tool_calls"]:
                history.append({"role": "user", "content": text_of(rng)})
    assert server.opened == many


@pytest.mark.skipif(not TRAJECTORIES.exists(), reason=f"no recorded conversations at {DATA}")
def test_real_conversations_interleaved_are_recognised_on_every_turn() -> None:
    with gzip.open(TRAJECTORIES) as file:
        trajectories = [run["traj"] for run in json.load(file)]
    assert len(trajectories) == 200

    def replay(trajectory: list[Message], server: Server) -> Iterator[bool]:
        """Yield for each turn after the first whether it was recognised correctly."""
        first = True
        for place, message in enumerate(trajectory):
            if message["role"] != "assistant":
                continue
            history = trajectory[:place]
            id = server.recognise(history)
            assert (id is None) == first
            # Runs of the same task may begin alike, and are then interchangeable: what counts is
            # that the conversation found has said exactly what this one says it has.
            assert id is None or said_by[id] == history[: len(said_by[id])]
            id = server.finish(id, history, message)
            said_by[id] = [*history, message]
            first = False
            yield True

    server = Server()
    said_by: dict[str, list[Message]] = {}
    running = [replay(trajectory, server) for trajectory in trajectories]
    turns = 0
    while running:
        going_on = [one for one in running if next(one, False)]
        turns += len(going_on)
        running = going_on
    assert turns == sum(m["role"] == "assistant" for t in trajectories for m in t)
    assert server.opened == 200

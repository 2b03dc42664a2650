"""Agents at work: the model decides what happens next, and real tools do what it asks for.

Each conversation is a session of `benchmarks.agent`: tool schemas, and tasks that take two to six
calls. The model's answer is sent back with what the tools made of it, until it answers a task
without a call; then the next task comes. So the number of turns, and the lengths of all but the
first prompt, are the model's doing. A tool's time is exponential. `AgentScript.right` tells at the
end whether answers are right.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.agent import Message, Session, is_right, make_session
from benchmarks.agent.loop import MAX_TURNS, go_on
from benchmarks.records import Answer, TurnRequest
from benchmarks.workloads.dialogues import CHAT
from benchmarks.workloads.plan import Arrivals, Arriving, Workload, require


def agents(
    *,
    conversations: int,
    arrivals: Arrivals,
    mean_gap_s: float = 1.0,
    max_output_tokens: int = 256,
    tasks: int = 2,
    seed: int = 0,
) -> Workload:
    """Agents with a session each; none has another's task.

    Args:
        mean_gap_s: mean of the exponential times that tools take.
        max_output_tokens: limit on every answer's length.
        tasks: how many are asked for one after another in each conversation.

    Raises:
        WorkloadError: a setting is wrong.
    """
    require(conversations > 0, f"{conversations} conversations are asked for; give a number from 1")
    require(
        math.isfinite(mean_gap_s) and mean_gap_s >= 0,
        f"mean_gap_s is {mean_gap_s:g}; give seconds from 0",
    )
    require(max_output_tokens > 0, f"max_output_tokens is {max_output_tokens}; give tokens from 1")
    require(tasks > 0, f"tasks is {tasks}; give a number from 1")
    require(seed >= 0, f"the seed is {seed}; give one from 0")

    def arrive() -> Iterator[Arriving]:
        for index, at_s in zip(range(conversations), arrivals.times_s(), strict=False):
            session = make_session(f"bench/{seed}/{index}", "held-out", tasks=tasks)
            rng = np.random.default_rng([seed, index])
            name = f"{index:05d}-agent"
            yield at_s, AgentScript(name, session, rng, mean_gap_s, max_output_tokens)

    return Workload("agents", {"conversations": conversations}, arrive)


class AgentScript:
    """One agent.

    Attributes:
        right: for each task that has been answered, whether the answer was right.
    """

    def __init__(
        self,
        conversation: str,
        session: Session,
        rng: np.random.Generator,
        mean_gap_s: float,
        max_output_tokens: int,
    ) -> None:
        self.right: list[bool] = []
        self._conversation = conversation
        self._session = session
        self._rng = rng
        self._mean_gap_s = mean_gap_s
        self._max_output_tokens = max_output_tokens
        self._messages: list[Message] = [{"role": "system", "content": session.system}]
        self._turns_of_task = 0
        self._ask()

    @property
    def conversation(self) -> str:
        return self._conversation

    def next(self, answer: Answer | None) -> TurnRequest | None:
        """The next turn: tools' results, or the next task; None after the last task."""
        first = answer is None
        if answer is not None and not self._goes_on(answer):
            return None
        self._turns_of_task += 1
        return TurnRequest(
            gap_s=0.0 if first else float(self._rng.standard_exponential()) * self._mean_gap_s,
            path=CHAT,
            body=partial(self._body, tuple(self._messages)),
        )

    def _goes_on(self, answer: Answer) -> bool:
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            message["tool_calls"] = list(answer.tool_calls)
        calls, _ = go_on(self._messages, message, self._session.toolbox.run)
        if calls and self._turns_of_task < MAX_TURNS:
            return True
        task = self._session.tasks[len(self.right)]
        self.right.append(not answer.tool_calls and is_right(task, answer.content))
        if len(self.right) == len(self._session.tasks):
            return False
        self._ask()
        return True

    def _ask(self) -> None:
        task = self._session.tasks[len(self.right)]
        self._messages.append({"role": "user", "content": task.question})
        self._turns_of_task = 0

    def _body(self, messages: Sequence[Message]) -> dict[str, Any]:
        return {
            "messages": list(messages),
            "tools": list(self._session.schemas),
            "max_tokens": self._max_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

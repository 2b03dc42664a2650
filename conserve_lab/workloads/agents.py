"""Live agents: the model decides what happens next, and real tools do what it asks for.

Each conversation is a session of `conserve_lab.agent`, with tasks that take two to six calls. The
number of turns, and the lengths of all but the first prompt, are the model's doing.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from conserve_lab.agent import Message, Session, is_right, make_session
from conserve_lab.agent.loop import MAX_TURNS, go_on
from conserve_lab.records import TurnRequest
from conserve_lab.workloads.dialogues import CHAT, chat
from conserve_lab.workloads.plan import Arrivals, Arriving, PlayedScript, Turns, Workload, at_least


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

    ``mean_gap_s`` is the mean of tools' exponential times; ``tasks`` are asked for one after
    another.
    """
    at_least(0, mean_gap_s=mean_gap_s, seed=seed)
    at_least(1, conversations=conversations, max_output_tokens=max_output_tokens, tasks=tasks)

    def arrive() -> Iterator[Arriving]:
        for index, at_s in zip(range(conversations), arrivals.times_s(), strict=False):
            session = make_session(f"bench/{seed}/{index}", "held-out", tasks=tasks)
            rng = np.random.default_rng([seed, index])
            name = f"{index:05d}-agent"
            yield at_s, AgentScript(name, session, rng, mean_gap_s, max_output_tokens)

    return Workload("agents", {"conversations": conversations}, arrive)


class AgentScript(PlayedScript):
    """One agent; ``right`` has whether the answer was right of each task that has been answered."""

    def __init__(
        self,
        conversation: str,
        session: Session,
        rng: np.random.Generator,
        mean_gap_s: float,
        max_output_tokens: int,
    ) -> None:
        super().__init__(conversation, self._play(session, rng, mean_gap_s, max_output_tokens))
        self.right: list[bool] = []

    def _play(
        self, session: Session, rng: np.random.Generator, mean_gap_s: float, max_output_tokens: int
    ) -> Turns:
        messages: list[Message] = [{"role": "system", "content": session.system}]
        gap_s = 0.0
        for task in session.tasks:
            messages.append({"role": "user", "content": task.question})
            right = False
            for _ in range(MAX_TURNS):
                body = partial(chat, tuple(messages), max_output_tokens, session.schemas)
                answer = yield TurnRequest(gap_s=gap_s, path=CHAT, body=body)
                assert answer is not None
                message: Message = {"role": "assistant", "content": answer.content}
                if answer.tool_calls:
                    message["tool_calls"] = list(answer.tool_calls)
                go_on(messages, message, session.toolbox.run)
                gap_s = float(rng.standard_exponential()) * mean_gap_s
                if not answer.tool_calls:
                    right = is_right(task, answer.content)
                    break
            self.right.append(right)

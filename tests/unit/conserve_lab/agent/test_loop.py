"""The agent's loop, with models that are scripted."""

import json
from collections.abc import Sequence

from conserve_lab.agent import Call, Message, Reply, Schema, make_session, run_agent, score
from conserve_lab.agent.tasks import call_message

SESSION = make_session(2, "held-out")
TASK = SESSION.tasks[0]
QUESTION: list[Message] = [
    {"role": "system", "content": SESSION.system},
    {"role": "user", "content": TASK.question},
]


class Scripted:
    """A model that says what it was given, one message a turn."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.asked: list[int] = []

    async def __call__(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> Reply:
        self.asked.append(len(messages))
        return Reply(self.messages.pop(0), {"asked": len(messages)})


def _script(calls: Sequence[Call], answer: str) -> Scripted:
    messages = [call_message(call, "", f"c{n}") for n, call in enumerate(calls)]
    return Scripted(*messages, {"role": "assistant", "content": answer})


async def test_a_right_run() -> None:
    model = _script(TASK.calls, TASK.answer)
    run = await run_agent(model, QUESTION, SESSION.schemas, SESSION.toolbox.run)
    turns = run.turns
    assert len(turns) == len(TASK.calls) + 1
    assert run.calls == list(TASK.calls)
    said = [json.loads(m["content"])["result"] for m in run.messages if m["role"] == "tool"]
    assert tuple(said) == TASK.results
    # The history only grows: two messages a turn.
    assert model.asked == [2 + 2 * n for n in range(len(turns))]
    assert [turn.reply.info["asked"] for turn in turns] == model.asked
    assert run.messages[:2] == QUESTION
    assert run.answer == TASK.answer
    result = score(TASK, run)
    assert (result.right_calls, result.right_answer) == (result.calls, True)


async def test_wrong_calls_are_told_and_counted() -> None:
    wrong = Call("no_such_tool", {})
    run = await run_agent(
        _script([wrong, *TASK.calls[1:]], "I do not know."),
        QUESTION, SESSION.schemas, SESSION.toolbox.run,
    )  # fmt: skip
    assert "no tool no_such_tool" in json.loads(run.messages[3]["content"])["error"]
    result = score(TASK, run)
    assert (result.right_calls, result.right_answer) == (result.calls - 1, False)


async def test_an_agent_without_end_is_stopped() -> None:
    run = await run_agent(
        _script([TASK.calls[0]] * 9, "never said"),
        QUESTION, SESSION.schemas, SESSION.toolbox.run, max_turns=3,
    )  # fmt: skip
    assert len(run.turns) == 3
    assert run.answer is None
    assert not score(TASK, run).right_answer

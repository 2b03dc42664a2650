"""A conversation has the same digests in every API."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.recognition.apis import answers_of, continues, messages_of, tools_of
from tests.unit.conserve.recognition.apis import told as apis
from tests.unit.conserve.recognition.apis.told import Json, Said, Told
from tests.unit.conserve.recognition.digests import candidate_digests, tail_digest
from tests.unit.conserve.recognition.messages import SEEDS

TELL: dict[str, Callable[[Told, random.Random], Json]] = {
    CHAT: apis.chat,
    MESSAGES: apis.messages,
    RESPONSES: apis.responses,
}
PATHS = tuple(TELL)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "source", "input", "output", "tools", "name"]
            ),
            inner | st.sampled_from(["system", "assistant", "user", "text", "image", "message",
                                     "tool_use", "tool_result", "function_call", "namespace",
                                     "function_call_output", "reasoning"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(SEEDS, st.integers(0, 6))
def test_a_conversation_told_in_each_api_has_the_same_digests(seed: int, answers: int) -> None:
    rng = random.Random(seed)
    told = apis.random_conversation(rng, answers)
    digests = {
        path: tuple(candidate_digests(messages_of(path, tell(told, rng))))
        for path, tell in TELL.items()
    }
    assert len(set(digests.values())) == 1
    assert len(digests[CHAT]) == answers


@settings(deadline=None)
@given(SEEDS, st.integers(0, 3), st.sampled_from(PATHS), st.booleans(), st.sampled_from(PATHS))
def test_an_answer_got_by_one_api_is_known_when_it_comes_by_another(
    seed: int, before: int, path: str, streamed: bool, next_path: str
) -> None:
    rng = random.Random(seed)
    told = apis.random_conversation(rng, before)
    answer = apis.random_answer(rng)
    (found,) = answers_of(path, sent(path, answer, streamed), streamed)
    tail = tail_digest(messages_of(path, TELL[path](told, rng)), found)
    told.steps += [answer, apis.following(answer, rng)]
    assert candidate_digests(messages_of(next_path, TELL[next_path](told, rng)))[0] == tail


ASSISTANT = {"role": "assistant", "content": "a"}
ITEM = {**ASSISTANT, "type": "message"}
JUNK: tuple[Any, ...] = (None, [], "a", [None], [[]], 7)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (MESSAGES, {"messages": [ASSISTANT]}, True),
        (MESSAGES, {"messages": [ASSISTANT, {"role": "user", "content": "a"}]}, False),
        (CHAT, {"messages": [ASSISTANT]}, False),
        (CHAT, {"messages": [ASSISTANT], "continue_final_message": True}, True),
        (RESPONSES, {"input": [ITEM]}, False),
        (RESPONSES, {"input": [{**ITEM, "status": "incomplete"}]}, True),
        (RESPONSES, {"input": [{**ITEM, "status": "in_progress", "role": "user"}]}, False),
        (RESPONSES, {"input": "a"}, False),
        *((path, {name: junk}, False) for path in PATHS for name in ("messages", "input")
          for junk in JUNK),
    ],
)  # fmt: skip
def test_it_is_known_which_turns_continue_their_last_message(
    path: str, body: Json, expected: bool
) -> None:
    assert continues(path, body) is expected


@settings(deadline=None)
@given(SEEDS)
def test_another_conversation_has_other_digests(seed: int) -> None:
    rng = random.Random(seed)
    told = apis.random_conversation(rng, 2)
    seen = {path: candidate_digests(messages_of(path, tell(told, rng)))[0]
            for path, tell in TELL.items()}  # fmt: skip
    step = rng.choice([step for step in told.steps[:-1] if step.texts])
    step.texts[0] += " more"
    for path, tell in TELL.items():
        assert candidate_digests(messages_of(path, tell(told, rng)))[0] != seen[path]


@settings(deadline=None)
@given(SEEDS)
def test_tools_told_in_each_api_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    told = apis.random_conversation(rng, 0)
    chat, messages, responses = (tools_of(path, tell(told, rng)) for path, tell in TELL.items())
    assert chat == messages == responses
    assert len(chat) == len(told.tools)


def sent(path: str, answer: Said, streamed: bool) -> list[bytes]:
    if path == MESSAGES:
        return apis.message_stream(answer) if streamed else [apis.message_body(answer)]
    if path == RESPONSES:
        if streamed:
            return apis.response_stream(answer)
        return [json.dumps(apis.response_object(answer)).encode()]
    message = apis.chat_answer(answer, random.Random(1))
    if not streamed:
        return [json.dumps({"choices": [{"message": message}]}).encode()]
    calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls}
    chunks = [{"delta": delta}, {"delta": {}, "finish_reason": "stop"}]
    events = [b"data: " + json.dumps({"choices": [one]}).encode() + b"\n\n" for one in chunks]
    return [*events, b"data: [DONE]\n\n"]


@settings(deadline=None)
@given(SEEDS, st.sampled_from([MESSAGES, RESPONSES]), st.data())
def test_answers_that_were_cut_off_are_none(seed: int, path: str, data: st.DataObject) -> None:
    whole = b"".join(sent(path, apis.random_answer(random.Random(seed)), streamed=True))
    size = data.draw(st.integers(1, len(whole)))
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert len(answers_of(path, parts, streamed=True)) == 1
    last = whole.rindex(b"event: ")
    cut = data.draw(st.integers(0, last))
    assert answers_of(path, [whole[:cut]], streamed=True) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"type": "error", "error": {"type": "api_error", "message": "no"}}),
        (RESPONSES, {"error": {"message": "no"}}),
        (RESPONSES, apis.response_object(Said("assistant", ["no"]), "failed")),
        (RESPONSES, apis.response_object(Said("assistant", ["no"]), "cancelled")),
        (CHAT, {"error": {"message": "no"}}),
    ],
)
def test_errors_are_no_answers(path: str, body: Json) -> None:
    assert answers_of(path, [json.dumps(body).encode()], streamed=False) == []


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, CHAT])
@settings(deadline=None)
@given(body=st.dictionaries(st.sampled_from(["messages", "input", "system", "tools"]), JSON))
def test_nothing_raises_whatever_json_comes(path: str, body: Json) -> None:
    candidate_digests(messages_of(path, body, ("times",)))
    tools_of(path, body)
    raw = json.dumps(body).encode()
    answers_of(path, [raw], streamed=False)
    answers_of(path, [b"data: " + raw], streamed=True)


def test_items_that_no_chat_has_count_whole() -> None:
    def asked(item: Json) -> Any:
        body = {"input": [{"role": "user", "content": "a"}, item, {"role": "assistant"}, "x"]}
        return candidate_digests(messages_of(RESPONSES, body))

    searches = [asked({"type": "web_search_call", "id": id}) for id in ("a", "b")]
    assert searches[0] != searches[1]


def test_grouped_tools_go_by_the_name_that_the_model_sees() -> None:
    inner = {"type": "function", "name": "add", "description": "d"}
    groups = [{"type": "namespace", "name": "math", "tools": [inner, {"type": "custom"}]}]
    body = {"tools": [*groups, {"type": "web_search"}]}
    (tool,) = tools_of(RESPONSES, body)
    assert tool["function"] == {"name": "math__add", "description": "d"}
    call = {"type": "function_call", "namespace": "math", "name": "add", "arguments": "{}"}
    (message,) = messages_of(RESPONSES, {"input": [call]})
    assert message["tool_calls"][0]["function"]["name"] == "math__add"

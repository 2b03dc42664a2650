"""Conversations are recognised by their messages."""

import gzip
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.recognition import (
    Digest,
    TailIndex,
    answers_from_body,
    answers_from_stream,
    candidate_digests,
    tail_digest,
)
from tests.checkout import DATA

TRAJECTORIES = DATA / "tau-bench" / "gpt-4o-airline.json.gz"

Message = dict[str, Any]

SEEDS = st.integers(0, 2**32)

SYSTEM = {"role": "system", "content": "You are a helpful agent."}
USER = {"role": "user", "content": "Hello"}


def never_busy(_: str) -> bool:
    return False


def said(content: Any = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def called(arguments: Any, name: str = "search", id: str = "call_1") -> Message:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return said(None, tool_calls=[call])


def same(one: Any, other: Any) -> bool:
    """Whether two messages count as the same one."""
    return tail_digest([USER], one) == tail_digest([USER], other)


# --- The chain ----------------------------------------------------------------------------------


def test_a_turn_names_the_tail_it_continues() -> None:
    answer = said("Hi, how can I help?")
    following = [SYSTEM, USER, answer, {"role": "user", "content": "Book a flight"}]
    assert candidate_digests(following) == [tail_digest([SYSTEM, USER], answer)]


def test_candidates_are_newest_first() -> None:
    history = [SYSTEM, USER, said("a"), USER, called("{}"), {"role": "tool", "content": "ok"}]
    assert candidate_digests(history) == [
        tail_digest(history[:4], history[4]),
        tail_digest(history[:2], history[2]),
    ]


def test_a_first_turn_has_no_candidates() -> None:
    assert candidate_digests([]) == []
    assert candidate_digests([SYSTEM, USER]) == []


def test_nothing_was_said_after_the_last_answer() -> None:
    # The agent asks for the answer again, or to go on with it: that is no later turn.
    assert candidate_digests([USER, said("a")]) == []
    assert len(candidate_digests([USER, said("a"), said("b")])) == 1


def test_digests_are_16_bytes_and_hold_across_processes() -> None:
    # One process computes a tail, another looks it up: neither hash seeds nor, by accident, a new
    # version may change it.
    digest = tail_digest([SYSTEM, USER], called('{"city": "Zürich", "n": 1}'))
    assert digest.hex() == "0053b32644b230daa5d4e34c4a443e65"


@pytest.mark.parametrize(
    "changed",
    [
        [USER, said("a"), USER],
        [{**SYSTEM, "content": "You are another agent."}, USER, said("a"), USER],
        [SYSTEM, {"role": "user", "content": "Summary of what was said so far"}, said("a"), USER],
        [SYSTEM, USER, said("b"), USER],
        [SYSTEM, USER, USER, said("a"), USER],
        [USER, SYSTEM, said("a"), USER],
        [SYSTEM, {**USER, "role": "tool"}, said("a"), USER],
        [SYSTEM, USER, {"role": "user", "content": "a"}, USER],
    ],
)
def test_an_edited_or_compacted_history_is_not_recognised(changed: list[Message]) -> None:
    index = TailIndex()
    index.add("c", [tail_digest([SYSTEM, USER], said("a"))])
    assert index.match(candidate_digests([SYSTEM, USER, said("a"), USER]), never_busy) == "c"
    assert index.match(candidate_digests(changed), never_busy) is None


# --- What counts, and what does not -------------------------------------------------------------

TEXT_PART = {"type": "text", "text": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hello", " \nHello\t "),
        ("Hello", [TEXT_PART]),
        ("Hello", [{"type": "text", "text": " Hello\n"}]),
        ("Hello", [TEXT_PART, {"type": "text", "text": "  "}]),
        ("Hello", ["Hello"]),
        ("Hello", [{**TEXT_PART, "cache_control": {"type": "ephemeral"}}]),
        ("Hello\nworld", [TEXT_PART, {"type": "text", "text": "world"}]),
        ([TEXT_PART, TEXT_PART, IMAGE], ["Hello\nHello", IMAGE]),
        ([TEXT_PART, IMAGE], [" Hello", dict(reversed(IMAGE.items()))]),
        (None, ""),
        (None, "  "),
        (None, []),
        (None, [{"type": "text", "text": ""}]),
        ("half a pair \ud83d", "half a pair \ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_equal_content(role: str, one: Any, other: Any) -> None:
    assert same({"role": role, "content": one}, {"role": role, "content": other})


def test_missing_content_is_empty_content() -> None:
    assert same({"role": "assistant"}, said(""))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hello", "hello"),
        ("Hello", "Hel lo"),
        ("Hello", ""),
        ([TEXT_PART, IMAGE], [TEXT_PART]),
        ([TEXT_PART, IMAGE], [IMAGE, TEXT_PART]),
        ([IMAGE], [{"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}]),
        ([IMAGE], [IMAGE, IMAGE]),
        ([IMAGE], json.dumps(IMAGE)),
        ([[TEXT_PART]], "Hello"),
        (None, 0),
        (None, False),
        (None, {}),
    ],
)
def test_different_content(one: Any, other: Any) -> None:
    assert not same({"role": "user", "content": one}, {"role": "user", "content": other})


@pytest.mark.parametrize(
    "field",
    ["reasoning", "reasoning_content", "thinking", "name", "refusal", "annotations", "audio",
     "provider_specific_fields"],
)  # fmt: skip
def test_ignored_fields(field: str) -> None:
    assert same(said("Hi"), said("Hi", **{field: "anything"}))
    assert same(said("Hi"), said("Hi", **{field: None}))


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "unknown"])
def test_null_fields_are_absent_fields(field: str) -> None:
    assert same(said("Hi"), said("Hi", **{field: None}))


def test_no_tool_calls() -> None:
    assert same(said("Hi"), said("Hi", tool_calls=[]))


@pytest.mark.parametrize(
    "content",
    [
        "<think>Let me see.</think>\n\nHi",
        "\n<think>\nLet me see.\n</think>Hi",
        "<think></think>Hi ",
        "<think>a</think><think>b</think> Hi",
        "Let me see.</think>Hi",  # the template opened the block in the prompt
        [{"type": "text", "text": "<think>Let me see.</think>"}, {"type": "text", "text": "Hi"}],
        [{"type": "thinking", "thinking": "Let me see."}, {"type": "text", "text": "Hi"}],
    ],
)
def test_reasoning_in_the_content_is_ignored(content: Any) -> None:
    assert same(said("Hi"), said(content))


@pytest.mark.parametrize("content", ["<think>Let me", " <think>", "<think>a</think>\n<think>b"])
def test_an_answer_cut_while_reasoning_is_empty(content: str) -> None:
    assert same(said(""), said(content))


def test_only_reasoning_before_the_answer_is_ignored() -> None:
    assert not same(said("Hi <think>a</think>"), said("Hi <think>b</think>"))
    assert not same(said("<think>x</think>Hi <think>a</think>"), said("Hi"))
    user_one, user_other = ({"role": "user", "content": f"<think>{c}</think>Hi"} for c in "ab")
    assert not same(user_one, user_other)


THINKING = st.lists(st.sampled_from(["<think>", "</think>", " ", "a", "b\n"]), max_size=8)


@given(THINKING, st.lists(st.sampled_from(["a", " b", "<think>c</think>"]), min_size=1))
def test_an_agent_may_cut_the_reasoning_off_itself(inner: list[str], rest: list[str]) -> None:
    raw = "<think>" + "".join(inner).replace("</think>", "") + "</think>" + "".join(rest)
    assert same(said(raw), said(raw.partition("</think>")[2]))


def test_marks_alone_cost_no_quadratic_time() -> None:
    started = time.perf_counter()
    for text in ("</think>" * 200_000, "<think>" * 200_000 + "</think>" * 200_000):
        candidate_digests([said(text), USER])
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'),
        ('{"a": 1}', {"a": 1}),
        ('{"a": {"c": 1, "b": 2}}', ' {"a": {"b": 2, "c": 1}}\n'),
        ('{"city": "Z\\u00fcrich \\ud83d\\ude00"}', '{"city": "Zürich \U0001f600"}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', {"a": 1.0}),
        ('{"a": 0}', {"a": -0.0}),
        ('{"a": 100}', '{"a": 1e2}'),
        ('{"id": 12345678901234567890}', '{"id": 12345678901234567000}'),  # through JavaScript
        ('{"a": ' + "9" * 5000 + "}", '{"a": 1e999}'),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ("", "{}"),
        (" ", {}),
        (None, {}),
        ('{"a": ', ' {"a":  '),
        ("[" * 5000, "[" * 5000 + " "),
    ],
)
def test_equal_arguments(one: Any, other: Any) -> None:
    assert same(called(one), called(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"b": 1}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": false}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": [[1], 2]}', '{"a": [[1, 2]]}'),
        ('{"a": []}', '{"a": {}}'),
        ('{"a": "x"}', '{"a": " x"}'),
        ("[]", "{}"),
        ("x", '"x"'),
        ('{"a": ', '{"b": '),
    ],
)
def test_different_arguments(one: Any, other: Any) -> None:
    assert not same(called(one), called(other))


def test_call_ids_and_positions_are_ignored() -> None:
    assert same(called("{}", id="call_1"), called("{}", id="other"))
    function = {"name": "search", "arguments": "{}"}
    assert same(called("{}"), said(None, tool_calls=[{"index": 3, "function": function}]))
    custom = {"type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    rewritten = {**custom, "id": "b", "index": 0, "function": None}
    assert same(said(tool_calls=[{**custom, "id": "a"}]), said(tool_calls=[rewritten]))


def test_calls_count_by_name_order_and_number() -> None:
    (one,) = called("{}")["tool_calls"]
    (other,) = called("{}", name="book")["tool_calls"]
    versions = [[], [one], [other], [one, other], [other, one], [one, one]]
    digests = {tail_digest([USER], said(None, tool_calls=calls)) for calls in versions}
    assert len(digests) == len(versions)


def test_a_legacy_function_call_is_a_tool_call() -> None:
    legacy = said(None, function_call={"name": "search", "arguments": '{"q": 1}'})
    assert same(legacy, called('{"q":1}'))
    assert not same(legacy, said(None))


def test_tool_results_count_by_their_content() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "name": "search", "content": "3 flights"}
    assert same(result, {"role": "tool", "content": "3 flights", "tool_call_id": "x", "name": "y"})
    assert same(result, {"role": "tool", "content": "3 flights"})
    assert not same(result, {**result, "content": "2 flights"})


def test_developer_is_system() -> None:
    assert same(SYSTEM, {**SYSTEM, "role": "developer"})
    assert not same(SYSTEM, {**SYSTEM, "role": "user"})


# --- Different lists have different digests -----------------------------------------------------

TEXTS = st.text(alphabet='ab":,[]{}01sld;', min_size=1, max_size=6).map(lambda s: f"x{s}x")
CALLS = st.builds(
    lambda name, key, value: {"function": {"name": name, "arguments": {key: value}}},
    TEXTS, TEXTS, TEXTS,
)  # fmt: skip
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": TEXTS,
        "tool_calls": st.lists(CALLS, max_size=2),
    }
)


@settings(max_examples=300)
@given(st.lists(MESSAGES, max_size=4), st.lists(MESSAGES, max_size=4))
def test_different_histories_differ(one: list[Message], other: list[Message]) -> None:
    assert (tail_digest(one, USER) == tail_digest(other, USER)) == (one == other)


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.data())
def test_one_changed_message_changes_every_later_digest(
    history: list[Message], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(history) - 1))
    change = data.draw(st.sampled_from(["role", "content", "tool_calls", "gone", "twice"]))
    edited = list(history)
    if change == "gone":
        del edited[place]
    elif change == "twice":
        edited.insert(place, {"role": "other", "content": "new"})
    else:
        other = {"role": "other", "content": "new", "tool_calls": [{"function": {"name": "new"}}]}
        edited[place] = {**history[place], change: other[change]}
    turn = [said("a"), USER, said("b"), USER]
    assert not set(candidate_digests([*history, *turn])[:2]) & set(
        candidate_digests([*edited, *turn])
    )


def test_text_cannot_imitate_structure() -> None:
    tricky: list[list[Message]] = [
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "ab"}],
        [{"role": "usera", "content": ""}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": ["a", IMAGE, "b"]}],
        [{"role": "user", "content": 'a", "b'}],
        [{"role": "user", "content": "al3:s4:user"}],
        [said("a"), called("{}")],
        [said("a", tool_calls=called("{}")["tool_calls"])],
        [called({"a": "b", "c": "d"})],
        [called({"a": "bs1:cs1:d"})],
        [called({}, name="{}")],
    ]
    assert len({tail_digest(messages, USER) for messages in tricky}) == len(tricky)


# --- Junk ---------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["assistant", "developer", "text", "\ud800", "<think>"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "function_call", "function", "name",
                         "arguments", "type", "text", "id"]) | st.text(max_size=3),
        inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300)
@given(JSON, JSON)
def test_junk_is_hashed_the_same_each_time(messages: Any, answer: Any) -> None:
    messages_copy: Any
    messages_copy, answer_copy = json.loads(json.dumps([messages, answer]))
    assert candidate_digests(messages) == candidate_digests(messages_copy)
    assert tail_digest(messages, answer) == tail_digest(messages_copy, answer_copy)


@pytest.mark.parametrize(
    "messages",
    [None, 7, "assistant", {"role": "assistant"}, [None, 7, "x"], [[], {}],
     [{"role": ["assistant"], "content": {"a": object()}}, {1: 2, None: 3}, b"x"],
     [{"role": "assistant", "tool_calls": "x", "content": 10**5000}, USER],
     [{"role": "assistant", "tool_calls": {"a": 1}, "function_call": "f"}, USER]],
)  # fmt: skip
def test_junk_does_not_raise(messages: Any) -> None:
    assert len(candidate_digests(messages)) <= 1
    assert tail_digest(messages, messages) == tail_digest(messages, messages)


def test_a_turn_is_recognised_in_spite_of_junk() -> None:
    history: list[Any] = [
        None,
        {"role": 7},
        {"content": [None, 3, {"type": "text", "text": 5}]},
        "x",
    ]
    following = [*history, said("a"), 9]
    assert candidate_digests(following) == [tail_digest(history, said("a"))]


def test_deep_nesting_does_not_raise() -> None:
    deep: Any = {}
    for _ in range(50_000):
        deep = {"a": [deep]}
    text = '{"a":' * 50_000 + "1" + "}" * 50_000
    for message in (
        {"role": "user", "content": deep},
        {"role": "user", "content": [deep]},
        called(deep),
        called(text),
        said(None, tool_calls=deep),
        deep,
    ):
        newest = candidate_digests([message, said("a"), USER])[0]
        assert newest == tail_digest([message], said("a"))
    while deep:  # freeing it in one go would recurse too
        deep = deep.pop("a").pop()


# --- Whole conversations ------------------------------------------------------------------------


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


def text_of(rng: random.Random) -> str:
    words = ["flight", "Zürich", "\U0001f600", '"quoted"', "{", "a\nb", "42", "</p>"]
    return " ".join(rng.choices(words, k=rng.randint(1, 12)))


def random_answer(rng: random.Random) -> Message:
    """What an engine answers."""
    answer: Message = said(text_of(rng) if rng.random() < 0.7 else None)
    answer |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    answer["reasoning_content"] = text_of(rng) if rng.random() < 0.3 else None
    if rng.random() < 0.2:
        answer["content"] = f"<think>{text_of(rng)}</think>\n\n{answer['content'] or ''}"
    answer["tool_calls"] = [
        {
            "id": f"call_{rng.random()}",
            "type": "function",
            "function": {
                "name": rng.choice(["search", "book"]),
                "arguments": json.dumps({text_of(rng): rng.choice([1, 2.5, None, [text_of(rng)]])})
                if rng.random() < 0.8
                else rng.choice(["", "{}", '{"cut": "of']),
            },
        }
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    return answer


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


def test_100_conversations_that_begin_alike_never_mix() -> None:
    rng = random.Random(1)
    server = Server()
    histories: list[list[Message]] = [[SYSTEM, USER] for _ in range(100)]
    ids: list[str | None] = [None] * 100
    for turn in range(8):
        for n in rng.sample(range(100), 100):
            assert server.recognise(histories[n]) == ids[n]
            answer = said(f"answer {turn} to {n}")
            ids[n] = server.finish(ids[n], histories[n], answer)
            histories[n] += [answer, {"role": "user", "content": "go on"}]
    assert len(set(ids)) == server.opened == 100


def test_100_conversations_with_equal_answers_never_merge() -> None:
    # All run at once: each turn must find a conversation of its own.
    server = Server()
    history = [SYSTEM, USER]
    for turn in range(5):
        running: set[str] = set()
        for _ in range(100):
            id = server.recognise(history, running.__contains__)
            assert (id is None) == (turn == 0)
            assert id not in running
            running.add(id or server.finish(None, history, said("same")))
        assert len(running) == 100
        for id in running:
            server.finish(id, history, said("same"))
        history = [*history, said("same"), USER]
    assert server.opened == 100


def test_equal_conversations_one_after_another_never_merge() -> None:
    # The first to continue moves on at once; the second must get the one that is left.
    server = Server()
    ids = [server.finish(None, [USER], said("same")) for _ in range(3)]
    following = [USER, said("same"), USER]
    seen = []
    for n in range(3):
        id = server.recognise(following)
        assert id is not None
        seen.append(server.finish(id, following, said(f"answer {n}")))
    assert sorted(seen) == ids
    assert server.recognise(following) is None


@pytest.mark.skipif(not TRAJECTORIES.exists(), reason=f"no recorded conversations at {DATA}")
def test_real_conversations_interleaved_are_recognised_on_every_turn() -> None:
    with gzip.open(TRAJECTORIES) as file:
        trajectories = [run["traj"] for run in json.load(file)]
    assert len(trajectories) == 200

    def replay(trajectory: list[Message], server: Server) -> Iterator[bool]:
        """Yields for each turn after the first whether it was recognised, and rightly."""
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


# --- Answers ------------------------------------------------------------------------------------


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def chunk(delta: Any, index: int = 0, finish: str | None = None) -> Any:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1,
            "model": "m", "choices": [choice]}  # fmt: skip


def call_delta(index: int, id: str | None = None, **function: Any) -> Any:
    delta: Any = {"index": index, "function": function}
    return {**delta, "id": id, "type": "function"} if id else delta


DONE = b"data: [DONE]\n\n"


def body_of(answers: list[Message]) -> bytes:
    choices = [{"index": i, "message": m, "finish_reason": "stop"} for i, m in enumerate(answers)]
    return json.dumps({"object": "chat.completion", "choices": choices, "usage": {}}).encode()


def stream_of(answers: list[Message], rng: random.Random) -> bytes:
    """The answers as an engine streams them: the choices interleaved, all else in pieces."""

    def pieces(text: str) -> Iterator[str]:
        while text:
            size = rng.randint(1, 5)
            yield text[:size]
            text = text[size:]

    def deltas(answer: Message) -> Iterator[Any]:
        yield {"role": "assistant", "content": ""}
        for piece in pieces(answer.get("reasoning_content") or ""):
            yield {"reasoning_content": piece}
        for piece in pieces(answer["content"] or ""):
            yield {"content": piece}
        for place, call in enumerate(answer["tool_calls"]):
            function = call["function"]
            yield {"tool_calls": [call_delta(place, call["id"], name=function["name"])]}
            for piece in pieces(function["arguments"]):
                yield {"tool_calls": [call_delta(place, arguments=piece)]}

    events = b": a comment\n\n"
    queues = [(index, list(deltas(answer))) for index, answer in enumerate(answers)]
    while queues:
        index, queue = queues.pop(rng.randrange(len(queues)))
        if queue:
            events += event(chunk(queue.pop(0), index))
            queues.append((index, queue))
        else:
            events += event(chunk({}, index, "stop")) + rng.choice([b"", b": ping\n\n"])
    return events + event({"choices": [], "usage": {"total_tokens": 7}}) + DONE


def cut(data: bytes, rng: random.Random) -> Iterator[bytes]:
    while data:
        size = rng.choice([1, 2, 7, 100, 1000])
        yield data[:size]
        data = data[size:]


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 3))
def test_streamed_and_not_is_the_same_answer(seed: int, many: int) -> None:
    rng = random.Random(seed)
    answers = [random_answer(rng) for _ in range(many)]
    whole = answers_from_body(body_of(answers))
    assert whole == answers
    streamed = answers_from_stream(cut(stream_of(answers, rng), rng))
    assert len(streamed) == many
    for one, other in zip(whole, streamed, strict=True):
        assert tail_digest([USER], one) == tail_digest([USER], other)
        assert (one["content"] or None) == other["content"]
        assert one["tool_calls"] == other.get("tool_calls", [])


def test_a_streamed_answer() -> None:
    stream = [
        event(chunk({"role": "assistant", "content": ""})),
        event(chunk({"reasoning": "Let me", "reasoning_content": " see"})),
        event(chunk({"content": "Zü"})),
        event(chunk({"content": "rich"})),
        event(chunk({"tool_calls": [call_delta(0, "a", name="search", arguments="")]})),
        event(chunk({"tool_calls": [call_delta(0, arguments='{"q"')]})),
        event(chunk({"tool_calls": [call_delta(1, "b", name="book", arguments="{}"),
                                    call_delta(0, arguments=": 1}")]})),
        event(chunk({}, finish="tool_calls")),
        DONE,
    ]  # fmt: skip
    expected = {
        "role": "assistant",
        "content": "Zürich",
        "tool_calls": [
            {"id": "a", "type": "function",
             "function": {"name": "search", "arguments": '{"q": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "book", "arguments": "{}"}},
        ],
    }  # fmt: skip
    data = b"".join(stream)
    assert answers_from_stream([data]) == [expected]
    assert answers_from_stream(data[i : i + 1] for i in range(len(data))) == [expected]
    assert answers_from_stream([data.replace(b"\n", b"\r\n")]) == [expected]
    assert answers_from_stream([data.replace(b"data: ", b"data:")]) == [expected]
    assert answers_from_stream([data.removesuffix(DONE).rstrip()]) == [expected]


def test_calls_come_in_their_order() -> None:
    deltas = [call_delta(1, "b", name="b", arguments=""), call_delta(0, "a", name="a")]
    (answer,) = answers_from_stream([event(chunk({"tool_calls": deltas}, finish="tool_calls"))])
    assert [call["id"] for call in answer["tool_calls"]] == ["a", "b"]


def test_choices_come_in_their_order() -> None:
    stream = [event(chunk({"content": f"answer {n}"}, n, "stop")) for n in (2, 0, 1)]
    assert [a["content"] for a in answers_from_stream(stream)] == [f"answer {n}" for n in range(3)]


def test_a_cut_stream_gives_no_answer() -> None:
    whole = event(chunk({"content": "Hello"})) + event(chunk({"content": "!"}, finish="stop"))
    assert len(answers_from_stream([whole])) == 1
    for size in range(len(whole) - 3):  # without the last brace and the line breaks
        assert answers_from_stream([whole[:size]]) == []


def test_an_error_leaves_the_finished_choices() -> None:
    stream = [
        event(chunk({"content": "whole"}, 0, "stop")),
        event(chunk({"content": "half"}, 1)),
        event({"error": {"message": "engine died", "code": 500}}),
        DONE,
    ]
    assert answers_from_stream(stream) == [said("whole")]


def test_an_empty_answer_is_an_answer() -> None:
    assert answers_from_stream([event(chunk({}, finish="length"))]) == [said(None)]


@pytest.mark.parametrize(
    "junk", [b"", b"\xff", b"null", b"[]", b'{"choices": 1}', b'{"choices": [{"delta": 1}]}',
             b'{"choices": [{"index": "x"}]}', b'{"choices": [{"message": 1}]}', b'{"error": {}}',
             b'{"a": ' + b"[" * 100_000, b'{"a": "\xff"}',
             b'{"choices": [{"delta": {"content": "\xff"}, "message": {"a": "\xff"}}]}']
)  # fmt: skip
def test_junk_gives_no_answers(junk: bytes) -> None:
    assert answers_from_body(junk) == []
    assert answers_from_stream([junk]) == []
    assert answers_from_stream([b"data: " + junk + b"\n\n"]) == []
    good = event(chunk({"content": "Hi"}, finish="stop"))
    assert answers_from_stream([b"data: " + junk + b"\n\n", good]) == [said("Hi")]


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    answers_from_body(data)
    answers_from_stream([b"data: ", data, b"\n\ndata:", data])


def test_an_answer_without_a_role_is_the_assistants() -> None:
    body = json.dumps({"choices": [{"message": {"content": "Hi"}}]}).encode()
    assert answers_from_body(body) == [said("Hi")]


# --- The index ----------------------------------------------------------------------------------


def test_each_of_several_answers_may_be_continued() -> None:
    index = TailIndex()
    index.add("a", [b"1", b"2"])
    assert index.match([b"1"], never_busy) == "a"
    assert index.match([b"2"], never_busy) == "a"
    index.discard("a", [b"1"])
    assert index.match([b"1"], never_busy) is None
    assert index.match([b"2"], never_busy) == "a"
    index.add("a", [])
    index.discard("a", [])
    assert index.match([b"2"], never_busy) == "a"


def test_discard() -> None:
    index = TailIndex()
    index.discard("a", [b"1"])
    index.add("a", [b"1", b"1"])
    index.add("b", [b"1"])
    index.discard("c", [b"1"])
    index.discard("a", [b"1", b"1"])
    index.discard("a", [b"1"])
    assert index.match([b"1"], never_busy) == "b"
    index.discard("b", [b"1"])
    assert index.match([b"1"], never_busy) is None


def test_the_longest_known_beginning_decides() -> None:
    index = TailIndex()
    index.add("long", [b"3"])
    index.add("short", [b"1"])
    assert index.match([b"4", b"3", b"2", b"1"], never_busy) == "long"
    assert index.match([b"4", b"3", b"1"], {"long"}.__contains__) == "long"
    assert index.match([b"2", b"1"], never_busy) == "short"
    assert index.match([], never_busy) is None


def test_a_free_owner_is_preferred_the_oldest_first() -> None:
    index = TailIndex()
    for id in "abc":
        index.add(id, [b"1"])
    assert index.match([b"1"], {"a"}.__contains__) == "b"
    assert index.match([b"1"], never_busy) == "a"
    assert index.match([b"1"], {"a", "b"}.__contains__) == "c"
    assert index.match([b"1"], lambda _: True) in {"a", "b", "c"}


IDS = st.sampled_from("abcd")
TAILS = st.lists(st.sampled_from([b"1", b"2", b"3"]), max_size=3)


@given(st.lists(st.tuples(IDS, TAILS), max_size=30), TAILS, st.sets(IDS))
def test_the_index_agrees_with_a_plain_search(
    steps: list[tuple[str, list[bytes]]], candidates: list[bytes], busy: set[str]
) -> None:
    index = TailIndex()
    tails: dict[str, list[bytes]] = {}
    for id, digests in steps:
        index.discard(id, tails.get(id, ()))
        tails[id] = digests
        index.add(id, digests)
        owners: set[str] = set()
        for digest in candidates:
            owners = {one for one, its in tails.items() if digest in its}
            if owners:
                break
        found = index.match(candidates, busy.__contains__)
        assert found in (owners - busy or owners or [None])


def test_100_000_equal_conversations_are_no_burden() -> None:
    index = TailIndex()
    many = 100_000
    started = time.perf_counter()
    for n in range(many):
        index.add(str(n), [b"same"])
    running: set[str] = set()
    for n in range(many):
        id = index.match([b"same"], running.__contains__)
        assert id is not None
        running.add(id)
        if n % 2:
            index.discard(id, [b"same"])
            index.add(id, [b"moved on %d" % n])
            running.remove(id)
    for n in range(many):
        index.discard(str(n), [b"same"])
    assert index.match([b"same"], never_busy) is None
    # About 0.5 s; were a step linear in the owners, minutes.
    assert time.perf_counter() - started < 10

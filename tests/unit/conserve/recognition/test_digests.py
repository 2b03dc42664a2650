"""Digests of histories: what they chain, that they differ, and that any JSON has some."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.apis import CHAT
from conserve.recognition import (
    Chain,
    TailIndex,
    chain_of,
)
from conserve.recognition.apis import heard
from tests.unit.conserve.recognition.digests import candidate_digests, tail_digest
from tests.unit.conserve.recognition.messages import (
    IMAGE,
    SYSTEM,
    USER,
    Message,
    called,
    never_busy,
    said,
)

# --- The chain ----------------------------------------------------------------------------------


def test_candidates_are_the_tails_that_a_turn_continues_newest_first() -> None:
    history = [SYSTEM, USER, said("a"), USER, called("{}"), {"role": "tool", "content": "ok"}]
    assert candidate_digests(history) == [
        tail_digest(history[:4], history[4]),
        tail_digest(history[:2], history[2]),
    ]
    assert candidate_digests([]) == candidate_digests([SYSTEM, USER]) == []


def test_a_turn_without_answers_names_the_prompts_it_may_go_on_from() -> None:
    messages = [SYSTEM, USER, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    chain = chain_of(messages)
    prompts = [chain_of(messages[:count]).root for count in (3, 2)]
    tails = [chain_of(messages[:count]).beginning.tails(said("x"))[1] for count in (3, 2)]
    assert list(chain.prompts) == prompts
    assert chain.since(prompts[1]) == Chain(
        prompts[1], chain.system, tuple(tails), beginning=chain.beginning, tools=chain.tools
    )
    assert chain.since(prompts[0]).ends == (tails[0],)
    # With an answer among the messages, none was left out.
    assert chain_of([*messages, said("x"), USER]).prompts == ()


def test_nothing_was_said_after_the_last_answer() -> None:
    # The agent asks for the answer again, or to go on with it: that is no later turn.
    assert candidate_digests([USER, said("a")]) == []
    assert len(candidate_digests([USER, said("a"), said("b")])) == 1


def test_digests_are_16_bytes_and_hold_across_processes() -> None:
    # One process computes a tail, another looks it up: neither hash seeds nor, by accident, a new
    # version may change it.
    digest = tail_digest([SYSTEM, USER], called('{"city": "Zürich", "n": 1}'))
    assert digest.hex() == "0a108d9143e7630507d85913e464f99a"


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


def test_tenants_have_no_digest_in_common() -> None:
    tails = {tenant: tail_digest([USER], said("hi"), tenant) for tenant in (None, "a", "b")}
    assert len(set(tails.values())) == 3
    for tenant, tail in tails.items():
        assert candidate_digests([USER, said("hi"), USER], tenant) == [tail]


def test_one_beginning_serves_all_answers() -> None:
    messages = [SYSTEM, USER]
    beginning = chain_of(messages).beginning
    for answer in (said("a"), called('{"x": 1}'), said("a")):
        assert beginning.tails(answer)[0] == tail_digest(messages, answer)


def test_arguments_of_very_many_values_are_compared_as_text() -> None:
    """Parsing megabytes of them would take seconds, in the thread that passes on all tokens."""
    most = 16_384
    for count, same in ((most - 2, True), (most, False)):
        compact = '{"x":[' + ",".join("1" * count) + "]}"
        spaced = compact.replace(",", ", ")
        digests = [tail_digest([USER], called(text)) for text in (compact, spaced, compact)]
        assert (digests[0] == digests[1]) is same
        assert digests[0] == digests[2]


@pytest.mark.parametrize(
    ("begun", "answer", "whole"),
    [
        (said("{"), said('"a": 1}'), said('{"a": 1}')),
        (said("It is "), said("so."), said("It is so.")),
        (said("It is"), said(" so."), said("It is so.")),
        (said([{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]), said(" so."),
         said([{"type": "text", "text": "It"}, {"type": "text", "text": "is so."}])),
        (said("Look:"), called('{"x": 1}'), {**called('{"x": 1}'), "content": "Look:"}),
        ({**said("It"), "reasoning": "hm"}, said(" is"), said("It is")),
        (said("It"), said(""), said("It")),
        (said("It"), said(None), said("It")),
    ],
)  # fmt: skip
def test_a_continued_message_is_known_as_one_or_as_two(
    begun: Message, answer: Message, whole: Message
) -> None:
    chain = chain_of([SYSTEM, USER, begun], continues=True)
    as_one, *as_two = chain.beginning.tails(answer, begun)
    assert as_one == tail_digest([SYSTEM, USER], whole)
    assert as_one == candidate_digests([SYSTEM, USER, whole, USER])[0]
    assert as_two == [tail_digest([SYSTEM, USER, begun], answer)]
    assert chain.root == chain_of([SYSTEM, USER]).root
    # What is closed is followed by an answer of its own.
    assert chain_of([SYSTEM, USER, begun]).beginning.tails(answer) == tuple(as_two)


def test_a_turn_that_continues_an_answer_goes_on_with_its_history() -> None:
    """The answer may have been cut off; an unknown beginning continues what is before it."""
    messages = [SYSTEM, USER, said("a"), USER, said("b")]
    chain = chain_of(messages, continues=True)
    assert list(chain.ends) == [
        tail_digest(messages[:4], said("b")),
        tail_digest(messages[:2], said("a")),
    ]
    assert chain.root == chain_of(messages).root
    assert chain_of([USER, said("b")], continues=True).root == chain_of([USER]).root
    assert not chain_of([USER, said("b")], continues=True).ends_with_root


@pytest.mark.parametrize("begun", [None, 7, "a", [], {}, {"content": 7, "tool_calls": "x"}])
@pytest.mark.parametrize("answer", [{}, {"content": 7}, {"content": [7, None], "tool_calls": {}}])
def test_junk_is_continued_too(begun: Any, answer: Any) -> None:
    chain = chain_of([USER, begun], continues=True)
    assert all(len(tail) == 16 for tail in (chain.root, *chain.beginning.tails(answer, begun)))


def test_what_decides_how_a_prompt_begins_makes_another_chain() -> None:
    """With another salt or template no KV is found."""

    def chain(**more: object) -> Chain:
        body = {"messages": [SYSTEM, USER, said("a"), USER], **more}
        return chain_of(*heard(CHAT, body))

    tool = {"type": "function", "function": {"name": "f"}}
    others = [
        chain(),
        chain(cache_salt="a"),
        chain(cache_salt="b"),
        chain(chat_template="{{ messages }}"),
        chain(tools=[tool]),
    ]
    assert len({one.root for one in others}) == len({one.ends for one in others}) == len(others)
    # What is about the answer alone makes none.
    assert chain(temperature=0, max_tokens=5, tools=[]) == chain()

"""Text that changes each time, in what real clients send."""

import pytest

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.recognition.apis import messages_of
from conserve.recognition.normal import without_billing_header
from tests.unit.conserve.recognition.digests import candidate_digests

BILLING = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch={};"
USER = {"role": "user", "content": "x-anthropic-billing-header: what is it?"}


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        (MESSAGES, {"system": BILLING + "\nYou are"}, {"system": "You are"}),
        (MESSAGES, {"system": BILLING}, {"system": ""}),
        (
            MESSAGES,
            {"system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "You are"}]},
            {"system": [{"type": "text", "text": "You are"}]},
        ),
        (RESPONSES, {"instructions": BILLING + "\n\nYou are"}, {"instructions": "You are"}),
        (
            CHAT,
            {"messages": [{"role": "system", "content": BILLING + "\nYou are"}, USER]},
            {"messages": [{"role": "system", "content": "You are"}, USER]},
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": [{"text": BILLING}]}, USER]},
            {"messages": [USER]},
        ),
    ],
)  # fmt: skip
def test_the_billing_header_is_taken_out(path: str, body: dict, kept: dict) -> None:
    assert without_billing_header(path, {**body, "model": "m"}) == {**kept, "model": "m"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER]}),
        (CHAT, {"messages": [{"role": "system", "content": "You are\n" + BILLING}, USER]}),
        (MESSAGES, {"system": [{"type": "text", "text": "You are"}, None, 7], "messages": [USER]}),
        (RESPONSES, {"input": BILLING}),
    ],
)
def test_what_has_none_stays_as_it_is(path: str, body: dict) -> None:
    assert without_billing_header(path, body) is body


@pytest.mark.parametrize(
    "text",
    [
        "Current date and time: Monday, March 9, 2026 at 0{}:00:31 PM PDT",  # pi
        "Today is 2026-06-1{} 23:59:59 UTC",
        "It is {}:03:04 p.m.",
    ],
)
def test_times_with_seconds_are_kept_out_where_that_is_set(text: str) -> None:
    def digests(said: str, *volatile: str) -> list[bytes]:
        body = {"messages": [{"role": "developer", "content": [{"type": "text", "text": said}]},
                             {"role": "assistant", "content": "a"}, USER]}  # fmt: skip
        return candidate_digests(messages_of(CHAT, body, volatile))

    now, later = text.format(3), text.format(4)
    assert digests(now) != digests(later)
    assert digests(now, "times") == digests(later, "times")


def test_times_that_somebody_says_count() -> None:
    def digests(said: str) -> list[bytes]:
        body = {"messages": [{"role": "user", "content": said}, {"role": "assistant"}, USER]}
        return candidate_digests(messages_of(CHAT, body, ("times",)))

    assert digests("at 12:00:01") != digests("at 12:00:02")

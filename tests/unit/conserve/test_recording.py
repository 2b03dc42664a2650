"""Turns are kept for a recorder, without text, and for no longer than one asks."""

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from conserve import recording as module
from conserve.recording import BLOCK_TOKENS, SILENCE_S, Recording, block_digests, digest
from conserve.turn import TurnKey, TurnStats

SALT = b"s" * 32
TURN = TurnKey("acme\tsecret-id", 1, 256)
ROUTERS = TurnStats(outcome="completed", latency_s=2.0, tool="open")
TABLES = TurnStats(prompt_tokens=200, output_tokens=5, began_s=100.0)


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + 8] for at in range(0, len(digests), 8)]


def test_equal_beginnings_have_equal_digests_and_no_others() -> None:
    prompt = list(range(1000, 1000 + 3 * BLOCK_TOKENS + 7))
    whole, images = split(block_digests(SALT, prompt, ())), [("cat", SimpleNamespace(offset=70))]
    assert len(set(whole)) == 3
    for place, same in ((5, 0), (BLOCK_TOKENS, 1), (2 * BLOCK_TOKENS + 1, 2)):
        changed = [*prompt[:place], 7, *prompt[place + 1 :]]
        found = split(block_digests(SALT, changed, ()))
        assert [one == other for one, other in zip(found, whole, strict=True)] == [
            number < same for number in range(3)
        ]
    with_image = split(block_digests(SALT, prompt, images))
    assert [one == other for one, other in zip(with_image, whole, strict=True)] == [True] + [
        False
    ] * 2
    assert not set(whole) & set(split(block_digests(b"other", prompt, ())))
    assert block_digests(SALT, prompt[: BLOCK_TOKENS - 1], ()) == b""


PARTS: tuple[dict[str, Any], ...] = (
    {"blocks": b"12345678"},
    {"said": TABLES, "parent": "acme\tboss", "background": True},
    {"said": ROUTERS, "at": 101.0, "ttfet_s": 1.5},
)


@pytest.mark.parametrize("order", permutations(range(3)))
def test_a_turn_is_kept_once_all_is_known_and_tells_no_id(order: tuple[int, ...]) -> None:
    kept = Recording()
    kept.note(TURN, 99.0, TABLES)
    assert kept.salt(99.0) == b""
    started, _ = kept.after(0, 100.0)
    salt = kept.salt(100.0)
    for number in order:
        # Its answer may take as long as it likes after the first token.
        now_s = 102.0 if order[0] else 102.0 + 20 * bool(number)
        assert kept.after(started, now_s) == (started, [])
        kept.note(TURN, now_s, **PARTS[number])
    newest, (told,) = kept.after(started, 123.0)
    assert told["conversation"] == digest(salt, b"acme\tsecret-id")
    assert told["parent"] == digest(salt, b"acme\tboss")
    assert (told["tenant"], told["at"], told["ttfet_s"], told["blocks"]) == (
        1, 101.0, 1.5, b"12345678",
    )  # fmt: skip
    assert (told["prompt_tokens"], told["latency_s"], told["tool"]) == (200, 2.0, "open")
    assert told["cause"] == "first"
    assert not {"secret-id", "acme", "boss"} & {str(one) for one in told.values()}
    assert kept.after(newest, 123.0) == (newest, [])


@pytest.mark.parametrize(("called", "name"), [("fs.read:v2,ls", "fs.read:v2,ls"), ("a b", "?")])
def test_what_cannot_be_a_tools_name_is_not_told(called: str, name: str) -> None:
    kept = Recording()
    after, _ = kept.after(0, 100.0)
    stats = TurnStats(outcome="completed", tool=called, began_s=100.0)
    kept.note(TURN, 101.0, stats, blocks=b"")
    assert kept.after(after, 101.0)[1][0]["tool"] == name


def test_a_part_that_does_not_come_is_not_waited_for() -> None:
    kept = Recording()
    after, _ = kept.after(0, 100.0)
    kept.note(TURN, 100.0, TABLES)
    # An engine without outputs, and a router that tells of the same turn again.
    kept.note(TurnKey("other", 1, 512), 100.0, TurnStats(unbound="unknown"))
    assert kept.after(after, 104.0)[1] == []
    assert [one["outcome"] for one in kept.after(after, 106.0)[1]] == [None]
    assert not kept._open


def test_it_ends_when_no_recorder_asks() -> None:
    kept = Recording()
    after, _ = kept.after(0, 100.0)
    first = kept.salt(100.0)
    kept.note(TURN, 100.0, ROUTERS)
    assert kept.salt(100.0 + SILENCE_S) == first
    assert kept.salt(100.1 + SILENCE_S) == b""
    assert not kept._open
    assert kept.after(after, 200.0) == (after, [])
    assert kept.salt(200.0) not in (b"", first)


def test_what_is_not_asked_for_in_time_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 5 * 600)
    monkeypatch.setattr(module, "_PAGE_BYTES", 2 * 600)
    kept = Recording()
    began, _ = kept.after(0, 100.0)
    for number in range(8):
        turn = TurnKey(f"{'acme' if number % 2 else 'ops'}\tc", 1, 256 * number)
        kept.note(turn, 101.0, TABLES, blocks=bytes(88))
        kept.note(turn, 101.0, ROUTERS, at=float(number))
    assert dict(kept.dropped) == {"ops": 2, "acme": 1}
    after = began
    for page in ([3.0, 4.0], [5.0, 6.0], [7.0], []):
        after, turns = kept.after(after, 101.0)
        assert [one["at"] for one in turns] == page
    assert [one["at"] for one in kept.after(began, 101.0, "acme")[1]] == [3.0, 5.0]


def test_digests_whose_turn_never_ends_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OPEN", 10)
    kept = Recording()
    after, _ = kept.after(0, 100.0)
    for number in range(11):
        kept.note(TURN._replace(turn_id=number), 101.0, blocks=b"12345678")
    for number in (0, 10):
        kept.note(TURN._replace(turn_id=number), 102.0, ROUTERS)
        kept.note(TURN._replace(turn_id=number), 102.0, TABLES)
    _, turns = kept.after(after, 120.0)
    assert ["blocks" in one for one in turns] == [True, False]

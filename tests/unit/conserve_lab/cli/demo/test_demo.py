"""What the demonstration promises, and when it says that it was not kept."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from conserve.settings import Settings, load
from conserve_lab.cli.demo import command
from conserve_lab.cli.demo.report import report
from conserve_lab.cli.demo.seen import AgentAnswer, Demonstration, TurnRow


def _rows(name: str, decoder: str = "d1", turns: int = 3) -> list[TurnRow]:
    first = TurnRow(name, 1, 1000, 0, 896, 0.5, 48, decoder)
    later = [
        TurnRow(name, n, 1000 + 100 * n, 896, 0, 0.1, 48, decoder) for n in range(2, turns + 1)
    ]
    return [first, *later]


def _kept() -> Demonstration:
    answers = [AgentAnswer("a", "It is 7.", 1.5, right=True)]
    return Demonstration(turns=[*_rows("a"), *_rows("b", "d2")], answers=answers, handoffs=2)


def test_each_broken_promise_is_named() -> None:
    assert _kept().verdict(conversations=2, turns=3) == []

    missing = Demonstration(turns=_rows("a"))
    assert any("1 conversations" in wrong for wrong in missing.verdict(2, 3))

    twice = _kept()
    twice.turns[1] = replace(twice.turns[1], lmcache_tokens=128)
    assert any("a: handed off in turns [1, 2]" in wrong for wrong in twice.verdict(2, 3))

    # A first prompt may be computed where it stays, unless all go to prefillers.
    never = _kept()
    never.turns[0] = replace(never.turns[0], lmcache_tokens=0)
    assert never.verdict(2, 3) == []
    wrong = never.verdict(2, 3, always_handed_off=True)
    assert [one for one in wrong if "handed off" in one] == [
        "a: handed off in turns [], not once, in turn 1"
    ]
    assert _kept().verdict(2, 3, always_handed_off=True) == []

    moved = _kept()
    moved.turns[2] = replace(moved.turns[2], decoder="d9")
    assert any("a: changed its decoder" in wrong for wrong in moved.verdict(2, 3))

    failed = replace(_kept(), errors=1, problems=["a, turn 3: lost"])
    assert "a, turn 3: lost" in failed.verdict(2, 3)


def _looked() -> Demonstration:
    """Two conversations of three turns about the same two screens, the second after the first."""
    rows = [
        replace(
            row,
            images=min(row.turn, 2),
            encoded_images=int(row.conversation == "a" and row.turn < 3),
        )
        for row in [*_rows("a", "abcdefgh"), *_rows("b (no id)", "d2")]
    ]
    rows[0] = replace(rows[0], node_images=1, ttft_s=12.345, does="click([bold]144, 80)")
    rows[3] = replace(rows[3], node_images=2)
    answers = [AgentAnswer("a", "It is 7.", 1.5, True), AgentAnswer("b", "It is [8].", None, False)]
    return Demonstration(rows, answers, handoffs=1, images=2, clicks=4, hits=3)


def test_the_table_tells_calls_answers_and_where_images_came_from_in_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    report(_looked(), console)
    lines = [line.split() for line in console.export_text().splitlines()]
    head = "agent turn images enc node prompt own LMCache TTFT on does"
    assert head.split() in lines
    first = ["a", "1", "1", "1", "1", "1,000", "-", "896", "12,345", "abcd", "click([bold]144,"]
    assert [*first, "80)"] in lines
    assert ["b*", "1", "1", "-", "2", "1,000", "-", "896", "500", "d2"] in lines
    told = " ".join(word for line in lines for word in line)
    assert "2 screens, 10 images in all prompts: 2 encoded, 3 from the node's memory." in told
    assert "3 of 4 clicks on the highlighted button." in told
    assert "1 handoff, 0 moves, 0 errors." in told
    assert "1.50 s" in told
    assert "It is [8]. (wrong)" in told
    report(_kept(), console)
    assert "images" not in console.export_text()


def test_what_a_killed_router_has_cost_is_told() -> None:
    seen = replace(_kept(), generated_tokens=6 * 48 + 2, rejoined=1)
    assert [one[:25] for one in seen.verdict(2, 3)] == ["no turn was sent again: n"]
    seen.turns[1] = replace(seen.turns[1], again=1)
    assert seen.verdict(2, 3) == []
    console = Console(width=200, record=True, file=io.StringIO())
    report(seen, console)
    told = console.export_text()
    assert ["2", "1", "1,200", "896"] in [line.split()[:4] for line in told.splitlines()]
    assert "1 turn sent again, 1 answer rejoined. Engines generated 290 tokens" in told
    seen.generated_tokens = 297
    assert seen.verdict(2, 3) == ["7 tokens of answers were computed twice"]


def test_an_image_that_is_encoded_again_is_named() -> None:
    seen = _looked()
    assert seen.verdict(2, 3, encoded_once=True) == []
    seen.turns[4] = replace(seen.turns[4], encoded_images=1)
    assert seen.verdict(2, 3) == []
    assert seen.verdict(2, 3, encoded_once=True) == ["2 images were encoded 3 times"]


@pytest.mark.parametrize(
    ("given", "model", "scheduler", "asked"),
    [
        (["device=cpu"], "embedded", "vllm", "conserve-embedded"),
        (["vision"], "embedded-vision", "conversation_lane", "conserve-embedded-vision"),
        (["vision", "model=their/own"], "their/own", "vllm", "their/own"),
    ],
)  # fmt: skip
def test_a_word_chooses_agents_that_see(
    given: list[str], model: str, scheduler: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []
    seen = _kept()
    # Only placement=conversation promises a handoff.
    seen.turns[0] = replace(seen.turns[0], lmcache_tokens=0)

    @contextlib.contextmanager
    def launched(settings: Settings, arguments: list[str], *_: object) -> Iterator[Any]:
        assert "vision" not in arguments
        assert load(dict(one.split("=") for one in arguments)) == settings
        told.append((settings.model, settings.engine_scheduler))
        yield None, "http://nowhere"

    async def converse(*given: Any, seeing: bool, kill: None) -> Demonstration:
        told.append((given[1], "sees" if seeing else ""))
        return seen

    monkeypatch.setattr(command, "laid_out", lambda settings: settings)
    monkeypatch.setattr(command, "launched", launched)
    monkeypatch.setattr(command, "converse", converse)
    done = CliRunner().invoke(command.cli, [*given, "--conversations", "2", "--turns", "3"])
    assert done.exit_code == 0, done.output
    assert told == [(model, scheduler), (asked, "sees" if "vision" in given else "")]

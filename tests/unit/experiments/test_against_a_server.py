"""Experiments on real engines, played against a server that only looks like one."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from conserve.apis import CHAT
from conserve.media import Lifted, name_of, places
from conserve.settings import MediaSettings, Settings
from deployments.router.media import MediaReader
from experiments import appends, overhead, seeing, stages, unkind, warm
from experiments.harness import Experiment
from tests.unit.experiments.chat import Chat


def test_what_is_appended_is_measured_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat()
    # One conversation in three comes to where the others are not.
    chat.decoders = ["decoder#0", "decoder#0", "decoder#0", "prefiller#0"]
    monkeypatch.setattr(appends, "_AGAIN_S", 0.0)
    monkeypatch.setattr(appends, "_OTHERS_TOKENS", 3_000)
    experiment = Experiment("appends", None, rounds=2, seed=1)
    experiment.option("--tokens", 50)
    experiment.option("--others", 2)
    experiment.parse([])

    async def play(url: str) -> dict[str, appends.Appended]:
        return await appends.measure(experiment, {appends.HOME: url, appends.WHEREVER: url})

    found = chat.run(play)
    assert list(found) == [appends.HOME, appends.WHEREVER]
    for one in found.values():
        assert len(one.ttft_s) == len(one.others_p95_s) == 2
        assert all(
            0 < p95 <= most for p95, most in zip(one.others_p95_s, one.others_most_s, strict=True)
        )
        assert one.taken_tokens == [128, 128]
    assert found[appends.HOME].answers == found[appends.WHEREVER].answers
    appended = [one for one in chat.seen if len(one.body["messages"]) == 3]
    assert len(appended) == 6
    assert {len(one.body["messages"][2]["content"].split()) for one in appended} == {50}
    assert {one.body["cache_salt"] == one.conversation for one in chat.seen} == {True}
    assert any(name not in {one.conversation for one in appended} for name in chat.ended)


def _staged(monkeypatch: pytest.MonkeyPatch, tokens: int) -> tuple[Experiment, Chat]:
    monkeypatch.setattr(stages, "_CALM_S", 0.01)
    experiment = Experiment("stages", None, width=140, rounds=2, seed=1)
    for flag, value in (("--streams", 2), ("--tokens", tokens), ("--images", 2), ("--words", 5)):
        experiment.option(flag, value)
    experiment.parse([])
    return experiment, Chat()


def test_streams_are_measured_while_turns_with_images_have_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, chat = _staged(monkeypatch, 200)

    async def play(url: str) -> dict[str, list[stages.Seen]]:
        return await stages.measure(experiment, {"off": url, "on": url})

    seen = chat.run(play)
    assert [len(ones) for ones in seen.values()] == [2, 2]
    # Three rounds, one of them to warm up; each through both.
    shown = [one for one in chat.seen if isinstance(one.body["messages"][0]["content"], list)]
    assert len(shown) == 12
    pictures = [one.body["messages"][0]["content"][1]["image_url"]["url"] for one in shown]
    assert len(set(pictures)) == 6
    assert sorted(one.conversation for one in chat.seen) == sorted(chat.ended)
    for one in seen["on"]:
        first, last = one.turns
        assert 0 == first.sent_s < first.first_s < last.sent_s < last.first_s
        # Tokens before and after these turns do not count.
        assert 0 < len(one.gaps_s) < sum(map(len, one.arrivals_s)) - 2
        assert one.arrivals_s[0][0] < 0 < last.first_s < one.arrivals_s[0][-1]
    seen["on"][0].answers[2] = "another"
    stages.report(seen, experiment)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "of 2" in line]
    rows = [[cell.strip() for cell in (line[1], *line[-3:-1])] for line in lines]
    assert rows == [["off", "5", "2 of 2"], ["on", "5", "1 of 2"]]
    panels = stages.draw({name: ones[-1] for name, ones in seen.items()}).axes
    assert [len(panel.patches) - 2 for panel in panels] == [4, 4]


def test_a_stream_that_ends_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, chat = _staged(monkeypatch, 5)
    with pytest.raises(RuntimeError, match="--tokens"):
        chat.run(lambda url: stages.measure(experiment, {"off": url}))


def test_unkind_clients_send_beside_agents_and_stop() -> None:
    chat = Chat()
    experiment = Experiment("unkind", None, rounds=1, seed=1)
    for flag, value in (("--seconds", 0.3), ("--agents", 2), ("--connections", 2)):
        experiment.option(flag, value)
    experiment.parse([])
    bad = unkind.Unkind("/v1/chat/completions", b'{"messages": []}')

    async def play(url: str) -> dict[str, unkind.Seen]:
        return await unkind.measure(experiment, url, {"bad": bad})

    seen = chat.run(play)
    assert set(seen) == {unkind.NONE, "bad"}
    assert set(seen["bad"].answers) == {"400"}
    assert not seen[unkind.NONE].answers
    assert all(len(one.p95_s) == 1 and one.p95_s[0] > 0 for one in seen.values())
    unkind.report(seen, experiment)


def test_no_unkind_body_is_longer_than_the_router_takes() -> None:
    kinds = unkind.kinds(Settings(max_body_bytes=10**6, media=MediaSettings(bytes=10**5)))
    lengths = {name: len(kinds[name].body or b"") for name in kinds}
    assert 10**6 - 2_000 < lengths["longest text"] <= 10**6
    assert 10**6 - 2_000 < lengths["most arrays, unbounded"] <= 10**6


@pytest.mark.parametrize("images", [1, 3])
def test_the_largest_bodies_of_images_are_taken_and_each_has_images_of_its_own(images: int) -> None:
    most_bytes = 100_000
    kind = seeing.largest(images, new=True, most_bytes=most_bytes)
    assert kind.body is not None
    reader = MediaReader(Settings(media=MediaSettings(bytes=most_bytes)))
    names = set()
    for body in (kind.body, unkind.varied(kind, kind.body), unkind.varied(kind, kind.body)):
        lifted = Lifted(body)
        assert lifted.size > 0.9 * most_bytes * 4 / 3
        own = reader.named(json.loads(lifted.raw), CHAT, lifted, None)
        names |= {name_of(place.url) for place in places(own, CHAT)}
    assert len(names) == 3 * images


def test_every_system_is_up_and_compared_with_the_bare_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, int, tuple[str, ...]]] = []
    compared: list[warm.System] = []

    @contextlib.contextmanager
    def up(self: Experiment, launch: Any, name: str, wait: Any, port: int) -> Iterator[str]:
        started.append((name, port, ()))
        yield f"url of {name}"

    @contextlib.contextmanager
    def serving(
        self: Experiment, *settings: str, port: int = 8000, name: str = "ConServe"
    ) -> Iterator[str]:
        started.append((name, port, settings[1:]))
        yield f"url of {name}"

    monkeypatch.setattr(Experiment, "up", up)
    monkeypatch.setattr(Experiment, "serving", serving)
    monkeypatch.setattr(warm, "compare", lambda _, systems: compared.extend(systems))
    overhead.main(["--beside", "pausing=off"])
    assert started == [
        (overhead.BARE, 8191, ()),
        ("ConServe", 8000, ()),
        ("ConServe, pausing=off", 8193, ("pausing=off",)),
        (overhead.RAY, 8192, ()),
    ]
    assert [one.name for one in compared] == [
        overhead.BARE, overhead.CONSERVE, overhead.RAY, "ConServe, pausing=off",
    ]  # fmt: skip
    assert all(one.url == f"url of {one.name}" for one in compared)
    compared.clear()
    overhead.main(["--without-ray-serve-llm"])
    assert [one.name for one in compared] == [overhead.BARE, overhead.CONSERVE]

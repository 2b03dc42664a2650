import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autoscale.capacity.profile import CappedPower, Profile, load_profile
from conserve import wire
from conserve_lab.capacity import fit
from conserve_lab.capacity.fit import DecodePoint, MixedPoint, PrefillPoint
from conserve_lab.cli.profile import command as module
from conserve_lab.cli.profile import measure
from conserve_lab.cli.profile.command import _median, cli, make_grid, save_profile
from conserve_lab.cli.profile.measure import (
    Application,
    MeasuredEngine,
    MeasureError,
    find_application,
)


@settings(max_examples=50, deadline=None)
@given(
    longest=st.integers(1024, 300_000),
    capacity=st.integers(20_000, 1_000_000),
    batch=st.integers(4, 256),
)
def test_what_is_measured_fits_the_engine_and_makes_a_curve(
    longest: int, capacity: int, batch: int
) -> None:
    grid = make_grid(longest, capacity, batch)
    assert len(grid.cold) >= 4
    assert max(grid.cold) <= longest
    assert all(new + cached <= longest for new, cached in grid.appends)
    assert all(count <= batch and count * context <= capacity for count, context in grid.decodes)
    assert len({new for _, _, new, _ in grid.beside}) >= 3
    assert all(new + cached <= longest for *_, new, cached in grid.beside)
    assert len({count * context for count, context in grid.decodes}) >= 3
    assert all(count <= batch for count, *_ in grid.beside)
    assert len(grid.handoffs) >= 3
    assert all(first + new <= longest for first, new in grid.turns)
    assert {bool(new) for _, new in grid.turns} == {False, True}
    assert len({count for count, _ in grid.decodes}) >= 3


def _application(batched: int | None = None, capacity: int = 400_000) -> Application:
    engines = (
        MeasuredEngine("e", role, "http://127.0.0.1:9", capacity, batched)
        for role in ("prefiller", "decoder")
    )
    return Application("http://a", "m", *engines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "my profile.json"], "a profile cannot be called 'my profile'"),
        (["--kv-bytes-per-token", "nan"], "--kv-bytes-per-token is nan"),
        (["--largest-batch", "2"], "a curve needs 3 of each"),
        (["--out", "file/p.json"], "cannot be written"),
        (["--data", "file"], "prompts of up to 100 tokens are too short for a curve"),
    ],
)
def test_what_would_fail_after_measuring_is_refused_before(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(url: str) -> Application:
        return _application()

    def measured(*arguments: object) -> NoReturn:
        raise AssertionError("something is measured")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text('{"input_length": 100}')
    monkeypatch.setattr(module, "find_application", find)
    monkeypatch.setattr(module, "Probe", measured)
    given = ["http://a", "--kv-bytes-per-token", "1024", "--out", "p.json", *arguments]
    done = CliRunner(env={"COLUMNS": "100"}).invoke(cli, given)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


class _RefusedProbe:
    """Measures times that follow no curve."""

    def __init__(self, *arguments: object) -> None:
        self._draws = random.Random(1)

    async def __aenter__(self) -> "_RefusedProbe":
        return self

    async def __aexit__(self, *about: object) -> None:
        pass

    async def sees(self) -> bool:
        return False

    async def border(self) -> None:
        return None

    async def cold_prefill(self, tokens: int) -> PrefillPoint:
        return PrefillPoint(tokens, 0, self._draws.uniform(0.01, 1))

    async def append(self, new: int, cached: int) -> PrefillPoint:
        return PrefillPoint(new, cached, self._draws.uniform(0.01, 1))

    async def decode(self, sequences: int, context: int, output: int) -> DecodePoint:
        return DecodePoint(sequences, sequences * context, 0.01)

    async def append_beside(
        self, sequences: int, context: int, new: int, cached: int
    ) -> MixedPoint:
        return MixedPoint(sequences, sequences * context, new, cached, 0.01)


def test_what_was_measured_is_kept_in_a_folder_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(url: str) -> Application:
        return _application()

    monkeypatch.setattr(module, "find_application", find)
    monkeypatch.setattr(module, "Probe", _RefusedProbe)
    out = tmp_path / "new" / "deep" / "p.json"
    done = CliRunner().invoke(
        cli, ["http://a", "--kv-bytes-per-token", "8", "--repeats", "1", "--out", str(out)]
    )
    assert done.exit_code == 2, done.output
    assert "no curve fits" in done.output
    kept = json.loads((out.parent / "p.refused.json").read_text())
    assert len(kept["decode"]) >= 3
    assert not out.exists()


def test_repeated_points_are_one_with_the_median_time() -> None:
    points = [PrefillPoint(128, 0, seconds) for seconds in (0.3, 0.1, 9.0)]
    assert _median(points) == PrefillPoint(128, 0, 0.3)


async def _found(about: dict[str, object]) -> Application:
    """An application, as it is found that says this of both its engines."""
    roles = ("prefiller", "decoder")
    said = {
        "/v1/models": [{"id": "m"}],
        "/v1/engines": [
            {"id": role, "role": role, "url": "u", "capacity_tokens": 7} | about for role in roles
        ],
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"data": said[request.path]})

    application = web.Application()
    application.add_routes([web.get(path, answer) for path in said])
    async with TestServer(application) as server:
        return await find_application(str(server.make_url("/")))


async def test_prefillers_that_host_are_not_measured() -> None:
    """They store nothing that they are not told to, and hand over what they choose to."""
    with pytest.raises(MeasureError, match="start it with placement=conversation"):
        await _found({"hosts": True})


class _Router:
    """Answers turns after a while, and says of each what an engine would have reported.

    Args:
        keeps: whether a second turn finds its history.
    """

    after_token_s = 0.3

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._prompts: dict[str, list[int]] = {}
        self._asked = 0
        self._stored: list[list[int]] = []
        self.transfer_params: list[dict[str, object]] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._answer),
            web.post(wire.PREFILL_PREFIX + "/v1/completions", self._prefill),
            web.get("/v1/conversations/{id}", self._state),
            web.delete("/v1/conversations/{id}", self._release),
        ]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        if not body.get("stream"):
            # Asked as an engine; the decoder has the beginning of an append.
            self.transfer_params.append(body["kv_transfer_params"])
            cached = {"num_vllm_cached_tokens": 600 if len(prompt) > 600 else 0}
            if prompt in self._stored:
                cached["num_lmcache_extra_cached_tokens"] = len(prompt) // 128 * 128
            await asyncio.sleep(0.01)
            return web.json_response({"kv_transfer_params": {"cached_token_stats": cached}})
        self._prompts.setdefault(request.headers["X-Conversation-Id"], []).append(len(prompt))
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(0.05)
        for reason in (None, "length"):
            token = {"choices": [{"index": 0, "text": "a", "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(token)}\n\n".encode())
            await asyncio.sleep(self.after_token_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _prefill(self, request: web.Request) -> web.Response:
        """Answer once the prompt is stored, which the path of turns does not wait for."""
        prompt = (await request.json())["prompt"]
        await asyncio.sleep(0.01)
        self._stored.append(prompt)
        return web.json_response({"prompt_tokens": len(prompt), "lmcache_tokens": 0})

    async def _state(self, request: web.Request) -> web.Response:
        prompts = self._prompts[request.match_info["id"]]
        self._asked += 1
        if self._asked % 2:
            # The report takes its time.
            return web.json_response({"last_turn": None})
        later = len(prompts) > 1
        turn = {
            "prompt_tokens": prompts[-1],
            "lmcache_tokens": 0 if later else prompts[0] // 128 * 128,
            "decoder_cached_tokens": prompts[0] if later and self._keeps else 0,
        }
        return web.json_response({"last_turn": turn})

    async def _release(self, request: web.Request) -> web.Response:
        del self._prompts[request.match_info["id"]]
        return web.json_response({})


async def test_appends_are_asked_for_as_live_turns_are() -> None:
    """With the first prompt's length, or the engine would ask LMCache in vain."""
    router = _Router()
    async with _probe(router.routes()) as probe:
        assert (await probe.append(128, 600)).cached_tokens == 600
    first, append = router.transfer_params[-2:]
    assert first == wire.transfer_params()
    assert append == wire.transfer_params(600)


async def test_a_handoff_is_measured_once_the_prompt_is_stored() -> None:
    async with _probe(_Router().routes()) as probe:
        assert (await probe.handoff(600, lambda new, cached: 0.0)).tokens == 512


@asynccontextmanager
async def _probe(routes: list[web.RouteDef]) -> AsyncIterator[measure.Probe]:
    """Of an application, and of engines, that answer by these routes; the first that fits."""
    served = web.Application()
    served.add_routes(routes)
    async with TestServer(served) as server:
        url = str(server.make_url("/")).rstrip("/")
        engine = replace(_application().decoder, url=url)
        application = Application(url, "m", engine, engine)
        async with measure.Probe(application, range(1000, 4000), seed=1) as probe:
            yield probe


async def test_turns_are_measured_as_clients_have_them() -> None:
    router = _Router()
    async with _probe(router.routes()) as probe:
        begun_s = time.monotonic()
        first = await probe.turn(600, 0)
        beside_s = time.monotonic() - begun_s - first.seconds
        second = await probe.turn(600, 128)
    assert (first.prompt_tokens, first.handed_off_tokens, first.cached_tokens) == (600, 512, 0)
    assert (second.prompt_tokens, second.handed_off_tokens) == (728, 0)
    assert second.cached_tokens == 600
    # To the first token, neither to the second nor to the end.
    assert first.seconds >= 0.05
    assert beside_s >= 2 * router.after_token_s
    # A prefiller's and a decoder's time; for an append the decoder's alone.
    assert first.engines_s >= 0.02
    assert second.engines_s >= 0.01
    assert not router._prompts


async def test_a_second_turn_that_finds_no_history_is_no_measurement() -> None:
    router = _Router(keeps=False)
    async with _probe(router.routes()) as probe:
        with pytest.raises(MeasureError, match="of a second turn's 728 tokens 0 were handed off"):
            await probe.turn(600, 128)
    assert not router._prompts


def test_fits_are_drawn(tmp_path: Path) -> None:
    from conserve_lab.cli.profile.pictures import draw_fits

    profile = load_profile("a40-qwen3-0.6b")
    draw_fits(profile, tmp_path / "empty.png")
    points = {
        "prefill": [
            {"new_tokens": n, "cached_tokens": c, "seconds": profile.prefill.seconds(n, c)}
            for n in (128, 1024)
            for c in (0, 4000)
        ],
        "decode": [
            {"sequences": b, "kv_tokens": b * k, "seconds": profile.decode.step_s(b, b * k)}
            for b in (1, 4)
            for k in (128, 1024)
        ],
        "handoff": [{"tokens": n, "seconds": profile.handoff.seconds(n)} for n in (128, 1024)],
    }
    measured = profile.model_copy(update={"points": json.loads(json.dumps(points))})
    draw_fits(measured, tmp_path / "full.png")
    empty, full = (tmp_path / f"{name}.png" for name in ("empty", "full"))
    assert full.read_bytes().startswith(b"\x89PNG")
    assert full.stat().st_size > empty.stat().st_size


# --- A power cap ----------------------------------------------------------------------------------

_A40 = load_profile("a40-qwen3-0.6b")


class _CappedProbe(_RefusedProbe):
    """Measures what a profile says, prefills 1.3 times and decode steps 1.05 times as long."""

    async def cold_prefill(self, tokens: int) -> PrefillPoint:
        return PrefillPoint(tokens, 0, 1.3 * _A40.prefill.seconds(tokens, 0))

    async def append(self, new: int, cached: int) -> PrefillPoint:
        return PrefillPoint(new, cached, 1.1 * _A40.prefill.seconds(new, cached))

    async def decode(self, sequences: int, context: int, output: int) -> DecodePoint:
        kv_tokens = sequences * context
        return DecodePoint(sequences, kv_tokens, 1.05 * _A40.decode.step_s(sequences, kv_tokens))


def _add_cap(profile: Profile, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    async def find(url: str) -> Application:
        return replace(_application(), model=_A40.model)

    async def limit(meter: object) -> float:
        return 220.0

    async def drawn(*arguments: object) -> CappedPower:
        return CappedPower(cap_w=220, idle_w=30, prefill_w=219, decode_w=180)

    monkeypatch.setattr(module, "find_application", find)
    monkeypatch.setattr(module, "Probe", _CappedProbe)
    monkeypatch.setattr(module, "_drawn", drawn)
    monkeypatch.setattr(module.DrawMeter, "limit_w", limit)
    save_profile(profile, out)
    assert load_profile(out) == profile
    arguments = ["http://a", "--add-cap", "--repeats", "1", "--out", str(out)]
    done = CliRunner(env={"COLUMNS": "100"}).invoke(cli, arguments)
    return done.exit_code, done.output


def test_a_cap_is_added_with_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _A40.model_copy(update={"origin": "measured"})
    status, output = _add_cap(measured, tmp_path / "p.json", monkeypatch)
    assert status == 0, output
    capped = load_profile(tmp_path / "p.json")
    assert [one.cap_w for one in capped.power] == [300, 220, 200]
    added = capped.power_at(220)
    assert added.prefill_slowdown == pytest.approx(1.3)
    assert added.decode_slowdown == pytest.approx(1.05)
    assert (capped.prefill, capped.decode) == (measured.prefill, measured.decode)
    assert "prefills take 1.30 times as long, decode steps 1.05" in output


def test_a_cap_of_another_model_is_refused_and_the_profile_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = _A40.model_copy(update={"origin": "measured", "model": "other"})
    status, output = _add_cap(known, tmp_path / "p.json", monkeypatch)
    assert status == 2, output
    assert "is of the model other" in " ".join(output.split())
    assert load_profile(tmp_path / "p.json") == known


class _LaneProbe:
    """``held`` has the decodes' SMs of each measurement, of which 32 may fail; 0 is a release."""

    def __init__(self, sizes_sms: list[int] | None, failure: BaseException | None = None) -> None:
        self._sizes_sms, self._failure, self.held = sizes_sms, failure, list[int]()

    async def border(self) -> list[int] | None:
        self.held.append(0)
        return self._sizes_sms

    async def stage(self, sms: int, longest: int, tokens: int = 0, pixels: int = 0) -> object:
        self.held.append(sms)
        if self._failure is not None and sms == 32:
            raise self._failure
        return fit.StagePoint(sms, (pixels or tokens) / 1_000, (sms + bool(pixels)) / 1_000)


@pytest.mark.parametrize("failure", [None, fit.FitError("why"), asyncio.CancelledError()])
async def test_stages_are_measured_at_each_place_and_then_the_border_is_released(
    failure: BaseException | None, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = _LaneProbe([16, 32, 132], failure)

    async def measured() -> object:
        sizes_sms = await module._stage_sizes(_application(), probe, True)
        with module._Repetitions(3, random.Random(0)).of(4) as repeat:
            return await module._stages(probe, repeat, sizes_sms, 4096, 100.0)

    if isinstance(failure, asyncio.CancelledError):
        with pytest.raises(asyncio.CancelledError):
            await measured()
    elif (curves := await measured()) is not None:
        sizes = [tuple(size.model_dump().values()) for size in curves.sizes]
        assert sizes == [(16, 0.896, 2.048, 0.017, 0.016), (32, 0.896, 2.048, 0.033, 0.032)]
        assert (curves.sms, curves.output_tokens) == (132, 100.0)
        assert sorted(probe.held) == [0, 0, *[16] * 8, *[32] * 8]
    else:
        assert "Stages were not measured: why." in capsys.readouterr().out
    assert probe.held[-1] == 0


async def test_a_stage_is_timed_by_the_engines_account_beside_four_answers() -> None:
    held, decodes = [], []

    async def border(request: web.Request) -> web.Response:
        held.append(await request.json())
        return web.json_response([16, 132])

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            told = wire.EngineTold(stages=wire.StageTimes(0.0, 0.25, 0.125)).params()
            await asyncio.sleep(0.4 if wire.TURN in body["kv_transfer_params"] else 0)
            return web.json_response({"kv_transfer_params": told})
        response = web.StreamResponse()
        await response.prepare(request)
        decodes.append(body)
        while True:
            await response.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
            await asyncio.sleep(0.01)

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [web.post(path, answer) for path in paths] + [web.post("/conserve/border", border)]

    async with _probe(routes) as probe:
        encode = await probe.stage(16, 4096, pixels=64)
        prefill = await probe.stage(16, 4096, tokens=900)
    assert (encode.seconds, prefill.seconds) == (0.25, 0.125)
    assert min(encode.step_s, prefill.step_s) > 0
    assert len(decodes) == 8
    assert [(one["decode_sms"], one["for_s"] > 0) for one in held] == [(16, True)] * 2

"""The border between the SMs of an engine's steps and of its lane."""

import random
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from conserve.settings import Settings
from conserve_inside.addon import stage_shares
from conserve_inside.border import BORDER_PATH, HoldBorder, offer_border
from conserve_inside.lane.scheduler_lane import LaneNotes
from conserve_inside.lane.thread import Turns
from conserve_inside.lane.worker import LaneWorking
from conserve_inside.scheduler.commands import SchedulerClient
from conserve_inside.sm_slots import pairs
from conserve_inside.sm_slots.pairs import Bound
from tests.unit.conserve_inside.lane.stand_in import LaneStandIn
from tests.unit.conserve_inside.scheduler.play import POLICIES, play
from tests.unit.conserve_inside.scheduler.stand_in import StandIn
from tests.unit.conserve_inside.scheduler.test_commands import Core
from tests.unit.conserve_inside.sm_slots.test_sm_slots import of_the_whole_gpu
from tests.unit.deployments.engine.stepping import words
from tests.unit.hetero.cuda_standin import Driver

SIZES_SMS = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


class Pairs:
    """As `SlotPairs`, without streams that anything runs on."""

    sizes_sms = SIZES_SMS

    def __init__(self) -> None:
        self.bound = Bound("all", "least", 100)
        self.asked: list[int] = []

    def bind(self, decode_sms: int) -> Bound:
        self.asked.append(decode_sms)
        self.bound = Bound(f"steps {decode_sms}", f"lane {decode_sms}", decode_sms)
        return self.bound


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    found = Pairs()
    monkeypatch.setattr(pairs, "_pairs", found)
    return found


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_both_have_all_sms_where_they_are_alone(made: Pairs, kind: str) -> None:
    engine = LaneStandIn(kind=kind, policies=POLICIES)
    play(engine, seed=0)
    engine.end()
    # Until the worker has said which sizes there are, nothing is decided.
    asked = [one for one in engine.borders if one[2] is not None]
    assert len(asked) > 0.9 * len(engine.borders)
    assert any(computes and job for computes, job, _ in asked)
    for computes, job, sms in asked:
        if not job:
            assert sms == 100
        elif not computes:
            assert sms == 0
        else:
            assert sms in SIZES_SMS[:-1]


def test_shares_of_a_profile_are_the_same_parts_of_the_engines_sms(made: Pairs) -> None:
    shares = stage_shares(Settings(profile="a6000-cogagent"))
    engine = LaneStandIn(policies=POLICIES | {"stages": shares})
    play(engine, seed=0)
    engine.end()
    beside = {sms for computes, job, sms in engine.borders if computes and job and sms}
    # Of 84, 30 with one prefill, and down to 12 with more: the next larger of ten sizes of 100.
    assert 40 in beside
    assert beside <= {40, 30, 20}


def test_late_steps_beside_the_lane_get_more_sms(made: Pairs) -> None:
    chance = random.Random(0)
    engine = LaneStandIn(policies=POLICIES, step_s=0.04)
    for number in range(2):
        engine.add(f"decode{number}", words(chance, 40), 200)
    for _ in range(6):
        engine.step()
    for number in range(3):
        engine.add(f"long{number}", words(chance, 1_400))
        while f"long{number}" in engine.live:
            engine.step()
    engine.drain()
    beside = [sms for computes, job, sms in engine.borders if computes and job and sms]
    engine.end()
    # Each step takes twice the bound of POLICIES.
    assert beside == sorted(beside)
    assert beside[0] == 10
    assert beside[-1] > 20
    said = engine.scheduler.lane.observed()
    assert said["decode_sms"] == 100


async def test_nothing_is_decided_or_held_where_nothing_moves() -> None:
    assert await _asked(StandIn(), 40, 600.0) is None
    assert "for_s" in (await _asked(StandIn(), 40, 601.0))["error"]
    assert "json" in (await _asked(StandIn(), 40, 600.0, "text/plain"))["error"]
    engine = LaneStandIn(policies=POLICIES)
    assert await _asked(engine, 40, 600.0) == []
    play(engine, seed=0, conversations=4)
    engine.end()
    assert {sms for _, _, sms in engine.borders} == {None}
    assert engine.scheduler.lane.observed()["decode_sms"] is None


class _Worker:
    """What `LaneWorking` is laid over."""

    def __init__(self) -> None:
        self.bound_in_step: list[Bound] = []

    def execute_model(self, scheduler_output: Any) -> None:
        self.bound_in_step.append(pairs.slot_pairs().bound)


class _Both(LaneWorking, _Worker):
    pass


def test_the_border_moves_in_a_steps_turn_before_the_model_runs(
    made: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, bind, in_turn = _Both(), made.bind, list[bool]()
    worker._turns = turns = Turns(alternate=False)
    monkeypatch.setattr(made, "bind", lambda sms: (in_turn.append(turns._busy), bind(sms))[1])
    for notes in (LaneNotes((), 32, 40), LaneNotes((), 32), None):
        metadata = SimpleNamespace(lane=notes)
        worker.execute_model(SimpleNamespace(kv_connector_metadata=metadata))
    worker.execute_model(SimpleNamespace(kv_connector_metadata=None))
    assert made.asked == [40]
    assert in_turn == [True]
    assert worker.bound_in_step[0].decode_sms == 40


async def _asked(
    engine: StandIn, decode_sms: int = 0, for_s: float = 0.0, kind: str = "application/json"
) -> Any:
    """What an engine's server answers to `HoldBorder`."""
    app = FastAPI()
    offer_border(app, SchedulerClient(SimpleNamespace(engine_core=Core(engine))).command)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e") as client:
        body = msgspec.json.encode(HoldBorder(decode_sms, for_s))
        headers = {"Content-Type": kind}
        return (await client.post(BORDER_PATH, content=body, headers=headers)).json()


async def test_a_held_border_stays_where_it_is_until_it_is_released_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "_pairs", of_the_whole_gpu(Driver()))
    engine, chance = LaneStandIn(policies=POLICIES), random.Random(0)

    def turn(name: str) -> tuple[set[int | None], int]:
        """The borders while a prompt within the budget comes beside a decode; how often by lane."""
        engine.borders.clear()
        done = engine.scheduler.lane.policy.done
        engine.add(f"decodes {name}", words(chance, 30), 60)
        for _ in range(3):
            engine.step()
        engine.add(name, words(chance, 100))
        engine.drain()
        return {sms for *_, sms in engine.borders}, engine.scheduler.lane.policy.done - done

    turn("first")
    sizes = await _asked(engine)
    assert sizes == [16, 32, 40, 56, 72, 80, 96, 112, 120, 132]
    # The next larger size.
    assert await _asked(engine, 33, 600.0) == sizes
    assert turn("held") == ({40}, 1)
    assert await _asked(engine) == sizes
    assert turn("released") == ({132}, 0)
    await _asked(engine, 56, 50.0)
    engine.now_s += 51.0
    assert turn("over") == ({132}, 0)
    engine.end()

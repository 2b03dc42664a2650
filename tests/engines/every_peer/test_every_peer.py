"""The peers that `tests/engines/peers` leaves out: `make test-peers`."""

import os
from pathlib import Path

import pytest

from conserve_lab.peers.pinning import engine_processes
from tests.engines.peers.peers import FIRST, LATER, affinity, converse, counted, started, threads

pytestmark = pytest.mark.usefixtures("machine_alone")


def test_ray_serve_llm_keeps_a_conversation_on_its_replica(tmp_path: Path) -> None:
    with started("ray_serve_llm", tmp_path) as peer:
        # By chance, each later turn would be on the other replica every second time.
        for number in range(4):
            _, second, third = converse(peer, f"conversation-{number}")
            assert second >= 384
            assert third >= 384


@pytest.mark.parametrize("name", ["vllm_router", "vllm_lmcache"])
def test_vllms_router_keeps_a_program_on_its_server(tmp_path: Path, name: str) -> None:
    with started(name, tmp_path) as peer:
        for number in range(4):
            _, second, third = converse(peer, f"conversation-{number}")
            assert second >= 384
            assert third >= 384


def test_vllm_with_the_cores_of_all(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    with started("vllm", tmp_path, engines=len(cores), cores=tuple(cores)) as peer:
        assert peer.described["cores"] == [cores]
        first, second, third = converse(peer, "conversation")
        assert first == 0
        assert 384 <= second <= third
        (engine,) = engine_processes()
        assert {tuple(affinity(pid)) for pid in threads(engine)} == {tuple(cores)}


def test_collocated_hands_nothing_off(tmp_path: Path) -> None:
    with started("collocated", tmp_path, engines=1) as peer:
        _, second, third = converse(peer, "conversation")
        assert 384 <= second <= third
        assert counted(peer, "handoffs", "later_prefills") == [0, 0]


def test_per_turn_prefills_wrongly_decided_turns_elsewhere(tmp_path: Path) -> None:
    with started("per_turn", tmp_path, wrong_decision_rate=0.5) as peer:
        before = counted(peer, "later_prefills", "prefiller_loaded_tokens")
        # Of turns that its decoder prefilled, a prefiller has to load whole chunks afterwards.
        converse(peer, "conversation", turns=9, later=f"{LATER} {FIRST[:1200]}")
        after = counted(peer, "later_prefills", "prefiller_loaded_tokens")
        assert 0 < after[0] - before[0] < 8
        assert after[1] > before[1]


def test_full_disaggregation_prefills_and_moves_every_turn(tmp_path: Path) -> None:
    with started("full_disaggregation", tmp_path) as peer:
        start = counted(peer, "handoffs", "later_prefills")
        converse(peer, "short turns")
        short = counted(peer, "handoffs", "later_prefills")
        # Each later turn brings whole chunks that no decoder has.
        converse(peer, "long turns", turns=4, later=f"{LATER} {FIRST[:1200]}")
        long = counted(peer, "handoffs", "later_prefills")
    # A short turn may have no whole chunk to move.
    assert short[1] - start[1] == 2
    assert [now - then for now, then in zip(long, short, strict=True)] == [4, 3]

"""Each peer, started once: it serves a conversation, and its later turns find their history."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.peers import Options, Peer, start
from benchmarks.peers.pinning import engine_processes
from benchmarks.peers.plan import free_port
from tests.engines.applications import START_S
from tests.engines.metrics import metric

pytestmark = pytest.mark.usefixtures("machine_alone")

FIRST = "open read file class return import value index " * 60
LATER = "close the file and print what was read"


@contextmanager
def _started(name: str, logs: Path, **options: object) -> Iterator[Peer]:
    chosen = Options(port=free_port(), logs=logs, timeout_s=START_S, **options)  # type: ignore[arg-type]
    with start(name, chosen) as peer:
        assert peer.model == "conserve-embedded"
        assert peer.described["engines"] == len(engine_processes())
        yield peer


def _converse(peer: Peer, name: str, turns: int = 3, later: str = LATER) -> list[int]:
    """Some turns; how many tokens of each prompt were found in caches."""
    headers = {peer.session_header: name} if peer.session_header else {}
    messages: list[dict[str, str]] = []
    cached = []
    for turn in range(turns):
        messages.append({"role": "user", "content": later if turn else f"{name} {FIRST}"})
        body = {
            "model": peer.model,
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
        }
        reply = httpx.post(
            peer.url + "/v1/chat/completions", json=body, headers=headers, timeout=180
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()["choices"][0]["message"]["content"]
        assert answer.strip()
        messages.append({"role": "assistant", "content": answer})
        cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached


def _counted(peer: Peer, *names: str) -> list[float]:
    page = httpx.get(peer.url + "/metrics", timeout=30).text
    return [metric(f"conserve_{name}_total", page) for name in names]


def test_ray_serve_llm_keeps_a_conversation_on_its_replica(tmp_path: Path) -> None:
    with _started("ray_serve_llm", tmp_path) as peer:
        # By chance, each later turn would be on the other replica every second time.
        for number in range(4):
            _, second, third = _converse(peer, f"conversation-{number}")
            assert second >= 384
            assert third >= 384


def test_ray_pd_moves_what_it_prefilled(tmp_path: Path) -> None:
    with _started("ray_pd", tmp_path) as peer:
        first, second, third = _converse(peer, "conversation")
        # The decode replica found all whole chunks of each prompt in LMCache.
        assert first >= 384
        assert first <= second <= third


def test_vllm_with_the_cores_of_all(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    with _started("vllm", tmp_path, engines=len(cores), cores=tuple(cores)) as peer:
        assert peer.described["cores"] == [cores]
        first, second, third = _converse(peer, "conversation")
        assert first == 0
        assert 384 <= second <= third
        (engine,) = engine_processes()
        assert {tuple(_affinity(pid)) for pid in _threads(engine)} == {tuple(cores)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_conserve_with_a_core_an_engine(tmp_path: Path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    with _started("conserve", tmp_path, cores=cores) as peer:
        before = _counted(peer, "handoffs", "later_prefills")
        _converse(peer, "conversation")
        after = _counted(peer, "handoffs", "later_prefills")
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0]
        pinned = [
            {tuple(_affinity(pid)) for pid in _threads(engine)} for engine in engine_processes()
        ]
        assert sorted(pinned) == [{(core,)} for core in cores]


def test_collocated_hands_nothing_off(tmp_path: Path) -> None:
    with _started("collocated", tmp_path, engines=1) as peer:
        _, second, third = _converse(peer, "conversation")
        assert 384 <= second <= third
        assert _counted(peer, "handoffs", "later_prefills") == [0, 0]


def test_per_turn_prefills_wrongly_decided_turns_elsewhere(tmp_path: Path) -> None:
    with _started("per_turn", tmp_path, wrong_decision_rate=0.5) as peer:
        before = _counted(peer, "later_prefills", "prefiller_loaded_tokens")
        # Of turns that its decoder prefilled, a prefiller has to load whole chunks afterwards.
        _converse(peer, "conversation", turns=9, later=f"{LATER} {FIRST[:1200]}")
        after = _counted(peer, "later_prefills", "prefiller_loaded_tokens")
        assert 0 < after[0] - before[0] < 8
        assert after[1] > before[1]


def test_full_disaggregation_prefills_and_moves_every_turn(tmp_path: Path) -> None:
    with _started("full_disaggregation", tmp_path) as peer:
        start = _counted(peer, "handoffs", "later_prefills")
        _converse(peer, "short turns")
        short = _counted(peer, "handoffs", "later_prefills")
        # Each later turn brings whole chunks that no decoder has.
        _converse(peer, "long turns", turns=4, later=f"{LATER} {FIRST[:1200]}")
        long = _counted(peer, "handoffs", "later_prefills")
    # A short turn may have no whole chunk to move.
    assert short[1] - start[1] == 2
    assert [now - then for now, then in zip(long, short, strict=True)] == [4, 3]


def _threads(engine: psutil.Process) -> list[int]:
    processes = [engine, *engine.children(recursive=True)]
    return [thread.id for process in processes for thread in process.threads()]


def _affinity(pid: int) -> list[int]:
    return sorted(os.sched_getaffinity(pid))

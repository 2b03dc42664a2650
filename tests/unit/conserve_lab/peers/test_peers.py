"""Peers: their options, what they are started with, and what is said when they cannot be."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from conserve.settings import load
from conserve_lab.peers import PEERS, Options, PeerUnavailable, start, systems
from conserve_lab.peers.pinning import share_out
from conserve_lab.peers.plan import Part, PeerPlan, engine_arguments, free_port
from conserve_lab.peers.running import answers, warm_up
from tests.unit.conserve_lab.stub import Stub, refuse, served


@pytest.fixture(autouse=True)
def router_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of a plan here is looked at, and not started."""
    monkeypatch.setattr(systems, "_ROUTER_INSTALLED", Path(sys.executable))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": {"kv_transfer_config": {}}}, "engine.kv_transfer_config"),
        ({"engines": 2, "cores": (0,)}, "cores: 1 different ones for 2 engines"),
        ({"engines": 1, "cores": (4096,)}, "cores: [4096] are not among"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        Options(**options)
    assert said in str(caught.value)


def test_all_engines_of_all_peers_have_the_same_arguments() -> None:
    options = Options(engine={"max_model_len": 4096}, device="cpu")
    shared = engine_arguments(options)
    assert shared["max_model_len"] == 4096
    own = {"max_num_batched_tokens", "kv_transfer_config"}
    for name, peer in PEERS.items():
        for arguments in peer(options).engine_arguments.values():
            assert {key: arguments[key] for key in arguments if key not in own} == shared, name


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_as_many_engines_as_asked_for(name: str) -> None:
    plan = PEERS[name](Options(engines=4, device="cpu"))
    assert plan.engines == (1 if name == "vllm" else 4)
    collocated = (
        *("vllm", "vllm_router", "vllm_lmcache", "vllm_lmcache_hash"),
        *("ray_serve_llm", "collocated"),
    )
    assert plan.prefillers == (0 if name in collocated else 1)


@pytest.mark.parametrize(
    "name", ["conserve", "elastic", "ray_pd", "per_turn", "full_disaggregation"]
)
def test_one_engine_cannot_be_disaggregated(name: str) -> None:
    with pytest.raises(PeerUnavailable, match=f"{name} needs a prefiller and a decoder"):
        PEERS[name](Options(engines=1))


@pytest.mark.parametrize(
    "name", ["conserve", "elastic", "collocated", "per_turn", "full_disaggregation"]
)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_conserve_accepts_the_settings_of_each_placement(name: str, device: Any) -> None:
    options = Options(engines=3, device=device, wrong_decision_rate=0.2, engine={"seed": 7})
    plan = PEERS[name](options)
    (part,) = plan.parts
    given = part.command[part.command.index("conserve.app") + 1 :]
    settings = load(dict(item.split("=", 1) for item in given))
    policies = {"conserve": "conversation", "per_turn": "per_turn:0.2"}
    assert settings.placement == policies.get(name, name)
    assert settings.prefiller_replicas == plan.prefillers
    assert settings.decoders.replicas == plan.decoders
    assert settings.engine["seed"] == 7
    assert settings.model_id == options.served_model
    assert settings.lmcache.port == settings.lmcache.http_port == 0


def test_elastic_is_what_a_user_starts() -> None:
    """With a chunk of its own it was compared unfairly with others, which have vLLM's."""
    plan = PEERS["elastic"](Options(device="cpu"))
    (part,) = plan.parts
    assert not [one for one in part.command if "max_num_batched_tokens" in one]
    for arguments in plan.engine_arguments.values():
        assert "max_num_batched_tokens" not in arguments


def test_cores_are_shared_out() -> None:
    assert share_out([3, 5], 2) == [[3], [5]]
    assert share_out([3, 5], 1) == [[3, 5]]
    with pytest.raises(ValueError, match="3 engines for 2 cores"):
        share_out([3, 5], 3)


async def _say_yes(request: web.Request, response: web.StreamResponse) -> None:
    await response.prepare(request)
    await response.write(b'{"choices": [{"message": {"content": "yes"}}]}')


def test_warming_up_is_conversations_of_two_turns_on_every_engine() -> None:
    plan = PeerPlan((Part("x", ("x",)),), {}, prefillers=1, decoders=1, releases=True)
    with served(Stub(choose=lambda body: _say_yes)) as stub:
        warm_up(stub.url, "stub-model", plan, deadline_s=time.monotonic() + 60)
    names = {turn.headers["X-Conversation-Id"] for turn in stub.turns}
    assert len(names) == 12
    assert [len(turn.body["messages"]) for turn in stub.turns] == [1, 3] * 12
    assert set(stub.released) == names


def test_a_peer_that_refuses_its_first_turn_is_not_available() -> None:
    plan = PeerPlan((Part("x", ("x",)),), {}, prefillers=0, decoders=1)
    with (
        served(Stub(choose=lambda body: refuse)) as stub,
        pytest.raises(PeerUnavailable, match=r"a first turn was refused: 429 \{"),
    ):
        warm_up(stub.url, "stub-model", plan, deadline_s=time.monotonic() + 60)


def test_a_peer_that_dies_while_it_starts_takes_its_other_processes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    first = (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")
    second = (sys.executable, "-c", "raise ValueError('unknown connector')")
    parts = (Part("first", first, ready_url=f"http://127.0.0.1:{port}"), Part("second", second))
    plan = PeerPlan(parts, {}, prefillers=0, decoders=1)
    monkeypatch.setitem(PEERS, "fake", lambda options: plan)
    with (
        pytest.raises(PeerUnavailable, match=r"second ended .* ValueError: unknown connector"),
        start("fake", Options(port=free_port(), logs=tmp_path)),
    ):
        pass
    assert not answers(f"http://127.0.0.1:{port}")


_NEVER_READY = """
import sys
from conserve_lab.peers import Options, running
from conserve_lab.peers.plan import Part, PeerPlan

part = Part("part", (sys.executable, "-c", "import time; time.sleep(60)"))
plan = PeerPlan((part,), {}, prefillers=0, decoders=1)
running.PEERS["fake"] = lambda options: plan
with running.start("fake", Options(port=int(sys.argv[1]))):
    pass
"""


def test_a_start_that_is_terminated_leaves_nothing() -> None:
    command = [sys.executable, "-c", _NEVER_READY, str(free_port())]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        parent = psutil.Process(process.pid)
        while not (started := parent.children()):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)
        process.terminate()
        _, told = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in told
    assert not any(child.is_running() for child in started)


_NOTED = """
import contextlib, sys
from pathlib import Path
from conserve_lab.peers import apart, Peer

@contextlib.contextmanager
def start(name, options, tell):
    try:
        yield Peer(name, "http://127.0.0.1:1", "model", None, True, {})
    finally:
        Path(sys.argv[2]).write_text("stopped")

apart.start = start
apart.main()
"""


def test_a_peer_in_a_process_of_its_own_stops_when_its_caller_is_gone(tmp_path: Path) -> None:
    note = tmp_path / "note"
    command = [sys.executable, "-c", _NOTED, "vllm", str(note)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(asdict(Options(engines=1))).encode() + b"\n")
        child.stdin.flush()
        assert "peer" in json.loads(child.stdout.readline())
        assert not note.exists()
        child.stdin.close()
        assert child.wait(60) == 0
    assert note.read_text() == "stopped"

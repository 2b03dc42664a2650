"""Peers: their options, what they are started with, and what is said when they cannot be."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from conserve.launch import Launch
from conserve.settings import load
from conserve_lab.peers import PEERS, Options, PeerUnavailable, pinning, start, systems
from conserve_lab.peers.__main__ import peers
from conserve_lab.peers.pinning import pin, share_out
from conserve_lab.peers.plan import Part, PeerPlan, engine_arguments, free_port
from conserve_lab.peers.running import answers, until_ready, warm_up


@pytest.fixture(autouse=True)
def router_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of a plan here is looked at, and not started."""
    monkeypatch.setattr(systems, "_ROUTER_INSTALLED", Path(sys.executable))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": 0}, "engines: 0"),
        ({"port": 80}, "port: 80"),
        ({"wrong_decision_rate": 1.5}, "wrong_decision_rate: 1.5"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0"),
        ({"timeout_s": 0}, "timeout_s: 0"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"model": ""}, "model"),
        ({"engine": {"kv_transfer_config": {}}}, "engine.kv_transfer_config"),
        ({"engine": {"dtype": object()}}, "engine"),
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


def test_vllms_router_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "_ROUTER_INSTALLED", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PeerUnavailable, match=r"make \.clients/vllm-router/\.installed"):
        PEERS["vllm_router"](Options())


def test_cores_are_shared_out() -> None:
    assert share_out([3, 5], 2) == [[3], [5]]
    assert share_out([3, 5], 1) == [[3, 5]]
    with pytest.raises(ValueError, match="3 engines for 2 cores"):
        share_out([3, 5], 3)


@pytest.mark.parametrize(("written", "warned"), [("1\n", True), ("0\n", False), (None, False)])
def test_cores_that_are_shared_out_by_session_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, warned: bool
) -> None:
    file = tmp_path / "sched_autogroup_enabled"
    if written is not None:
        file.write_text(written)
    monkeypatch.setattr(pinning, "_AUTOGROUP", file)
    problem = pinning.autogroup_warning()
    assert warned == ("kernel.sched_autogroup_enabled=0" in (problem or ""))
    assert warned or problem is None


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """A process with a second thread, as engines have many."""
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    code += "; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def test_all_threads_of_an_engine_are_pinned(sleeper: psutil.Process) -> None:
    core = max(os.sched_getaffinity(0))
    assert pin([sleeper], [core]) == [[core]]
    threads = sleeper.threads()
    assert len(threads) == 2
    assert all(os.sched_getaffinity(thread.id) == {core} for thread in threads)


def test_a_process_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    with (
        Launch([], log, None, [sys.executable, "-c", "import time; time.sleep(60)"]) as launch,
        pytest.raises(PeerUnavailable, match="part was not ready in time: it said nothing"),
    ):
        until_ready("part", launch, log, lambda: False, deadline_s=0)


class Server(ThreadingHTTPServer):
    """Answers turns, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []
        self.refuses = False


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("X-Conversation-Id"), body))
        self.send_response(400 if self.server.refuses else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode())

    def do_DELETE(self) -> None:
        self.server.seen.append(("DELETE", self.path.rpartition("/")[2], {}))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on a thread of its own."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_warming_up_is_conversations_of_two_turns_on_every_engine(server: Server) -> None:
    plan = PeerPlan((Part("x", ("x",)),), {}, prefillers=1, decoders=1, releases=True)
    warm_up(server.url, "model", plan, deadline_s=time.monotonic() + 60)
    turns = [(name, body) for path, name, body in server.seen if path == "/v1/chat/completions"]
    names = {name for name, _ in turns}
    assert len(names) == 12
    assert [len(body["messages"]) for _, body in turns] == [1, 3] * 12
    assert {name for path, name, _ in server.seen if path == "DELETE"} == names


def test_a_peer_that_refuses_its_first_turn_is_not_available(server: Server) -> None:
    server.refuses = True
    plan = PeerPlan((Part("x", ("x",)),), {}, prefillers=0, decoders=1)
    with pytest.raises(PeerUnavailable, match=r"a first turn was refused: 400 \{"):
        warm_up(server.url, "model", plan, deadline_s=time.monotonic() + 60)


def test_no_port_is_given_twice() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == len(ports)


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vlm"], "no peer 'vlm'"),
        (["vllm", "--cores", "a"], "--cores a: not numbers"),
        (["vllm", "--engine", "dtype"], "--engine dtype: not NAME=VALUE"),
        (["vllm", "--engine", "model=x"], "engine.model cannot be set"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    shown = CliRunner().invoke(peers, ["start", *arguments])
    assert shown.exit_code == 2
    assert said in " ".join(shown.output.split())

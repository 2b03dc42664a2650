"""A real node actor, on a real Ray cluster, with the stand-in's GPUs: caps end with everything."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.power import DIRECTORY_VARIABLE
from tests.checkout import ROOT
from tests.engines.processes import processes
from tests.nvml.standin import Machine

PATIENCE_S = 300.0

# An engine's end, without an engine: it leases SMs as its worker would, beats, and says once a
# second what it knows. The first starts Ray, the others are told where it is. A line on its input
# has it leave.
ENGINE = """
import asyncio, json, sys, threading, time
import ray
from conserve.settings import load
from conserve_inside.sm_slots.lease import lease_slots
from deployments.node.node import NodeClient
from hetero.gpus import EngineUse
from hetero.power import Cap

gpu, name, slots, address = sys.argv[1:]
options = {"namespace": "serve", "log_to_driver": False}
if address:
    ray.init(address=address, **options)
else:
    ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, **options)
lmcache = {"size_gb": 0.1, "port": 0}
client = NodeClient("test", load({"lmcache": lmcache}))
cap = Cap(fraction=2 / 3)
client.use = EngineUse(name, (), cap)
client.keep_beating()
asked_s = time.monotonic()
lease = lease_slots(gpu, int(slots), name, client.actor_name)
waited_s = time.monotonic() - asked_s
client.use = EngineUse(name, (gpu,), cap, (lease,))
left = threading.Event()

def leave():
    sys.stdin.readline()
    asyncio.run(client.leave(name))
    left.set()

threading.Thread(target=leave, daemon=True).start()
leased = [lease.units.start, lease.units.stop, lease.sms]
while True:
    energy = client.energy
    said = {
        "joules": energy.joules if energy else None, "leased": leased, "waited_s": waited_s,
        "left": left.is_set(), "address": ray.get_runtime_context().gcs_address,
    }
    try:
        said |= ray.get(client._connect().status.remote(), timeout=30)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        said["down"] = str(error)
    print(json.dumps(said), flush=True)
    time.sleep(1)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "gpus", real_time=True)


@pytest.fixture
def engine(
    machine_alone: None, machine: Machine, tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    process = start(machine, tmp_path, "decoder", 6)
    yield process
    left = processes("", below=process.pid) if process.poll() is None else []
    process.kill()
    process.communicate()
    _kill(left)
    # Whoever is killed is still seen until the kernel is done with it.
    eventually("no process is left", lambda: not processes(""))


def start(
    machine: Machine, folder: Path, name: str, slots: int, address: str = ""
) -> subprocess.Popen[str]:
    """An engine's end of this name, that wants so many tenths of the first GPU."""
    environment = machine.environment()
    environment[DIRECTORY_VARIABLE] = str(folder / "power")
    # A token that lies about here is for the first alone to find.
    environment["RAY_AUTH_MODE"] = "disabled"
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, machine.gpus[0].id, name, str(slots), address],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _kill(doomed: list[psutil.Process]) -> None:
    # Some end by themselves when the one that started them dies.
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def limits(machine: Machine) -> list[int]:
    return [gpu.limit_mw // 1000 for gpu in machine.gpus]


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


def said(engine: subprocess.Popen[str], enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first line that is enough."""
    assert engine.stdout is not None
    deadline_s = time.monotonic() + PATIENCE_S
    for line in engine.stdout:
        # Ray tells of killed workers there too.
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            if enough(found):
                return found
        assert time.monotonic() < deadline_s, line
    raise AssertionError("the engine's end has ended")


def test_caps_energy_and_slots_live_and_die_with_the_actor(
    machine: Machine, engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "power"
    first = machine.gpus[0]
    first.load_mw = 250_000
    # Energy comes with beats; it is what a GPU capped at 200 W can draw.
    found = said(engine, lambda line: (line["joules"] or 0) > 400)
    assert limits(machine) == [200, 300]
    (record,) = folder.glob("*.json")
    assert json.loads(record.read_text())["previous_w"] == 300
    assert found["gpus"]["caps_w"] == {first.id: 200}
    # Six tenths of 84 SMs, in fours, from the first on.
    assert found["leased"] == [0, 13, 52]
    # Killed, the actor leaves no cap behind; Ray starts it again, and beats bring the cap back.
    set_calls, killed = first.set_calls, found["agent_pid"]
    os.kill(killed, signal.SIGKILL)
    eventually("it is put back, and set again", lambda: first.set_calls >= set_calls + 2)
    eventually("the cap holds again", lambda: limits(machine) == [200, 300])
    again = said(engine, lambda line: bool(line.get("gpus", {}) and line["gpus"]["caps_w"]))
    assert again["agent_pid"] != killed
    # It learns what is leased from the engine that has it.
    said(engine, lambda line: bool(line.get("gpus")) and line["gpus"]["sm_leases"] == 1)
    # The whole of Ray goes, at once.
    _kill(processes("", below=engine.pid))
    engine.kill()
    eventually("the limit is put back", lambda: limits(machine) == [300, 300])
    eventually("no record is left", lambda: not [*folder.glob("*.json")])
    eventually("no process is left", lambda: not processes(""))


def test_slots_come_back_whatever_ends_their_engine(
    machine: Machine, engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    """By a word of its own, or by ``kill -9``: the next one gets the same SMs, after a while."""
    address = said(engine, lambda line: bool(line["leased"]))["address"]
    others = [start(machine, tmp_path, "prefiller-1", 4, address)]
    try:
        first = said(others[0], lambda line: bool(line["leased"]))
        assert first["leased"] == [13, 21, 32]
        others[0].kill()
        others.append(start(machine, tmp_path, "prefiller-2", 4, address))
        second = said(others[1], lambda line: bool(line["leased"]))
        assert second["leased"] == first["leased"]
        assert others[1].stdin is not None
        others[1].stdin.write("leave\n")
        others[1].stdin.flush()
        # It is there still, and has none: nobody has to wait until it is missed.
        left = said(others[1], lambda line: line["left"])
        assert left["gpus"]["sm_leases"] == 1
        others.append(start(machine, tmp_path, "prefiller-3", 4, address))
        third = said(others[2], lambda line: bool(line["leased"]))
        assert third["leased"] == first["leased"]
        assert third["gpus"]["sm_leases"] == 2
    finally:
        for other in others:
            other.kill()
            other.communicate()

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

from hetero.power import DIRECTORY_VARIABLE, records
from tests.checkout import ROOT
from tests.engines.processes import processes
from tests.nvml import standin
from tests.nvml.standin import Machine

PATIENCE_S = 300.0

# An engine's end, without an engine: it beats, and says once a second what it knows.
ENGINE = """
import json, sys, time
import ray
from conserve.settings import load
from deployments.node.node import NodeClient
from hetero.gpus import EngineUse
from hetero.power import Cap
from hetero.sm_slots import NoFreeSms

gpu = sys.argv[1]
ray.init(num_cpus=1, num_gpus=0, namespace="serve", include_dashboard=False, log_to_driver=False)
lmcache = {"size_gb": 0.1, "chunk_tokens": 128, "port": 0, "http_port": 0}
client = NodeClient("test", load({"lmcache": lmcache}))
client.use = EngineUse("decoder", (gpu,), Cap(fraction=2 / 3))
client.keep_beating()
leased = None
while True:
    time.sleep(1)
    energy = client.energy
    said = {"joules": energy.joules if energy else None}
    try:
        actor = client._actor
        if energy and leased is None:
            lease = ray.get(actor.lease_sm_slots.remote(gpu, "decoder", 50), timeout=30)
            leased = [lease.slots, lease.sms, *lease.units[:1]]
            try:
                ray.get(actor.lease_sm_slots.remote(gpu, "prefiller", 50), timeout=30)
            except NoFreeSms:
                leased.append("no room")
            leased.append(ray.get(actor.rebind_sm_slots.remote(lease.id, 8), timeout=30).sms)
        said |= ray.get(actor.status.remote(), timeout=30)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        said["down"] = str(error)
    print(json.dumps(said | {"leased": leased}), flush=True)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "gpus", real_time=True)


@pytest.fixture
def engine(
    machine_alone: None, machine: Machine, tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    library = standin.compile_library(tmp_path)
    environment = machine.environment(library)
    environment[DIRECTORY_VARIABLE] = str(tmp_path / "power")
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, machine.gpus[0].id],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    left = processes("", below=process.pid) if process.poll() is None else []
    process.kill()
    process.communicate()
    _kill(left)


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
    found = said(engine, lambda line: (line["joules"] or 0) > 400 and bool(line["leased"]))
    assert limits(machine) == [200, 300]
    assert records(folder)[0].previous_w == 300
    assert found["gpus"]["caps_w"] == {first.id: 200}
    # Six tenths of 84 SMs, in fours, from the first on; nobody gets what it has; then one tenth.
    assert found["leased"] == [6, 52, 0, "no room", 12]
    # Killed, the actor leaves no cap behind; Ray starts it again, and beats bring the cap back.
    set_calls, killed = first.set_calls, found["agent_pid"]
    os.kill(killed, signal.SIGKILL)
    eventually("it is put back, and set again", lambda: first.set_calls >= set_calls + 2)
    eventually("the cap holds again", lambda: limits(machine) == [200, 300])
    again = said(engine, lambda line: bool(line.get("gpus", {}) and line["gpus"]["caps_w"]))
    assert again["agent_pid"] != killed
    assert again["gpus"]["sm_leases"] == 0
    # The whole of Ray goes, at once.
    _kill(processes("", below=engine.pid))
    engine.kill()
    eventually("the limit is put back", lambda: limits(machine) == [300, 300])
    eventually("no record is left", lambda: records(folder) == [])
    eventually("no process is left", lambda: not processes(""))

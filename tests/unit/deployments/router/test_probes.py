"""Probes: a router that lives, that can serve turns, that drains, and what it is made of."""

import importlib.metadata
from pathlib import Path

import httpx
import pytest

from conserve.settings import Settings
from conserve.tenants import KeyFile, keyfile
from deployments.router.frontdoor import FrontDoor
from deployments.router.operators import Probes
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.stub_table import StubTable

# Its table fails a test that has it asked.
TABLE = StubTable()


def asked(door: FrontDoor, path: str, host: str = "10.0.0.7:8000") -> httpx.Response:
    """Ask as Kubernetes does: from another machine, by the pod's address, without a key."""

    return ask(door, "GET", path, host, "10.0.0.1")


def a_door(can_serve: bool | None = None, settings: Settings | None = None) -> FrontDoor:
    door = FrontDoor(settings or Settings(), TABLE, "router")
    if can_serve is not None:
        door.probes.heard(can_serve)
    return door


def test_a_router_that_cannot_serve_lives() -> None:
    for door in (a_door(), a_door(False)):
        assert asked(door, "/live").status_code == 200
        assert asked(door, "/ready").status_code == 503


def test_serves_own_answer_is_success_and_nothing_else() -> None:
    answer = asked(a_door(True), "/-/healthz", host="localhost:8000")
    assert (answer.status_code, answer.text) == (200, "success")
    answer = asked(a_door(False), "/-/healthz", host="localhost:8000")
    assert answer.status_code == 503
    assert "success" not in answer.text


def test_one_that_drains_is_not_ready_and_lives() -> None:
    door = a_door(True)
    assert asked(door, "/ready").json() == {"status": "ready"}
    door.probes.draining = True
    door.probes.heard(True)
    for path in ("/ready", "/-/healthz"):
        assert asked(door, path).status_code == 503
        assert "drain" in asked(door, path).text
    assert asked(door, "/live").status_code == 200


def test_a_table_that_is_silent_or_starts_again_counts_only_after_a_while() -> None:
    now_s = [0.0]
    probes = Probes(Settings(), lambda: now_s[0])
    assert "starting" in str(probes.not_ready())
    probes.heard(None)
    assert "no decoder" in str(probes.not_ready())
    probes.heard(True)
    now_s[0] = 14.0
    assert probes.not_ready() is None
    now_s[0] = 16.0
    assert "has not answered for 15 s" in str(probes.not_ready())
    # The new one does not know its engines yet; turns wait for them.
    probes.heard(None)
    assert probes.not_ready() is None
    probes.heard(False)
    assert "no decoder" in str(probes.not_ready())


def test_versions_are_those_that_are_installed() -> None:
    versions = asked(a_door(), "/version").json()
    assert versions.pop("model") == "conserve-embedded"
    assert list(versions) == ["conserve", "vllm", "lmcache", "ray"]
    assert versions["lmcache"] == importlib.metadata.version("lmcache")
    assert versions["vllm"].count(".") >= 2


@pytest.mark.parametrize(
    ("path", "status"), [("/live", 200), ("/ready", 200), ("/-/healthz", 200), ("/version", 401)]
)
def test_probes_need_no_key(tmp_path: Path, path: str, status: int) -> None:
    file = tmp_path / "keys.json"
    keyfile.write(file, KeyFile.new().with_key("acme", "2026-01-31")[0])
    settings = Settings(host="0.0.0.0", keys_file=str(file))
    assert asked(a_door(True, settings), path).status_code == status

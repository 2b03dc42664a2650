"""The address of a Ray that is started here, and how others find it."""

import os

import pytest
from ray._private import ray_constants, services

from deployments.upstream.outer_address import find_on_loopback, start_on_loopback

pytestmark = pytest.mark.usefixtures("ray_as_before")


@pytest.fixture(autouse=True)
def on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda address: "192.0.2.1")


def test_ray_has_the_machines_outer_address() -> None:
    assert services.get_node_ip_address() == "192.0.2.1"


def test_patched_ray_has_a_loopback_address() -> None:
    start_on_loopback()
    assert services.get_node_ip_address() == "127.0.0.1"
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "running", "bootstrap"),
    [
        ("auto", "127.0.0.1:6379", "127.0.0.1:6379"),
        ("auto", "192.0.2.1:6379", "192.0.2.1:6379"),
        # Ray of a cluster, asked for from its head: it knows itself by its other address.
        ("127.0.0.1:6379", "192.0.2.1:6379", "192.0.2.1:6379"),
    ],
)
def test_a_ray_that_runs_is_found_where_it_listens(
    monkeypatch: pytest.MonkeyPatch, address: str, running: str, bootstrap: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {running})
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    find_on_loopback(address)
    assert services.canonicalize_bootstrap_address(address) == bootstrap


def test_where_no_ray_runs_joining_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set())
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    find_on_loopback("auto")
    assert ray_constants.ENABLE_RAY_CLUSTER

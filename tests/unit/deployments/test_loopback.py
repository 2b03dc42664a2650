"""Ray and Serve's replicas listen on loopback where they are told to, and only there."""

import os
import socket

import grpc
import psutil
import pytest
import ray
from ray._private import ray_constants, services
from ray.serve._private import replica

from deployments import loopback

pytestmark = pytest.mark.usefixtures("ray_as_before")


async def _listening(address: str) -> list[str]:
    """Addresses on which a server, started as Serve starts a replica's, listens."""
    server = grpc.aio.server()
    port = replica.add_port_to_grpc_server(server, address)
    await server.start()
    try:
        return [
            found.laddr.ip
            for found in psutil.Process().net_connections("tcp")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port
        ]
    finally:
        await server.stop(None)


def test_the_ray_that_is_started_next_has_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a machine with a network, whatever this one has.
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda address: "192.0.2.1")
    assert services.get_node_ip_address() == "192.0.2.1"
    loopback.start_on_loopback()
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
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda address: "192.0.2.1")
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {running})
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    monkeypatch.setattr(loopback, "answer", lambda address: "UNAVAILABLE")
    loopback.find_ray(address)
    assert services.canonicalize_bootstrap_address(address) == bootstrap


def test_where_no_ray_runs_joining_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    loopback.find_ray("auto")
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.anyio
async def test_a_replica_listens_where_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.1")
    loopback.listen_where_ray_does()
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    assert await _listening("[::]:0") == [everywhere]
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    loopback.listen_where_ray_does()
    # gRPC has an IPv6 socket for an IPv4 address.
    assert await _listening("[::]:0") in (["127.0.0.1"], ["::ffff:127.0.0.1"])

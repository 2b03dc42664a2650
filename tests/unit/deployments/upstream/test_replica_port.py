"""The address of Serve's own port of a replica."""

import socket

import grpc
import psutil
import pytest
import ray
from ray.serve._private import replica

from deployments.upstream.replica_port import apply

pytestmark = [pytest.mark.usefixtures("ray_as_before")]


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


def _patched(monkeypatch: pytest.MonkeyPatch, ray_address: str) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: ray_address)
    apply()


EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


async def test_a_replica_listens_on_every_address() -> None:
    assert await _listening("[::]:0") == [EVERYWHERE]


async def test_a_patched_replica_listens_where_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    _patched(monkeypatch, "192.0.2.1")
    assert await _listening("[::]:0") == [EVERYWHERE]
    _patched(monkeypatch, "127.0.0.1")
    # gRPC has an IPv6 socket for an IPv4 address.
    assert await _listening("[::]:0") in (["127.0.0.1"], ["::ffff:127.0.0.1"])

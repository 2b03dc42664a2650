"""Ray on loopback, where the application has one node.

Ray listens on every address of a machine unless a node's address is a loopback one, which it takes
only on Windows and macOS. So this changes internals of Ray 2.60.0: check them when the version
changes. See docs/security.md.
"""

import os

import ray
from ray._private import ray_constants, services

LOOPBACK = "127.0.0.1"


def start_on_loopback() -> None:
    """Have the Ray that this process starts next, and all that runs on it, listen on loopback."""
    # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 would do the same before Ray is imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    # An engine finds itself among Ray's nodes by its address.
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)


def find_on_loopback(address: str) -> None:
    """Have this process join a Ray on this machine that listens only on loopback.

    Ray would look for its node at the machine's other address.

    Args:
        address: as for ``ray.init``, such as ``auto``.
    """
    try:
        found = services.get_ray_address_from_environment(address, None)
    except ConnectionError:
        return  # There is none; joining it will say so.
    # A cluster's head knows itself by its other address, however it is asked for.
    if found.startswith(f"{LOOPBACK}:") and found in services.find_gcs_addresses():
        ray_constants.ENABLE_RAY_CLUSTER = False


def listen_where_ray_does() -> None:
    """Have Serve's own port of this replica on loopback, if Ray is.

    Serve opens it on every address, for calls between deployments, once the replica's constructor
    has returned. The constructor has to call this.
    """
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server

    def on_loopback(server: object, address: str) -> int:
        return int(add_port(server, address.replace("[::]", LOOPBACK)))

    replica.add_port_to_grpc_server = on_loopback

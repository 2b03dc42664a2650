"""Has Ray listen on loopback, where the application has one node.

Ray 2.60 listens on every address of a machine, or on its outer one, and takes a loopback address
for a node's only on Windows and macOS. ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`` would do the same,
but before Ray is imported, which ``serve run`` does first. See docs/reference/security.md.
"""

import os

from deployments.upstream.patch import Patch, require

LOOPBACK = "127.0.0.1"


def start_on_loopback() -> None:
    """Have the Ray that this process starts next, and all that runs on it, listen on loopback."""
    require(PATCH)
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    # An engine finds itself among Ray's nodes by its address.
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)


def find_on_loopback(address: str) -> str | None:
    """Have this process join a Ray on this machine that listens only on loopback.

    Ray would look for its node at the machine's other address. Returns where Ray is, if it is.

    Args:
        address: as for ``ray.init``, such as ``auto``.
    """
    require(PATCH)
    from ray._private import ray_constants, services

    try:
        found: str = services.get_ray_address_from_environment(address, None)
    except ConnectionError:
        return None  # There is none; joining it will say so.
    # A cluster's head knows itself by its other address, however it is asked for.
    if found.startswith(f"{LOOPBACK}:") and found in services.find_gcs_addresses():
        ray_constants.ENABLE_RAY_CLUSTER = False
    return found


PATCH = Patch(
    name="outer_address",
    seams=(
        "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
        "ray._private.services:get_node_ip_address",
        "ray._private.services:get_ray_address_from_environment",
        "ray._private.services:find_gcs_addresses",
    ),
    why="anyone who reaches the machine by its network can have Ray run code",
    upstream="not reported: take 127.0.0.1 as a node's address on Linux (near: ray PR #59852)",
    process="ray",
)

"""Ray on loopback, where the application has one node, and with its token.

Ray listens on every address of a machine unless a node's address is a loopback one, which it takes
only on Windows and macOS. So this changes internals of Ray 2.60.0: check them when the version
changes. See docs/security.md.
"""

import os

import ray
from ray._private import ray_constants, services
from ray._raylet import AuthenticationTokenLoader, Config

from conserve.ray_token import NO_TOKEN, answer

LOOPBACK = "127.0.0.1"


def start_on_loopback() -> None:
    """Have the Ray that this process starts next, and all that runs on it, listen on loopback."""
    # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 would do the same before Ray is imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    # An engine finds itself among Ray's nodes by its address.
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)


def find_ray(address: str) -> None:
    """Have this process join a Ray, with its token, and on loopback if it listens only there.

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
    _use_token(found)


def _use_token(address: str) -> None:
    """Have this process send its token to the Ray there if that Ray asks for one.

    A Ray that asks for none would end the actors of a process with one: it cannot call it back.
    """
    asked = answer(address)
    if "RAY_AUTH_MODE" not in os.environ and asked in ("OK", NO_TOKEN):
        os.environ["RAY_AUTH_MODE"] = "token" if asked == NO_TOKEN else "disabled"
        Config.initialize("")
    if asked == NO_TOKEN:
        tokens = AuthenticationTokenLoader.instance()
        found = tokens.has_token(ignore_auth_mode=True)
        if not found or answer(address, tokens.get_token_for_http_header()) == NO_TOKEN:
            raise ConnectionError(
                "it asks for a token, and this process has none that it takes: run as the user "
                "who started it, or copy that user's ~/.ray/auth_token, and set RAY_AUTH_MODE=token"
            )


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

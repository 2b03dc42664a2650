"""Has Serve's own port of a replica listen on loopback, if Ray does.

Serve 2.60 opens it on every address, for calls between deployments, once the replica's constructor
has returned. The constructor has to apply this.
"""

from deployments.upstream.outer_address import LOOPBACK
from deployments.upstream.patch import Patch


def apply() -> None:
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    add_port = replica.add_port_to_grpc_server

    def on_loopback(server: object, address: str) -> int:
        return int(add_port(server, address.replace("[::]", LOOPBACK)))

    replica.add_port_to_grpc_server = on_loopback


PATCH = Patch(
    name="replica_port",
    seams=("ray.serve._private.replica:add_port_to_grpc_server",),
    why="each replica has a port that is open to the network, though Ray listens on loopback",
    upstream="not reported: Replica._on_initialized binds [::]:0 (near: ray-project/ray#64544)",
    process="ray",
)

"""Examines every node of a Ray cluster, and tries the connections between them."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conserve.settings import Settings
from conserve_cli.doctor.cluster import check_nodes, check_tiers, places
from conserve_cli.doctor.findings import Finding, ok, warning, wrong
from conserve_cli.doctor.node import Comparable, NodeReport, Place, examine_node
from deployments import joining
from deployments.messages import HEAD_NODE
from hetero.container import cpu_dtype
from hetero.tiers import NodeOffer

# A node's first worker takes long to import its modules.
_NODE_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 3.0
_MOST_NODES = 4096


def examine_cluster(
    settings: Settings, address: str, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Examine every node of this Ray cluster; raises `ConnectionError` if there is none."""
    joining.find_ray(address)
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="error")
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        on_progress(f"asking {len(alive)} nodes, trying connections")
        head = next((node for node in alive if HEAD_NODE in node["Resources"]), alive[0])
        # The head examines the nodes, as Ray would end this process's actors if it has a token for
        # another Ray, and the cluster has none.
        where = NodeAffinitySchedulingStrategy(head["NodeID"], soft=False)
        task = ray.remote(_examine).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        try:
            findings = ray.get(task.remote(settings), timeout=3 * _NODE_TIMEOUT_S)
            return [*findings, *_token(ray.get_runtime_context().gcs_address)]
        except ray.exceptions.RayError as error:
            return [_silent(str(head["NodeManagerAddress"]), error)]
    finally:
        ray.shutdown()


def _token(address: str) -> list[Finding]:
    """Return whether the Ray there asks for a token; nothing if it uses TLS."""
    asked = joining.answer(address)
    if asked == joining.NO_TOKEN:
        return [ok("token", f"Ray at {address} answers only clients that have its token")]
    seen = (
        f"Ray at {address} asks for no token: a client that reaches one of its ports can run code"
    )
    to_do = (
        "start Ray with RAY_AUTH_MODE=token, and the same ~/.ray/auth_token on every node "
        "(docs/reference/cluster.md, A token for Ray)"
    )
    return [warning("token", seen, to_do)] if asked == "OK" else []


def _examine(settings: Settings) -> list[Finding]:
    nodes = _nodes()
    # This runs on the head, whose CPU decides.
    there = places(settings, [node.offer for node in nodes], cpu_dtype()[0])
    asked = [
        node.probe.examine.remote(settings, place) for node, place in zip(nodes, there, strict=True)
    ]
    answered: list[tuple[_Node, NodeReport]] = []
    silent: list[Finding] = []
    for node, answer in zip(nodes, asked, strict=True):
        try:
            answered.append((node, ray.get(answer, timeout=_NODE_TIMEOUT_S)))
        except ray.exceptions.RayError as error:
            silent.append(_silent(node.offer.name, error))
    return [
        *silent,
        *(finding for _, report in answered for finding in report.findings),
        *check_nodes(_between(answered)),
        *(check_tiers(settings, [node.offer for node, _ in answered]) if answered else ()),
    ]


class NodeProbe:
    """An actor that examines the node it is on."""

    def __init__(self) -> None:
        # Linux completes connections that nothing has accepted yet, up to the backlog.
        where = (ray.util.get_node_ip_address(), 0)
        self._listener = socket.create_server(where, backlog=_MOST_NODES)

    def examine(self, settings: Settings, place: Place) -> NodeReport:
        return examine_node(settings, place)

    def listens(self) -> tuple[str, int]:
        """Return a host and a port where other nodes can try to reach this one."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def misses(self, listeners: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Return the nodes to which this one cannot open a connection."""
        missed = []
        for name, where in listeners.items():
            try:
                socket.create_connection(where, _CONNECT_TIMEOUT_S).close()
            except OSError:
                missed.append(name)
        return tuple(missed)


@dataclass(frozen=True, slots=True)
class _Node:
    offer: NodeOffer
    probe: Any


def _nodes() -> list[_Node]:
    """Return the live nodes, the head first, with which the others are compared."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: HEAD_NODE not in node["Resources"])
    addresses = [node["NodeManagerAddress"] for node in alive]
    found = []
    for node, address in zip(alive, addresses, strict=True):
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probe = ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=where).remote()
        # Nodes on one machine have the same address.
        name = address if addresses.count(address) == 1 else f"{address}/{node['NodeID'][:6]}"
        offer = NodeOffer(name, dict(node["Resources"]), dict(node.get("Labels", {})))
        found.append(_Node(offer, probe))
    return found


def _silent(node: str, error: Exception) -> Finding:
    said = str(error).strip().splitlines()[-1]
    to_do = "install the same conserve there, in the environment that Ray runs in"
    return wrong("node", f"cannot be examined: {said}", to_do, node)


def _between(answered: Sequence[tuple[_Node, NodeReport]]) -> list[Comparable]:
    """Add the nodes that each node cannot reach."""
    asked = [node.probe.listens.remote() for node, _ in answered]
    where = ray.get(asked, timeout=_NODE_TIMEOUT_S)
    listeners = {node.offer.name: at for (node, _), at in zip(answered, where, strict=True)}
    tries = [node.probe.misses.remote(listeners) for node, _ in answered]
    missed = ray.get(tries, timeout=_NODE_TIMEOUT_S + _CONNECT_TIMEOUT_S * len(tries))
    return [
        replace(report.facts, unreachable=names)
        for (_, report), names in zip(answered, missed, strict=True)
    ]

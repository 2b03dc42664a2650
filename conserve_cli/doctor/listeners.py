"""Finds what of ConServe, Ray and vLLM other machines may reach; see docs/security.md."""

import ipaddress
import os
import re
from collections.abc import Iterable

import psutil

from conserve.settings import Settings
from conserve_cli.doctor.facts import Finding, ListenerFacts

# By command line; the first that matches names the owner.
_OWNERS = (
    (r"^ray::ServeReplica:[^:]*:Router", "router"),
    (r"^ray::ServeReplica:[^:]*:(decoder|prefiller)", "engine"),
    (r" -m (lmcache\.cli\.main|deployments\.node\.lmcache_main) server ", "LMCache"),
    (r"^VLLM::| -m vllm\.| -m multiprocessing\.\S* .*vllm", "vLLM"),
    (r"^ray::|/ray/core/src/ray/|/ray/(_private|dashboard|autoscaler|util/client)/", "Ray"),
    (r" -m ray\.|bin/(ray|serve) ", "Ray"),
)
_TO_DO = {
    "router": "set host=127.0.0.1, or give its clients keys and have TLS ended in front of it",
    "engine": "set nodes=one, and have Ray on loopback, as `conserve serve` does",
    "LMCache": "set nodes=one: whoever reaches it can run code",
    "Ray": "start the application by `conserve serve` or `serve run conserve.app`, or Ray with "
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which keep it on loopback; or close these ports: whoever "
    "reaches them, and has Ray's token where it asks for one, can run code",
    "vLLM": "set VLLM_HOST_IP=127.0.0.1 before Ray starts, or close these ports",
}


def observe_listeners() -> list[ListenerFacts]:
    """Return those on this machine that listen on more than loopback, this process aside.

    Others' processes may not be visible.
    """
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    open_to_others: dict[int, set[tuple[str, int]]] = {}
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip)
        if listens and connection.pid not in (None, os.getpid()):
            where = (connection.laddr.ip, connection.laddr.port)
            open_to_others.setdefault(connection.pid, set()).add(where)
    found = []
    for pid, addresses in sorted(open_to_others.items()):
        try:
            command = " ".join(psutil.Process(pid).cmdline()).strip()
        except psutil.Error:
            continue
        owner = owner_of(command)
        if owner:
            name = process_name(command)
            found.append(ListenerFacts(owner, name, pid, tuple(sorted(addresses))))
    return found


def owner_of(command_line: str) -> str:
    """Return whose process it is, or an empty string if it is nobody's here."""
    return next((owner for pattern, owner in _OWNERS if re.search(pattern, command_line)), "")


def process_name(command_line: str) -> str:
    """A process's own title, or the program or module that it runs."""
    title, *arguments = command_line.split()
    if "::" in title:
        return title
    if "python" in title.rpartition("/")[2]:
        ran = (one for one in arguments if not one.startswith("-"))
        title = next(ran, title)
    return title.rpartition("/")[2]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_listeners(listeners: Iterable[ListenerFacts], settings: Settings) -> list[Finding]:
    """Judge what listens on more than loopback although there is no other node to reach it.

    What the settings ask for, by `host` and `nodes`, is not told.
    """
    findings = []
    for one in listeners:
        left = [where for where in one.addresses if not _asked_for(one, where, settings)]
        if left:
            places = ", ".join(_shown(host, port) for host, port in left)
            seen = f"{one.process} (pid {one.pid}) listens on {places}, which others may reach"
            findings.append(Finding("warning", f"{one.owner}'s ports", seen, _TO_DO[one.owner]))
    if findings:
        return findings
    return [
        Finding("ok", "exposure", "nothing listens on more than loopback but what settings say")
    ]


def _asked_for(one: ListenerFacts, where: tuple[str, int], settings: Settings) -> bool:
    host, port = where
    if one.owner == "router":
        return port == settings.port and _same(host, settings.host)
    if one.owner == "engine":
        return settings.nodes == "several" and _same(host, settings.engine_host)
    return False


def _same(host: str, setting: str) -> bool:
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address(setting)
    except ValueError:
        # A name (or `node`, an engine's own), which is an address that is not every one of them.
        return setting != "localhost" and not ipaddress.ip_address(host).is_unspecified


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

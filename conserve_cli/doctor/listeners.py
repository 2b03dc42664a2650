"""Checks the ports that settings name, and processes that others can reach."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from conserve.loopback import address_of, is_loopback
from conserve.settings import Settings
from conserve_cli.doctor.findings import Finding, ok, warning, wrong
from deployments.node.lmcache_server import SERVER_MODULE, is_free


def check_ports(settings: Settings, has_router: bool = True) -> Iterator[Finding]:
    """Check that every port that the settings name is free, or already ConServe's."""
    lmcache = settings.lmcache
    # On several nodes LMCache listens on its node's address.
    host = "0.0.0.0" if settings.nodes == "several" else "127.0.0.1"
    if has_router:
        yield _port("port", "router", settings.host, settings.port)
        yield from _caches(settings)
    if lmcache.port:
        yield _port("lmcache.port", "LMCache", host, lmcache.port)
    if lmcache.http_port:
        admin = "LMCache's admin interface"
        yield _port("lmcache.port", admin, "127.0.0.1", lmcache.http_port)


_TO_SEE = "docs/reference/metrics.md says more (ConServeCacheFindsNothing)"


def _caches(settings: Settings) -> Iterator[Finding]:
    """Tell what engines of a running application have found of prompts before they were ready."""
    host = settings.host if settings.host not in ("0.0.0.0", "::") else "127.0.0.1"
    if is_free(host, settings.port):
        return
    url = f"{settings.scheme}://{_shown(host, settings.port)}/v1/engines"
    # It may be another server, or not up yet.
    with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        for one in httpx.get(url, verify=False, trust_env=False, timeout=2).json()["data"]:
            if (problem := one["cache_check"] and one["cache_check"]["problem"]) is not None:
                found = ok("cache", f"{one['id']} finds prompts that come again")
                yield warning("cache", f"{one['id']}: {problem}", _TO_SEE) if problem else found


def _port(setting: str, purpose: str, host: str, port: int) -> Finding:
    where = f"{host}:{port}"
    if is_free(host, port):
        return ok("port", f"{where} is free, for {purpose}")
    holder, command = _holder(port)
    if is_ours(command):
        return ok("port", f"{where}: ConServe's {purpose} is there already")
    seen = f"{where}, for {purpose}: {holder} listens there"
    return wrong("port", seen, f"stop it, or set another {setting}")


def _holder(port: int) -> tuple[str, str]:
    """Return the process that listens there, for people, and its command line if it is visible."""
    for connection in _listening():
        command = command_of(connection.pid) if connection.pid else ""
        if connection.laddr.port == port and command:
            return f"{process_name(command)} (pid {connection.pid})", command
    return "another process", ""


def is_ours(command_line: str) -> bool:
    """Return whether a listening process is ConServe's router or LMCache server."""
    return "ray::ServeReplica:" in command_line or f"-m {SERVER_MODULE} server " in command_line


# Owners by command line; the first match counts.
_OWNERS = (
    (r"^ray::ServeReplica:[^:]*:Router", "router"),
    (r"^ray::ServeReplica:[^:]*:(decoder|encoder|prefiller)", "engine"),
    (r" -m (lmcache\.cli\.main|deployments\.node\.lmcache_main) server ", "LMCache"),
    (r"^VLLM::| -m vllm\.| -m multiprocessing\.\S* .*vllm", "vLLM"),
    (r"^ray::|/ray/core/src/ray/|/ray/(_private|dashboard|autoscaler|util/client)/", "Ray"),
    (r" -m ray\.|bin/(ray|serve) ", "Ray"),
)
_TO_DO = {
    "router": "set host=127.0.0.1, or give its clients keys and have TLS ended in front of it",
    "engine": "set nodes=one, and have Ray on loopback, as `conserve serve` does",
    "LMCache": "set nodes=one: clients that reach it can run code",
    "Ray": "start the application by `conserve serve` or `serve run conserve.app`, or Ray with "
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which keep it on loopback; or close these ports: whoever "
    "reaches them, and has Ray's token where it asks for one, can run code",
    "vLLM": "set VLLM_HOST_IP=127.0.0.1 before Ray starts, or close these ports",
}


def check_listeners(settings: Settings) -> list[Finding]:
    """Warn of what listens on more than loopback, though there is no other node to reach it.

    Only visible processes count (docs/reference/security.md), and not what `host` asks for.
    """
    open_to_others: dict[int, set[tuple[str, int]]] = {}
    for connection in _listening():
        if not is_loopback(connection.laddr.ip) and connection.pid not in (None, os.getpid()):
            where = (connection.laddr.ip, connection.laddr.port)
            open_to_others.setdefault(connection.pid, set()).add(where)
    findings = []
    for pid, addresses in sorted(open_to_others.items()):
        command = command_of(pid)
        owner = owner_of(command)
        if owner == "router":
            addresses = {where for where in addresses if not _is_asked_for(*where, settings)}
        if owner and addresses:
            places = ", ".join(_shown(host, port) for host, port in sorted(addresses))
            name = process_name(command)
            seen = f"{name} (pid {pid}) listens on {places}, which others may reach"
            findings.append(warning(f"{owner}'s ports", seen, _TO_DO[owner]))
    return findings or [
        ok("exposure", "nothing listens on more than loopback but what settings say")
    ]


def _is_asked_for(host: str, port: int, settings: Settings) -> bool:
    if port != settings.port:
        return False
    listens, asked = address_of(host), address_of(settings.host)
    if asked is not None:
        return listens == asked
    # A name, or `node` for an engine's own address, is a single address.
    return settings.host != "localhost" and listens is not None and not listens.is_unspecified


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listening() -> list[Any]:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    return [one for one in connections if one.status == psutil.CONN_LISTEN]


def command_of(pid: int) -> str:
    """Return a process's command line; empty if it is not visible from here."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return ""


def owner_of(command_line: str) -> str:
    """Return the part of the application, of Ray or vLLM that a process is; empty: none of them."""
    return next((owner for pattern, owner in _OWNERS if re.search(pattern, command_line)), "")


def process_name(command_line: str) -> str:
    """Return a process's own title, or the program or module that it runs."""
    title, *arguments = command_line.split()
    if "::" in title:
        return title
    if "python" in title.rpartition("/")[2]:
        ran = (one for one in arguments if not one.startswith("-"))
        title = next(ran, title)
    return title.rpartition("/")[2]

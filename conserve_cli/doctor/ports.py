"""Ports: what the application wants to listen on."""

from collections.abc import Iterable

from conserve_cli.doctor.facts import PortFacts
from conserve_cli.doctor.findings import Finding


def check_ports(ports: Iterable[PortFacts]) -> list[Finding]:
    """Whether every port that the settings name is free, or ConServe's already."""
    return [_port(port) for port in ports]


def _port(port: PortFacts) -> Finding:
    where = f"{port.host}:{port.port}"
    if port.free:
        return Finding("ok", "port", f"{where} is free, for {port.purpose}")
    if port.ours:
        return Finding("ok", "port", f"{where}: ConServe's {port.purpose} is there already")
    holder = f"{port.holder} listens there" if port.holder else "another process listens there"
    return Finding(
        "wrong", "port", f"{where}, for {port.purpose}: {holder}",
        f"stop it, or set another {port.setting}",
    )  # fmt: skip

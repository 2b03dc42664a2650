"""Ports that are free, and who holds those that are not."""

import dataclasses

from conserve_cli.doctor.facts import PortFacts
from conserve_cli.doctor.verdict import check_ports


def test_ports_that_others_have() -> None:
    free = PortFacts("port", "router", "127.0.0.1", 8000, free=True)
    ours = dataclasses.replace(free, free=False, holder="python (pid 1)", ours=True)
    other = dataclasses.replace(ours, ours=False, holder="nginx (pid 2)")
    unseen = dataclasses.replace(other, holder="")
    findings = check_ports([free, ours, other, unseen])
    assert [finding.level for finding in findings] == ["ok", "ok", "wrong", "wrong"]
    assert "nginx (pid 2) listens there" in findings[2].seen
    assert findings[2].to_do == "stop it, or set another port"

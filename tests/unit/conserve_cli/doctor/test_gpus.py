"""GPUs that work, and those that do not."""

import dataclasses

import pytest

from conserve.settings import Settings
from conserve_cli.doctor.facts import GpuFacts
from conserve_cli.doctor.machine import check_gpus
from tests.unit.conserve_cli.doctor.sound import H100, NO_GPU, SETTINGS, bad


@pytest.mark.parametrize(
    ("facts", "settings", "caps", "expected"),
    [
        (NO_GPU, SETTINGS, False, []),
        (NO_GPU, Settings(device="gpu"), False, [("wrong", "GPU")]),
        (H100, SETTINGS, True, []),
        (dataclasses.replace(H100, problem="no driver: install it"), SETTINGS, False,
         [("wrong", "GPU")]),
        (dataclasses.replace(H100, lost=(1,)), SETTINGS, False, [("wrong", "GPU")]),
        (dataclasses.replace(H100, may_cap_power=False), SETTINGS, False, []),
        (dataclasses.replace(H100, may_cap_power=False), SETTINGS, True, [("warning", "power")]),
    ],
)  # fmt: skip
def test_gpus(
    facts: GpuFacts, settings: Settings, caps: bool, expected: list[tuple[str, str]]
) -> None:
    assert bad(check_gpus(facts, settings, caps)) == expected

"""Streams on leased SMs, made by the calls that a driver gets, against a stand-in for it."""

import sys
from types import ModuleType
from typing import Any

import pytest

from conserve_inside.sm_slots import green_contexts
from conserve_inside.sm_slots.green_contexts import (
    GreenContexts,
    SmsUnavailable,
    load_driver,
    probe,
    why_not,
)
from hetero.sm_slots import SmSlotLedger
from hetero.sm_units import SmSlots, sm_granularity
from tests.unit.hetero.cuda_standin import CUresult, Driver

GPU = "GPU-0"


def h100() -> SmSlots:
    return SmSlots(132, sm_granularity((9, 0)))


def test_leases_of_two_processes_share_no_sm_and_have_all_together() -> None:
    """Each process splits the device by itself: only the lease says who has which."""
    slots = h100()
    ledger = SmSlotLedger({GPU: slots})
    leases = [ledger.lease_slots(GPU, owner, asked) for owner, asked in (("p", 3), ("d", 7))]
    had = []
    for lease in leases:
        driver = Driver()
        contexts = GreenContexts(slots, 0, driver)
        had.append(driver.streams[contexts.stream(lease.units)])
        assert contexts.sms(lease.units) == lease.sms == len(had[-1])
    assert had[0].isdisjoint(had[1])
    assert had[0] | had[1] == set(range(132))


def test_a_context_is_made_once() -> None:
    driver = Driver()
    contexts = GreenContexts(h100(), 0, driver)
    assert contexts.sms(range(16, 16)) == 0
    first = contexts.stream(range(3))
    made = len(driver.calls)
    assert contexts.stream(range(3)) == first
    assert len(driver.calls) == made
    assert contexts.stream(range(2)) != first


def test_the_rest_is_left_out_where_the_driver_does_not_put_it_beside_the_units() -> None:
    driver = Driver(rest_alignment=2)
    contexts = GreenContexts(h100(), 0, driver)
    last = range(14, 16)
    assert len(driver.streams[contexts.stream(last)]) == contexts.sms(last) == 16


def test_a_device_smaller_than_a_unit_is_not_split() -> None:
    driver = Driver(sms=6)
    contexts = GreenContexts(SmSlots(6, sm_granularity((9, 0))), 0, driver)
    assert driver.streams[contexts.stream(range(1))] == set(range(6))
    assert "cuDevSmResourceSplitByCount" not in driver.calls


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(unit=16), "splits 132 SMs into 8 of 16 and a rest of 4, and the ledger into 16"),
        (Driver(hidden=2), "into 14 of 8 and a rest of 20"),
        (Driver(hidden=16), "into nothing and a rest of 132"),
        (Driver(sms=40), "has 40 SMs to split where the ledger has 132; under MPS"),
        (
            Driver(fails={"cuDeviceGetDevResource": CUresult.CUDA_ERROR_NOT_SUPPORTED}),
            "cuDeviceGetDevResource: CUDA_ERROR_NOT_SUPPORTED",
        ),
    ],
)
def test_a_driver_that_splits_otherwise_is_refused_in_a_sentence(driver: Driver, said: str) -> None:
    with pytest.raises(SmsUnavailable, match=said) as refused:
        GreenContexts(h100(), 0, driver)
    assert "\n" not in str(refused.value)


def test_a_context_that_is_not_made_is_said_with_the_drivers_error() -> None:
    driver = Driver(fails={"cuGreenCtxCreate": CUresult.CUDA_ERROR_OUT_OF_MEMORY})
    contexts = GreenContexts(h100(), 0, driver)
    with pytest.raises(SmsUnavailable, match="cuGreenCtxCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        contexts.stream(range(2))


@pytest.mark.parametrize("units", [range(0), range(3, 3), range(-1, 2), range(15, 17)])
def test_units_that_there_are_not_are_refused(units: range) -> None:
    contexts = GreenContexts(h100(), 0, Driver())
    with pytest.raises(ValueError, match="not this GPU's"):
        contexts.stream(units)


def _install(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    module = ModuleType("cuda.bindings.driver")
    for name in ("CUresult", "cuDriverGetVersion"):
        if hasattr(driver, name):
            setattr(module, name, getattr(driver, name))
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)


def test_a_driver_that_is_too_old_is_named_by_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, Driver(version=12_040))
    with pytest.raises(SmsUnavailable, match=r"for CUDA 12\.4, .* 12\.8 \(driver 570\)"):
        load_driver()
    _install(monkeypatch, Driver(version=12_080))
    load_driver()


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        CUresult = CUresult

        @staticmethod
        def cuDriverGetVersion() -> None:
            raise RuntimeError("libcuda.so.1: cannot open shared object file")

    _install(monkeypatch, Missing)
    with pytest.raises(SmsUnavailable, match=r"no CUDA driver by cuda-bindings: libcuda\.so\.1"):
        load_driver()


def test_looking_for_them_makes_no_context() -> None:
    driver = Driver(devices=2)
    probe(driver)
    assert driver.calls.count("cuDevSmResourceSplitByCount") == 2
    with pytest.raises(SmsUnavailable, match="cuInit: CUDA_ERROR_NOT_SUPPORTED"):
        probe(Driver(fails={"cuInit": CUresult.CUDA_ERROR_NOT_SUPPORTED}))


def test_another_process_looks_and_says_why_there_are_none() -> None:
    """On a machine without a GPU, or without cuda-bindings: really another process."""
    reason = ""
    try:
        probe()
    except SmsUnavailable as error:
        reason = str(error)
    assert why_not() == reason


def test_the_reason_is_what_the_process_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(green_contexts, "load_driver", lambda: Driver(sms=16))
    assert green_contexts.main() == 0
    old = Driver(fails={"cuDeviceGetDevResource": CUresult.CUDA_ERROR_NOT_SUPPORTED})
    monkeypatch.setattr(green_contexts, "load_driver", lambda: old)
    assert green_contexts.main() == 1
    assert capsys.readouterr().out == "cuDeviceGetDevResource: CUDA_ERROR_NOT_SUPPORTED\n"

"""Engines that share a GPU beside one that does not: taking turns, under MPS, and on SM slots."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from conserve_inside.sm_slots.means import mps_runs
from tests.acceptance.gpu.conftest import hands_over, is_replaced, new_prompt
from tests.engines.applications import GPU, GPU_ONE, GPU_SLOTS, GPU_TWO, Application
from tests.engines.client import engines
from tests.engines.engine_calls import complete, compute
from tests.engines.metrics import metric
from tests.engines.processes import kill
from tests.engines.stage import Stage
from tests.engines.streams import Put, compare

pytestmark = pytest.mark.anyio

_MPS = pytest.mark.skipif(not mps_runs(), reason="no MPS control daemon runs")


def _on(where: str, application: Application, step: str) -> object:
    marks = [pytest.mark.application(application), pytest.mark.step(step)]
    return pytest.param(where, marks=marks, id=application.name)


@pytest.mark.parametrize(
    "where",
    [
        _on("a prefiller and a decoder", GPU, "one or two"),
        _on("one engine", GPU_ONE, "one or two"),
        _on("two engines", GPU_TWO, "one or two"),
        _on("a prefiller and a decoder on slots", GPU_SLOTS, "engines on slots"),
    ],
)
async def test_the_same_conversations(
    application: str, client: httpx.AsyncClient, figure: Put, where: str
) -> None:
    await compare(client, figure, where)


@_MPS
@pytest.mark.step("MPS")
@pytest.mark.application(GPU_TWO)
@pytest.mark.parametrize("tokens", [4_500, 32_000])
def test_clients_of_mps_hand_over(alone: dict[str, str], application: str, tokens: int) -> None:
    """Through LMCache's server, which is a client as well."""
    one, other = engines("decoder")
    hands_over(one["url"], other["url"], alone, tokens)


@_MPS
@pytest.mark.step("MPS")
@pytest.mark.application(GPU_TWO, last=True)
async def test_an_engine_outlives_its_neighbour(application: str, stage: Stage) -> None:
    """The killed engine's kernels run."""
    one, other = engines("decoder")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, other["url"], new_prompt("outlives", 500), 1_000)
        for number in range(4):
            pool.submit(compute, one["url"], new_prompt(f"doomed {number}", 32_000))
        await asyncio.sleep(0.2)
        kill(one["pid"])
        assert answer.result().text
    await is_replaced(stage, one)


@pytest.mark.step("engines on slots")
@pytest.mark.application(GPU_SLOTS)
@pytest.mark.parametrize("tokens", [4_500, 16_000])
def test_engines_on_slots_hand_over(
    alone: dict[str, str], application: str, figure: Put, tokens: int
) -> None:
    (prefiller,), (decoder,) = engines("prefiller"), engines("decoder")
    assert (prefiller["sm_slots"], decoder["sm_slots"]) == (3, 7)
    assert metric("conserve_engine_sm_slots") == 10
    figure("SMs of the prefiller and the decoder", f"{prefiller['sms']}, {decoder['sms']}")
    computed = hands_over(prefiller["url"], decoder["url"], alone, tokens)
    figure(f"{tokens:,} tokens computed on three tenths of the SMs", computed.took_s * 1e3, "ms")

"""Power of phases from an application's joules, with the application's own account of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from conserve_lab.cli.profile.draw import (
    DrawMeter,
    Energy,
    NoDraw,
    measure_power,
    one_limit_w,
    parse_energy,
)
from deployments.table.engine_metrics import ENERGY
from deployments.table.metrics import Rows
from hetero.energy import EnergyBook, EngineEnergy, GpuReading
from tests.unit.deployments.table.virtual_time import run

IDLE_W, PREFILL_W, DECODE_W = 50.0, 300.0, 130.0


@dataclass
class Gpu:
    """Draws what it is told to."""

    role: str
    limit_w: float = 300.0
    draw_w: float = IDLE_W
    joules: float = 0.0
    read_s: float = field(default_factory=lambda: time.monotonic())

    def reading(self) -> EngineEnergy:
        now_s = time.monotonic()
        self.joules += self.draw_w * (now_s - self.read_s)
        self.read_s = now_s
        gpu = GpuReading(f"GPU-{self.role}", "NVIDIA A40", self.draw_w, self.limit_w, 0.5, 40)
        return EngineEnergy(self.joules, "epoch", False, (gpu,))


class Application:
    """Metrics as the conversation table has them; engines report a few times a second."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = {gpu.role: gpu for gpu in gpus}
        self._book = EnergyBook()
        self._registry = CollectorRegistry()
        self._registry.register(Rows(ENERGY, self._book))
        self.replicas = Gauge("conserve_replicas", "Engines.", ["role"], registry=self._registry)
        for role in ("prefiller", "decoder"):
            self.replicas.labels(role).set(sum(gpu.role == role for gpu in gpus))

    def report(self) -> None:
        for role, gpu in self.gpus.items():
            self._book.report(f"{role}-0", role, "any", gpu.reading(), time.monotonic())

    def metrics(self) -> str:
        return generate_latest(self._registry).decode()

    async def beat(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(0.3)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(text=self.metrics())

        app = web.Application()
        app.router.add_get("/metrics", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        beating = asyncio.create_task(self.beat())
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            beating.cancel()
            await runner.cleanup()


class _Meter(DrawMeter):
    """Reads an application's metrics without HTTP, for which virtual time has no room."""

    def __init__(self, application: Application) -> None:
        super().__init__("")
        self._application = application

    async def energy(self) -> Energy:
        return parse_energy(self._application.metrics())


def test_each_phase_has_the_draw_of_its_role() -> None:
    async def scenario() -> None:
        prefiller, decoder = Gpu("prefiller"), Gpu("decoder")
        application = Application(prefiller, decoder)

        async def work_on(gpu: Gpu, draw_w: float) -> None:
            # The other role idles, at another draw.
            prefiller.draw_w = decoder.draw_w = IDLE_W
            gpu.draw_w = draw_w
            await asyncio.sleep(0.05)

        beating = asyncio.create_task(application.beat())
        # Joules are known from the second report on.
        await asyncio.sleep(1)
        power = await measure_power(
            _Meter(application),
            lambda: work_on(prefiller, PREFILL_W),
            lambda: work_on(decoder, DECODE_W),
        )
        beating.cancel()
        # Joules are seen up to a poll after they were reported.
        assert power.cap_w == 300
        assert power.idle_w == pytest.approx(IDLE_W, rel=0.02)
        assert power.prefill_w == pytest.approx(PREFILL_W, rel=0.02)
        assert power.decode_w == pytest.approx(DECODE_W, rel=0.02)

    run(scenario())


async def test_joules_that_stand_still_are_no_power() -> None:
    application = Application(Gpu("prefiller", draw_w=0), Gpu("decoder", draw_w=0))
    async with application.serving() as url:
        with pytest.raises(NoDraw, match="the decoder's joules did not advance"):
            await DrawMeter(url).mean_w("decoder", lambda: asyncio.sleep(0.05), phase_s=1)


@pytest.mark.parametrize(
    ("gpus", "decoders", "said"),
    [
        ([Gpu("decoder")], 1, "no GPU of both roles"),
        ([Gpu("prefiller"), Gpu("decoder", limit_w=200)], 1, "is 300 W and the decoder's 200"),
        # Joules of several engines cannot be told apart.
        ([Gpu("prefiller"), Gpu("decoder")], 3, "there are 3 decoders"),
        ([Gpu("prefiller"), Gpu("decoder")], 1, None),
    ],
)
def test_where_there_is_no_one_limit_it_says_why(
    gpus: list[Gpu], decoders: int, said: str | None
) -> None:
    application = Application(*gpus)
    application.replicas.labels("decoder").set(decoders)
    for _ in range(2):
        time.sleep(0.01)
        application.report()
    energy = parse_energy(application.metrics())
    if said is None:
        assert one_limit_w(energy) == 300
        return
    with pytest.raises(NoDraw, match=said):
        one_limit_w(energy)

"""Compares a call of the table's actor by Ray with the same call over a unix socket.

``python -m experiments.calls BUSY``: beside so many processes that never sleep. Both sides have the
same messages and do nothing else; calls come 10 ms after each other, and the two take turns.
"""

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from statistics import quantiles
from typing import Any

import msgspec
import ray

from conserve.recognition import chain_of
from conserve.turn import TurnKey
from deployments.messages import BeginTurn, TurnPlan

CALLS, GAP_S, ROUNDS = 300, 0.01, 5
_SAID = [{"role": "user", "content": str(number)} for number in range(40)]
ASKED = BeginTurn("router-1", 1, None, chain_of(_SAID))
PLAN = TurnPlan(TurnKey("c" * 32, 1, 256), "decoder-1", "http://127.0.0.1:1234", later=True)
LENGTH_BYTES = 4


@ray.remote(num_cpus=0)
class Table:
    async def begin(self, asked: BeginTurn) -> TurnPlan:
        return PLAN


def serve(path: str) -> None:
    decode, encode = msgspec.msgpack.Decoder(BeginTurn).decode, msgspec.msgpack.Encoder().encode

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while length := await reader.readexactly(LENGTH_BYTES):
            decode(await reader.readexactly(int.from_bytes(length, "big")))
            body = encode(PLAN)
            writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)

    async def main() -> None:
        server = await asyncio.start_unix_server(answer, path)
        await server.serve_forever()

    asyncio.run(main())


def burn() -> None:
    while True:
        pass


async def timed(call: Any) -> list[float]:
    took_ms = []
    for _ in range(CALLS):
        await asyncio.sleep(GAP_S)
        began_s = time.perf_counter()
        await call()
        took_ms.append(1e3 * (time.perf_counter() - began_s))
    return took_ms


async def main() -> None:
    busy = int(sys.argv[1])
    path = os.path.join(tempfile.mkdtemp(), "table")
    spawn = multiprocessing.get_context("spawn")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    actor: Any = Table.remote()  # type: ignore[attr-defined]
    server = spawn.Process(target=serve, args=(path,), daemon=True)
    server.start()
    await asyncio.sleep(5)  # It starts.
    reader, writer = await asyncio.open_unix_connection(path)
    decode, encode = msgspec.msgpack.Decoder(TurnPlan).decode, msgspec.msgpack.Encoder().encode

    async def by_socket() -> TurnPlan:
        body = encode(ASKED)
        writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return decode(await reader.readexactly(length))

    async def by_ray() -> Any:
        return await actor.begin.remote(ASKED)

    assert await by_ray() == await by_socket() == PLAN
    hogs = [spawn.Process(target=burn, daemon=True) for _ in range(busy)]
    for hog in hogs:
        hog.start()
    await asyncio.sleep(3)
    for _ in range(ROUNDS):
        line = []
        for name, call in (("ray", by_ray), ("socket", by_socket)):
            cuts = quantiles(await timed(call), n=20)
            line.append(f"{name} p50 {cuts[9]:.2f} p95 {cuts[18]:.2f} ms")
        print("; ".join(line), flush=True)
    for hog in hogs:
        hog.kill()
    server.kill()


if __name__ == "__main__":
    asyncio.run(main())

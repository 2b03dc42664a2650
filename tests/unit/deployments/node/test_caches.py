"""A node's directory of other nodes' caches, asked by LMCache's own client code."""

import asyncio
import time
from typing import Any

import httpx
from lmcache.v1.mp_coordinator.registrar import keep_registered
from lmcache.v1.multiprocess.modules.p2p_controller import P2PController

from deployments.messages import NodeCache
from deployments.node.node import CacheDirectory, SeenCaches

OTHER = NodeCache("other", "10.0.0.2", 7610, 41000)


async def test_lmcache_finds_other_nodes_servers_there() -> None:
    seen = SeenCaches()
    directory = CacheDirectory(seen)
    url = await directory.start()
    assert url.startswith("http://127.0.0.1:")
    registered = asyncio.Event()
    async with httpx.AsyncClient() as client:
        # What a server runs as long as it lives.
        member = asyncio.create_task(
            keep_registered(
                client,
                url,
                http_port=7611,
                instance_id="own",
                advertise_ip="10.0.0.1",
                heartbeat_interval=0.05,
                p2p_advertised_url="10.0.0.1:40000",
                mq_port=7610,
                on_registered=registered.set,
            )
        )
        await asyncio.wait_for(registered.wait(), 10)
        # One that it does not know has to register again.
        beats = [await client.put(f"{url}/instances/{one}/heartbeat") for one in ("own", "gone")]
        assert [one.status_code for one in beats] == [200, 404]
        controller = _controller(url, "own", "10.0.0.1:40000")
        instances = await asyncio.to_thread(controller._fetch_instances)
        assert controller._is_self_registered(instances)
        assert [instance.instance_id for instance in instances] == ["own"]

        seen.saw("node", OTHER, time.monotonic())
        _, found = await asyncio.to_thread(controller._fetch_instances)
        assert (found.instance_id, found.ip, found.mq_port) == ("other", "10.0.0.2", 7610)
        assert found.p2p_advertised_url == "10.0.0.2:41000"

        # A heartbeat or two later it is still known, and it leaves when it ends.
        await asyncio.sleep(0.2)
        assert controller._is_self_registered(await asyncio.to_thread(controller._fetch_instances))
        member.cancel()
        await asyncio.gather(member, return_exceptions=True)
        instances = await asyncio.to_thread(controller._fetch_instances)
        assert [instance.instance_id for instance in instances] == ["other"]
        controller._http_client.close()


def _controller(url: str, instance_id: str, advertise_url: str) -> Any:
    """LMCache's, without the memory that it would share."""
    controller = object.__new__(P2PController)
    controller._http_client = httpx.Client(timeout=10)
    controller._instances_url = url + "/instances"
    controller._instance_id = instance_id
    controller._p2p_config = type("Config", (), {"advertise_url": advertise_url})()
    return controller

"""Kills one of the demonstration's routers while agents read answers from it."""

import os
import re
import signal

import httpx
import psutil

_COUNTERS = (r"^vllm:generation_tokens_total\S* (\S+)$", r"^conserve_rejoined_turns_total (\S+)$")


class RouterKill:
    """Kills the router of an answer as that begins, once.

    Args:
        port: the application's.
        after: answers that begin before, at least one.
    """

    def __init__(self, port: int, after: int) -> None:
        self.done = False
        self._port, self._after = port, after
        self._routers: list[psutil.Process] = []

    def begins(self, response: httpx.Response) -> None:
        """Note that an answer begins, and kill its router if it is time."""
        self._after -= 1
        if self._after == 0:
            # Not with the kill: a machine's sockets take a while to list.
            found = [one for one in psutil.net_connections("tcp") if one.laddr.port == self._port]
            listen = {one.pid for one in found if one.pid and one.status == psutil.CONN_LISTEN}
            self._routers = [*map(psutil.Process, listen)]
        if self.done or self._after >= 0:
            return
        _, mine = response.extensions["network_stream"].get_extra_info("client_addr")[:2]
        for router in self._routers:
            if any(one.raddr and one.raddr.port == mine for one in router.net_connections("tcp")):
                os.kill(router.pid, signal.SIGKILL)
                self.done = True


async def counters(plain: httpx.AsyncClient) -> list[int]:
    """Return how many tokens all engines have generated, and how many answers were rejoined."""
    urls = [one["url"] for one in (await plain.get("/v1/engines")).json()["data"]]
    text = "".join([(await plain.get(f"{url}/metrics")).text for url in ("", *urls)])
    return [int(sum(map(float, re.findall(one, text, re.MULTILINE)))) for one in _COUNTERS]

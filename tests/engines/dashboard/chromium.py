"""Chromium, driven by its DevTools protocol."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import websockets

PROGRAM = shutil.which("chromium")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-port=0",
)
_SEEN_WITHIN_S = 60.0
_DESK = (1440, 900)


class Page:
    """The one tab of a browser.

    Attributes:
        complaints: uncaught errors, and what the browser refused to load.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._count = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Take what the browser says, until it is gone."""
        async for message in self._socket:
            said = json.loads(message)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(said["params"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        """Return the answer to a command of the protocol."""
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        command = {"id": self._count, "method": method, "params": parameters}
        await self._socket.send(json.dumps(command))
        said = await asyncio.wait_for(answer, 60)
        assert "error" not in said, said
        return said["result"]

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 640,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        said = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline_s = time.monotonic() + _SEEN_WITHIN_S
        while not (found := await self.value(expression)):
            seen = await self.value("document.body.innerText")
            assert time.monotonic() < deadline_s, f"not seen: {expression}\n{seen}"
            await asyncio.sleep(0.2)
        return found

    async def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else ""
            )


@contextlib.asynccontextmanager
async def open_page(folder: Path, url: str) -> AsyncIterator[Page]:
    """Have a page open in a browser for the time of a ``with`` block.

    Args:
        folder: an empty one, for what the browser writes.
    """
    with _browser(folder) as address:
        async with httpx.AsyncClient() as client:
            (tab,) = (
                one for one in (await client.get(f"{address}/json")).json() if one["type"] == "page"
            )
        async with websockets.connect(
            tab["webSocketDebuggerUrl"], max_size=None, proxy=None
        ) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.size(*_DESK)
                await page.call("Page.navigate", url=url)
                await page.until(f"location.href === '{url}' && document.readyState === 'complete'")
                yield page
            finally:
                listening.cancel()


@contextlib.contextmanager
def _browser(folder: Path) -> Iterator[str]:
    """Have a browser run; yields where it listens."""
    assert PROGRAM is not None
    process = subprocess.Popen(
        [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        file = folder / "DevToolsActivePort"
        deadline_s = time.monotonic() + _SEEN_WITHIN_S
        while not (file.exists() and "\n" in file.read_text()):
            assert process.poll() is None, "chromium has ended"
            assert time.monotonic() < deadline_s, "chromium does not listen"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{file.read_text().splitlines()[0]}"
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(30)
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
